"""A byte-level tokenizer, what checks grammars for it, and walks through grammars."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.checkpoints.files import ModelFiles
from tandem.guided.accept import GrammarCheck
from tandem.guided.guides import Guides
from tandem.guided.vocabulary import Vocabulary
from tandem.protocol.request import StructuredOutputs
from tandem.testing import EOS, write_tokenizer
from tandem.text.tokenizer import Tokenizer, load_tokenizer

Walk = Callable[..., str]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return load_tokenizer(ModelFiles(path, "tiny"))


@pytest.fixture(scope="session")
def check(tokenizer: Tokenizer) -> GrammarCheck:
    return GrammarCheck(tokenizer)


@pytest.fixture
def guides(tokenizer: Tokenizer) -> Guides:
    return Guides(Vocabulary(lambda: tokenizer, 520, (EOS,)))


@pytest.fixture
def walk(guides: Guides, tokenizer: Tokenizer) -> Walk:
    """One random output of a form, as text; fails if it does not end within `limit` tokens."""

    def walked(form: StructuredOutputs, seed: int, limit: int = 800) -> str:
        rng, produced = np.random.default_rng(seed), []
        guides.add("walk", form, [])
        for _ in range(limit):
            masks = guides.masks(["walk"])
            assert not masks.given_up
            token = int(rng.choice(np.flatnonzero(np.unpackbits(masks.bits.view(np.uint8), bitorder="little"))))
            guides.advance("walk", token)
            if token == EOS:
                guides.remove("walk")
                return tokenizer.decode(produced, skip_special_tokens=False)
            produced.append(token)
        raise AssertionError(tokenizer.decode(produced))

    return walked


@pytest.fixture(scope="session")
def schemas() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "schemas.json").read_text())
    return found
