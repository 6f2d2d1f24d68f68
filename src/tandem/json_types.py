"""Types of parsed JSON objects, whose members are unchecked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]
