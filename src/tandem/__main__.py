"""`python -m tandem` is the `tandem` command."""

from __future__ import annotations

import sys

from tandem.processes.interpreter import leave_working_directory

leave_working_directory(sys.path)

from tandem.cli.main import main  # noqa: E402 - after sys.path is safe

sys.exit(main())
