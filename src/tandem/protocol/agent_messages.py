"""Messages between `tandem agent` on a machine and heads: pairing with a code, then sessions."""

from __future__ import annotations

from msgspec import Struct

# --- pairing, over a socket open to anyone ------------------------------------------------------------------------


class PairIdentity(Struct, frozen=True, tag=True):
    """Name and public key of the agent. Neither side's key is authenticated before the `PairProof`."""

    name: str
    public: str
    """CURVE25519 public key in Z85."""


class PairHello(PairIdentity, frozen=True, tag=True):
    """Name and public key of the head; answered by `PairIdentity`."""


class PairElement(Struct, frozen=True, tag=True):
    """The agent's group element of the password-authenticated key exchange."""

    element: bytes


class PairStart(PairElement, frozen=True, tag=True):
    """The head's group element of the key exchange. Uses up one attempt; answered by `PairElement`."""


class PairProof(Struct, frozen=True, tag="PairDone"):
    """Proof that the agent has the pairing code; it trusts the head's key from then on. Differs from the head's proof, so
    neither can be replayed as the other."""

    proof: bytes


class PairConfirm(PairProof, frozen=True, tag=True):
    """Proof that the head has the pairing code; answered by `PairProof`."""


class PairRefused(Struct, frozen=True, tag=True):
    """Pairing failed; `reason` is one line."""

    reason: str


PairRequest = PairHello | PairStart | PairConfirm
PairReply = PairIdentity | PairElement | PairProof | PairRefused

# --- sessions, over a socket for paired heads only ----------------------------------------------------------------


class OpenSession(Struct, frozen=True, tag=True):
    """Start a program on the agent's machine. The session carries its standard input and output."""

    program: str
    """Program to start: `rank-host` (a node agent) or `probe`."""


class Data(Struct, frozen=True, tag=True):
    """Bytes of the program's standard input, or of its output and error output. Empty data closes standard input."""

    data: bytes


class Beat(Struct, frozen=True, tag=True):
    """Heartbeat in either direction. A peer without messages for a while counts as lost."""


class Ended(Struct, frozen=True, tag=True):
    """The program has ended. A negative exit code is the negated number of the signal that ended it."""

    code: int
    reason: str = ""
    """Reason why the program was not started or was ended, in one line."""


class PartEnded(Struct, frozen=True):
    """A rank process of a node agent has ended by itself: a line of JSON in the pipe from the node agent to its agent."""

    pid: int
    how: str
    """Phrase such as `was killed (SIGKILL)`."""


SessionRequest = OpenSession | Data | Beat
SessionReply = Data | Beat | Ended
