"""The options of `tandem cache`; light, so that the other commands do not wait for its imports."""

from __future__ import annotations

from typing import Any

from tandem.cli.arguments import Parser, add_command
from tandem.cli.options.bench import add_server

SUMMARY = "See, warm and drop the prefixes that a running server keeps, in memory and on disk."
ACTIONS = {
    "list": "List the prefixes in memory, and how much of each is on disk; or what is in a directory.",
    "info": "Say how much is kept, where, and how often it served.",
    "warm": "Compute a prompt before users come, at every replica: a system prompt, a repository's context, a chat.",
    "drop": "Let go of what is kept, in memory and on disk.",
}


def add_parser(commands: Any) -> Parser:
    """Add `cache` with its actions; each sets `action`. The caller sets `run`."""
    cache = add_command(commands, "cache", SUMMARY)
    actions = cache.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    for name, text in ACTIONS.items():
        parser = add_command(actions, name, text)
        if name == "warm":
            parser.add_argument("file", metavar="FILE", help="a text; or .json with a chat request or its messages; or "
                                ".jsonl with one of these, or a message, on each line; - is a text from standard "
                                "input.")
            parser.add_argument("--role", choices=("system", "user", "none"), default="system", help="what a text is: "
                                "the system message, the beginning of the first user's message, or, with none, of "
                                "prompts to /v1/completions [system]")
        if name == "drop":
            parser.add_argument("--tier", choices=("memory", "all"), default="all", help="memory: what is on disk "
                                "stays there, and is read again [all]")
            parser.add_argument("--unused-days", type=float, metavar="DAYS", help="with --kv-disk: only what nobody "
                                "has used for so long.")
        if name != "warm":
            parser.add_argument("--kv-disk", metavar="DIR", help="this directory, of all servers that use it, in place "
                                "of a server.")
        parser.add_argument("--model", metavar="NAME", help="of a server with several: this one.")
        add_server(parser)
    return cache
