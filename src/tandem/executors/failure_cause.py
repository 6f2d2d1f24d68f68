"""Classification of a rank's error by cause. Pure functions."""

from __future__ import annotations

from tandem import errors
from tandem.errors import GpuSilent, RankFailure, UsageError
from tandem.protocol.control import Failure
from tandem.system.metal import fault_of

FULL = (
    "its GPU's memory is full: lower --max-batch-size, --prefill-chunk, --kv-tokens or --memory-fraction, or give "
    "this machine fewer layers"
)
WAITED = (
    "a command took its GPU longer than macOS allows; where it waited for another rank of its stage, that one "
    "is slow, but answers"
)

PORT_TAKEN = ("Couldn't bind socket", "Address already in use")
"""Error texts of MLX and NCCL for a port taken since it was found free."""


def usage_error(failure: Failure) -> UsageError | None:
    """Return the usage error that a rank reported, of its class; None for other failures."""
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, UsageError)):
        return None
    mistake = kind(f"rank {failure.rank}: {failure.message}")
    mistake.rank = failure.rank
    return mistake


def rank_failure(rank: int, kind: str, message: str, details: str = "") -> RankFailure:
    """Return the RankFailure for an error of class `kind` in `rank`.

    Causes `memory` (GPU memory full) and `timeout` (macOS ended a GPU command, which may have waited for another rank) do not
    implicate requests.
    """
    if any(sign in message for sign in PORT_TAKEN):
        return RankFailure(
            f"rank {rank}: somebody took a port of the group before it did ({message}); it gets others",
            rank=rank,
            details=details,
            cause="link",
        )
    if kind == GpuSilent.__name__:
        return RankFailure(f"rank {rank}: {message}", rank=rank, details=details, cause="gpu")
    fault = fault_of(message)
    words = {"memory": f"{FULL} ({message})", "timeout": f"{WAITED} ({message})"}.get(fault or "", f"{kind}: {message}")
    return RankFailure(f"rank {rank}: {words}", rank=rank, details=details, cause=fault or "error")
