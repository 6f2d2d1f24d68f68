"""Every command, flag and address of ours that the documentation names exists."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tandem.cli.main import build_parser
from tandem.cli.talk.conversation import COMMANDS
from tandem.config.settings import Settings
from tandem.server.app import create_app
from tandem.server.engines.replicas import Replicas
from tandem.server.engines.router import Router

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
COMMAND = re.compile(r"(?:\.venv/bin/|python -m )?tandem(?= |$)")
ENDS = {"&&", "||", "|", ";", "#", ">", "2>", "&", "&&,"}
FOREIGN = {"--node-ip-address", "--resources", "--object-store-memory"}
"""Flags of Ray's that the right column of docs/migrating.md names."""

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="only in a checkout")


def code(text: str) -> Iterator[str]:
    """Lines of fenced blocks of shell commands, with continued ones joined, and code spans outside of blocks."""
    blocks = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for language, block in blocks.findall(text):
        if language in ("bash", "sh", ""):
            yield from block.replace("\\\n", " ").splitlines()
    for span in re.findall(r"`([^`]+)`", blocks.sub("", text)):
        yield span.replace("\n", " ").replace("\\|", "|")


parser_of_all = cache(build_parser)


def children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(actions[0].choices) if actions else {}


def commands(page: Path) -> list[str]:
    """What comes after `tandem`, for each command of a page."""
    found = []
    for line in code(page.read_text()):
        for part in re.split(r"&& |(?<= )\| ", line):
            words = part.strip()
            if match := COMMAND.match(words):
                found.append(words[match.end() :].strip())
    return found


def faults(command: str) -> list[str]:
    """What of a command there is not: its name, or a flag."""
    parser = parser_of_all()
    words = shlex.split(command, comments=True)
    while words and (below := children(parser)) and not words[0].startswith("-"):
        names = words.pop(0).strip(",").split("|")
        if unknown := [name for name in names if name not in below]:
            return unknown
        parser = below[names[0]]
    given = []
    for word in words:
        if word in ENDS:
            break
        given += [part for part in word.split("=")[:1] if re.match(r"--?[a-z]", part)]
    return [flag for flag in given if flag not in parser._option_string_actions]


def every_flag(parser: argparse.ArgumentParser) -> set[str]:
    flags = set(parser._option_string_actions)
    return flags.union(*(every_flag(child) for child in children(parser).values()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    wrong = {command: fault for command in commands(page) if (fault := faults(command))}
    assert not wrong


def test_commands_are_found_and_faults_seen() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 150
    assert faults("serve M --no-such-flag 1 --port 3") == ["--no-such-flag"]
    assert faults("replica add|remove") == ["remove"]
    assert faults("bench nothing") == ["nothing"]


def test_flags_that_replace_others_exist() -> None:
    known, named = every_flag(build_parser()) | FOREIGN, set()
    for row in (ROOT / "docs" / "migrating.md").read_text().splitlines():
        cells = re.split(r"(?<!\\)\|", row)
        if row.startswith("|") and len(cells) in (4, 5):
            for span in re.findall(r"`(-[^`]+)`", cells[2]):
                named |= set(re.findall(r"(?:^| )(--?[a-z][\w-]*)", span))
    assert len(named) > 40
    assert named <= known, named - known


ADDRESS = re.compile(r"(?:(GET|POST|DELETE)(?:`/`POST)? )?(/[a-z][^ `]*)")
ABSENT = {"/chat/completions", "/v1", "/v1/audio/*"}
"""Addresses of the right column which it says are not there."""
SLASH = {"/bye", *(usage.split()[0] for usage in COMMANDS)}
"""Commands of a chat in the terminal, which are no addresses."""


def addresses(cell: str) -> set[tuple[str, str]]:
    """Method, or nothing, and path with `{}` for what is named in it, of each address in a cell."""
    found = [match.groups(default="") for span in re.findall(r"`([^`]+)`", cell) if (match := ADDRESS.fullmatch(span))]
    return {(method, re.sub(r"\{\w+\}|\b(NAME|ID)\b", "{}", path)) for method, path in found if path not in SLASH}


def test_addresses_are_there_or_not_as_the_tables_say() -> None:
    routes = create_app(Settings(), Replicas(Router())).openapi()["paths"]
    there = {
        (method, re.sub(r"\{\w+\}", "{}", path)) for path, methods in routes.items() for method in ("", *map(str.upper, methods))
    } | {("", "/ui"), ("", "/metrics")}
    named, absent = set(), set()
    for row in (ROOT / "docs" / "migrating.md").read_text().splitlines():
        cells = re.split(r"(?<!\\)\|", row)
        if not row.startswith("|") or len(cells) not in (4, 5):
            continue
        theirs, ours = addresses(cells[1]), {one for one in addresses(cells[2]) if one[1] not in ABSENT}
        named |= ours
        if re.match(r" (the same|there\b)", cells[2]):
            named |= theirs
        elif re.match(r" not (there|yet)\b", cells[2]):
            absent |= theirs
    assert len(named) > 25 and named <= there, named - there
    assert len(absent) > 6 and not {path for _, path in absent | {("", one) for one in ABSENT}} & {path for _, path in there}
