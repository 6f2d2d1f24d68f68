"""`tandem bench serve` and `tandem bench latency`."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.bench.client import Target, Timed
from tandem.bench.plot import svg
from tandem.bench.summary import GOODPUT_METRICS, METRICS, RATIOS, detail, lines, ratios, samples, summary
from tandem.bench.workload import Mix, PromptSource, offer
from tandem.bench.workload import Progress as OnAnswer
from tandem.cli.address import api_key, checked_url, server_url
from tandem.cli.arguments import fail
from tandem.errors import UsageError
from tandem.system.files import file_errors
from tandem.system.http_client import ServerClient

EXIT_OK, EXIT_FAILED = 0, 1
_MOST_TOKENS = 10_000_000
_FASTEST = 1_000_000


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen action. Return 0, or 1 when a request failed. Raises UsageError and RankFailure."""
    actions = {"serve": _serve, "latency": _latency}
    return actions[arguments.action](arguments)


def _target(arguments: argparse.Namespace, url: str, model: str | None, flag: str = "--url") -> Target:
    url = checked_url(url, flag)
    server = ServerClient(url, api_key(arguments, url))
    body = {"temperature": arguments.temperature, **({"ignore_eos": True} if arguments.ignore_eos else {})}
    need(0 <= arguments.temperature < math.inf, "--temperature", arguments.temperature, "a number from 0 on")
    need(arguments.request_timeout > 0, "--request-timeout", arguments.request_timeout, "above 0")
    need(arguments.endpoint.startswith("/"), "--endpoint", arguments.endpoint, "a path such as /v1/completions")
    model = model or next(iter(server.models()), None)
    if model is None:
        raise UsageError(f"{url}/v1/models lists no model; name one with --model", param="model")
    return Target(
        base_url=url, model=model, endpoint=arguments.endpoint, api_key=server.key, body=body, timeout_s=arguments.request_timeout
    )


def need(holds: bool, flag: str, value: object, words: str) -> None:
    """Raise UsageError with the flag, its value and the requirement `words`, unless `holds`."""
    if not holds:
        raise UsageError(f"{flag} {value}: must be {words}", param=flag.removeprefix("--").replace("-", "_"))


def _need_counts(arguments: argparse.Namespace, *names: str) -> None:
    """Raise UsageError unless each of these arguments is a number of tokens or requests."""
    for name in names:
        value = getattr(arguments, name)
        need(0 < value <= _MOST_TOKENS, "--" + name.replace("_", "-"), value, f"1 to {_MOST_TOKENS}")


def _prompts(arguments: argparse.Namespace, seed: int) -> PromptSource:
    return PromptSource(Path(arguments.tokenizer) if arguments.tokenizer else None, seed)


# --- serve ---


def _serve(arguments: argparse.Namespace) -> int:
    mix, percentiles, goodput = _mix(arguments), _percentiles(arguments), _goodput(arguments)
    rate, burstiness, concurrency = arguments.request_rate, arguments.burstiness, arguments.max_concurrency
    need(0 < rate <= _FASTEST or rate == math.inf, "--request-rate", rate, f"above 0 and at most {_FASTEST}, or inf")
    need(0 < burstiness <= _FASTEST, "--burstiness", burstiness, f"above 0 and at most {_FASTEST}")
    need(concurrency is None or concurrency > 0, "--max-concurrency", concurrency, "at least 1")
    need(arguments.rounds > 0, "--rounds", arguments.rounds, "at least 1")
    targets = [_target(arguments, server_url(arguments), arguments.model)]
    if arguments.compare:
        targets.append(_target(arguments, arguments.compare, arguments.compare_model, "--compare"))
    for target in targets:
        _warm_up(arguments, target, mix)
    rounds: list[list[list[Timed]]] = []
    for number in range(arguments.rounds if arguments.compare else 1):
        answers = _round(arguments, targets, mix, number)
        rounds.append(answers)
        if arguments.compare:
            _print_ratios(f"round {number + 1}", *(summary(server, percentiles, goodput) for server in answers))
    results = []
    for index, target in enumerate(targets):
        result = _merged([summary(turn[index], percentiles, goodput) for turn in rounds])
        results.append(result)
        print(f"=== {target.model} at {target.base_url}")
        print("\n".join(lines(result, arguments.percentile_metrics.split(","))), flush=True)
    if arguments.compare:
        _print_ratios("all rounds", *results)
    _save(arguments, targets, results, rounds)
    return EXIT_FAILED if _report_failures([a for turn in rounds for answers in turn for a in answers]) else EXIT_OK


def _round(arguments: argparse.Namespace, targets: Sequence[Target], mix: Mix, number: int) -> list[list[Timed]]:
    """Send one set of requests to each target and return the answers by target. Odd rounds start with the last target."""
    jobs = mix.jobs(_prompts(arguments, arguments.seed + 1 + number))
    order = list(range(len(targets)))
    answers: dict[int, list[Timed]] = {}
    for index in order if number % 2 == 0 else reversed(order):
        with _bar(f"{targets[index].base_url}", len(jobs)) as advance:
            answers[index] = asyncio.run(
                offer(
                    targets[index],
                    jobs,
                    rate=arguments.request_rate,
                    burstiness=arguments.burstiness,
                    concurrency=arguments.max_concurrency,
                    seed=arguments.seed + number,
                    progress=advance,
                )
            )
    return [answers[index] for index in order]


def _warm_up(arguments: argparse.Namespace, target: Target, mix: Mix) -> None:
    """Send a few unmeasured requests. Raises UsageError when the server does not answer one."""
    jobs = replace(mix, count=arguments.num_warmups).jobs(_prompts(arguments, arguments.seed - 1))
    answers = asyncio.run(offer(target, jobs, concurrency=1))
    if failed := [answer for answer in answers if answer.error]:
        raise UsageError(f"{target.base_url}{target.endpoint} does not answer: {failed[0].error}", param="base_url")


def _mix(arguments: argparse.Namespace) -> Mix:
    a = arguments
    repeats = a.dataset_name == "prefix_repetition"
    _need_counts(a, "num_prompts", "random_input_len", "random_output_len", "long_input_len")
    _need_counts(a, *(f"prefix_repetition_{name}" for name in ("prefix_len", "suffix_len", "num_prefixes", "output_len")))
    need(a.num_warmups >= 0, "--num-warmups", a.num_warmups, "at least 0")
    need(0 <= a.random_range_ratio < 1, "--random-range-ratio", a.random_range_ratio, "from 0 to less than 1")
    need(0 <= a.long_share <= 1, "--long-share", a.long_share, "from 0 to 1")
    return Mix(
        dataset=a.dataset_name,
        count=a.num_prompts,
        input_len=a.random_input_len,
        output_len=a.prefix_repetition_output_len if repeats else a.random_output_len,
        range_ratio=a.random_range_ratio,
        prefix_len=a.prefix_repetition_prefix_len,
        suffix_len=a.prefix_repetition_suffix_len,
        num_prefixes=a.prefix_repetition_num_prefixes,
        long_len=a.long_input_len,
        long_share=a.long_share,
    )


def _percentiles(arguments: argparse.Namespace) -> list[float]:
    for metric in arguments.percentile_metrics.split(","):
        need(metric in METRICS, "--percentile-metrics", metric, f"of {', '.join(METRICS)}")
    text, words = arguments.metric_percentiles, "numbers from 0 to 100, separated by commas"
    try:
        percentiles = [float(item) for item in text.split(",")]
    except ValueError:
        percentiles = [math.nan]
    need(all(0 <= p <= 100 for p in percentiles), "--metric-percentiles", text, words)
    return percentiles


def _goodput(arguments: argparse.Namespace) -> dict[str, float]:
    goodput, words = {}, f"METRIC:MILLISECONDS with {', '.join(GOODPUT_METRICS)}"
    for text in arguments.goodput:
        metric, _, limit = text.partition(":")
        try:
            goodput[metric] = float(limit)
        except ValueError:
            metric = ""
        need(metric in GOODPUT_METRICS and goodput[metric] > 0, "--goodput", text, words)
    return goodput


def _merged(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return one summary of several rounds: sums of counts and durations, medians of the rest."""
    if len(results) == 1:
        return results[0]
    merged = {}
    for key in results[0]:
        values = [result[key] for result in results if key in result]
        adds = key in ("completed", "failed", "duration") or key.startswith("total_") and key.endswith("_tokens")
        merged[key] = sum(values) if adds else statistics.median(values)
    return merged


def _print_ratios(name: str, first: dict[str, float], second: dict[str, float]) -> None:
    texts = [f"{RATIOS[key]} {ratio:.3f}" for key, ratio in ratios(first, second).items()]
    print(f"{name}: second server over first: {', '.join(texts) or 'nothing to compare'}", flush=True)


def _save(
    arguments: argparse.Namespace,
    targets: Sequence[Target],
    results: Sequence[dict[str, float]],
    rounds: Sequence[Sequence[Sequence[Timed]]],
) -> None:
    if arguments.plot:
        runs = {
            f"{target.model} at {target.base_url}": samples([a for turn in rounds for a in turn[i] if not a.error])
            for i, target in enumerate(targets)
        }
        title = f"{arguments.dataset_name}, {arguments.num_prompts} requests"
        write_file(Path(arguments.plot), svg(title, runs), "--plot")
    if not (arguments.save_result or arguments.save_detailed):
        return
    rate = arguments.request_rate if math.isfinite(arguments.request_rate) else "inf"
    servers = []
    for i, target in enumerate(targets):
        more = {"rounds": [detail(turn[i]) for turn in rounds]} if arguments.save_detailed else {}
        servers.append({"base_url": target.base_url, "model_id": target.model, **results[i], **more})
    same = ("endpoint", "seed", "dataset_name", "num_prompts", "burstiness", "max_concurrency")
    facts = {"date": time.strftime("%Y%m%d-%H%M%S"), "request_rate": rate, **{name: getattr(arguments, name) for name in same}}
    second: dict[str, object] = {}
    if servers[1:]:
        second = {"compared": servers[1], "ratios": ratios(results[0], results[1])}
    name = f"{targets[0].model.replace('/', '-')}-{rate}qps-{facts['date']}.json"
    path = Path(arguments.result_dir) / (arguments.result_filename or name)
    write_file(path, json.dumps({**facts, **servers[0], **second}, indent=2) + "\n", "--result-dir")
    print(f"written to {path}")


def write_file(path: Path, text: str, flag: str) -> None:
    """Write the file given by `flag`. Raises UsageError."""
    with file_errors(f"{flag} {path}: cannot be written", param=flag):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _report_failures(answers: Sequence[Timed]) -> int:
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        fail(f"{len(failed)} of {len(answers)} requests failed, the first with: {failed[0]}")
    return len(failed)


@contextmanager
def _bar(text: str, total: int) -> Iterator[OnAnswer]:
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task(text, total=total)
        yield lambda answer: bars.advance(task)


# --- latency ---


def _latency(arguments: argparse.Namespace) -> int:
    _need_counts(arguments, "input_len", "output_len", "num_iters")
    need(arguments.num_iters_warmup >= 0, "--num-iters-warmup", arguments.num_iters_warmup, "at least 0")
    target = _target(arguments, server_url(arguments), arguments.model)
    mix = Mix(count=arguments.num_iters, input_len=arguments.input_len, output_len=arguments.output_len)
    arguments.num_warmups = arguments.num_iters_warmup
    _warm_up(arguments, target, mix)
    jobs = mix.jobs(_prompts(arguments, arguments.seed))
    with _bar(target.base_url, len(jobs)) as advance:
        answers = asyncio.run(offer(target, jobs, concurrency=1, progress=advance))
    result = summary(answers, [10, 25, 50, 75, 90, 99], {})
    rates = [rate for answer in answers if not answer.error and (rate := answer.decode_rate)]
    if rates:
        result["median_decode_tokens_per_s"] = statistics.median(rates)
    print(f"=== {target.model} at {target.base_url}: {arguments.input_len} tokens in, {arguments.output_len} out")
    print("\n".join(lines(result, ("ttft", "tpot", "e2el"))))
    if rates:
        print(f"{'Tokens per second after the first':<40}{result['median_decode_tokens_per_s']:>14.2f}")
    if arguments.output_json:
        write_file(Path(arguments.output_json), json.dumps(result, indent=2) + "\n", "--output-json")
    return EXIT_FAILED if _report_failures(answers) else EXIT_OK
