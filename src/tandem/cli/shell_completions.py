"""`tandem completions`: scripts for bash (from 3.2, macOS's), zsh and fish, which shtab makes from the parser."""

from __future__ import annotations

import argparse
import re

import shtab

from tandem.cli.arguments import Parser, first_sentence

_BRACES = re.compile(r"\{([^{}]+)\}")
_ZSH_BEGINS = """(( $+functions[compdef] )) || {  # a new Mac's zsh has not started it
  autoload -Uz compinit; compinit -i
}
"""
_BASH_ENDS = """
_tandem() {  # readline makes three words of --option=value
  local words=() i
  for ((i = 0; i < COMP_CWORD; i++)); do
    [[ "${COMP_WORDS[i]}" == "=" ]] || words+=("${COMP_WORDS[i]}")
  done
  words+=("${COMP_WORDS[COMP_CWORD]#=}")
  local COMP_WORDS=("${words[@]}") COMP_CWORD=$((${#words[@]} - 1))
  _shtab_tandem
}
complete -o default -F _tandem tandem
"""


def run(arguments: argparse.Namespace) -> int:
    """Print the script for a shell."""
    from tandem.cli.main import build_parser

    print(script(arguments.shell, build_parser()), end="")
    return 0


def script(shell: str, parser: Parser) -> str:
    """Return the script for `bash`, `zsh` or `fish`. Changes the parser, which cannot parse afterwards."""
    _prepare(parser, shell)
    text = shtab.complete(parser, shell, preamble=_ZSH_BEGINS if shell == "zsh" else "")
    if shell == "bash":
        return text + _BASH_ENDS
    if shell == "zsh":
        return text.replace("$zsh_eval_context[-1] == eval", "$zsh_eval_context[-1] == (eval|file)")
    text = text.replace('-xka "(__fish_complete_path (commandline -ct))"', "-rF")  # also in --option=FILE
    return re.sub(r" -s (\w{2,})", r" -o \1", text)  # fish's name for options such as -pp


def _prepare(parser: Parser, shell: str) -> None:
    """Add to the parser what shtab needs: values of settings, files, and commands that help does not list."""
    parser.description = first_sentence(parser.description)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            listed = {command.dest for command in action._choices_actions}
            for name, child in action.choices.items():
                _prepare(child, shell)
                if name not in listed:
                    action._choices_actions.append(action._ChoicesPseudoAction(name, (), child.description))
        elif action.help != argparse.SUPPRESS and action.nargs != 0:
            metavar = action.metavar if isinstance(action.metavar, str) else action.dest
            if braces := _BRACES.fullmatch(metavar):  # settings check their values themselves
                action.choices = braces[1].split(",")
            if action.choices is None and not (action.nargs and action.option_strings):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            if shell == "zsh":  # an optional value, no other colon, and --option=value
                optional = ":" if action.nargs == "?" and action.option_strings else ""
                action.metavar = optional + re.sub(r"\W+", " ", metavar)
                action.option_strings = [f"{flag}=" if flag[:2] == "--" else flag for flag in action.option_strings]
        action.help = first_sentence(action.help)
