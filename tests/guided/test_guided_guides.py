"""Matchers follow what is sampled, beside rows without a grammar; a replay takes up where the last rank group stopped."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from llguidance import LLParserLimits

from tandem.guided import vocabulary
from tandem.guided.guides import Guides
from tandem.guided.vocabulary import Vocabulary
from tandem.protocol.request import StructuredOutputs
from tandem.protocol.step import NO_CONTINUATION, NO_GRAMMAR
from tandem.testing import EOS
from tandem.text.tokenizer import Tokenizer

DATE = StructuredOutputs(regex="[0-9]{4}-[0-9]{2}")
COSTLY = StructuredOutputs(regex="(.*a.{500}b|.*c.{500}d)*")
"""Needs more and more lexer states as the output grows."""


def masks(guides: Guides, ids: list[str]) -> tuple[npt.NDArray[np.bool_], dict[int, int]]:
    """Which tokens each may take, [n, vocabulary]; a row without a mask may take all."""
    rows, bits, given_up = guides.masks(ids)
    found = np.ones((len(ids), 520), dtype=np.bool_)
    found[rows] = np.unpackbits(bits.view(np.uint8), axis=1, count=520, bitorder="little")
    return found, given_up


def allowed(guides: Guides, request_id: str) -> set[int]:
    mask, given_up = masks(guides, [request_id])
    assert not given_up
    return set(np.flatnonzero(mask[0]).tolist())


def test_a_replay_stands_where_the_first_run_stood(guides: Guides) -> None:
    rng, produced = np.random.default_rng(0), []
    guides.add("first", DATE, [])
    while True:
        mine = allowed(guides, "first")
        guides.add("replay", DATE, produced)
        assert allowed(guides, "replay") == mine
        guides.remove("replay")
        token = int(rng.choice(sorted(mine)))
        guides.advance("first", token)
        if token == EOS:
            break
        produced.append(token)
    assert mine == {EOS}, "complete: only the end may follow"


def test_rows_without_a_grammar_and_finished_ones_may_take_anything(guides: Guides, tokenizer: Tokenizer) -> None:
    guides.add("a", StructuredOutputs(choice=("0",)), [])
    rows, bits, _ = guides.masks(["x", "a", "y"])
    assert rows == [1] and bits.shape == (1, 17) and bits.dtype == np.uint32, "others cost nothing"
    [zero] = tokenizer.encode("0", False)
    assert allowed(guides, "a") == {zero}
    guides.advance("a", zero)
    assert allowed(guides, "a") == {EOS}
    guides.advance("a", EOS)
    # Plans sent ahead still sample once for it, and nobody looks at the token.
    assert guides.masks(["a"]).rows == []
    guides.advance("a", 7)
    guides.remove("a")
    assert "a" not in guides
    guides.advance("a", 7)


def test_ids_without_text_are_never_allowed(guides: Guides) -> None:
    guides.add("a", StructuredOutputs(regex="(.|\n)*"), [])
    found = allowed(guides, "a")
    assert EOS in found
    assert not found & {0, 1, *range(512, 520)}, "special tokens and padding"


def test_a_grammar_that_costs_too_much_ends_its_row_alone(
    guides: Guides, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "limits", lambda: LLParserLimits(max_lexer_states=2000))
    rng, letters = np.random.default_rng(3), tokenizer.encode("a") + tokenizer.encode("c")
    guides.add("costly", COSTLY, [])
    guides.add("cheap", DATE, [])
    for _ in range(500):
        mask, given_up = masks(guides, ["cheap", "costly"])
        if given_up:
            break
        guides.advance("costly", int(rng.choice(letters)))
    assert given_up == {1: NO_CONTINUATION}
    assert mask[1].all()
    assert 0 < mask[0].sum() < 30
    assert guides.masks(["costly"]).given_up == {}, "said once"


def test_a_vocabulary_that_cannot_be_loaded_costs_one_request(tokenizer: Tokenizer) -> None:
    def load() -> Tokenizer:
        raise OSError("no such file")

    guides = Guides(Vocabulary(load, 520, (EOS,)))
    guides.add("a", DATE, [])
    mask, given_up = masks(guides, ["b", "a"])
    assert given_up == {1: NO_GRAMMAR}
    assert mask.all()


def test_an_end_that_the_model_has_no_token_for_is_passed_over(tokenizer: Tokenizer) -> None:
    guides = Guides(Vocabulary(lambda: tokenizer, 520, (EOS, 5000)))
    guides.add("a", StructuredOutputs(choice=("0",)), [])
    assert guides.masks(["a"]).given_up == {}


@pytest.mark.parametrize("produced", [[], [100, 101, 102]])
def test_tokens_that_do_not_fit_are_given_up(guides: Guides, produced: list[int]) -> None:
    guides.add("a", StructuredOutputs(choice=("0",)), [*produced, 5])
    assert guides.masks(["a"]).given_up == {0: NO_CONTINUATION}
