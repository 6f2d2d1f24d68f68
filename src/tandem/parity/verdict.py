"""Do two recordings agree?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.errors import ConfigError
from tandem.parity.reference import Recording

RELATIVE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}
"""Largest difference of a logit, as a share of the largest logit, where ranks add up parts in another order."""


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison."""

    passed: bool
    max_abs_diff: float
    positions: int
    """Positions compared."""
    remarks: tuple[str, ...]
    """What a person should know of it, one line each."""

    @property
    def line(self) -> str:
        """The one line that scripts look for."""
        return f"PARITY {'PASS' if self.passed else 'FAIL'} max_abs_diff={self.max_abs_diff:.3e}"


def default_tolerance(stage_sizes: tuple[int, ...], dtype: str) -> float:
    """0, so the same bits, for stages of one rank each: they compute what one process computes."""
    return 0.0 if max(stage_sizes) == 1 else RELATIVE[dtype]


def compare(reference: Recording, found: Recording, tolerance: float) -> Verdict:
    """Logits of all positions, up to where the greedy tokens part, and the tokens.

    `tolerance` is relative to the reference's largest absolute logit; 0 asks for the same bits. Tokens may differ only
    where the reference's own logits leave it open within twice the tolerance, a tie. Raises ConfigError when the two
    were computed in different types.
    """
    if reference.dtype != found.dtype:
        raise ConfigError(f"the reference was computed in {reference.dtype}, the layout in {found.dtype}; give both "
                          "the same --dtype", param="dtype")
    scale = max(float(np.abs(logits).max()) for logits in reference.logits)
    worst, positions, remarks, equal = 0.0, 0, [], True
    for i, (expected, mine) in enumerate(zip(reference.logits, found.logits, strict=True)):
        if expected.shape != mine.shape:
            raise ConfigError(f"prompt {i + 1} has logits {expected.shape} in the reference and {mine.shape} in the "
                              "layout; make the reference again", param="reference")
        shared, remark, tie = _tokens(reference, found, i, 2 * tolerance * scale)
        equal &= tie
        remarks += [remark] if remark else []
        rows = expected.shape[0] - len(reference.tokens[i]) + 1 + shared
        difference = np.abs(expected[:rows] - mine[:rows]).max()
        worst = float(np.fmax(worst, difference)) if np.isfinite(difference) else float("nan")
        positions += min(rows, expected.shape[0])
        if not np.isfinite(worst):
            break
    if equal and not remarks:
        remarks.append(f"tokens equal: {sum(map(len, found.tokens))} of {len(found.tokens)} prompts")
    passed = equal and worst <= tolerance * scale
    return Verdict(passed, worst, positions, tuple(remarks))


def _tokens(reference: Recording, found: Recording, prompt: int, open_within: float) -> tuple[int, str, bool]:
    """How many tokens are alike, what to say of the next, and whether that one may differ."""
    expected, mine = reference.tokens[prompt], found.tokens[prompt]
    shared = next((i for i, pair in enumerate(zip(expected, mine, strict=True)) if pair[0] != pair[1]), len(expected))
    if shared == len(expected):
        return shared, "", True
    row = reference.logits[prompt][reference.logits[prompt].shape[0] - len(expected) + shared]
    gap = float(row[expected[shared]] - row[mine[shared]])
    what = (f"prompt {prompt + 1}: token {shared + 1} is {expected[shared]} in the reference and {mine[shared]} in the "
            f"layout, whose logits are {gap:.3g} apart")
    return (shared, f"{what}: a tie, compared up to there", True) if gap <= open_within and open_within > 0 else (
        shared, what, False)
