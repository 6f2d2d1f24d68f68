"""`python -m tandem` is the `tandem` command."""

from __future__ import annotations

import sys

from tandem.cli.main import main

sys.exit(main())
