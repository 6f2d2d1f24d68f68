"""The options of `tandem doctor`; light, so that the other commands do not wait for its imports."""

from __future__ import annotations

import argparse
from typing import Any

from tandem.cli.arguments import Parser, add_command, filled

SUMMARY = "Look at the machines of a cluster, side by side, and say what is wrong and how to mend it."


def add_parser(commands: Any) -> Parser:
    """Add the command to the parser's subcommands; the caller sets `run`."""
    parser = add_command(commands, "doctor", SUMMARY)
    parser.add_argument("--hostfile", metavar="FILE", type=filled, help="MLX's JSON hosts file; without it this "
                        "machine is looked at.")
    parser.add_argument("--ray", nargs="?", const="auto", metavar="ADDRESS", help="the nodes of a Ray cluster: that of "
                        "its head's ADDRESS, by default RAY_ADDRESS, else the one that this machine is a node of.")
    parser.add_argument("--backend", choices=("ring", "jaccl", "jaccl-ring", "nccl"),
                        help="of the all_sum test; by default the hosts file's, else ring.")
    parser.add_argument("--remote-python", metavar="PATH", help="Python interpreter on the other machines, as for "
                        "`tandem serve`.")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="of the HTTP server, here [8000]")
    parser.add_argument("--ports", metavar="A-B", help="ports that must be free on every machine, such as 32323-32330.")
    parser.add_argument("--full-hash", action="store_true", help="read all of every weight file instead of samples.")
    parser.add_argument("--verbose", "-v", action="store_true", help="also say of each check that does not apply why.")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON.")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)  # what ssh runs on another machine
    group = parser.add_argument_group("the model")
    group.add_argument("--model", metavar="MODEL", help="directory, GGUF file, hub id or demo: is it there, is it the "
                       "same, does it fit?")
    group.add_argument("--weights-from", choices=("local", "head"), default="local",
                       help="head: other machines need no copy [local]")
    group.add_argument("--layout", metavar="TEXT", help='as for `tandem plan`, such as "pp=2 layers=20,16"; by default '
                       "a stage for each machine.")
    group.add_argument("--context", type=int, metavar="N", help="tokens of each stream, prompt and output [8192]")
    group.add_argument("--streams", type=int, default=1, metavar="N", help="requests answered at once [1]")
    return parser
