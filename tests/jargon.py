"""Words that need a glossary, which pages and screens of newcomers leave to docs/ and to the log."""

from __future__ import annotations

import re

JARGON = re.compile(
    r"(?<![\w-])(ranks?|rank-host|stages?|KV|GGUF|LoRA|wired|ring|probe|prefill|micro-batch\w*|shard\w*|self-check|pipeline|"
    r"(?:--)?layer-split|-pp|(?:--)?tensor-\w+|all_sum|all-reduces?|jaccl|fences?|repl(?:ica)?s?|pace|"
    r"peak|headroom|tickets?|subnets?|accelerators|ms/step|workers?)(?![\w-])|default: |"
    r"\b[pdt]p=|(?<!-)\b[pdt]p \d",
    re.IGNORECASE,
)


def jargon(text: str) -> set[str]:
    """Those of the words that stand in `text`."""
    return {found[0].lower() for found in JARGON.finditer(text)}
