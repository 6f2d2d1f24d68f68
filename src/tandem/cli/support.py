"""`tandem support`: write one text file to attach to a bug report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tandem.cli.lifecycle import last_lines
from tandem.cli.selftest import private_names
from tandem.cli.status import as_json, look_at
from tandem.diagnostics.doctor.examine import Question, examine, findings, hostfile_hosts
from tandem.diagnostics.selftest.report import facts, redacted
from tandem.env import SECRET_VARIABLES, variable
from tandem.errors import ConfigError, UsageError
from tandem.launchers.hostfile import read_hostfile
from tandem.supervision.record import Background, known_names
from tandem.system.files import file_errors
from tandem.version import __version__

_SECRETS = re.compile(
    r"""(?ix) (\bbearer\s+ | ["']?[\w-]*(?:api[-_]?key|token|secret|password|prompt)["']?\s*[=:]\s*)
    (?!\d+\b|true\b|false\b|null\b) (?:"(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | [^\s"',}]+)
    | \b(?:sk|hf|ghp)[-_][\w-]{8,}"""
)
"""Matches what looks like a key or a prompt, behind its field's name in group 1. Numbers, such as counts of tokens, stay."""


def run(arguments: argparse.Namespace) -> int:
    """Write versions, settings, states, logs and the doctor's findings, without keys, prompts and names. Raises UsageError."""
    output = Path(arguments.output or f"tandem-support-{datetime.date.today().isoformat()}.txt")
    named = arguments.server or arguments.name
    if named and named not in known_names():
        raise UsageError(f"{named}: no server of this name was started by `tandem up`", param="name")
    servers = [Background(name) for name in ([named] if named else known_names())]
    file = read_hostfile(arguments.hostfile) if arguments.hostfile else None
    print("asking the servers and the doctor", file=sys.stderr)
    question = Question(hosts=hostfile_hosts(file, None) if file else [])
    sections = {
        "versions and machine": _json({"tandem": __version__, **facts()}),
        **{title: text for server in servers for title, text in _server(server, arguments.lines)},
        "doctor": _json([dataclasses.asdict(finding) for finding in findings(examine(question))]),
    }
    text = "\n".join(f"==== {title}\n{body}" for title, body in sections.items())
    names = [*private_names(file), *(key for server in servers for key in _keys(server))]
    text = _SECRETS.sub(lambda match: f"{match[1] or ''}<secret>", redacted(text, names))
    with (
        file_errors(f"--output {output}: cannot be written", "name another file", param="output", kind=ConfigError),
        open(output, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as written,
    ):
        written.write(text)
    print(f"{output}: read it, then attach it to a report; keys, prompts, paths and names of users and machines are taken out")
    return 0


def _json(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"


def _server(server: Background, lines: int) -> Iterator[tuple[str, str]]:
    """Yield the titles and texts about a background server: how it was started, its state with its events, its log."""
    with contextlib.suppress(msgspec.DecodeError):
        yield f"settings of {server.name}", _json(msgspec.json.decode(server.kept() or b"null"))
    yield f"state of {server.name}", _json(as_json(look_at(server, 0.0)))
    if server.log.exists():
        yield f"log of {server.name}", "".join(last_lines(server, lines))


def _keys(server: Background) -> Iterator[str]:
    """Yield this user's API keys that are within reach."""
    yield from filter(None, map(variable, SECRET_VARIABLES))
    record = server.record()
    if record is not None and record.api_key_file:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            yield from (line.split()[0] for line in Path(record.api_key_file).read_text().splitlines() if line.strip())
