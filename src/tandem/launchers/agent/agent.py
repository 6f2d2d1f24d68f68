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
from dataclasses import dataclass, field

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from tandem.env import child_environment
from tandem.errors import TransportError, UsageError
from tandem.launchers.agent.link import BEAT_S, CHUNK, MAX_FRAME, SILENCE_S
from tandem.launchers.agent.pairing import AgentSide
from tandem.launchers.agent.trust import NAME, Peer, Trust
from tandem.log import Seldom
from tandem.processes.interpreter import module_command
from tandem.protocol.agent import (
    Beat,
    CloseInput,
    Data,
    Ended,
    OpenSession,
    PairHello,
    PairRefused,
    PairRequest,
    SessionReply,
    SessionRequest,
)
from tandem.protocol.codec import Decoder

log = logging.getLogger(__name__)
seldom = Seldom(log)

PROGRAMS = {"rank-host": "tandem.launchers.rank_host", "probe": "tandem.doctor.probe"}
"""What a head may have run, and the module that it is."""
PORT = 29640
"""Of sessions; pairing has the next one."""
END_S = 3.0
MOST_SESSIONS = 64
DOMAIN = "tandem-agent"


@dataclass
class _Session:
    identity: bytes
    process: subprocess.Popen[bytes]
    heard: float = field(default_factory=time.monotonic)

    @property
    def output(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def close_input(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def end(self) -> int:
        """Its exit code; it gets a moment to end its ranks, then it is killed."""
        self.close_input()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.returncode


class Agent:
    """Both sockets and all sessions; one thread calls `serve`."""

    def __init__(self, name: str, trust: Trust, *, host: str = "0.0.0.0", port: int = PORT) -> None:
        """Bind. Raises UsageError when a port is taken. `port` 0 takes free ones."""
        identity = trust.identity()
        self.name, self.public = name, identity.public
        self.pairing = AgentSide(name, identity.public)
        self._trust = trust
        self._sessions: dict[bytes, _Session] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = {peer.public for peer in trust.peers().values()}
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=self)
        self._commands = self._context.socket(zmq.ROUTER)
        self._commands.curve_server = True
        self._commands.curve_secretkey = identity.secret.encode()
        self._commands.curve_publickey = identity.public.encode()
        self._commands.zap_domain = DOMAIN.encode()
        self._pairs = self._context.socket(zmq.ROUTER)
        try:
            self.port = self._bind(self._commands, host, port)
            self.pair_port = self._bind(self._pairs, host, port + 1 if port else 0)
        except UsageError:
            self.close()
            raise
        self._decode = Decoder[SessionRequest](SessionRequest).decode
        self._decode_pair = Decoder[PairRequest](PairRequest).decode
        self._beaten = 0.0

    def _bind(self, one: zmq.Socket[bytes], host: str, port: int) -> int:
        one.linger = 500
        one.maxmsgsize = MAX_FRAME
        try:
            one.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error}; choose another --port", param="port") from error
        return int(one.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq for each handshake with the peer's public key."""
        return key.decode("ascii", errors="replace") in self._keys

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Answer until `until` says so."""
        while not until():
            poller = zmq.Poller()
            for source in (self._commands, self._pairs):
                poller.register(source, zmq.POLLIN)
            outputs = {one.output: one for one in self._sessions.values()}
            for descriptor in outputs:
                poller.register(descriptor, zmq.POLLIN)
            for source, _ in poller.poll(500):
                if source is self._commands:
                    self._obey()
                elif source is self._pairs:
                    self._pair()
                elif source in outputs:
                    self._pass_on(outputs[source])
            self._watch()

    def _obey(self) -> None:
        frames = self._commands.recv_multipart()
        try:
            message = self._decode(frames[-1])
        except TransportError as error:
            seldom.warning("a message of a paired head cannot be read: %s; it is dropped; is it of this version?",
                           error)
            return
        session = self._sessions.get(frames[0])
        if isinstance(message, OpenSession):
            self._open(frames[0], message)
        elif session is None:
            self._send(frames[0], Ended(255, "there is no such session"))
        else:
            session.heard = time.monotonic()
            if isinstance(message, Data):
                session.write(message.data)
            elif isinstance(message, CloseInput):
                session.close_input()

    def _open(self, identity: bytes, message: OpenSession) -> None:
        module = PROGRAMS.get(message.program)
        if module is None or identity in self._sessions or len(self._sessions) >= MOST_SESSIONS:
            self._send(identity, Ended(255, f"{message.program} cannot be started here"))
            return
        process = subprocess.Popen(module_command(module), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, env=child_environment(), start_new_session=True)
        self._sessions[identity] = _Session(identity, process)
        log.info("a head has started a %s (process %d)", message.program, process.pid)
        self._send(identity, Beat())

    def _pass_on(self, session: _Session) -> None:
        """Output of a program; its end when there is no more."""
        if data := os.read(session.output, CHUNK):
            self._send(session.identity, Data(data))
        else:
            self._close(session, "")

    def _close(self, session: _Session, reason: str) -> None:
        del self._sessions[session.identity]
        code = session.end()
        self._send(session.identity, Ended(code, reason))
        log.info("process %d has ended with %d%s", session.process.pid, code, f": {reason}" if reason else "")

    def _pair(self) -> None:
        frames = self._pairs.recv_multipart()
        try:
            request = self._decode_pair(frames[-1])
        except TransportError:
            return  # anybody may knock
        if isinstance(request, PairHello) and not NAME.fullmatch(request.name):
            return
        reply, head = self.pairing.answer(frames[0], request)
        if head is not None:
            self._trust.add(head.name, Peer(head.public))
            self._keys = {peer.public for peer in self._trust.peers().values()}
            log.info("paired with %s: it may run ranks here", head.name)
        elif isinstance(reply, PairRefused):
            seldom.warning("pairing refused: %s; nothing has changed; who meant it runs `tandem hosts pair` again",
                           reply.reason)
        self._pairs.send_multipart([frames[0], msgspec.msgpack.encode(reply)])

    def _watch(self) -> None:
        """Beats, both ways."""
        now = time.monotonic()
        beat = now - self._beaten >= BEAT_S
        self._beaten = now if beat else self._beaten
        for session in list(self._sessions.values()):
            if now - session.heard > SILENCE_S:
                self._close(session, "nothing was heard of the head")
            elif beat:
                self._send(session.identity, Beat())

    def _send(self, identity: bytes, message: SessionReply) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the head has gone; silence ends the session
            self._commands.send_multipart([identity, msgspec.msgpack.encode(message)], zmq.DONTWAIT)

    def close(self) -> None:
        """End all sessions, and close."""
        for session in list(self._sessions.values()):
            self._close(session, "the agent ends")
        self._authenticator.stop()
        for one in (self._commands, self._pairs):
            one.close()
        self._context.term()
