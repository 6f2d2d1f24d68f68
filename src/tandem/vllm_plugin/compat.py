"""Whatever has to be replaced in vLLM or torch, in one table. Everything else is subclassing.

Each entry says what, why and for which versions; a test fails for an entry that has become needless.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Override:
    """One replaced attribute."""

    target: str
    reason: str
    versions: str
    apply: Callable[[], None]


def _empty() -> None:
    """Nothing of torch's is on an accelerator."""


def _emptying(name: str) -> Callable[[], None]:
    """Replace a function of torch.accelerator where there is no accelerator."""

    def replace() -> None:
        import torch

        if not torch.accelerator.is_available():
            setattr(torch.accelerator, name, _empty)

    return replace


OVERRIDES = tuple(
    Override(
        target=f"torch.accelerator.{name}",
        reason="vLLM calls it when any platform but its own CPU one shuts down; without an accelerator torch raises",
        versions="vllm 0.32, torch 2.13",
        apply=_emptying(name),
    )
    for name in ("empty_cache", "empty_host_cache")
)


def apply() -> None:
    """Apply every override; may be called again."""
    for override in OVERRIDES:
        override.apply()
