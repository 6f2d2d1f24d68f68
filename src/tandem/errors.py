"""Every error that Tandem raises on purpose, drawn as one tree.

`TandemError` carries what a person needs to act: which field or flag is at fault (`param`) and a message that names
the value and the remedy. The command line turns a `UsageError` into exit code 2 and one line, the server turns a
`RequestError` into OpenAI's error shape with `status`; anything outside the tree is a bug.
"""

from __future__ import annotations


class TandemError(Exception):
    """Base of all deliberate errors. `param` names the field, flag or file at fault, where there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class UsageError(TandemError):
    """What the user asked for cannot be done as asked: exit code 2 and one line on the command line."""

    rank: int | None = None
    """The rank that found it, if one did."""


class SpawnError(TandemError):
    """A process could not be started: no memory, processes or open files are left. That may change."""


class ConfigError(UsageError):
    """A flag, variable or configuration file entry has a wrong value."""


class ModelError(UsageError):
    """A model cannot be found, read or supported."""


class ModelNotFound(ModelError):
    """No such directory, file or hub repository."""


class BrokenModel(ModelError):
    """A file of the model is missing, truncated or contradicts its configuration."""


class UnsupportedModel(ModelError):
    """The architecture or the quantisation is one that Tandem does not run."""


class LayoutError(UsageError):
    """The parallel layout does not fit the model or the machines."""


class OutOfMemory(UsageError):
    """The model or its KV cache does not fit into the memory that is there."""


class RequestError(TandemError):
    """A client's request is at fault. `status` is the HTTP status, `code` OpenAI's error code."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param)
        self.code = code


class AuthenticationError(RequestError):
    """Missing or wrong API key."""

    status = 401
    kind = "authentication_error"


class NotFoundError(RequestError):
    """No such model, route or request."""

    status = 404


class TooLargeError(RequestError):
    """The request's body is over the limit."""

    status = 413


class OverloadedError(RequestError):
    """The queue is full; `retry_after` is in seconds."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: float = 1.0, code: str | None = "overloaded") -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class ServerError(RequestError):
    """Tandem is at fault, not the client."""

    status = 500
    kind = "server_error"


class UnavailableError(ServerError):
    """The engine is not there (yet, or any more); `retry_after` is in seconds."""

    status = 503

    def __init__(self, message: str, *, retry_after: float = 2.0, code: str | None = "engine_unavailable") -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class TimeoutExceeded(ServerError):
    """A request took longer than the time it was given."""

    status = 504


CAUSES = ("died", "stopped", "silent", "link", "stuck", "start", "host", "gpu", "memory", "timeout", "error")
"""Why a rank group ended: a rank's process ended, stands still by a signal, does not answer; a link brings nothing; a step
does not move; ranks did not come up in time; machines are missing; a GPU does not answer; a GPU's memory is full; a GPU
waited for another rank until the system ended that; a rank raised."""


class RankFailure(TandemError):
    """A rank died, hung or raised. The rank group ends and is replaced.

    `cause` is one of `CAUSES`, for metrics.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, details: str = "", cause: str = "error", blame: bool = True
    ) -> None:
        """`blame`: a request that the ranks worked on may have done it."""
        super().__init__(message)
        self.rank = rank
        self.details = details
        self.cause = cause
        self.blame = blame and cause not in ("stopped", "start", "host", "gpu")


class GpuSilent(RankFailure):
    """A GPU does not do the least thing: its machine counts as lost until it is restarted."""


class EngineStuck(RankFailure):
    """A step that runs in the engine's own process does not end: the process must be replaced."""


class BatchDesync(RankFailure):
    """A rank's batch is not the one that the plan describes: it stops rather than compute a wrong token."""


class TransportError(TandemError):
    """A frame is malformed, a peer is unknown, or a channel has closed."""
