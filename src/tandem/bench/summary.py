"""Statistics of answers, under the names of `vllm bench serve`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tandem.bench.client import Timed

METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (without the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which the fraction `share` (0 to 1) of `values` lies, linearly interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def samples(answers: Sequence[Timed]) -> dict[str, list[float]]:
    """Return milliseconds by metric: one per answer, or for `itl` one per gap between events with text."""
    return {
        "ttft": [1000 * a.ttft for a in answers],
        "tpot": [1000 * a.tpot for a in answers if a.tokens > 1],
        "itl": [1000 * gap for a in answers for gap in a.gaps],
        "e2el": [1000 * a.e2e for a in answers],
    }


def duration(answers: Sequence[Timed]) -> float:
    """Return the seconds from the first request to the last answer."""
    return max(a.ended for a in answers) - min(a.sent for a in answers)


def summary(answers: Sequence[Timed], percentiles: Sequence[float], goodput: Mapping[str, float]) -> dict[str, float]:
    """Return totals, rates, and mean, median, standard deviation and percentiles (0 to 100) of each metric in
    milliseconds.

    `goodput` maps metrics to the most milliseconds that count as good; empty omits that rate.
    """
    done = [a for a in answers if not a.error]
    seconds = duration(answers)
    tokens_in, tokens_out = sum(a.prompt_tokens for a in done), sum(a.tokens for a in done)
    result: dict[str, float] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "total_cached_tokens": sum(a.cached_tokens for a in done),
        "request_throughput": len(done) / seconds,
        "output_throughput": tokens_out / seconds,
        "total_token_throughput": (tokens_in + tokens_out) / seconds,
    }
    if goodput:
        good = sum(all(_of(a, metric) <= most for metric, most in goodput.items()) for a in done)
        result["request_goodput"] = good / seconds
    for metric, values in samples(done).items():
        if values:
            result[f"mean_{metric}_ms"] = statistics.fmean(values)
            result[f"median_{metric}_ms"] = statistics.median(values)
            result[f"std_{metric}_ms"] = statistics.pstdev(values)
            for p in percentiles:
                result[f"p{p:g}_{metric}_ms"] = percentile(values, p / 100)
    return result


def _of(answer: Timed, metric: str) -> float:
    return 1000 * {"ttft": answer.ttft, "tpot": answer.tpot, "e2el": answer.e2e}[metric]


_TOTALS = {"completed": "Successful requests", "failed": "Failed requests", "duration": "Duration (s)",
           "total_input_tokens": "Input tokens", "total_cached_tokens": "of these from a prefix cache",
           "total_output_tokens": "Output tokens", "request_throughput": "Requests per second",
           "request_goodput": "Good requests per second", "output_throughput": "Output tokens per second",
           "total_token_throughput": "All tokens per second"}  # fmt: skip


def lines(result: Mapping[str, float], metrics: Sequence[str]) -> list[str]:
    """Return the summary as lines of text, with these `metrics`."""
    rows = [_row(text, result[key]) for key, text in _TOTALS.items() if key in result]
    for metric in metrics:
        keys = [key for key in result if key.endswith(f"_{metric}_ms") and not key.startswith("std_")]
        rows += [f"--- {METRICS[metric]} (ms)"] if keys else [f"--- {METRICS[metric]}: no samples"]
        rows += [_row(key.partition("_")[0].capitalize(), result[key]) for key in keys]
    return rows


def _row(text: str, value: float) -> str:
    return f"{text:<40}{value:>14.2f}" if isinstance(value, float) else f"{text:<40}{value:>14}"


def detail(answers: Sequence[Timed]) -> dict[str, object]:
    """Return lists with one entry per request, in the order of sending. Times are in seconds."""
    return {
        "input_lens": [a.prompt_tokens for a in answers],
        "output_lens": [a.tokens for a in answers],
        "ttfts": [a.ttft if a.pieces else None for a in answers],
        "itls": [a.gaps for a in answers],
        "generated_texts": [a.text for a in answers],
        "errors": [a.error for a in answers],
    }


RATIOS = {"mean_ttft_ms": "TTFT", "mean_tpot_ms": "TPOT", "p99_itl_ms": "p99 ITL", "output_throughput": "tokens/s"}


def ratios(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return second divided by first for each metric in `RATIOS` that is nonzero in both."""
    return {key: second[key] / first[key] for key in RATIOS if first.get(key) and second.get(key)}
