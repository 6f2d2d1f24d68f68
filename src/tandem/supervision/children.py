"""What the supervisor and its children agree on."""

from __future__ import annotations

MODULE = "tandem.cli.processes"
LAST_WORDS = 4096
"""Most bytes in which an engine says why it ended."""
EXIT_USAGE, EXIT_FAILED = 2, 3
"""Exit codes: something is amiss that a person must mend; it has tried, and gives up."""
