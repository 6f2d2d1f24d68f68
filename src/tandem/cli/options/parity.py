"""The options of `tandem parity`; light, so that the other commands do not wait for its imports."""

from __future__ import annotations

from typing import Any

from tandem.cli.arguments import Parser, add_command, add_settings

SUMMARY = "Compare a layout's logits and greedy tokens with those of a single process."


def add_parser(commands: Any) -> Parser:
    """Add the command to the parser's subcommands; the caller sets `run`."""
    parser = add_command(commands, "parity", SUMMARY)
    add_settings(parser, ("model", "parallel"))
    group = parser.add_argument_group("comparison")
    group.add_argument("--tiny", metavar="TYPE|DIR", help="instead of a model, try an architecture: a tiny random "
                       "model of a type, or of a directory's config.json cut down, in up to three stages against "
                       "mlx-lm's own forward pass; with --tensor-parallel-size then in that layout. No weights are "
                       "read.")
    group.add_argument("--reference", metavar="FILE", help="logits of the single process: read if the file is there, "
                       "else computed and written. By default they are computed and kept in Tandem's cache; under "
                       "mlx.launch they are read from there.")
    group.add_argument("--prompts", metavar="FILE", help="one prompt a line: text, or token ids as a JSON list. By "
                       "default a short prompt and one of more than two chunks, of pseudo-random tokens.")
    group.add_argument("--tokens", type=int, default=8, metavar="N", help="greedy tokens after each prompt [8]")
    group.add_argument("--prefill-chunk", type=int, default=32, metavar="N", help="prompt tokens in one step [32]")
    group.add_argument("--tolerance", type=float, metavar="X", help="largest difference of a logit, as a share of the "
                       "largest logit; by default 0 for pipelines and, where ranks share layers, 1e-4 in float32, "
                       "2e-2 in float16, 5e-2 in bfloat16.")
    return parser
