"""Scripts that complete the words of `tandem` in bash (from 3.2, macOS's), zsh and fish, made from its parser."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_BRACES = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True)
class Word:
    """A command or an option."""

    names: tuple[str, ...]
    help: str = ""
    takes_value: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A command, by the words that lead to it."""

    place: str
    """Such as `model get`; empty for `tandem` itself."""
    commands: list[Word] = field(default_factory=list)
    options: list[Word] = field(default_factory=list)
    values: tuple[str, ...] = ()
    """What its positional argument may be, where that is known."""


def describe(parser: argparse.ArgumentParser, place: str = "") -> Iterator[Command]:
    """All commands below a parser, itself first."""
    here = Command(place)
    values: list[str] = []
    below: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {one.dest: one.help or "" for one in action._choices_actions}
            here.commands.extend(Word((name,), _plain(helps.get(name, ""))) for name in action.choices)
            below.extend(action.choices.items())
        elif action.help == argparse.SUPPRESS:
            continue
        elif action.option_strings:
            here.options.append(Word(tuple(action.option_strings), _plain(action.help or ""), action.nargs != 0,
                                     _choices(action)))
        else:
            values += _choices(action)
    yield Command(place, here.commands, here.options, tuple(values))
    for name, child in below:
        yield from describe(child, f"{place} {name}".strip())


def _choices(action: argparse.Action) -> tuple[str, ...]:
    """Allowed values; settings show theirs in braces and check them later."""
    if action.choices is not None:
        return tuple(str(one) for one in action.choices)
    braces = _BRACES.fullmatch(action.metavar) if isinstance(action.metavar, str) else None
    return tuple(braces[1].split(",")) if braces else ()


def _plain(text: str) -> str:
    """The first sentence of a help text."""
    return " ".join(text.replace("%%", "%").split()).partition(". ")[0].rstrip(".")


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script for `bash`, `zsh` or `fish`."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](list(describe(parser)))


def _walk(commands: list[Command]) -> str:
    """A pattern of shell for "PLACE WORD" that leads to another place."""
    return "|".join(f'"{one.place} {word.names[0]}"' for one in commands for word in one.commands)


def _values(commands: list[Command], line: str) -> str:
    """Branches of shell for "PLACE:OPTION" whose values are known; `line` gets them as %s."""
    branches = []
    for one in commands:
        for word in one.options:
            if word.choices:
                names = "|".join(f'"{one.place}:{name}"' for name in word.names)
                branches.append(f"    {names}) {line % ' '.join(map(shlex.quote, word.choices))}; return;;")
    return "\n".join(branches)


def _files(commands: list[Command]) -> str:
    """A pattern for options whose value is anything."""
    return "|".join(f'"{one.place}:{name}"' for one in commands for word in one.options
                    if word.takes_value and not word.choices for name in word.names)


def _bash(commands: list[Command]) -> str:
    def listed(words: Iterable[str]) -> str:
        return shlex.quote(" ".join(words))

    places = "\n".join(
        f'    "{one.place}") words={listed([*(word.names[0] for word in one.commands), *one.values])}; '
        f"options={listed(name for word in one.options for name in word.names)};;" for one in commands)
    return f"""_tandem() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" place="" words="" options="" i
  case "$previous$current" in  # --option=value: readline makes three words of it
    --*=) current="";;
    =*) previous="${{COMP_WORDS[COMP_CWORD-2]}}";;
  esac
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$place ${{COMP_WORDS[i]}}" in
    {_walk(commands)}) place="${{place:+$place }}${{COMP_WORDS[i]}}";;
    esac
  done
  case "$place:$previous" in
{_values(commands, 'COMPREPLY=($(compgen -W "%s" -- "$current"))')}
    {_files(commands)}) return;;
  esac
  case "$place" in
{places}
  esac
  case "$current" in
    -*) COMPREPLY=($(compgen -W "$options" -- "$current"));;
    *) COMPREPLY=($(compgen -W "$words" -- "$current"));;
  esac
}}
complete -o default -F _tandem tandem
"""


def _zsh(commands: list[Command]) -> str:
    def described(words: list[Word]) -> str:
        return " ".join(shlex.quote(f"{name}:{word.help}") for word in words for name in word.names)

    places = "\n".join(f'    "{one.place}") found=({described(one.commands)}); options=({described(one.options)}); '
                       f"values=({' '.join(map(shlex.quote, one.values))});;" for one in commands)
    return f"""#compdef tandem
_tandem() {{
  local place="" word
  local -a found options values
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    case "$place $word" in
    {_walk(commands)}) place="${{place:+$place }}$word";;
    esac
  done
  local previous="${{words[CURRENT-1]}}"
  if [[ "${{words[CURRENT]}}" == --*=* ]]; then
    previous="${{words[CURRENT]%%=*}}"
    compset -P '*='
  fi
  case "$place:$previous" in
{_values(commands, "compadd -- %s")}
    {_files(commands)}) _files; return;;
  esac
  case "$place" in
{places}
  esac
  if [[ "${{words[CURRENT]}}" == -* ]]; then
    _describe option options
  elif (( $#found )); then
    _describe command found
  elif (( $#values )); then
    compadd -- $values
  else
    _files
  fi
}}
if [[ "${{funcstack[1]}}" == _tandem ]]; then _tandem "$@"; return; fi
(( $+functions[compdef] )) || {{ autoload -Uz compinit; compinit -i; }}  # a new Mac's zsh has not started it
compdef _tandem tandem
"""


def _fish(commands: list[Command]) -> str:
    lines = []
    for one in commands:
        at = f"complete -c tandem -n '__tandem_at \"{one.place}\"'"
        lines += [f"{at} -f -a {_fished(word.names[0])} -d {_fished(word.help)}" for word in one.commands]
        if one.values:
            lines.append(f"{at} -f -a {_fished(' '.join(one.values))}")
        for word in one.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else
                             f"-s {name[1:]}" if len(name) == 2 else f"-o {name[1:]}" for name in word.names)
            value = f" -x -a {_fished(' '.join(word.choices))}" if word.choices else " -r" if word.takes_value else ""
            lines.append(f"{at} {names}{value} -d {_fished(word.help)}")
    walk = " ".join(f"'{one.place} {word.names[0]}'" for one in commands for word in one.commands)
    return f"""function __tandem_at
  set -l place ""
  for word in (commandline -opc)[2..-1]
    switch "$place $word"
    case {walk}
      set place (string trim "$place $word")
    end
  end
  test "$place" = "$argv[1]"
end
{chr(10).join(lines)}
"""


def _fished(text: str) -> str:
    """A word of fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
