"""Messages between an agent, which waits on a machine to be used, and heads: pairing, then sessions."""

from __future__ import annotations

from msgspec import Struct

# --- pairing, over a socket that anybody may reach ---------------------------------------------------------------


class PairHello(Struct, frozen=True, tag=True):
    """A head asks who the agent is; answered by `PairIdentity`."""

    name: str
    public: str
    """CURVE key of the head, Z85."""


class PairIdentity(Struct, frozen=True, tag=True):
    """The agent's name and CURVE key. Nothing vouches for them before `PairDone`."""

    name: str
    public: str


class PairStart(Struct, frozen=True, tag=True):
    """The head's element of the exchange; uses up one attempt. Answered by `PairElement`."""

    element: bytes


class PairElement(Struct, frozen=True, tag=True):
    """The agent's element."""

    element: bytes


class PairConfirm(Struct, frozen=True, tag=True):
    """Proof that the head knows the code; answered by `PairDone`."""

    proof: bytes


class PairDone(Struct, frozen=True, tag=True):
    """Proof that the agent knows the code; from now on it trusts the head's key."""

    proof: bytes


class PairRefused(Struct, frozen=True, tag=True):
    """No pairing; `reason` is one line."""

    reason: str


PairRequest = PairHello | PairStart | PairConfirm
PairReply = PairIdentity | PairElement | PairDone | PairRefused

# --- sessions, over a socket for paired heads alone --------------------------------------------------------------


class OpenSession(Struct, frozen=True, tag=True):
    """Start a program on the agent's machine, whose standard input and output the session carries."""

    program: str
    """`rank-host` or `probe`."""


class Data(Struct, frozen=True, tag=True):
    """Bytes of the program's standard input, or of its output and error output."""

    data: bytes


class CloseInput(Struct, frozen=True, tag=True):
    """The end of its standard input."""


class Beat(Struct, frozen=True, tag=True):
    """Still there. Whoever hears nothing for a while gives the other up."""


class Ended(Struct, frozen=True, tag=True):
    """The program has ended. Exit codes of signals are negative."""

    code: int
    reason: str = ""
    """Why it was not started or was ended, in one line."""


SessionRequest = OpenSession | Data | CloseInput | Beat
SessionReply = Data | Beat | Ended
