"""Ids of what the server answers, and its own."""

from __future__ import annotations

import time
import uuid
from typing import Any

from tandem.version import __version__

FINGERPRINT = f"tandem-{__version__}"


def head(kind: str, request_id: str, model: str) -> dict[str, Any]:
    """Return the first fields of OpenAI's answers and chunks; `kind` is the value of `object`."""
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model,
            "system_fingerprint": FINGERPRINT}


def new_id(prefix: str, mark: str = "-") -> str:
    """Return an id that cannot be guessed, such as `chatcmpl-9f3c...`; `mark` stands after the prefix."""
    return f"{prefix}{mark}{uuid.uuid4().hex}"
