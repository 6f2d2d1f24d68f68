"""The agent: waits on a machine until a paired head wants a program of Tandem's run there, as sshd would with ssh.

Two sockets: one for pairing, which anybody may reach and where only `pairing` happens; one for sessions, where CURVE
lets in nobody but paired heads. A session is one program: a rank host, or the doctor's probe; nothing else can be asked
for. It ends with the program, when the head closes it, or when nothing is heard of the head for a while.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Callable

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from tandem.env import child_environment
from tandem.errors import ConfigError, TransportError, UsageError
from tandem.launchers.agent.link import BEAT_S, CHUNK, MAX_FRAME, SILENCE_S
from tandem.launchers.agent.pairing import LIFE_S, AgentSide
from tandem.launchers.agent.trust import NAME, Peer, Trust
from tandem.log import Seldom
from tandem.processes.interpreter import module_command
from tandem.protocol import agent
from tandem.protocol.codec import Decoder
from tandem.protocol.keys import HANDSHAKE_S
from tandem.transport.guard import Guard

log = logging.getLogger(__name__)
seldom = Seldom(log)

PROGRAMS = {"rank-host": "tandem.launchers.rank_host", "probe": "tandem.diagnostics.doctor.probe"}
"""What a head may have run, and the module that it is."""
PORT = 29640
"""Of sessions; pairing has the next one."""
MOST_SESSIONS = 64
MOST_AT_ONCE = 1000
"""Messages taken from a socket before anything else is looked at."""
ENDING_MS, QUIET_MS = 50, 500
"""Longest sleeps while a program ends, and else."""
DOMAIN = "tandem-agent"
UNPAIRED = "it is not paired with this head any more"
END_S = 3.0
"""Seconds that a program gets to end by itself once its input is closed."""
MOST_UNREAD = 8 * 2**20
"""Bytes kept for a program that does not read; what is beyond is a reason to end it."""


class Session:
    """A running program and its pipes. Nothing here waits: a program that does not read, or does not end, is no reason
    to keep other heads waiting."""

    def __init__(self, identity: bytes, owner: str, module: str) -> None:
        """Start it for the head whose connection is `identity` and whose key is `owner`. Raises OSError."""
        self.identity, self.owner = identity, owner
        self._process = subprocess.Popen(module_command(module), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.STDOUT, env=child_environment(), start_new_session=True,
                                         bufsize=0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.input, False)
        self.heard = time.monotonic()
        self._unread = bytearray()
        self._closing = False
        self.reason: str | None = None
        """Why it is being ended; empty when it ended by itself, None while it shall run."""
        self._deadline = 0.0

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def behind(self) -> bool:
        """Something waits for the program to read it."""
        return bool(self._unread)

    def write(self, data: bytes) -> bool:
        """To its standard input, as far as it reads; the rest is kept. False when too much is kept."""
        if not self._closing:
            self._unread += data
        self.flush()
        return len(self._unread) <= MOST_UNREAD

    def flush(self) -> None:
        """Write what was kept."""
        try:
            while self._unread:
                del self._unread[:os.write(self.input, self._unread[:65536])]
        except BlockingIOError:
            return
        except OSError:  # it has ended, or closed its input
            self._unread.clear()
        if self._closing and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def close_input(self) -> None:
        """When all is read."""
        self._closing = True
        self.flush()

    def end(self, reason: str) -> None:
        """Close its input, at once; from now on `ended` says when it is over. The first reason counts."""
        if self.reason is None:
            self.reason, self._deadline = reason, time.monotonic() + END_S
            self._unread.clear()
            self.close_input()

    def ended(self) -> int | None:
        """Its exit code when it is over; one that has been told to end, and does not in time, is killed."""
        code = self._process.poll()
        if code is None and self.reason is not None and time.monotonic() > self._deadline:
            self._process.kill()
        if code is not None:
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._closing = True
            self.flush()
        return code


class Agent:
    """Both sockets and all sessions; one thread calls `serve`."""

    def __init__(self, name: str, trust: Trust, *, host: str = "0.0.0.0", port: int = PORT) -> None:
        """Bind. Raises UsageError when a port is taken. `port` 0 takes free ones."""
        identity = trust.identity()
        self.name, self.public = name, identity.public
        self.pairing = AgentSide(name, identity.public)
        self._trust = trust
        self._sessions: dict[bytes, Session] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._trusted: tuple[set[str], tuple[int, int]] = set(), (-1, 0)
        """Keys, and as of what change; assigned at once, as two threads look."""
        self._look_at_keys()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=self)
        self._commands = self._context.socket(zmq.ROUTER)
        self._commands.curve_server = True
        self._commands.curve_secretkey = identity.secret.encode()
        self._commands.curve_publickey = identity.public.encode()
        self._commands.zap_domain = DOMAIN.encode()
        self._pairs = self._context.socket(zmq.ROUTER)
        self._guards: list[Guard] = []
        try:
            self.port = self._bind(self._commands, host, port)
            self._guards.append(Guard(self._commands, "agent's port"))
            self.pair_port = self._bind(self._pairs, host, port + 1 if port else 0)
            self._guards.append(Guard(self._pairs, "pairing port", keyless_s=LIFE_S))
        except UsageError:
            self.close()
            raise
        self._decode = Decoder[agent.SessionRequest](agent.SessionRequest).decode
        self._decode_pair = Decoder[agent.PairRequest](agent.PairRequest).decode
        self._beaten = 0.0

    def _bind(self, one: zmq.Socket[bytes], host: str, port: int) -> int:
        one.linger = 500
        one.maxmsgsize = MAX_FRAME
        one.handshake_ivl = int(HANDSHAKE_S * 1000)
        try:
            one.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error}; choose another --port", param="port") from error
        return int(one.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq, in its thread, for each handshake with the peer's public key."""
        return key.decode("ascii", errors="replace") in self._look_at_keys()

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Answer until `until` says so."""
        while not until():
            poller = zmq.Poller()
            for source in (self._commands, self._pairs):
                poller.register(source, zmq.POLLIN)
            running = [one for one in self._sessions.values() if one.reason is None]
            outputs = {one.output: one for one in running}
            inputs = {one.input: one for one in running if one.behind}
            for descriptor in outputs:
                poller.register(descriptor, zmq.POLLIN)
            for descriptor in inputs:
                poller.register(descriptor, zmq.POLLOUT)
            ready = dict(poller.poll(ENDING_MS if len(running) < len(self._sessions) else QUIET_MS))
            self._drain(self._commands, self._obey)  # all of them: what is read late was not said late
            self._drain(self._pairs, self._pair)
            for descriptor in ready:
                if descriptor in outputs:
                    self._pass_on(outputs[descriptor])
                elif descriptor in inputs:
                    inputs[descriptor].flush()
            self._watch()

    def _drain(self, one: zmq.Socket[bytes], take: Callable[[list[zmq.Frame]], None]) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                frames = one.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            take(frames)

    def _obey(self, frames: list[zmq.Frame]) -> None:
        identity, owner = frames[0].bytes, str(frames[-1].get("User-Id"))
        try:
            message = self._decode(frames[-1].bytes)
        except TransportError as error:
            seldom.warning("a message of a paired head cannot be read: %s; it is dropped; is it of this version?",
                           error)
            return
        session = self._sessions.get(identity)
        if owner not in self._trusted[0] and owner not in self._look_at_keys():  # it may be paired since a moment ago
            self._send(identity, agent.Ended(255, UNPAIRED))
        elif isinstance(message, agent.OpenSession):
            self._open(identity, owner, message)
        elif session is None:
            self._send(identity, agent.Ended(255, "there is no such session"))
        elif session.reason is None:
            session.heard = time.monotonic()
            if isinstance(message, agent.Data):
                if not session.write(message.data):
                    session.end("it does not read what it is sent")
            elif isinstance(message, agent.CloseInput):
                session.close_input()

    def _open(self, identity: bytes, owner: str, message: agent.OpenSession) -> None:
        module = PROGRAMS.get(message.program)
        if module is None or identity in self._sessions or len(self._sessions) >= MOST_SESSIONS:
            self._send(identity, agent.Ended(255, f"{message.program} cannot be started here"))
            return
        try:
            session = self._sessions[identity] = Session(identity, owner, module)
        except OSError as error:
            self._send(identity, agent.Ended(255, f"{message.program} cannot be started: {error.strerror}"))
            return
        log.info("a head has started a %s (process %d)", message.program, session.pid)
        self._send(identity, agent.Beat())

    def _pass_on(self, session: Session) -> None:
        """Output of a program; its end when there is no more."""
        if data := os.read(session.output, CHUNK):
            self._send(session.identity, agent.Data(data))
        else:
            session.end("")

    def _pair(self, received: list[zmq.Frame]) -> None:
        frames = [frame.bytes for frame in received]
        try:
            request = self._decode_pair(frames[-1])
        except TransportError:
            return  # anybody may knock
        if isinstance(request, agent.PairHello) and not NAME.fullmatch(request.name):
            return
        reply, head = self.pairing.answer(frames[0], request)
        if head is not None:
            try:
                self._trust.add(head.name, Peer(head.public))
            except (OSError, ConfigError) as error:
                reply = agent.PairRefused(f"{self.name} cannot write down whom it trusts: {error}")
            else:
                self._look_at_keys()
                log.info("paired with %s: it may run ranks here", head.name)
        if isinstance(reply, agent.PairRefused):
            seldom.warning("pairing refused: %s; nothing has changed; who meant it runs `tandem hosts pair` again",
                           reply.reason)
        self._pairs.send_multipart([frames[0], msgspec.msgpack.encode(reply)])

    def _watch(self) -> None:
        """Beats, both ways; who is trusted; programs that have ended."""
        now = time.monotonic()
        trusted = self._look_at_keys()
        beat = now - self._beaten >= BEAT_S
        self._beaten = now if beat else self._beaten
        for session in list(self._sessions.values()):
            if session.owner not in trusted:
                session.end(UNPAIRED)
            elif now - session.heard > SILENCE_S:
                session.end("nothing was heard of the head")
            if session.reason is not None:
                self._bury(session)
            elif beat:
                self._send(session.identity, agent.Beat())

    def _bury(self, session: Session) -> None:
        """Say how a session has ended, if it has."""
        if (code := session.ended()) is None:
            return
        del self._sessions[session.identity]
        reason = session.reason or ""
        self._send(session.identity, agent.Ended(code, reason))
        log.info("process %d has ended with %d%s", session.pid, code, f": {reason}" if reason else "")

    def _look_at_keys(self) -> set[str]:
        """Whom this machine trusts now. Raises ConfigError at first."""
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

    def _send(self, identity: bytes, message: agent.SessionReply) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the head has gone; silence ends the session
            self._commands.send_multipart([identity, msgspec.msgpack.encode(message)], zmq.DONTWAIT)

    def close(self) -> None:
        """End all sessions, and close."""
        for session in list(self._sessions.values()):
            session.end("the agent ends")
        while self._sessions:
            for session in list(self._sessions.values()):
                self._bury(session)
            time.sleep(ENDING_MS / 1000)
        for guard in self._guards:
            guard.stop()
        self._authenticator.stop()
        for one in (self._commands, self._pairs):
            one.close()
        self._context.term()
