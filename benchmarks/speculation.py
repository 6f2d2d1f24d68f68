"""Speculative decoding against plain decoding: the same server twice, with and without, in turns.

One greedy stream whose text repeats (goal: at least 1.5 times the tokens a second), and streams whose text does not, as
it is sampled, one and eight at once (goal: never below 0.97). With `--draft-model` a small model guesses instead of
n-grams. `--model planted:0.7` makes a model of eight dense layers whose own draft head guesses right after 70 % of the tokens
(goal: 1.5 for one stream), `planted:0` one whose head never does (goal: 0.97). `planted-8b:0.7` has the shape of a model of
8B, for a GPU (goal: 1.3); to make it takes some minutes and 60 GB of memory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import harness
import load

from tandem.testing import tiny_model

FACTS = (
    "The red house stands by the river. The blue house stands by the hill. "
    "The green house stands by the road. The white house stands by the lake. "
)
REPETITIVE = "Copy the following text again and again.\n\n" + FACTS * 4 + "\n\nThe copy:\n\n" + FACTS
GOALS = {"repetitive": 1.5, "other": 0.97, "planted": 1.5, "misled": 0.97}
PLANTED = {"planted": (768, 3072, 8, 8, 96, 8, 512), "planted-8b": (4096, 12288, 32, 8, 128, 36, 32000)}
"""Width, MLP, heads, KV heads, elements of a head, layers and vocabulary of the models with a head of their own."""
SAMPLED = {"temperature": 1.0, "seed": 1}
"""Small models begin to repeat themselves when they are greedy."""


def main() -> None:
    """Command line."""
    parser = harness.arguments(__doc__, rounds=5)
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--num-speculative-tokens", type=int, default=5, help="most drafts of a sequence in one step")
    parser.add_argument("--draft-model", help="directory of a small model that guesses, in place of n-grams")
    parser.add_argument("--layout", default="1,1", help="pipeline stages and tensor-parallel ranks of both servers")
    parser.add_argument("--parts", help="kinds of text and streams at once; default: repetitive-1,other-1,other-8")
    args = parser.parse_args()
    shape, _, right = args.model.partition(":") if args.model.split(":")[0] in PLANTED else ("", "", None)
    model = harness.prepared(args.model, args.dtype, harness.on_gpu()) if right is None else planted(shape, right)
    prompts = load.PromptSource(model)
    stages, ranks = args.layout.split(",")
    layout = {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks}
    method = {"draft_model": args.draft_model} if args.draft_model else {"speculative_method": "mtp" if right else "ngram"}
    parts = args.parts or ("repetitive-1,other-1,other-8" if right is None else "planted-1" if float(right) else "misled-1")
    flags = {**method, "num_speculative_tokens": args.num_speculative_tokens}
    texts = {"repetitive": lambda: REPETITIVE, **dict.fromkeys(("other", "planted", "misled"), lambda: prompts.make(64))}
    results: dict[str, Any] = {}
    verdicts = []
    with (
        harness.tandem_server(model, args.threads, "plain", **layout, speculative_method="none") as plain,
        harness.tandem_server(model, args.threads, "speculating", **layout, **flags) as speculating,
    ):
        for name in parts.split(","):
            kind, streams = name.split("-")
            body = SAMPLED if kind == "other" else {} if right is None else {"ignore_eos": True, "temperature": 0}

            def play(kind: str = kind, streams: str = streams, body: dict[str, Any] = body) -> dict[str, Any]:
                jobs = [load.BenchRequest(texts[kind](), args.max_tokens) for _ in range(int(streams))]
                return {"plain": measured(plain, jobs, body), "speculating": measured(speculating, jobs, body)}

            with harness.heading(f"{kind} text, {streams} stream(s)"):
                play()  # warms up, and lets it learn what steps cost
                played = harness.rounds(args, play)
                rows = [(one["plain"], one["speculating"], others) for one, others in played]
                harness.table(
                    ["round", "plain tok/s", "speculating tok/s", "ratio", "accepted/drafts", "same text", "others"],
                    [
                        [
                            i + 1,
                            one["rate"],
                            two["rate"],
                            two["rate"] / one["rate"],
                            f"{two['accepted']:.0f}/{two['drafts']:.0f}",
                            "yes" if one["texts"] == two["texts"] else "no",
                            others,
                        ]
                        for i, (one, two, others) in enumerate(rows)
                    ],
                )
                ratio = harness.middle([two["rate"] / one["rate"] for one, two, _ in rows])
                verdicts.append(harness.verdict(f"{name}: tokens/s, median of the rounds' ratios", ratio, goal(kind, shape)))
                results[name] = rows
    harness.write_json(args.json, args, {"runs": results, "verdicts": verdicts})


def goal(kind: str, shape: str) -> float:
    """Ratio to reach."""
    return 1.3 if kind == "planted" and shape == "planted-8b" else GOALS[kind]


def planted(shape: str, right: str) -> Path:
    """Make, once, the model of this shape whose head is right after the part `right` of the tokens."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from planted_head import add_mtp_head

    target = harness.cache_dir() / "benchmarks" / f"{shape}-{right}"
    if not (target / "made").exists():
        width, mlp, heads, kv_heads, size, layers, vocab = PLANTED[shape]
        config = {
            **{"hidden_size": width, "intermediate_size": mlp, "num_attention_heads": heads, "num_key_value_heads": kv_heads},
            **{"head_dim": size, "first_k_dense_replace": layers, "max_position_embeddings": 4096},
        }
        add_mtp_head(tiny_model(target, "glm4_moe", layers=layers, vocab=vocab, config=config), right=float(right))
        (target / "made").touch()
    return target


def measured(server: harness.Server, jobs: list[load.BenchRequest], body: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second of all of `jobs` at once, from the first request to the last token, prompts included."""
    drafts, accepted = counts(server)
    started = harness.now()
    answers = load.closed_loop(server, jobs, len(jobs), **body)
    rate = sum(one.tokens for one in answers) / (harness.now() - started)
    after = counts(server)
    return {
        "rate": rate,
        "texts": sorted(one.text for one in answers),
        "drafts": after[0] - drafts,
        "accepted": after[1] - accepted,
    }


def counts(server: harness.Server) -> tuple[float, float]:
    """Tokens that were tried and accepted so far."""
    draft, accepted = (
        sum(harness.metric(server, f"tandem_spec_decode_num_{name}_tokens_total").values()) for name in ("draft", "accepted")
    )
    return draft, accepted


if __name__ == "__main__":
    main()
