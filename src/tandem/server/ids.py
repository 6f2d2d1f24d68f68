"""Ids of what the server answers."""

from __future__ import annotations

import uuid


def new_id(prefix: str) -> str:
    """An id that cannot be guessed, such as `chatcmpl-9f3c...`."""
    return f"{prefix}-{uuid.uuid4().hex}"
