"""Checks of layouts on this machine against a single process, and of model types against mlx-lm."""

from __future__ import annotations

from tandem.config.loading import load
from tandem.diagnostics.parity.comparison import ParityOptions, prepare
from tandem.diagnostics.selftest.check import Differs, NotApplicable
from tandem.diagnostics.tasks import Figures, Task
from tandem.env import variables
from tandem.launchers.process_groups import visible_gpus
from tandem.system.cuda import uses_cuda

TYPES = ("qwen3", "gemma3_text", "gpt_oss", "mixtral", "deepseek_v3", "mamba2", "qwen3_next")
"""One type per architecture: plain, sliding windows, sinks with experts, experts, MLA, SSM states, states with attention."""


def stages(task: Task) -> Figures:
    """Check two pipeline stages over Tandem's TCP channel."""
    return parity(task.model, pipeline_parallel_size="2", channel="tcp")


def ring(task: Task) -> Figures:
    """Check two pipeline stages over MLX's ring."""
    _require_gpus()
    return parity(task.model, pipeline_parallel_size="2", channel="mlx")


def tensor(task: Task) -> Figures:
    """Check two tensor-parallel ranks."""
    _require_gpus()
    return parity(task.model, tensor_parallel_size="2")


def both(task: Task) -> Figures:
    """Check a stage of two tensor-parallel ranks followed by a stage of one."""
    _require_gpus()
    return parity(task.model, parallel="2,1")


def _require_gpus() -> None:
    if uses_cuda("auto") and len(visible_gpus()) == 1:
        raise NotApplicable("ranks that MLX joins need a GPU each, there is one")


def parity(model: str, **layout: str) -> Figures:
    """Compare logits and tokens with a single process. `layout` has settings by name, on top of the environment's. Raises
    Differs."""
    settings = load({"model": [model], **{name: [value] for name, value in layout.items()}}, environment=variables())
    remarks: list[str] = []
    verdict = prepare(settings.settings, ParityOptions(), note=remarks.append).run()
    figures: Figures = {"largest difference of a logit": float(f"{verdict.max_abs_diff:.3e}")}
    if not verdict.passed:
        raise Differs(
            f"the logits and tokens of one process, expected; {' '.join(' '.join(remarks).split())[-200:]}, seen", figures
        )
    return figures


def types(task: Task) -> Figures:
    """Check that tiny random models of several types have mlx-lm's logits, whole and in up to three stages."""
    from tandem.loading.dry_run import outcome
    from tandem.loading.memory import choose_device
    from tandem.models.families.tiny import tiny_config

    choose_device("auto")
    wrong = []
    for name in TYPES:
        passed, line = outcome(tiny_config(name))
        if not passed:
            wrong.append(f"{name}: {line}")
    if wrong:
        raise Differs(f"mlx-lm's logits, expected; {'; '.join(wrong)}, seen")
    return {"types": ", ".join(TYPES)}
