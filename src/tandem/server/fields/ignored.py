"""Fields of a request that have no effect: their client is told."""

from __future__ import annotations

import logging

from fastapi import Request

from tandem.log import Seldom
from tandem.server.context import get_api
from tandem.server.fields.policy import told

seldom = Seldom(logging.getLogger(__name__))


def note_ignored(request: Request, *names: str) -> None:
    """The answer's headers name them, and the log."""
    request.scope.setdefault("tandem.ignored", []).extend(names)
    level = logging.WARNING if get_api(request).settings.server.unknown_fields == "warn" else logging.DEBUG
    shown = told(names)
    seldom.log(level, "%s: no effect of %s", request.url.path, shown, kind=shown)
