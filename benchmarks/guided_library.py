"""llguidance against xgrammar over one model's vocabulary: size, time to compile, time of masks, what they refuse.

Needs the package xgrammar, which brings torch; without it only llguidance's column is printed. Eight outputs of each
schema are walked at random, all masks of a step at once with the same number of threads, as a step of eight rows does.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from harness import table

from guided import SCHEMAS
from tandem.checkpoints.resolve import resolve
from tandem.guided.guides import Guides
from tandem.guided.vocabulary import Entries, Vocabulary
from tandem.protocol.request import StructuredOutputs
from tandem.text.tokenizer import Tokenizer, load_tokenizer

ROWS, STEPS, THREADS = 8, 64, 4


class Library(Protocol):
    """One library as the benchmark uses it."""

    def start(self, schema: dict[str, Any]) -> None:
        """Compile, and make ROWS matchers. Raises ValueError or RuntimeError when the library refuses."""

    def masks(self) -> np.ndarray:
        """Which tokens each row may take, bool [ROWS, vocabulary]."""

    def advance(self, row: int, token: int) -> None:
        """A token was sampled."""


class LLGuidance:
    """As Tandem uses it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary = Vocabulary(lambda: tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
        self._vocabulary.matcher(StructuredOutputs(regex="a"), []).result()
        self._names = [str(row) for row in range(ROWS)]

    def start(self, schema: dict[str, Any]) -> None:
        """Compile."""
        matcher = self._vocabulary.matcher(StructuredOutputs(json=schema), []).result()
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        self._guides = Guides(self._vocabulary)
        for name in self._names:
            self._guides.add(name, StructuredOutputs(json=schema), [])
        self.masks()

    def masks(self) -> np.ndarray:
        """Bits to booleans included."""
        return self._guides.mask(self._names)[0]

    def advance(self, row: int, token: int) -> None:
        """As the sampler does."""
        self._guides.advance(self._names[row], token)


class XGrammar:
    """With any white space off, which is its bounded form."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        import torch
        import xgrammar

        self._xgrammar, self._size = xgrammar, tokenizer.vocab_size
        entries = Entries(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
        info = xgrammar.TokenizerInfo(
            entries.tokens, xgrammar.VocabType.RAW, vocab_size=self._size, stop_token_ids=list(tokenizer.eos_token_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=THREADS, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=THREADS)
        self._bits = xgrammar.allocate_token_bitmask(ROWS, self._size)
        assert self._bits.dtype == torch.int32

    def start(self, schema: dict[str, Any]) -> None:
        """Compile."""
        compiled = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, strict_mode=False)
        self._matchers = [self._xgrammar.GrammarMatcher(compiled) for _ in range(ROWS)]
        self.masks()

    def masks(self) -> np.ndarray:
        """Bits to booleans included."""
        self._bits.fill_(-1)
        self._batch.batch_fill_next_token_bitmask(self._matchers, self._bits)
        bits = self._bits.numpy().view(np.uint8)
        return np.unpackbits(bits, axis=1, count=self._size, bitorder="little").view(np.bool_)

    def advance(self, row: int, token: int) -> None:
        """A token was sampled."""
        if not self._matchers[row].is_terminated():
            self._matchers[row].accept_token(token)


def walked(library: Library, schema: dict[str, Any]) -> tuple[float, float, float]:
    """Milliseconds to compile and make the first masks; microseconds of a step's masks, median and longest."""
    started = time.perf_counter()
    library.start(schema)
    compiled = time.perf_counter() - started
    rng, times = np.random.default_rng(0), []
    for _ in range(STEPS):
        started = time.perf_counter()
        masks = library.masks()
        times.append(time.perf_counter() - started)
        for row in range(ROWS):
            allowed = np.flatnonzero(masks[row])
            if len(allowed):
                library.advance(row, int(rng.choice(allowed)))
    return compiled * 1e3, statistics.median(times) * 1e6, max(times) * 1e6


def refused(library: Library, schemas: dict[str, Any]) -> list[str]:
    """Names of the schemas that the library does not take."""
    names = []
    for name, schema in schemas.items():
        try:
            library.start(schema)
        except (ValueError, RuntimeError):
            names.append(name)
    return names


def installed_mb(packages: Sequence[str]) -> float:
    """Size of the installed files of some packages."""
    files = [file for package in packages for file in importlib.metadata.files(package) or ()]
    return sum(Path(str(file.locate())).stat().st_size for file in files if Path(str(file.locate())).is_file()) / 2**20


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--schemas", default="tests/guided/schemas.json")
    args = parser.parse_args()
    tokenizer = load_tokenizer(resolve(args.model))
    sides = {"llguidance": (LLGuidance, ["llguidance"])}
    if importlib.util.find_spec("xgrammar"):
        sides["xgrammar"] = (XGrammar, ["xgrammar", "apache-tvm-ffi", "torch"])
    made, facts = {}, []
    for name, (kind, packages) in sides.items():
        started = time.perf_counter()
        made[name] = kind(tokenizer)
        facts.append(
            [
                name,
                importlib.metadata.version(name),
                installed_mb(packages),
                time.perf_counter() - started,
                ", ".join(refused(made[name], json.loads(Path(args.schemas).read_text()))) or "none",
            ]
        )
    table(["library", "version", "MB installed", "s to read the vocabulary", "schemas refused"], facts)
    print()
    table(
        ["schema", "library", "compile, ms", "masks of 8 rows, us", "longest, us"],
        [[schema, name, *walked(library, SCHEMAS[schema])] for schema in SCHEMAS for name, library in made.items()],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
