"""The seam for recurrences that go token by token: states of tokens that are done are let go (mlx).

Where mlx-lm has no kernel for a recurrence it takes a step for each token. MLX would compute the states of all tokens
of a chunk first and the outputs after them, with every state alive in between: 2 GiB a layer for 512 tokens of
Qwen3.5-397B. Here a token's state waits for the token's output. The arithmetic stays the same, number by number.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from tandem.loading.memory import on_cuda

BLOCK = 16
"""Tokens whose states may be alive together, where a step is not a function of its own."""
AHEAD = 8
"""Tokens that an NVIDIA GPU is given while those before them are waited for. MLX would give it some 70, whose states
and products of states all take their memory at once: 2.4 GiB for two layers of Qwen3.5-397B in place of 1."""
STEPS = (("gated_delta", "_gated_delta_step_ops"), ("rwkv7", "_wkv7_step_ops"), ("mamba", "MambaBlock.ssm_step"))
"""Functions of mlx-lm, by module, that give one token's output and the state after it."""
SCANS = (("bailing_moe_linear", "recurrent_gla"),)
"""Functions that go over all tokens of q, k, v [B, H, L, D] from a state `h`, which they return last."""

Recurrence = Callable[..., tuple[mx.array, Any]]


def bound_recurrences() -> None:
    """Put the seam into those of mlx-lm's models that are imported. Idempotent."""
    for places, ordered in ((STEPS, _step), (SCANS, _scan)):
        for module, path in places:
            owner: Any = sys.modules.get(f"mlx_lm.models.{module}")
            *parents, name = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent, None)
            theirs = getattr(owner, name, None)
            if theirs is not None and not hasattr(theirs, "__wrapped__"):
                setattr(owner, name, ordered(theirs))


def _step(theirs: Recurrence) -> Recurrence:
    wait = _Waiting().after if on_cuda() else None

    @functools.wraps(theirs)
    def step(*args: Any) -> tuple[mx.array, mx.array]:
        output, state = theirs(*args)
        state = mx.depends(state, output)
        if wait is not None:
            wait(args, state)
        return output, state

    return step


class _Waiting:
    """Has tokens of a chunk computed, `AHEAD` at a time. A token is of the same chunk as the one before if it is given
    that one's state."""

    def __init__(self) -> None:
        self._last: mx.array | None = None
        self._before: mx.array | None = None
        self._tokens = 0

    def after(self, args: tuple[Any, ...], state: mx.array) -> None:
        """`state` comes after a step of `args`."""
        goes_on = any(one is self._last for one in args)
        self._last, self._tokens = state, self._tokens + 1 if goes_on else 1
        if not goes_on:
            self._before = None
        elif self._tokens % AHEAD == 0:
            mx.async_eval(state)
            if self._before is not None:
                mx.eval(self._before)
            self._before = state


def _scan(theirs: Recurrence) -> Recurrence:
    @functools.wraps(theirs)
    def scan(q: mx.array, k: mx.array, v: mx.array, g: mx.array, scale: float,
             h: mx.array | None = None) -> tuple[mx.array, Any]:
        outputs: list[mx.array] = []
        for start in range(0, q.shape[2], BLOCK):
            part = (slice(None), slice(None), slice(start, start + BLOCK))
            keys = mx.depends(k[part], outputs[-1]) if outputs else k[part]  # products of keys and values need no state
            output, h = theirs(q[part], keys, v[part], g, scale, h)
            outputs.append(output)
        return mx.concatenate(outputs, axis=2), h

    return scan
