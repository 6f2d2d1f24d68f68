"""The agent: a daemon that runs Tandem's programs for paired heads, as sshd would.

Anyone may connect to the pairing socket, which serves `pairing` alone. The session socket admits only paired heads (CURVE). A
session runs one program, a node agent or the doctor's probe. It ends when the program exits, the head closes it, or the head is
silent for `SILENCE_S` seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import time
from collections.abc import Callable
from functools import partial

import msgspec
import zmq

from tandem.crash_guard import start_thread
from tandem.env import child_environment
from tandem.errors import ConfigError, TransportError, UsageError
from tandem.launchers.agent.link import BEAT_S, CHUNK, MAX_FRAME, SILENCE_S
from tandem.launchers.agent.pairing import LIFE_S, AgentSide
from tandem.launchers.agent.trust import NAME, Peer, Trust
from tandem.log import Seldom
from tandem.processes.interpreter import module_command
from tandem.protocol import agent_messages as messages
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.payloads import RANK_HOST
from tandem.transport.bus import HubSocket

log = logging.getLogger(__name__)
seldom = Seldom(log)

PROGRAMS = {"rank-host": RANK_HOST, "probe": "tandem.diagnostics.doctor.probe"}
"""Programs that a head may start: name -> arguments after `python -m`."""
PURPOSES = {"rank-host": "a part of a model", "probe": "a check of the doctor"}
"""Descriptions of `PROGRAMS` for people."""
PORT = 29640
"""Default port for sessions; pairing uses the next port."""
MOST_SESSIONS = 64
MOST_AT_ONCE = 1000
"""Limit of messages read from a socket before other work."""
ENDING_S, QUIET_S = 0.05, 0.5
"""Longest poll in seconds while a program is being stopped, and otherwise."""
UNPAIRED = "it is not paired with this head any more"
END_S = 3.0
"""Seconds for a program to exit after its standard input is closed; then it is killed."""
MOST_UNREAD = 8 * 2**20
"""Limit of bytes queued for a program that does not read; beyond it the session ends."""


class AgentSession:
    """A running program with one thread per pipe, so that a blocked program delays no other session."""

    def __init__(self, owner: str, program: str, on_output: Callable[[bytes], None]) -> None:
        """Start `python -m program EVENTS` for the head with public key `owner`; EVENTS is the descriptor of a pipe for
        `PartEnded`. `on_output` is called in another thread with each chunk of output, and with b"" at its end. Raises
        OSError."""
        self.owner = owner
        events, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                module_command(*program.split(), str(theirs)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=child_environment(),
                start_new_session=True,
                pass_fds=(theirs,),
            )
        except OSError:
            os.close(events)
            raise
        finally:
            os.close(theirs)
        self._on_output = on_output
        self._input: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._queued = self._written = 0
        """Bytes queued and written to standard input; each is changed by one thread only."""
        self._takes_input = True
        """False once the program has exited or closed its standard input; further input is dropped."""
        self.drained = False
        """True once the program has closed its output."""
        self.heard = time.monotonic()
        self.reason: str | None = None
        """Reason why the session ends; empty if the program exited by itself, None while it runs."""
        self._deadline = 0.0
        start_thread(self._write, name="input", on_failure=lambda _: None)
        start_thread(self._read, name="output", on_failure=lambda _: None)
        start_thread(partial(_log_events, events), name="events", on_failure=lambda _: None)

    @property
    def pid(self) -> int:
        """Process id of the program."""
        return self._process.pid

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stdin:  # the program has exited or closed its input
            while data := self._input.get():
                stdin.write(data)
                stdin.flush()
                self._written += len(data)
        self._takes_input = False

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            while data := os.read(stdout.fileno(), CHUNK):
                self._on_output(data)
        self.drained = True
        self._on_output(b"")

    def write(self, data: bytes) -> bool:
        """Queue bytes for standard input; b"" closes it after them. Return False if over `MOST_UNREAD` bytes are queued."""
        if not self._takes_input:
            return True
        self._queued += len(data)
        self._input.put(data)
        return self._queued - self._written <= MOST_UNREAD

    def end(self, reason: str) -> None:
        """Discard queued input, close standard input and keep the first `reason`; `ended` then returns the exit code."""
        if self.reason is None:
            self.reason, self._deadline = reason, time.monotonic() + END_S
            with contextlib.suppress(queue.Empty):
                while True:
                    self._input.get_nowait()
            self.write(b"")

    def ended(self) -> int | None:
        """Return the exit code, None while the program runs. Kill it if it is past its deadline."""
        if self.drained:
            self.end("")
        code = self._process.poll()
        if code is None and self.reason is not None and time.monotonic() > self._deadline:
            self._process.kill()
        return None if self.reason is None else code


def _log_events(descriptor: int) -> None:
    """Log the ends of ranks that a node agent reports; its own log goes to the head alone."""
    with os.fdopen(descriptor, "rb") as lines:
        for line in lines:
            ended = msgspec.json.decode(line, type=messages.PartEnded)
            log.warning(
                "the part of the model here (process %d) %s; the machine that serves starts it anew", ended.pid, ended.how
            )


class _SessionSocket(HubSocket[messages.SessionReply, messages.SessionRequest]):
    """Socket at which paired heads open sessions."""

    def take(self) -> tuple[bytes, str, messages.SessionRequest] | None:
        """Return the next message as (connection, the head's public key, message); None if there is none. Raises TransportError
        for an unreadable one."""
        try:
            frames = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        return frames[0].bytes, str(frames[-1].get("User-Id")), self._decoder.decode(frames[-1].bytes)


class Agent:
    """Both sockets and all sessions, served by one thread."""

    def __init__(self, name: str, trust: Trust, *, host: str = "0.0.0.0", port: int = PORT) -> None:
        """Bind the sockets; `port` 0 uses free ports. Raises UsageError when a port is taken."""
        identity = trust.identity()
        self.name, self.public = name, identity.public
        self.pairing = AgentSide(name, identity.public)
        self._trust = trust
        self._sessions: dict[bytes, AgentSession] = {}
        self._trusted: tuple[set[str], tuple[int, int]] = set(), (-1, 0)
        """Trusted public keys, and the version of the peers file that they come from. Assigned together, as two threads read
        them."""
        self._look_at_keys()
        self._beaten = 0.0
        keys = ClusterKeys(identity.public, identity.secret, "", "")
        try:
            self._commands = _SessionSocket(
                messages.SessionRequest,
                keys,
                host,
                port,
                name="agent's port",
                max_frame=MAX_FRAME,
                linger_ms=500,
                admits=self.admits,
            )
            try:
                self._pairs = HubSocket[messages.PairReply, messages.PairRequest](
                    messages.PairRequest,
                    None,
                    host,
                    port + 1 if port else 0,
                    name="pairing port",
                    max_frame=MAX_FRAME,
                    linger_ms=500,
                    keyless_s=LIFE_S,
                )
            except TransportError:
                self._commands.close()
                raise
        except TransportError as error:
            remedy = "if an agent runs here already, end it first (Ctrl-C), else choose another --port"
            raise UsageError(f"{error.message}; {remedy}", param="port") from error
        self.port, self.pair_port = self._commands.port, self._pairs.port

    def admits(self, key: str) -> bool:
        """True for the public key of a paired head. Called by the socket's own thread at each handshake."""
        return key in self._look_at_keys()

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve both sockets until `until` returns True."""
        while not until():
            ending = any(session.reason is not None for session in self._sessions.values())
            self._commands.wait(ENDING_S if ending else QUIET_S, self._pairs)
            for _ in range(MOST_AT_ONCE):  # drain the socket first: a message read late was not sent late
                try:
                    received = self._commands.take()
                except TransportError as error:
                    seldom.warning("a message of a paired head cannot be read: %s; it is dropped; is it of this version?", error)
                    continue
                if received is None:
                    break
                self._obey(*received)
            for _ in range(MOST_AT_ONCE):
                try:
                    request = self._pairs.receive()
                except TransportError:
                    continue  # anyone may connect, so errors are expected
                if request is None:
                    break
                self._pair(*request)
            self._watch()

    def _obey(self, identity: bytes, owner: str, message: messages.SessionRequest) -> None:
        session = self._sessions.get(identity)
        if owner not in self._trusted[0] and owner not in self._look_at_keys():  # the head may have been paired a moment ago
            if session is None:  # else `_watch` reports the session's end
                self._commands.post(identity, messages.Ended(255, UNPAIRED))
        elif isinstance(message, messages.OpenSession):
            self._open(identity, owner, message)
        elif session is None or session.owner != owner:
            self._commands.post(identity, messages.Ended(255, "there is no such session"))
        elif session.reason is None:
            session.heard = time.monotonic()
            if isinstance(message, messages.Data) and not session.write(message.data):
                session.end("it does not read what it is sent")

    def _open(self, identity: bytes, owner: str, message: messages.OpenSession) -> None:
        program = PROGRAMS.get(message.program)
        reason = ""
        if program is None or identity in self._sessions or len(self._sessions) >= MOST_SESSIONS:
            reason = f"{message.program} cannot be started here"
        else:

            def pass_on(data: bytes) -> None:
                # Each message wakes the serving thread.
                self._commands.post(identity, messages.Data(data) if data else messages.Beat())

            try:
                session = self._sessions[identity] = AgentSession(owner, program, pass_on)
            except OSError as error:
                reason = f"{message.program} cannot be started: {error.strerror}"
        if not reason:
            log.info("a paired machine runs %s here (process %d)", PURPOSES.get(message.program, message.program), session.pid)
        self._commands.post(identity, messages.Ended(255, reason) if reason else messages.Beat())

    def _pair(self, identity: bytes, request: messages.PairRequest) -> None:
        if isinstance(request, messages.PairHello) and not NAME.fullmatch(request.name):
            return
        reply, head = self.pairing.answer(identity, request)
        if head is not None:
            try:
                self._trust.add(head.name, Peer(head.public))
            except (OSError, ConfigError) as error:
                reply = messages.PairRefused(f"{self.name} cannot write down whom it trusts: {error}")
            else:
                self._look_at_keys()
                log.info("paired with %s: it may run models here", head.name)
        if isinstance(reply, messages.PairRefused):
            seldom.warning("a machine could not pair, and was told: %s; nothing has changed here", reply.reason)
        with contextlib.suppress(TransportError):  # the head has disconnected
            self._pairs.send(identity, reply)

    def _watch(self) -> None:
        """Send heartbeats, end sessions of silent or unpaired heads, and report exited programs."""
        now = time.monotonic()
        trusted = self._look_at_keys()
        beat = now - self._beaten >= BEAT_S
        self._beaten = now if beat else self._beaten
        for identity, session in list(self._sessions.items()):
            if session.owner not in trusted:
                session.end(UNPAIRED)
            elif now - session.heard > SILENCE_S:
                session.end("the other machine is silent")
            if not self._reported(identity, session) and session.reason is None and beat:
                self._commands.post(identity, messages.Beat())

    def _reported(self, identity: bytes, session: AgentSession) -> bool:
        """Send the exit code to the head and forget the session if its program has exited; return whether it has."""
        if (code := session.ended()) is None:
            return False
        del self._sessions[identity]
        self._commands.post(identity, messages.Ended(code, session.reason or ""))
        why = session.reason or (f"killed or failed (code {code}); the other machine shows what follows" if code else "done")
        log.info("process %d, which ran here for a paired machine, has ended: %s", session.pid, why)
        return True

    def _look_at_keys(self) -> set[str]:
        """Return the trusted public keys, read again if the file has changed. Raises ConfigError at the first read only."""
        changed, (keys, since) = self._trust.changed_at(), self._trusted
        if changed != since:
            try:
                keys = {peer.public for peer in self._trust.peers().values()}
            except ConfigError as error:
                if since[0] < 0:
                    raise
                log.error("nobody is trusted: %s; nobody is let in until it is mended", error.message)
                keys = set()
            self._trusted = keys, changed
        return keys

    def close(self) -> None:
        """End all sessions, wait for their programs, and close the sockets."""
        while self._sessions:
            for identity, session in list(self._sessions.items()):
                session.end("the agent ends")
                self._reported(identity, session)
            self._commands.wait(ENDING_S)
        self._commands.close()
        self._pairs.close()
