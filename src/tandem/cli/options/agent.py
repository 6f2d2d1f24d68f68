"""The options of `tandem agent` and `tandem hosts`; light, and without the packages that they need."""

from __future__ import annotations

from typing import Any

from tandem.cli.arguments import Parser, add_command


def add_parsers(commands: Any, run: Any) -> None:
    """Add both commands; `run` takes the parsed arguments, whose `command` says which it is."""
    agent = add_command(commands, "agent", "Wait on this machine for heads that it is paired with, to run ranks for "
                        "them.")
    agent.add_argument("--name", help="by which others know this machine; by default its host name.")
    agent.add_argument("--host", default="0.0.0.0", metavar="IP", help="address to listen on [all]")
    agent.add_argument("--port", type=int, default=29640, metavar="N", help="and the next one, for pairing [29640]")
    agent.add_argument("--pair", action="store_true", help="show a code for one more head.")
    agent.add_argument("--forget", metavar="HEAD", help="trust a head no longer, and exit.")
    agent.add_argument("--no-announce", action="store_true", help="do not answer `tandem hosts find`.")
    hosts = add_command(commands, "hosts", "Find machines, pair with them, write the hosts file, and "
                        "install Tandem on them.")
    actions = hosts.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    find = add_command(actions, "find", "List machines on the local network that run `tandem agent`.")
    find.add_argument("--json", action="store_true", help="print them as JSON.")
    pair = add_command(actions, "pair", "Have an agent trust this machine, with the code that it shows.")
    pair.add_argument("agent", metavar="NAME|IP[:PORT]", help="as `tandem hosts find` lists it, or its address.")
    pair.add_argument("--code", help="the six digits; by default they are asked for.")
    forget = add_command(actions, "forget", "Use an agent no longer.")
    forget.add_argument("agent", metavar="NAME")
    write = add_command(actions, "write", "Write a hosts file for machines, with addresses that they can all use.")
    write.add_argument("file", metavar="FILE", help="the hosts file; - prints it.")
    write.add_argument("hosts", nargs="*", metavar="HOST", help="127.0.0.1, ssh destinations, or agent:NAME, in the "
                       "ranks' order; by default all agents that this machine is paired with.")
    write.add_argument("--backend", choices=("ring", "jaccl", "jaccl-ring", "nccl"), help="to put into the file.")
    write.add_argument("--cable", action="append", default=[], metavar="A:IF=B:IF", help="a cable between two "
                       "hosts' interfaces, to be given a subnet that clashes with nothing; repeatable.")
    write.add_argument("--over", choices=("thunderbolt", "ethernet"), help="Macs: let mlx.distributed_config find out "
                       "what is cabled, over ssh.")
    sync = add_command(actions, "sync", "Install this machine's Tandem, with the same versions of mlx and mlx-lm, on "
                       "the machines of a hosts file, over ssh, with pip or uv.")
    sync.add_argument("--hostfile", required=True, metavar="FILE", help="the hosts file; 127.0.0.1 in it is left "
                      "alone.")
    sync.add_argument("--remote-python", metavar="FILE", help="their interpreter; by default the one that ranks would "
                      "run with, else a new environment below ~/.local/share/tandem.")
    for parser in (find, pair):
        parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="seconds to listen for agents [3]")
    for parser in (agent, hosts):
        parser.set_defaults(run=run)
