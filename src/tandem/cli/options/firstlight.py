"""The options of `tandem firstlight`; light, so that the other commands do not wait for its imports."""

from __future__ import annotations

from typing import Any

from tandem.cli.arguments import Parser, add_command, filled

SUMMARY = "Try on this machine all that may go another way on another one, and write a report of one page."


def add_parser(commands: Any) -> Parser:
    """Add the command to the parser's subcommands; the caller sets `run`."""
    parser = add_command(commands, "firstlight", SUMMARY)
    parser.add_argument("--hostfile", metavar="FILE", type=filled, help="MLX's JSON hosts file: also try those "
                        "machines together.")
    parser.add_argument("--model", metavar="MODEL", default="demo", help="directory, GGUF file, hub id, or demo; "
                        "where the demo model is not here, a tiny random one is made [demo]")
    parser.add_argument("--minutes", type=float, default=5.0, metavar="X", help="begin no check after so many; what is "
                        "left is made when the command is given again [5]")
    parser.add_argument("--only", metavar="CHECK,...", help="these checks alone; --list names them.")
    parser.add_argument("--risky", action="store_true", help="also what may lock a GPU up until the machine is "
                        "restarted: full memory, and MLX's fast fences.")
    parser.add_argument("--fresh", action="store_true", help="begin anew, though a run was interrupted or has ended.")
    parser.add_argument("--output", "-o", metavar="FILE", default="firstlight.md", help="the report; beside it stands "
                        "the same as JSON [firstlight.md]")
    parser.add_argument("--list", action="store_true", help="only say which checks there are, and what they prove.")
    return parser
