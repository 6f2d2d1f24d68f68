"""Membership of node agents: those that have joined, served by a thread of the head beside the engine's."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.crash_guard import start_thread
from tandem.errors import RankFailure, TransportError
from tandem.launchers.host_facts import versions
from tandem.log import Seldom
from tandem.protocol import hosts
from tandem.protocol.keys import ClusterKeys
from tandem.transport.bus import HeadEnd

log = logging.getLogger(__name__)
seldom = Seldom(log)

POLL_S = 0.1
PING_S = 1.0
ASK_S = 10.0
"""Timeout in seconds for a node agent's answer."""
LOST = 255
"""Exit code of a rank on a lost host."""


class RemoteRank:
    """A rank process on another machine, as reported by its node agent."""

    def __init__(self, number: int, member: JoinedHost, kill: Callable[[], None], changed: threading.Condition) -> None:
        self.number = number
        self.pid = 0
        self.stopped = False
        self._member = member
        self._kill = kill
        self._changed = changed
        self._code: int | None = None
        self._how = ""

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._code

    def describe_exit(self) -> str:
        """Return how and where the process ended, or where it runs, as text."""
        where = self._member.facts.name
        return f"on {where} {self._how}" if self._code is not None else f"is running on {where}"

    def ended(self, code: int, how: str) -> None:
        """Record the exit. Called by `Membership`."""
        with self._changed:
            if self._code is None:
                self._code, self._how = code, how
            self._changed.notify_all()

    def kill(self) -> None:
        """Ask the host to kill the process."""
        if self._code is None:
            self._kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to exit; return False after `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._code is not None, timeout_s)


@dataclass(eq=False)
class JoinedHost:
    """A node agent that has joined."""

    identity: bytes
    join: hosts.Join
    slot: int | None
    """Rank that the host serves; None for a standby host."""
    heard: float
    rank: RemoteRank | None = None

    @property
    def facts(self) -> hosts.HostFacts:
        """Facts of the host's machine."""
        return self.join.facts

    @property
    def mlx(self) -> hosts.MlxProcessGroup:
        """Process group that mlx.launch prepared on the machine."""
        return self.join.mlx


class Membership:
    """Node agents that have joined; silent ones are removed. Public methods are for the engine's thread unless noted."""

    def __init__(self, keys: ClusterKeys, host: str, port: int, heartbeat_s: float, *, tickets: bool) -> None:
        """Open the join socket. With `tickets` a node agent must present its slot's latest ticket. Raises TransportError."""
        self._end = HeadEnd(keys, host, port)
        self.port = self._end.port
        self._heartbeat = heartbeat_s
        self._needs_tickets = tickets
        self._tickets: dict[int, str] = {}
        self._count = 0
        self._members: dict[bytes, JoinedHost] = {}
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        """Numbers for ranks and questions."""
        self._ports: dict[int, hosts.Ports] = {}
        """Answers by the question's number."""
        self._refusals: dict[int | None, str] = {}
        self._closing = False
        self._pinged = 0.0
        self._thread = start_thread(self._run, name="membership", on_failure=self._broken)

    # --- the engine's thread ---

    def issue(self, slot: int, ticket: str) -> None:
        """Admit one node agent for `slot` with `ticket`, and remove the slot's current one."""
        with self._changed:
            self._tickets[slot] = ticket
            self._refusals.pop(slot, None)
            for member in [other for other in self._members.values() if other.slot == slot]:
                self._strike(member, "makes way for another that is started", level=logging.INFO)

    def fill(self, count: int) -> list[JoinedHost | None]:
        """Return the host of each of `count` ranks, None if missing. Standby hosts fill empty slots in order of joining."""
        with self._changed:
            self._count = count
            places: list[JoinedHost | None] = [None] * count
            for member in self._members.values():
                if member.slot is not None and member.slot < count:
                    places[member.slot] = member
            standby = (other for other in self._members.values() if other.slot is None)
            for slot in range(count):
                if places[slot] is None and (chosen := next(standby, None)) is not None:
                    chosen.slot = slot
                    places[slot] = chosen
            return places

    def refusal(self, slot: int) -> str | None:
        """Return and forget why the node agent for `slot` was refused; None if it was not."""
        with self._changed:
            return self._refusals.pop(slot, None)

    def wait(self, timeout_s: float) -> None:
        """Wait until a host joins, leaves or answers, at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait(timeout_s)

    def send(self, member: JoinedHost, message: hosts.HeadMessage) -> None:
        """Send a message through the membership's thread."""
        self._end.post(member.identity, message)

    def begin(self, member: JoinedHost) -> RemoteRank:
        """Register a rank process on the member's host, before `StartRank` is sent."""
        number = next(self._numbers)
        rank = RemoteRank(number, member, lambda: self.send(member, hosts.KillRank(number)), self._changed)
        with self._changed:
            member.rank = rank
            if member.identity not in self._members:
                rank.ended(LOST, "is lost with the Tandem there")
        return rank

    def reserve(self, member: JoinedHost, address: str, count: int, wanted: list[int]) -> list[int]:
        """Return `count` free ports at `address` of the member's machine, those in `wanted` if free. Raises RankFailure after
        `ASK_S` seconds or the host's loss."""
        number = next(self._numbers)
        self.send(member, hosts.ReservePorts(number, address, count, wanted))
        deadline = time.monotonic() + ASK_S
        with self._changed:
            while number not in self._ports:
                if member.identity not in self._members or time.monotonic() > deadline:
                    raise RankFailure(f"{member.facts.name} does not answer")
                self._changed.wait(POLL_S)
            answer = self._ports.pop(number)
        if answer.problem:
            raise RankFailure(answer.problem)
        return answer.ports

    def leave(self, ticket: str, reason: str) -> None:
        """Remove the member with this ticket, since its process has exited. Thread-safe."""
        with self._changed:
            for member in [other for other in self._members.values() if other.join.ticket == ticket]:
                self._strike(member, reason)

    def close(self) -> None:
        """Release all node agents and close the socket. Idempotent."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._thread.join()

    # --- the membership's own thread ---

    def _run(self) -> None:
        while not self._closing:
            self._end.wait(POLL_S)
            while True:
                try:
                    received = self._end.receive()
                except TransportError as error:
                    seldom.warning("Dropping an unreadable message on the join socket: %s", error)
                    continue
                if received is None:
                    break
                self._take(*received)
            self._keep_up()
        with self._changed:
            for member in self._members.values():
                self._end.post(member.identity, hosts.Release())
            self._members.clear()
        self._end.wait(0.0)
        self._end.close()

    def _broken(self, error: BaseException) -> None:
        """Remove all hosts after a failure of the receiving thread. Raises its error, which exits this process."""
        with self._changed:
            for member in list(self._members.values()):
                self._strike(member, "cannot be heard: the thread that listens has failed")
        raise error

    def _take(self, identity: bytes, message: hosts.HostMessage) -> None:
        if isinstance(message, hosts.Join):
            self._greet(identity, message)
            return
        with self._changed:
            member = self._members.get(identity)
            if member is None:
                self._end.post(identity, hosts.JoinAgain())
                return
            member.heard = time.monotonic()
            rank = member.rank
            if isinstance(message, hosts.Leave):
                self._strike(member, "has been ended there")
            elif isinstance(message, hosts.Ports):
                self._ports[message.number] = message
            elif rank is not None and isinstance(message, hosts.HostPong):
                rank.stopped = message.stopped
            elif rank is not None and rank.number == message.number:
                if isinstance(message, hosts.RankStarted):
                    rank.pid = message.pid
                elif isinstance(message, hosts.RankExited):
                    rank.ended(message.code, message.how)
            self._changed.notify_all()

    def _greet(self, identity: bytes, join: hosts.Join) -> None:
        with self._changed:
            if identity not in self._members:
                for earlier in [other for other in self._members.values() if other.join.host_id == join.host_id]:
                    if earlier.join.attempt > join.attempt:
                        return  # a delayed message: the node agent has reconnected since
                    self._strike(earlier, "has joined anew")
                facts = join.facts
                if (reason := self._objection(join)) is not None:
                    seldom.warning("%s (%s) cannot join yet: %s; it joins once that is past", facts.name, facts.address, reason)
                    self._refusals[join.slot] = reason
                    self._end.post(identity, hosts.Refuse(reason))
                    self._changed.notify_all()
                    return
                self._members[identity] = JoinedHost(identity, join, join.slot, time.monotonic())
                rank, gib = "" if join.slot is None else f" for rank {join.slot}", facts.memory_bytes / 2**30
                machine = f"{facts.chip or facts.system}, {facts.cores} cores, {gib:.0f} GiB"
                log.info("%s has joined from %s%s: %s", facts.name, facts.address, rank, machine)
                self._changed.notify_all()
            # Within the lock: other threads may post to a visible member, and a host drops messages that precede this one.
            self._end.post(identity, hosts.Welcome(self._heartbeat))

    def _objection(self, join: hosts.Join) -> str | None:
        """Return why the node agent is refused, None if it is admitted. Uses up its ticket."""
        facts, own = join.facts, versions()
        theirs = {name: facts.versions.get(name, "missing") for name in own}
        if different := [f"{name} {theirs[name]} (here {own[name]})" for name in own if theirs[name] != own[name]]:
            return f"{facts.name} has {', '.join(different)}; install the same versions on all machines (`tandem hosts sync`)"
        if self._needs_tickets and (join.slot is None or self._tickets.get(join.slot) != join.ticket):
            return "it is back with a process of before, and a new one is started there in its place"
        if join.slot is None:
            return None
        self._tickets.pop(join.slot, None)
        if self._count and join.slot >= self._count:
            return f"rank {join.slot} was asked for, and the layout has {self._count} ranks"
        holder = next((other for other in self._members.values() if other.slot == join.slot), None)
        if holder is not None:
            return f"rank {join.slot} is taken: {holder.facts.name} (process {holder.facts.pid}) has it"
        return None

    def _keep_up(self) -> None:
        """Ping all hosts and remove silent ones, at most every `PING_S` seconds."""
        now = time.monotonic()
        if now - self._pinged < PING_S:
            return
        self._pinged = now
        with self._changed:
            for member in list(self._members.values()):
                if now - member.heard > self._heartbeat:
                    self._strike(member, f"has not answered for {self._heartbeat:.0f} s (heartbeat_timeout)")
            identities = list(self._members)
        for identity in identities:
            self._end.post(identity, hosts.HostPing(int(now)))

    def _strike(self, member: JoinedHost, reason: str, level: int = logging.ERROR) -> None:
        del self._members[member.identity]
        log.log(level, "%s is lost: Tandem there %s", member.facts.name, reason)
        if member.rank is not None:
            member.rank.ended(LOST, f"is lost with the Tandem there, which {reason}")
        self._changed.notify_all()
