"""Exceptions of pyzmq do not leave this package: they have no base that says more than that something failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from tandem.errors import TransportError


@contextmanager
def translated(what: str, undo: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Raises TransportError, which begins with `what`, for whatever pyzmq raises, after `undo` has been called."""
    try:
        yield
    except (zmq.ZMQBaseError, NotImplementedError) as error:  # ZMQVersionError is of the second kind
        undo()
        raise TransportError(f"{what}: {error}") from error
