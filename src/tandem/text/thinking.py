"""Chat template variables that set thinking. Templates read different ones: `reasoning_effort` (gpt-oss, Mistral, DeepSeek V4),
a switch called `enable_thinking` (Qwen3, GLM, Gemma 4, SmolLM3) or `thinking` (DeepSeek V3.1, Kimi, Granite), or several.
"""

from __future__ import annotations

from collections.abc import Collection

LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Reasoning efforts in ascending order; `none` disables thinking."""
_USUAL = frozenset({"low", "medium", "high"})
"""Efforts assumed for a template that names fewer than two levels."""
_SWITCHES = ("enable_thinking", "thinking")
THINKING_VARIABLES = (*_SWITCHES, "reasoning_effort")


def thinking_variables(
    reads: Collection[str], words: Collection[str], effort: str | None, think: bool | None = None
) -> dict[str, object]:
    """Return the variables for a reasoning effort, and for thinking switched on or off; None leaves either to the model.

    `reads` and `words`: names that the template reads, and its strings.
    """
    think = think if think is not None or effort is None else effort != "none"
    switches = [name for name in _SWITCHES if name in reads]
    found: dict[str, object] = {} if think is None else dict.fromkeys(switches, think)
    if effort is not None and "reasoning_effort" in reads and (level := _nearest(effort, words, switched=bool(switches))):
        found["reasoning_effort"] = level
    return found


def _nearest(effort: str, words: Collection[str], *, switched: bool) -> str | None:
    """Return the effort in `words` (strings of the template) that is closest to `effort`; of two, the higher.

    Return None for `none` if the template does not have that word but has a switch (`switched`).
    """
    told = {level for level in LEVELS if level in words}
    levels = told if len(told) > 1 else _USUAL
    if effort == "none":
        if "none" in levels:
            return "none"
        if switched:
            return None
    place = LEVELS.index(effort)
    return min(
        (level for level in LEVELS if level in levels - {"none"}),
        key=lambda level: (abs(LEVELS.index(level) - place), -LEVELS.index(level)),
    )
