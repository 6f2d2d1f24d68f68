"""Ids of what the server answers, and its own."""

from __future__ import annotations

import uuid

from tandem.version import __version__

FINGERPRINT = f"tandem-{__version__}"


def new_id(prefix: str) -> str:
    """An id that cannot be guessed, such as `chatcmpl-9f3c...`."""
    return f"{prefix}-{uuid.uuid4().hex}"
