"""Options of `tandem agent`, `hosts`, `rank`, `doctor`, `selftest`, `parity` and `plan`."""

from __future__ import annotations

import argparse

from tandem.cli.arguments import BACKENDS, Later, Parser, add_actions, add_as_for_serve, add_hostfile, add_settings, filled
from tandem.planner.hardware import CHIPS, LINKS
from tandem.planner.types import GOALS


def add_agent(agent: Parser) -> None:
    """Add the options of `tandem agent`."""
    agent.add_argument("--name", help="name by which other machines know this one; by default its own.")
    agent.add_argument("--host", default="0.0.0.0", metavar="IP", help="address to listen on [all]")
    agent.add_argument("--port", type=int, default=29640, metavar="N", help="port to listen on; the next is for pairing [29640]")
    agent.add_argument("--pair", action="store_true", help="show a code, so that one more machine can pair with this one.")
    agent.add_argument("--forget", metavar="NAME", help="let the machine NAME run nothing here any more, and exit.")
    page = "serve a page here that pairs with machines and starts models [29642]"
    agent.add_argument("--page", type=int, nargs="?", const=29642, metavar="PORT", help=page)
    agent.add_argument("--no-announce", action="store_true", help="stay out of the list of `tandem hosts find`.")
    add_as_for_serve(agent, "log_format")


def add_hosts(parser: Parser) -> None:
    """Add the actions of `tandem hosts`."""
    actions = add_actions(
        parser,
        {
            "find": "List machines on the local network that run `tandem agent`.",
            "pair": "Have an agent trust this machine, with the code that it shows.",
            "forget": "Use an agent no longer.",
            "write": "Write a hosts file for machines, with addresses that they can all use.",
            "sync": "Install this machine's Tandem, with the same versions of mlx and mlx-lm, on the machines of a hosts "
            "file, over ssh, with pip or uv.",
        },
    )
    find, pair, forget, write, sync = actions.values()
    find.add_argument("--json", action="store_true", help="print them as JSON.")
    pair.add_argument("agent", metavar="NAME|IP[:PORT]", help="as `tandem hosts find` lists it, or its address.")
    pair.add_argument("--code", help="the six digits; by default they are asked for.")
    forget.add_argument("agent", metavar="NAME")
    write.add_argument("file", metavar="FILE", help="the hosts file; - prints it.")
    write.add_argument(
        "hosts",
        nargs="*",
        metavar="HOST",
        help="127.0.0.1, ssh destinations, or agent:NAME, in the "
        "ranks' order; by default all agents that this machine is paired with. One that is not paired is asked for its code.",
    )
    write.add_argument("--backend", choices=BACKENDS, help="to put into the file.")
    write.add_argument(
        "--cable",
        action="append",
        default=[],
        metavar="A:IF=B:IF",
        help="a cable between two hosts' interfaces, to be given a subnet that clashes with nothing; repeatable.",
    )
    write.add_argument(
        "--over", choices=("thunderbolt", "ethernet"), help="Macs: let mlx.distributed_config find out what is cabled, over ssh."
    )
    sync.set_defaults(run=Later("hosts.sync:run"))
    sync.add_argument("--hostfile", required=True, metavar="FILE", help="the hosts file; 127.0.0.1 in it is left alone.")
    sync.add_argument(
        "--remote-python",
        metavar="FILE",
        help="their interpreter; by default the one that ranks would "
        "run with, else a new environment below ~/.local/share/tandem.",
    )
    for action in (find, pair):
        action.add_argument("--timeout", type=float, default=3.0, metavar="S", help="seconds to listen for agents [3]")


def add_doctor(parser: Parser) -> None:
    """Add the options of `tandem doctor`."""
    add_hostfile(parser, "; without it this machine is looked at.")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="the nodes of a Ray cluster: that of "
        "its head's ADDRESS, by default RAY_ADDRESS, else the one that this machine is a node of.",
    )
    parser.add_argument("--backend", choices=BACKENDS, help="for sums over machines; by default the hosts file's, else ring.")
    add_as_for_serve(parser, "remote_python")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="of the HTTP server, here [8000]")
    parser.add_argument("--ports", metavar="A-B", help="ports that must be free on every machine, such as 32323-32330.")
    parser.add_argument("--full-hash", action="store_true", help="read all of every weight file instead of samples.")
    parser.add_argument("--verbose", "-v", action="store_true", help="also say of each check that does not apply why.")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON.")
    parser.add_argument("--deep", action="store_true", help="then run `tandem selftest` with this --hostfile and --model.")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)  # run over ssh on another machine
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--model", metavar="MODEL", help="directory, GGUF file, hub id or demo: is it there, is it the same, does it fit?"
    )
    add_as_for_serve(group, "weights_from")
    group.add_argument(
        "--layout", metavar="TEXT", help='as for `tandem plan`, such as "pp=2 layers=20,16"; by default some layers for each.'
    )
    group.add_argument("--context", type=int, metavar="N", help="tokens of each stream, prompt and output [8192]")
    group.add_argument("--streams", type=int, default=1, metavar="N", help="requests answered at once [1]")


def add_selftest(parser: Parser, report: str = "selftest.md") -> None:
    """Add the options of `tandem selftest`, which writes `report` unless another file is named."""
    machines, output = parser.add_mutually_exclusive_group(), parser.add_mutually_exclusive_group()
    add_hostfile(machines, ": also try those machines together.")
    cluster = (
        ": try those machines alone, with prompts of 2,048 and 30,000 tokens, beside `tandem plan`'s "
        "prediction; on Macs last with MLX's fast fences, which may lock a GPU up until a restart."
    )
    add_hostfile(machines, cluster, "--cluster")
    parser.add_argument("--quick", action="store_true", help="with --cluster: short prompts.")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        default="demo",
        help="directory, GGUF file, hub id, or demo; where the demo model is not here, a tiny random one is made [demo]",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="X",
        help="start no check after X minutes; what is left is made when the command is given again [5; with --cluster 1440]",
    )
    parser.add_argument("--only", metavar="CHECK,...", help="these checks alone; --list names them.")
    parser.add_argument(
        "--risky",
        action="store_true",
        help="also what may lock a GPU up until the machine is restarted: full memory, and MLX's fast fences.",
    )
    parser.add_argument("--fresh", action="store_true", help="discard an earlier run, interrupted or complete.")
    publish = "write report and, with --cluster, profile.json (`tandem plan --profile` reads it) into this directory."
    output.add_argument("--publish", metavar="DIR", type=filled, help=publish)
    output.add_argument(
        "--output", "-o", metavar="FILE", default=report, help=f"the report; beside it stands the same as JSON [{report}]"
    )
    parser.add_argument("--list", action="store_true", help="only say which checks there are, and what they prove.")


def add_parity(parser: Parser) -> None:
    """Add the options of `tandem parity`."""
    add_settings(parser, ("model", "parallel"))
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--tiny",
        metavar="TYPE|DIR",
        help="instead of a model, try an architecture: a tiny random "
        "model of a type, or of a directory's config.json cut down, in up to three stages against "
        "mlx-lm's own forward pass; with --tensor-parallel-size then in that layout. No weights are "
        "read.",
    )
    group.add_argument(
        "--reference",
        metavar="FILE",
        help="logits of the single process: read if the file is there, "
        "else computed and written. By default they are computed and kept in Tandem's cache; under "
        "mlx.launch they are read from there.",
    )
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help="one prompt a line: text, or token ids as a JSON list. By "
        "default a short prompt and one of more than two chunks, of pseudo-random tokens.",
    )
    group.add_argument("--tokens", type=int, default=8, metavar="N", help="greedy tokens after each prompt [8]")
    group.add_argument("--prefill-chunk", type=int, default=32, metavar="N", help="prompt tokens in one step [32]")
    group.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference of a logit, as a share of the "
        "largest logit; by default 0 for pipelines and, where ranks share layers, 1e-4 in float32, "
        "2e-2 in float16, 5e-2 in bfloat16.",
    )


def add_rank(rank: Parser) -> None:
    """Add the options of `tandem rank`."""
    rank.add_argument("--join", metavar="HOST[:PORT]", help="the head's machine, and its --join-port [29650]")
    rank.add_argument("--token-file", metavar="FILE", help="a copy of the head's token file, mode 600.")
    rank.add_argument("--rank", type=int, metavar="N", help="which rank; by default MLX_RANK, else as they join.")
    rank.add_argument(
        "--address", metavar="IP", help="address of this machine for other ranks; by default that from which it reaches the head."
    )
    rank.add_argument(
        "--join-timeout",
        type=float,
        default=300.0,
        metavar="X",
        help="seconds to keep trying to reach the head, at first and when it was lost [300]",
    )
    add_as_for_serve(rank, "log_level")
    add_as_for_serve(rank, "log_format")
    rank.add_argument("--stdin", action="store_true", help=argparse.SUPPRESS)


def add_plan(parser: Parser) -> None:
    """Add the options of `tandem plan`."""
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
    add_as_for_serve(parser, "revision")
    _add_planned_machines(parser)
    _add_wanted(parser)
    shown = parser.add_argument_group("output")
    shown.add_argument("--all", action="store_true", help="show all layouts that were compared, not just the best.")
    shown.add_argument("--json", action="store_true", help="print the plan as JSON.")


def _add_planned_machines(parser: argparse.ArgumentParser) -> None:
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
    add_hostfile(group, '; each host may have "memory", "chip", "gpu", "bandwidth", "tflops" and "fence".')
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
    add_as_for_serve(group, "fast_sync")


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
    add_as_for_serve(group, "dtype", "dequantize", "kv_dtype", "prefill_chunk", "memory_fraction", "max_memory")
    group.add_argument("--max-loras", type=int, default=0, metavar="N", help="LoRA adapters to set memory aside for [0]")
    add_as_for_serve(group, "max_lora_rank")
    group.add_argument(
        "--layout",
        action="append",
        metavar="TEXT",
        help='check this layout instead of searching: "single", "tp=2", "pp=2 layers=20,16", "tp=2,1" (a stage of two '
        'machines and one of one), "dp=2 tp=2", "tp=2 split=2,1", "pp=2 machines=b,a"; repeatable.',
    )
