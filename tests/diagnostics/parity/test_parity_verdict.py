"""When two recordings agree."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.diagnostics.parity.comparison import compare, default_tolerance
from tandem.diagnostics.parity.reference import Recording
from tandem.errors import ConfigError

PROMPT, TOKENS, VOCAB = 3, 4, 10


def _recording(dtype: str = "float32") -> Recording:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((PROMPT + TOKENS - 1, VOCAB)).astype(np.float32)
    logits[2, 1] = 10.0
    return Recording([[int(row.argmax()) for row in logits[PROMPT - 1 :]]], [logits], dtype, False)


def _changed(row: int, column: int, by: float) -> Recording:
    other = _recording()
    other.logits[0][row, column] += by
    other.tokens = [[int(row.argmax()) for row in other.logits[0][PROMPT - 1 :]]]
    return other


def test_the_same_bits_pass_at_tolerance_0() -> None:
    verdict = compare(_recording(), _recording(), 0.0)
    assert verdict.line == "PARITY PASS max_abs_diff=0.000e+00"
    assert verdict.positions == PROMPT + TOKENS - 1
    assert not compare(_recording(), _changed(0, 0, 1e-6), 0.0).passed


def test_the_tolerance_is_relative_to_the_largest_logit() -> None:
    other = _changed(0, 0, 9e-4)
    assert compare(_recording(), other, 1e-4).passed
    assert not compare(_recording(), other, 8e-5).passed
    assert compare(_recording(), other, 8e-5).line == "PARITY FAIL max_abs_diff=9.000e-04"


def test_a_value_that_is_not_finite_fails() -> None:
    for value in (np.nan, np.inf):
        for reference, other in ((_recording(), _changed(1, 1, value)), (_changed(1, 1, value), _recording())):
            assert not compare(reference, other, 1e-4).passed


def test_tokens_that_differ_fail_unless_they_tie() -> None:
    reference = _recording()
    row = PROMPT - 1 + 2
    first, second = np.argsort(reference.logits[0][row])[[-1, -2]]
    gap = float(reference.logits[0][row, first] - reference.logits[0][row, second])
    other = _changed(row, int(second), gap + 1e-4)
    assert other.tokens[0][2] == second
    verdict = compare(reference, other, 1e-4)
    assert not verdict.passed
    assert "token 3 is" in verdict.remarks[0]
    # Made a tie: the logits beyond it belong to different texts, and don't count.
    reference.logits[0][row, second] = reference.logits[0][row, first] - 1e-4
    other = Recording([list(reference.tokens[0])], [reference.logits[0].copy()], "float32", False)
    other.logits[0][row, second] += 2e-4
    other.logits[0][row + 1] = 99.0
    other.tokens[0][2:] = [int(second), 0]
    verdict = compare(reference, other, 1e-4)
    assert verdict.passed
    assert "a tie" in verdict.remarks[0]
    assert verdict.positions == row + 1
    assert not compare(reference, other, 0.0).passed


def test_tokens_that_their_logits_do_not_bear_out_fail() -> None:
    other = _recording()
    other.tokens[0][1] = (other.tokens[0][1] + 1) % VOCAB
    assert not compare(_recording(), other, 1e-4).passed


def test_types_and_shapes_must_match() -> None:
    with pytest.raises(ConfigError, match="computed in bfloat16"):
        compare(_recording("bfloat16"), _recording(), 0.1)
    short = _recording()
    short.logits[0] = short.logits[0][:-1]
    with pytest.raises(ConfigError, match="make the reference again"):
        compare(_recording(), short, 0.1)


def test_pipelines_are_held_to_the_bit() -> None:
    assert default_tolerance((1, 1, 1), "bfloat16") == 0.0
    assert default_tolerance((1, 2), "float32") == 1e-4
    assert default_tolerance((2,), "bfloat16") > default_tolerance((2,), "float16") > 1e-4
