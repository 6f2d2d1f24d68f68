"""The options of `tandem plan`."""

from __future__ import annotations

import argparse

from tandem.cli.arguments import Parser, filled
from tandem.planner.hardware import CHIPS, LINKS
from tandem.planner.types import GOALS


def add_plan(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="directory, GGUF file, hub id, or demo. Well-known hub ids are planned for without their files "
        "(docs/planning.md lists them).",
    )
    parser.add_argument(
        "--quant",
        metavar="BITS",
        help="how weights of such a model would be stored: native, bf16, 2bit to 8bit, mxfp4, nvfp4, mxfp8 [native].",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub model.")
    _add_machines(parser)
    _add_wanted(parser)
    shown = parser.add_argument_group("output")
    shown.add_argument("--all", action="store_true", help="show all layouts that were compared, not just the best.")
    shown.add_argument("--json", action="store_true", help="print the plan as JSON.")


def _add_machines(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machines")
    group.add_argument(
        "--hosts",
        nargs="+",
        action="extend",
        metavar="NAME=MEMORY[:CHIP]",
        help="such as a=64GB b=128GB:m4-max; memory is what is installed. Chips: " + ", ".join(CHIPS) + ". More, each "
        "after a colon: gpu=112GB (memory for MLX), bandwidth=500 (GB/s) and tflops=14, taken as measured when both "
        "are given; fence=17 (us that a collective waits for a Mac's GPU; else as --fast-sync says). By default this "
        "machine.",
    )
    group.add_argument(
        "--hostfile",
        metavar="FILE",
        type=filled,
        help='MLX\'s JSON hosts file; each host may have "memory", "chip", "gpu", "bandwidth", "tflops" and "fence".',
    )
    group.add_argument(
        "--link",
        action="append",
        metavar="[A,B=]NAME",
        help="what joins the machines, or two of them: " + ", ".join(LINKS) + ". More, each after a colon: latency=30 "
        "(us), bandwidth=7.5 (GB/s).",
    )
    group.add_argument(
        "--profile",
        "--hardware-profile",
        metavar="FILE",
        type=filled,
        help="measured speeds of hosts and links, which `tandem bench comm --write-profile` writes, in place of "
        "assumed ones; without --hosts and --hostfile its hosts are planned for.",
    )
    group.add_argument("--fast-sync", choices=("auto", "on", "off"), default="off",
                       help="as for `tandem serve`: the fences of Macs that share layers [off]")


def _add_wanted(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what it must carry")
    group.add_argument("--context", type=int, metavar="N", help="tokens of each stream, prompt and output [8192]")
    group.add_argument("--streams", type=int, default=1, metavar="N", help="requests answered at once [1]")
    group.add_argument(
        "--goal",
        choices=GOALS,
        help="latency of one stream, throughput of all, or capacity for KV tokens; by default latency for one stream, "
        "else throughput.",
    )
    same = "as for `tandem serve` "
    types = ("auto", "float32", "bfloat16", "float16")
    group.add_argument("--dtype", choices=types, default="auto", help=same + "[auto]")
    group.add_argument("--dequantize", choices=("auto", "yes", "no"), default="auto", help=same + "[auto]")
    group.add_argument("--kv-dtype", choices=("auto", "8bit", "4bit"), default="auto", help=same + "[auto]")
    group.add_argument("--prefill-chunk", type=int, metavar="N", help=same)
    group.add_argument("--memory-fraction", type=float, default=0.85, metavar="X",
                       help="share of each machine's memory to plan with [0.85]")
    group.add_argument(
        "--layout",
        action="append",
        metavar="TEXT",
        help='check this layout instead of searching: "single", "tp=2", "pp=2 layers=20,16", "tp=2,1" (a stage of two '
        'machines and one of one), "dp=2 tp=2", "tp=2 split=2,1", "pp=2 machines=b,a"; repeatable.',
    )
