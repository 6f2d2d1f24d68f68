"""Options of `tandem bench`, `top` and `batch`."""

from __future__ import annotations

import argparse
import math

from tandem.cli.arguments import BACKENDS, Later, Parser, add_actions, add_as_for_serve, add_hostfile, add_server, filled


def add_bench(parser: Parser) -> None:
    """Add the actions `serve`, `latency` and `comm` of `tandem bench`."""
    actions = add_actions(
        parser,
        {
            "serve": "Load an OpenAI-compatible server and measure its answers; or two.",
            "latency": "Latency of one stream at a time.",
            "comm": "Collectives and hand-offs between ranks on this machine.",
        },
    )
    _add_serve(actions["serve"])
    _add_latency(actions["latency"])
    _add_comm(actions["comm"])
    actions["comm"].set_defaults(run=Later("bench.comm:run"))


def add_top(parser: Parser) -> None:
    """Add the options of `tandem top`."""
    add_server(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks [1]")
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one picture, of one interval, and end, as where the output goes to a file or a pipe.",
    )


def add_batch(parser: Parser) -> None:
    """Add the options of `tandem batch`."""
    parser.add_argument("input", metavar="IN", help="a request on each line: custom_id, url and body, as JSON.")
    parser.add_argument("output", metavar="OUT", help="answers as they come; what is answered there is not asked again.")
    add_server(parser)
    parser.add_argument("--concurrency", type=int, default=32, metavar="N", help="requests at once [32]")
    parser.add_argument("--retries", type=int, default=5, metavar="N", help="more tries for each request [5]")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="seconds for one answer [3600]")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--model", metavar="NAME", help="name of the model; by default the first that the server lists.")
    group.add_argument(
        "--endpoint", default="/v1/completions", metavar="PATH", help="/v1/completions or /v1/chat/completions [/v1/completions]"
    )
    group.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="directory with the model's tokenizer.json, to make prompts of exact lengths; without it words are counted.",
    )
    group.add_argument("--ignore-eos", action="store_true", help="let no answer end early (vLLM's field ignore_eos).")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy [0]")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals [0]")
    group.add_argument("--request-timeout", type=float, default=600.0, metavar="S", help="seconds for an answer [600]")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    _add_requests(parser)
    mix = parser.add_argument_group("mix")
    mix.add_argument(
        "--dataset-name",
        default="random",
        choices=("random", "sharegpt", "prefix_repetition", "long"),
        help="random: of given lengths; sharegpt: lengths drawn like those of conversations; "
        "prefix_repetition: shared beginnings; long: long prompts among others [random]",
    )
    for flag, default, text in (
        ("--num-prompts", 100, "requests"),
        ("--random-input-len", 1024, "tokens of a prompt (random, and the short ones of long)"),
        ("--random-output-len", 128, "most tokens of an answer (random, long)"),
        ("--prefix-repetition-prefix-len", 256, "tokens of a shared beginning"),
        ("--prefix-repetition-suffix-len", 256, "tokens after it"),
        ("--prefix-repetition-num-prefixes", 10, "beginnings"),
        ("--prefix-repetition-output-len", 128, "most tokens of an answer"),
        ("--long-input-len", 8192, "tokens of a long prompt"),
    ):
        mix.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} [{default}]")
    mix.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="lengths of random are drawn from length * (1 - X) to length * (1 + X) [0]",
    )
    mix.add_argument("--long-share", type=float, default=0.25, metavar="X", help="share of long prompts [0.25]")
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=math.inf, metavar="X", help="requests a second [inf: at once]")
    load.add_argument("--burstiness", type=float, default=1.0, metavar="X", help="1: Poisson arrivals; less: burstier [1]")
    load.add_argument("--max-concurrency", type=int, metavar="N", help="most requests under way at a time.")
    load.add_argument("--num-warmups", type=int, default=1, metavar="N", help="requests before, which do not count [1]")
    load.add_argument("--compare", metavar="URL", help="measure this server too, by turns, and print ratios.")
    load.add_argument("--compare-model", metavar="NAME", help="its name of the model.")
    load.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each with --compare [3]")
    out = parser.add_argument_group("results")
    out.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="what makes an answer good, such as ttft:500 tpot:50 e2el:5000; their rate is printed.",
    )
    out.add_argument(
        "--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="LIST", help="what to print [ttft,tpot,itl,e2el]"
    )
    out.add_argument("--metric-percentiles", default="90,99", metavar="LIST", help="percentiles [90,99]")
    out.add_argument("--save-result", action="store_true", help="write the numbers to a JSON file.")
    out.add_argument("--save-detailed", action="store_true", help="with every request's times and text.")
    out.add_argument("--result-dir", default=".", metavar="DIR", help="where to write it [.]")
    out.add_argument("--result-filename", metavar="NAME", help="by default made of model, load and time.")
    out.add_argument("--plot", metavar="FILE", help="draw the distributions into an SVG file.")


def _add_latency(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    _add_requests(parser)
    group = parser.add_argument_group("runs")
    for flag, default, text in (
        ("--input-len", 32, "tokens of the prompt"),
        ("--output-len", 128, "most tokens of the answer"),
        ("--num-iters", 10, "answers"),
        ("--num-iters-warmup", 2, "answers that do not count"),
    ):
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} [{default}]")
    group.add_argument("--output-json", metavar="FILE", help="write the numbers to FILE.")


def _add_comm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", choices=BACKENDS, help="of the collectives; by default the hosts file's, else ring. jaccl needs --hostfile."
    )
    parser.add_argument("--ranks", "-n", type=int, metavar="N", help="processes on this machine [2]")
    add_hostfile(parser, ": measure each two of its hosts, in place of ranks on this machine.")
    add_as_for_serve(parser, "remote_python")
    parser.add_argument(
        "--fast-sync",
        choices=("on", "off"),
        default="off",
        help="MLX's fast fences on ranks of Macs, which can lock a GPU up (docs/two-machines.md) [off]",
    )
    parser.add_argument("--sizes", default="4K,64K,1M,16M", metavar="LIST", help="bytes of a message [4K,64K,1M,16M]")
    parser.add_argument("--num-iters", type=int, default=50, metavar="N", help="messages of each size [50]")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for each group of ranks [120]")
    parser.add_argument("--output-json", metavar="FILE", help="write the numbers to FILE.")
    parser.add_argument(
        "--write-profile",
        metavar="FILE",
        type=filled,
        help="also measure how fast each machine "
        "computes layers, and write all to FILE for `tandem plan --profile` and `tandem serve "
        "--hardware-profile`. What FILE has of other machines, backends and fences stays.",
    )
