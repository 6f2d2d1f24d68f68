"""Layouts on this machine against a single process, and types of models against mlx-lm."""

from __future__ import annotations

import re

from tandem.firstlight.check import Differs, Figures, NotApplicable, Task
from tandem.firstlight.served import tandem
from tandem.launchers.worlds import visible_gpus
from tandem.system.cuda import uses_cuda

PARITY_S = 150.0
VERDICT = re.compile(r"PARITY (PASS|FAIL) max_abs_diff=(\S+)")
TYPES = ("qwen3", "gemma3_text", "gpt_oss", "mixtral", "deepseek_v3", "mamba2", "qwen3_next")
"""One of each kind: plain, windows, sinks and experts, experts, MLA, states, states and attention."""


def stages(task: Task) -> Figures:
    """Two pipeline stages over Tandem's own channel."""
    return parity(task.model, "-pp", "2", "--channel", "tcp")


def ring(task: Task) -> Figures:
    """Two pipeline stages over MLX's ring."""
    _require_gpus()
    return parity(task.model, "-pp", "2", "--channel", "mlx")


def tensor(task: Task) -> Figures:
    """Two tensor-parallel ranks."""
    _require_gpus()
    return parity(task.model, "-tp", "2")


def both(task: Task) -> Figures:
    """A stage of two ranks, and a stage of one."""
    _require_gpus()
    return parity(task.model, "--parallel", "2,1")


def _require_gpus() -> None:
    if uses_cuda("auto") and len(visible_gpus()) == 1:
        raise NotApplicable("ranks that MLX joins need a GPU each, there is one")


def parity(model: str, *options: str) -> Figures:
    """Logits and tokens of a layout against those of one process, which a first call computes and keeps."""
    done = tandem("parity", model, *options, timeout_s=PARITY_S)
    found = VERDICT.search(done.stdout)
    if not found:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Differs(f"a comparison, expected; {lines[-1]}, seen")
    figures: Figures = {"largest difference of a logit": float(found[2])}
    if done.returncode or found[1] != "PASS":
        raise Differs(f"the logits and tokens of one process, expected; {' '.join(done.stderr.split())[-200:]}, seen",
                      figures)
    return figures


def types(task: Task) -> Figures:
    """Tiny random models of several kinds, whole and in up to three stages, have mlx-lm's logits."""
    from tandem.loading.memory import choose_device
    from tandem.loading.mlx_lm_models import import_models_only
    from tandem.loading.trial import outcome
    from tandem.models.families.tiny import tiny_config

    choose_device("auto")
    import_models_only()
    wrong = []
    for name in TYPES:
        passed, line = outcome(tiny_config(name))
        if not passed:
            wrong.append(f"{name}: {line}")
    if wrong:
        raise Differs(f"mlx-lm's logits, expected; {'; '.join(wrong)}, seen")
    return {"types": ", ".join(TYPES)}
