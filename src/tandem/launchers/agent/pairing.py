"""Pairing: two machines exchange public keys, authenticated by a six-digit code that the user types in.

The exchange is SPAKE2 (Abdalla and Pointcheval, "Simple Password-Based Encrypted Key Exchange Protocols", CT-RSA 2005; also RFC
9382). The `spake2` package implements it; magic-wormhole uses it for its short codes. The group is Ed25519, the head is side A,
the agent side B. The code is the password; names and CURVE keys are the identities. Both ends get the same strong key if and
only if they used the same code and saw the same names and CURVE keys. Each then proves possession of that key, the head first:
HMAC-SHA256 of its role.

An eavesdropper learns nothing about the code. An active attacker can test one guess per run. The agent counts runs when they
begin: a code allows three runs, five minutes and one success. After that, pairing is refused until another code is
shown, which `tandem agent` does by itself a few times, but not after a wrong one. So an attacker succeeds with probability
three in a million per code.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable

from spake2 import SPAKE2_A, SPAKE2_B

from tandem.errors import UsageError
from tandem.protocol.agent_messages import (
    PairConfirm,
    PairElement,
    PairHello,
    PairIdentity,
    PairProof,
    PairRefused,
    PairReply,
    PairRequest,
    PairStart,
)

DIGITS = 6
ATTEMPTS = 3
LIFE_S = 300.0
MOST_RUNS = 8
"""Limit of concurrent runs; the oldest is dropped."""
_WRONG = "the code is wrong; run this again with the one that the other machine shows now"


class HeadSide:
    """The head's end of one pairing run."""

    def __init__(self, code: str, own: PairHello, agent: PairIdentity) -> None:
        """Start a run with a `code`, in which spaces and hyphens are ignored. Raises UsageError for a malformed code."""
        digits = code.replace(" ", "").replace("-", "")
        if len(digits) != DIGITS or not (digits.isascii() and digits.isdigit()):
            raise UsageError(f"the code has {DIGITS} digits; the agent shows it")
        self._exchange = SPAKE2_A(digits.encode(), idA=_identity(own), idB=_identity(agent))

    def start(self) -> PairStart:
        """Return the first message of the exchange."""
        return PairStart(self._exchange.start())

    def confirm(self, reply: PairElement) -> PairConfirm:
        """Return the head's proof, given the agent's element. Raises UsageError."""
        key = _finish(self._exchange, reply.element)
        if key is None:
            raise UsageError(_WRONG)
        self._key = key
        return PairConfirm(_proof(key, b"head"))

    def check(self, reply: PairProof) -> None:
        """Check the agent's proof. Raises UsageError for a wrong one; then the agent must not be trusted."""
        if not hmac.compare_digest(reply.proof, _proof(self._key, b"agent")):
            raise UsageError(_WRONG)


class AgentSide:
    """The agent's end: one code, and the runs that try it. Pure except for the clock."""

    def __init__(self, name: str, public: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._identity = PairIdentity(name, public)
        self._clock = clock
        self._code: str | None = None
        self._until = 0.0
        self.attempts_left = 0
        """Attempts that the code still allows."""
        self._heads: dict[bytes, PairHello] = {}
        self._keys: dict[bytes, bytes] = {}

    def open(self) -> str:
        """Return a new random code to show to the user; it replaces the previous one."""
        self._code = f"{secrets.randbelow(10**DIGITS):0{DIGITS}d}"
        self._until, self.attempts_left = self._clock() + LIFE_S, ATTEMPTS
        self._keys.clear()  # heads stay: somebody may be typing
        return self._code

    @property
    def is_open(self) -> bool:
        """True while the code is valid: not expired, and with attempts left or a run in progress."""
        return self._code is not None and self._clock() < self._until and (self.attempts_left > 0 or bool(self._keys))

    @property
    def is_over(self) -> bool:
        """True once a code has expired, or its attempts are used up, without a success."""
        return self._code is not None and not self.is_open

    def answer(self, peer: bytes, request: PairRequest) -> tuple[PairReply, PairHello | None]:
        """Return the reply to `peer`, a connection's identity, and the head to trust once a run succeeds, else None."""
        if not self.is_open:
            why = "the agent shows no code (paired machines need none): end it (Ctrl-C) and run `tandem agent --pair` for one"
            return PairRefused(why), None
        if isinstance(request, PairHello):
            while len(self._heads) >= MOST_RUNS:
                oldest = next(iter(self._heads))
                del self._heads[oldest]
                self._keys.pop(oldest, None)
            self._heads[peer] = request
            return self._identity, None
        if peer not in self._heads:
            return PairRefused("begin with who you are"), None
        if isinstance(request, PairStart):
            return self._start(peer, request), None
        return self._confirm(peer, request)

    def _start(self, peer: bytes, request: PairStart) -> PairReply:
        if not self.attempts_left:
            return PairRefused(f"{ATTEMPTS} codes have been tried; run `tandem agent --pair` there for a new one")
        self.attempts_left -= 1
        assert self._code is not None
        exchange = SPAKE2_B(self._code.encode(), idA=_identity(self._heads[peer]), idB=_identity(self._identity))
        element = exchange.start()
        key = _finish(exchange, request.element)
        if key is None:
            return PairRefused(_WRONG)
        self._keys[peer] = key
        return PairElement(element)

    def _confirm(self, peer: bytes, request: PairConfirm) -> tuple[PairReply, PairHello | None]:
        key, head = self._keys.pop(peer, None), self._heads.pop(peer)
        if key is None or not hmac.compare_digest(request.proof, _proof(key, b"head")):
            return PairRefused(f"{_WRONG} (attempts left: {self.attempts_left})"), None
        self._code = None
        return PairProof(_proof(key, b"agent")), head


def _identity(side: PairIdentity) -> bytes:
    return f"{side.name} {side.public}".encode()


def _proof(key: bytes, role: bytes) -> bytes:
    return hmac.digest(key, b"tandem pairing, " + role, "sha256")


def _finish(exchange: SPAKE2_A | SPAKE2_B, element: bytes) -> bytes | None:
    """Return the shared key; None for an invalid `element`."""
    try:
        key: bytes = exchange.finish(element)
    except Exception:  # noqa: BLE001 - the package raises bare assertions, ValueErrors and errors of its own
        return None
    return key
