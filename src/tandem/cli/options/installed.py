"""The options of `tandem completions` and `tandem service`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.cli.arguments import Parser, add_command, add_settings

SHELLS = ("bash", "zsh", "fish")


def add_completions(commands: Any, run: Any) -> None:
    """Add `completions`."""
    completions = add_command(commands, "completions", "Print a script that completes this command's words in a shell.")
    completions.add_argument("shell", choices=SHELLS, help='bash and zsh: eval "$(tandem completions bash)" in '
                             "~/.bashrc or ~/.zshrc; fish: tandem completions fish | source.")
    completions.set_defaults(run=run)


def add_service(commands: Any, sections: Sequence[str], run: Any) -> None:
    """Add `service`; `run` takes the parsed arguments, whose `action` says what to do."""
    service = add_command(commands, "service", "Have the system keep a server running: by launchd on macOS, by systemd "
                          "on Linux.")
    actions = service.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    install = add_command(actions, "install", "Install it with the options of `tandem serve`, and start it.")
    add_settings(install, sections)
    uninstall = add_command(actions, "uninstall", "Stop it, and take it away.")
    status = add_command(actions, "status", "Say whether it is installed and runs; exit code 0 if it does.")
    for parser in (install, uninstall, status):
        parser.add_argument("--name", default="default", help="of the service, where there are several [default]")
    service.set_defaults(run=run)
