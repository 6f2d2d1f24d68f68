"""`tandem generate` and `tandem chat`: the Python API in a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from tandem.cli.arguments import load_settings
from tandem.cli.options.sampling import CHAT_DEFAULTS, DEFAULTS, asked_of
from tandem.errors import UsageError
from tandem.llm import LLM
from tandem.log import set_up
from tandem.protocol.request import SamplingParams


def run_generate(arguments: argparse.Namespace) -> int:
    """Complete one prompt; the text goes to standard output as it comes."""
    prompt = arguments.prompt if arguments.prompt is not None else sys.stdin.read()
    with _open(arguments) as llm:
        for piece in llm.stream(prompt, _params(llm, arguments, DEFAULTS)):
            print(piece, end="", flush=True)
        print()
    return 0


def run_chat(arguments: argparse.Namespace) -> int:
    """A conversation until end of input or /exit; /clear forgets what was said."""
    start = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(start)
    with _open(arguments) as llm:
        if not llm.tokenizer.has_chat_template:
            raise UsageError("the model has no chat template; use `tandem generate`, or give --chat-template")
        while True:
            try:
                said = input("> ").strip()
            except EOFError:
                return 0
            if said == "/exit":
                return 0
            if said == "/clear":
                messages = list(start)
            elif said:
                messages.append({"role": "user", "content": said})
                answer = ""
                for piece in llm.stream(messages, _params(llm, arguments, CHAT_DEFAULTS)):
                    print(piece, end="", flush=True)
                    answer += piece
                print()
                messages.append({"role": "assistant", "content": answer})


def _params(llm: LLM, arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> SamplingParams:
    """The options, else the model's own, else those of a terminal. Raises UsageError."""
    return SamplingParams(**{**defaults, **llm.default_sampling.given(), **asked_of(arguments)})


@contextmanager
def _open(arguments: argparse.Namespace) -> Iterator[LLM]:
    """The model, loaded under a progress bar."""
    loaded = load_settings(arguments)
    set_up("WARNING")
    given = loaded.given("model", "parallel", "scheduler", "speculation")
    given.setdefault("log_level", "WARNING")  # of the ranks: their news would stand between the text
    if "model" not in given:
        raise UsageError("no model is given: name a directory, a GGUF file, a hub id or demo", param="model")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, transient=True, disable=not sys.stderr.isatty()) as bars:
        tasks: dict[tuple[int, str], TaskID] = {}

        def report(rank: int, done: int, total: int, phase: str) -> None:
            if (rank, phase) not in tasks:
                tasks[rank, phase] = bars.add_task(f"rank {rank}: {phase}", total=total)
            bars.update(tasks[rank, phase], completed=done, total=total)

        llm = LLM(progress=report, **given)
    with llm:
        yield llm
