"""Exception classes for all deliberate errors.

A `TandemError` names the field or flag at fault (`param`), the value and the remedy. The command line turns a `UsageError`
into exit code 2 and one line. The server turns a `RequestError` into OpenAI's error object with `status`. Any other
exception is a bug.
"""

from __future__ import annotations


class TandemError(Exception):
    """Base of all deliberate errors. `param` names the field, flag or file at fault; None if there is none."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class UsageError(TandemError):
    """The user's command cannot be carried out. The command line prints one line and exits with code 2."""

    rank: int | None = None
    """Rank that raised the error; None if no rank did."""


class SpawnError(TandemError):
    """A process cannot be started for lack of memory, processes or open files. A retry may succeed."""


class ConfigError(UsageError):
    """A flag, variable or configuration file entry has a wrong value."""


class ModelError(UsageError):
    """A model cannot be found, read or supported."""

    def __init__(self, message: str, *, param: str | None = "model") -> None:
        super().__init__(message, param=param)


class ModelNotFound(ModelError):
    """The directory, file or hub repository does not exist."""


class BrokenModel(ModelError):
    """A file of the model is missing, truncated or contradicts its configuration."""


class UnsupportedModel(ModelError):
    """Tandem does not support the architecture or the quantisation."""


class LayoutError(UsageError):
    """The parallel layout does not fit the model or the machines."""


class OutOfMemory(UsageError):
    """The model or its KV cache does not fit into the available memory."""


class RequestError(TandemError):
    """A client's request is invalid. `status` is the HTTP status, `kind` OpenAI's error type, `code` OpenAI's error code."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param)
        self.code = code


def invalid(param: str, message: str) -> RequestError:
    """Return the error for a value of the field `param` that cannot be used."""
    return RequestError(message, param=param, code="invalid_value")


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    status = 401
    kind = "authentication_error"


class NotFoundError(RequestError):
    """The model, route or request does not exist."""

    status = 404


class TooLargeError(RequestError):
    """The request's body exceeds the size limit."""

    status = 413


class OverloadedError(RequestError):
    """The queue is full. `retry_after` is in seconds."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: float = 1.0, code: str | None = "overloaded") -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class ServerError(RequestError):
    """Tandem failed, not the client."""

    status = 500
    kind = "server_error"


class UnavailableError(ServerError):
    """The engine is not available, yet or any more. `retry_after` is in seconds."""

    status = 503

    def __init__(self, message: str, *, retry_after: float = 2.0, code: str | None = "engine_unavailable") -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class TimeoutExceeded(ServerError):
    """A request exceeded its time limit."""

    status = 504


class RankFailure(TandemError):
    """A rank died, hung or raised. The rank group ends and is replaced.

    `cause`, for metrics:

    - died, stopped, silent: a rank's process has ended, is stopped by a signal, does not answer
    - link: a link delivers no data; stuck: a step makes no progress; start: ranks did not start in time
    - host: machines are missing; gpu: a GPU does not answer; memory: a GPU's memory is full
    - timeout: the system ended a GPU's wait for another rank; error: a rank raised an exception
    """

    def __init__(
        self, message: str, *, rank: int | None = None, details: str = "", cause: str = "error", blame: bool = True
    ) -> None:
        """Store the failed `rank` (None if unknown), `details` for the log, and the cause.

        With `blame`, a request in the batch may be the cause. Causes such as `host` and `gpu` clear it.
        """
        super().__init__(message)
        self.rank = rank
        self.details = details
        self.cause = cause
        self.blame = blame and cause not in ("stopped", "start", "host", "gpu")


class GpuSilent(RankFailure):
    """A GPU does not complete even a trivial computation. Its machine counts as lost until it restarts."""


class EngineStuck(RankFailure):
    """A step that runs in the engine's own process does not end. The process must be replaced."""


class BatchDesync(RankFailure):
    """A rank's batch differs from the plan. The rank stops rather than compute a wrong token."""


class TransportError(TandemError):
    """A message is malformed, a peer is unknown, or a channel is closed."""
