"""Messages between an agent, which waits on a machine to be used, and heads: pairing, then sessions."""

from __future__ import annotations

from msgspec import Struct

# --- pairing, over a socket that anybody may reach ---------------------------------------------------------------


class PairIdentity(Struct, frozen=True, tag=True):
    """Name and key of the agent. Nothing vouches for them, nor for the head's, before the `PairProof`."""

    name: str
    public: str
    """CURVE key, Z85."""


class PairHello(PairIdentity, frozen=True, tag=True):
    """Name and key of the head; answered by `PairIdentity`."""


class PairElement(Struct, frozen=True, tag=True):
    """The agent's element of the exchange."""

    element: bytes


class PairStart(PairElement, frozen=True, tag=True):
    """The head's element, which uses up one attempt; answered by `PairElement`."""


class PairProof(Struct, frozen=True, tag="PairDone"):
    """Proof that the agent knows the code; it trusts the head's key from now on. Those of the two differ, so that none
    can be sent back."""

    proof: bytes


class PairConfirm(PairProof, frozen=True, tag=True):
    """Proof that the head knows the code; answered by the agent's."""


class PairRefused(Struct, frozen=True, tag=True):
    """No pairing; `reason` is one line."""

    reason: str


PairRequest = PairHello | PairStart | PairConfirm
PairReply = PairIdentity | PairElement | PairProof | PairRefused

# --- sessions, over a socket for paired heads alone --------------------------------------------------------------


class OpenSession(Struct, frozen=True, tag=True):
    """Start a program on the agent's machine, whose standard input and output the session carries."""

    program: str
    """`rank-host` or `probe`."""


class Data(Struct, frozen=True, tag=True):
    """Bytes of the program's standard input, or of its output and error output. None end its standard input."""

    data: bytes


class Beat(Struct, frozen=True, tag=True):
    """Sign of life. An end that hears nothing for a while counts the other as lost."""


class Ended(Struct, frozen=True, tag=True):
    """The program has ended. Exit codes of signals are negative."""

    code: int
    reason: str = ""
    """Why it was not started or was ended, in one line."""


SessionRequest = OpenSession | Data | Beat
SessionReply = Data | Beat | Ended
