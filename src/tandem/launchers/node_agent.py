"""Node agent: the process on a rank's machine that joins the head and starts, watches and kills a rank.

Launchers run `python -m tandem.launchers rank-host` with a `HostPayload` as a line on standard input; users run `tandem rank`.
The node agent imports no mlx, so it stays responsive while its rank hangs in a collective. The rank is killed within
`heartbeat_timeout` of the head's last message, whatever failed.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from tandem.descriptors import raise_limit
from tandem.errors import SpawnError, TransportError, UsageError
from tandem.launchers.host_facts import address_towards, host_facts, is_own, launched_process_group
from tandem.launchers.local import END_S, Standbys, Variables, thread_variables
from tandem.launchers.process_groups import free_ports, written_files
from tandem.log import Seldom, set_up
from tandem.processes.child import receive_payload, watch_lifeline
from tandem.processes.leftovers import temporary_prefix
from tandem.protocol import hosts
from tandem.protocol.agent_messages import PartEnded
from tandem.protocol.payloads import HostPayload
from tandem.system.awake import keep_awake
from tandem.system.privacy import silent_because
from tandem.transport.bus import SILENT, HostEnd

log = logging.getLogger(__name__)
seldom = Seldom(log)

POLL_S = 0.1
JOIN_S = 3.0
"""Seconds to wait for the head at one of its addresses before the next is tried."""
REPEAT_S = 0.5
PROCESS_GROUP_VARIABLES = (
    "MLX_RANK",
    "MLX_HOSTFILE",
    "MLX_IBV_DEVICES",
    "MLX_JACCL_COORDINATOR",
    "MLX_JACCL_RING",
    "JACCL_RANK",
    "JACCL_IBV_DEVICES",
    "JACCL_COORDINATOR",
    "JACCL_RING",
    "NCCL_HOST_IP",
    "NCCL_PORT",
    "MLX_WORLD_SIZE",
)
"""Variables of the node agent's own environment that ranks must not inherit, since the head sends their group. jaccl reads the
names without the MLX_ prefix first."""


class _RankProcess:
    """The rank process and the files of its group."""

    def __init__(self, order: hosts.StartRank, standbys: Standbys) -> None:
        self.number = order.number
        self._directory = Path(tempfile.mkdtemp(prefix=temporary_prefix("rank")))
        process_group = {**order.process_group, **written_files(self._directory, order.files)}
        self.process = standbys.start(order.rank, order.payload, _variables(order), process_group)

    def kill(self) -> None:
        """Kill the process and delete its files. Idempotent."""
        self.process.kill()
        self.process.wait(END_S)
        shutil.rmtree(self._directory, ignore_errors=True)


def _variables(order: hosts.StartRank | hosts.KeepStandby) -> Variables:
    threads = thread_variables(max(1, (os.cpu_count() or 1) // order.sharing))
    return {**dict.fromkeys(PROCESS_GROUP_VARIABLES), **threads, **order.environment}


def _received(link: HostEnd, seconds: float) -> hosts.HeadMessage | None:
    """Return the head's next message; None after `seconds`, or for one that cannot be read."""
    try:
        return link.receive(seconds)
    except TransportError as error:
        seldom.warning("%s; it is dropped; is the head of this version?", error)
        return None


class NodeAgent:
    """Joins the head and follows its orders until released, refused, or the head is lost."""

    def __init__(self, payload: HostPayload, mlx: hosts.MlxProcessGroup | None = None, events: int | None = None) -> None:
        """Store the payload. `events` is the descriptor of a pipe to the agent that has started this process, if one has."""
        self._payload, self._events = payload, events
        self._mlx = mlx or hosts.MlxProcessGroup()
        self._id = secrets.token_hex(8)
        self._attempts = 0
        self._rank: _RankProcess | None = None
        self._standbys = Standbys(payload.worker)
        self._told_to_end = False
        self._heartbeat_s = 0.0

    def end(self) -> None:
        """Make `run` return soon. Safe in threads and signal handlers."""
        self._told_to_end = True

    def run(self) -> int:
        """Join and serve until the end. Return an exit code, 0 if the head released this host. Raises UsageError."""
        while True:
            link = self._join()
            if link is None:
                return 1
            try:
                code = self._serve(link)
            finally:
                self._end_rank()
                self._standbys.clear()
                link.close()
            if code is not None:
                return code
            if not self._payload.rejoin:
                return 1

    # --- joining ---

    def _join(self) -> HostEnd | None:
        """Return a link to the head, trying its addresses in turn; None after `end`. Raises UsageError if no address answers
        within `join_timeout`."""
        payload = self._payload
        deadline = time.monotonic() + payload.join_timeout
        troubles: dict[str, str] = {}
        for endpoint in itertools.cycle(payload.endpoints):
            host, _, port = endpoint.rpartition(":")
            try:
                head = socket.gethostbyname(host)
                link, troubles[endpoint] = self._knock(head, int(port), min(deadline, time.monotonic() + JOIN_S))
                if link is not None:
                    log.info("joined the head at %s", endpoint)
                    return link
                if troubles[endpoint] == SILENT:
                    troubles[endpoint] = silent_because(head, int(port)) or SILENT
            except OSError as error:
                troubles[endpoint] = error.strerror or str(error)
                time.sleep(REPEAT_S)
            if self._told_to_end:
                return None
            if time.monotonic() > deadline:
                tried = ", ".join(f"{where} ({trouble})" for where, trouble in troubles.items())
                raise UsageError(
                    f"{socket.gethostname()} could not join the head within {payload.join_timeout:.0f} s: tried "
                    f"{tried}; is the head up, its firewall open for this port, and --head-address one that this "
                    "machine reaches?"
                )
        raise UsageError("no address of the head is given")

    def _knock(self, head: str, port: int, until: float) -> tuple[HostEnd | None, str]:
        address = self._payload.address or address_towards(head)
        if not is_own(address):
            raise UsageError(
                f"{socket.gethostname()} has no address {address}, which is given for it (`ips` in a "
                f"hostfile, or --address); towards the head it has {address_towards(head)}"
            )
        link = HostEnd(f"tcp://{head}:{port}", self._payload.keys, secrets.token_hex(8))
        self._attempts += 1
        join = hosts.Join(
            facts=host_facts(address),
            host_id=self._id,
            attempt=self._attempts,
            head=head,
            slot=self._payload.slot,
            ticket=self._payload.ticket,
            mlx=self._mlx,
        )
        try:
            while time.monotonic() < until and not self._told_to_end:
                link.send(join)
                answer = _received(link, REPEAT_S)
                if isinstance(answer, hosts.Refuse):
                    raise UsageError(f"the head at {head}:{port} refuses this machine: {answer.reason}")
                if isinstance(answer, hosts.Welcome):
                    self._heartbeat_s = answer.heartbeat_timeout
                    return link, ""
        except BaseException:
            link.close(flush=False)
            raise
        trouble = link.trouble
        link.close(flush=False)
        return None, trouble

    # --- serving ---

    def _serve(self, link: HostEnd) -> int | None:
        """Follow the head's orders. Return the exit code, or None if the head is lost."""
        heard = time.monotonic()
        while not self._told_to_end:
            message, now = _received(link, POLL_S), time.monotonic()
            if message is not None:
                heard = now
            if isinstance(message, hosts.Release):
                return 0
            if isinstance(message, hosts.JoinAgain):
                log.error("Removed by the head after a silence: ending the rank")
                return None
            if now - heard > self._heartbeat_s:
                log.error("No message from the head for %.0f s (heartbeat_timeout): ending the rank", self._heartbeat_s)
                return None
            if message is not None:
                self._obey(link, message)
            self._report_exit(link)
        self._end_rank()
        link.send(hosts.Leave())
        return 128 + signal.SIGTERM

    def _obey(self, link: HostEnd, message: hosts.HeadMessage) -> None:
        if isinstance(message, hosts.HostPing):
            link.send(hosts.HostPong(message.number, self._rank is not None and self._rank.process.stopped))
        elif isinstance(message, hosts.ReservePorts):
            try:
                link.send(hosts.Ports(message.number, free_ports(message.count, message.address, message.wanted)))
            except OSError as error:
                why = f"{socket.gethostname()} cannot listen on {message.address}: {error.strerror}"
                link.send(hosts.Ports(message.number, [], why))
        elif isinstance(message, hosts.StartRank):
            self._start(link, message)
        elif isinstance(message, hosts.KeepStandby):
            self._standbys.keep(message.rank, message.spec, _variables(message))
        elif isinstance(message, hosts.DropStandby):
            self._standbys.clear()
        elif isinstance(message, hosts.KillRank) and self._rank is not None and self._rank.number == message.number:
            self._rank.process.kill()

    def _start(self, link: HostEnd, order: hosts.StartRank) -> None:
        self._end_rank()
        try:
            self._rank = _RankProcess(order, self._standbys)
        except (OSError, SpawnError) as error:
            link.send(hosts.RankExited(order.number, 1, f"could not be started: {error}"))
            return
        link.send(hosts.RankStarted(order.number, self._rank.process.pid))

    def _report_exit(self, link: HostEnd) -> None:
        rank = self._rank
        if rank is None or (code := rank.process.poll()) is None:
            return
        pid, how = rank.process.pid, rank.process.describe_exit()
        log.info("the part of the model here (process %d) %s", pid, how)
        if code and self._events is not None:
            with suppress(OSError):  # the agent has ended
                os.write(self._events, msgspec.json.encode(PartEnded(pid, how)) + b"\n")
        self._end_rank()
        link.send(hosts.RankExited(rank.number, code, how))

    def _end_rank(self) -> None:
        if self._rank is not None:
            self._rank.kill()
            self._rank = None


def host_ranks(payload: HostPayload, events: int | None = None) -> int:
    """Run a node agent in this process until it ends; return its exit code. Raises UsageError. Main thread only."""
    raise_limit()
    keep_awake()
    host = NodeAgent(payload, launched_process_group(), events)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
            signal.signal(number, lambda number, frame: host.end())
    if not payload.rejoin:
        watch_lifeline(host.end)
    return host.run()


def main(events: str | None = None) -> int:
    """Run the node agent that a launcher has started, with the payload on standard input. Return its exit code."""
    payload = msgspec.json.decode(receive_payload(), type=HostPayload)
    set_up(payload.log_level, prefix="[node agent]", log_format=payload.log_format)
    try:
        return host_ranks(payload, None if events is None else int(events))
    except UsageError as error:
        print(f"tandem: {error.message}", file=sys.stderr)  # noqa: T201 - read by the launcher
        return 2
