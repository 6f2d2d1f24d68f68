"""Translation of the command line of `python -m vllm_mlx.distributed_launcher` into Tandem's options."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tandem.cli.arguments import SERVE_SECTIONS, Parser, add_settings
from tandem.errors import UsageError
from tandem.protocol.hosts import MlxProcessGroup

COMMAND = "distributed_launcher"

RENAMED: dict[str, tuple[str, ...]] = {
    "--max-tokens": ("--default-max-tokens",),
    "--timeout": ("--request-timeout",),
    "--rate-limit": ("--requests-per-minute",),
    "--tool-call-parser": ("--tool-parser",),
    "--completion-batch-size": ("--max-batch-size",),
    "--chunked-prefill-tokens": ("--prefill-chunk",),
    "--prefill-step-size": ("--prefill-chunk",),
    "--max-kv-size": ("--kv-tokens",),
    "--disable-prefix-cache": ("--prefix-cache", "0"),
}
"""Launcher's flag -> Tandem's words, which precede its value. Flags in neither table stay the same."""

NEEDLESS = {
    "--continuous-batching": "batching is always continuous",
    "--enable-auto-tool-choice": "tools need no switch",
    "--enable-prefix-cache": "prefixes are always kept",
}
"""Launcher's switch -> reason why Tandem has none."""


def translate(words: Sequence[str]) -> list[str]:
    """Return the arguments of `tandem serve` for those of the launcher. The launcher's `--` is dropped."""
    translated: list[str] = []
    apart = list(words)
    if "--" in apart:
        apart.remove("--")
    for word in apart:
        flag, equals, value = word.partition("=")
        if flag in RENAMED:
            *before, last = RENAMED[flag]
            translated += [*before, last + equals + value]
        elif flag not in NEEDLESS:
            translated.append(word)
    return translated


def add_launcher(parser: Parser) -> None:
    """Add the options of `tandem serve`, into which `translate` turns the launcher's."""
    parser.translate = translate
    add_settings(parser, SERVE_SECTIONS)


def by_hand(words: Sequence[str], group: MlxProcessGroup) -> UsageError:
    """Return the error for a rank started by hand, with the commands to use instead. `words` are those of `tandem serve`."""
    head = group.coordinator.rpartition(":")[0] or "THAT-MACHINE"
    ranks = str(len(group.devices) or len(group.hostfile) or "N")
    serve = ["tandem", "serve", *words, "--launcher", "manual", "--token-file", "token", "--tensor-parallel-size", ranks]
    return UsageError(
        f"MLX_RANK={group.rank} starts a rank by hand, and here ranks join a head. On {head} run `{shlex.join(serve)}`; copy "
        f"the file token, which that makes, to each machine, and run there, on {head} too, `tandem rank --join {head} "
        "--token-file token`, in any order; or give --hostfile, and all is started from here",
        param="hostfile",
    )
