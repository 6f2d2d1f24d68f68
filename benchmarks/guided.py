"""Guided decoding against unguided on the same engine, in turns: the same prompts, sampling and number of tokens.

Each guided stream follows a JSON schema that does not end before its token limit. Goal: at most 8 % fewer tokens per
second at concurrency 8. With `--outputs` it also samples so many outputs of each schema in a file, and validates them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tandem import LLM, SamplingParams, StructuredOutputs

GOAL = 0.92
SCHEMAS: dict[str, Any] = {
    "records": {
        "type": "array",
        "minItems": 500,
        "items": {
            "type": "object",
            "required": ["name", "age", "kind", "tags"],
            "additionalProperties": False,
            "properties": {
                "name": {"type": "string", "maxLength": 40},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "kind": {"enum": ["person", "place", "thing"]},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
            },
        },
    },
    "any JSON": {"type": "array", "minItems": 500, "items": {"type": "object", "minProperties": 2}},
    "one long string": {"type": "string", "minLength": 4000},
}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96, help="of each stream")
    parser.add_argument("--rounds", type=int, default=7, help="of each side, in turns")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--layouts", default="1,1 2,1 1,2", help="pairs of pipeline stages and tensor-parallel ranks")
    parser.add_argument("--outputs", type=int, default=0, help="validate so many outputs of each schema")
    parser.add_argument("--schemas", default="tests/guided/schemas.json", help="file with the schemas to validate")
    return parser.parse_args()


@dataclass(frozen=True)
class Run:
    """One side's share of a round."""

    speed: float
    """Tokens per second of all streams together, prompts included."""
    cpu: float
    """Milliseconds of processor time a token, of all processes: on a busy machine it tells more than the clock."""


def cpu_seconds() -> float:
    """Processor time that this process and its children have used."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return float(sum(times.user + times.system for times in (process.cpu_times() for process in processes)))


def run(llm: LLM, args: argparse.Namespace, form: StructuredOutputs | None, seed: int) -> Run:
    """Decode all streams once."""
    params = SamplingParams(
        max_tokens=args.tokens, temperature=args.temperature, seed=seed, structured_outputs=form, ignore_eos=form is None
    )
    prompts = [f"Write number {i} of a list of records, as JSON." for i in range(args.concurrency)]
    started, used = time.perf_counter(), cpu_seconds()
    outputs = llm.generate(prompts, params)
    seconds, used = time.perf_counter() - started, cpu_seconds() - used
    produced = sum(len(output.token_ids) for output in outputs)
    if produced != args.tokens * args.concurrency:
        raise SystemExit(f"{produced} tokens instead of {args.tokens * args.concurrency}: the streams are not alike")
    return Run(produced / seconds, used / produced * 1e3)


def compare(llm: LLM, args: argparse.Namespace, layout: str) -> bool:
    """One line for each schema; False when one misses the goal."""
    good = True
    for name, schema in SCHEMAS.items():
        form = StructuredOutputs(json=schema)
        run(llm, args, form, 0)
        pairs = [(run(llm, args, None, seed), run(llm, args, form, seed)) for seed in range(args.rounds)]
        speeds = [statistics.median(side.speed for side in sides) for sides in zip(*pairs, strict=True)]
        ratio = statistics.median(guided.speed / plain.speed for plain, guided in pairs)
        cpu = statistics.median(guided.cpu / plain.cpu for plain, guided in pairs)
        good &= ratio >= GOAL
        print(f"{layout:>8}  {name:16} {speeds[0]:9.1f} {speeds[1]:9.1f} {ratio:9.3f} {cpu:9.3f}", flush=True)
    return good


def validate(llm: LLM, args: argparse.Namespace) -> bool:
    """Sample outputs of every schema; False when one that ended does not validate."""
    import jsonschema

    counts: Counter[str] = Counter()
    for name, schema in json.loads(Path(args.schemas).read_text()).items():
        params = SamplingParams(max_tokens=400, temperature=1.0, structured_outputs=StructuredOutputs(json=schema))
        validator = jsonschema.Draft202012Validator(schema)
        for output in llm.generate(["An example:"] * args.outputs, params):
            if output.finish_reason != "stop":
                counts["cut off by max_tokens"] += 1
            elif list(validator.iter_errors(json.loads(output.text))):
                counts["invalid"] += 1
                print(f"invalid under {name!r}: {output.text}")
            else:
                counts["valid"] += 1
    print(f"sampled outputs: {dict(counts)}")
    return counts["invalid"] == 0


def main() -> int:
    """Print the comparison; 1 when a goal is missed."""
    args = arguments()
    print(
        f"tokens/s of {args.concurrency} streams, {args.tokens} tokens each, medians of {args.rounds}\n"
        f"{'pp,tp':>8}  {'schema':16} {'unguided':>9} {'guided':>9} {'ratio':>9} {'CPU time':>9}",
        flush=True,
    )
    good = True
    for layout in args.layouts.split():
        stages, ranks = map(int, layout.split(","))
        with LLM(args.model, pipeline_parallel_size=stages, tensor_parallel_size=ranks, log_level="WARNING") as llm:
            good &= compare(llm, args, layout)
            if args.outputs:
                good &= validate(llm, args)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
