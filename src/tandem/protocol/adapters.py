"""LoRA adapters beside a model: what they are, and the messages that load and unload them."""

from __future__ import annotations

from msgspec import Struct


class AdapterSpec(Struct, frozen=True):
    """One loaded adapter."""

    index: int
    """Number of the adapter on the ranks, from 1."""
    name: str
    """Model name that selects it; empty for the adapter of requests that name the base (`--adapter-path`)."""
    path: str
    """Directory of its files."""
    digest: str = ""
    """Digest of its files, part of the keys of cached prefixes; empty where all requests use the adapter."""


class LoadAdapter(Struct, frozen=True, tag=True):
    """Load an adapter between two steps, or unload it; each rank answers with `AdapterLoaded`. From engine to rank."""

    adapter: AdapterSpec
    unload: bool = False
    directory: str = ""
    """Directory on the rank's machine, where it differs."""
    weights_endpoint: str = ""
    """Endpoint that serves the files, if they are not on the rank's machine."""


class AdapterLoaded(Struct, frozen=True, tag=True):
    """Report that a rank has loaded or unloaded an adapter, or why it could not."""

    rank: int
    index: int
    unloaded: bool = False
    error: str = ""


class ChangeAdapter(Struct, frozen=True, tag=True):
    """Load an adapter, or unload it once its requests are finished. From api to engine, which answers `AdapterChanged`."""

    query_id: int
    name: str
    path: str = ""
    """Directory of the files; empty to unload."""


class AdapterChanged(Struct, frozen=True, tag=True):
    """Answer to `ChangeAdapter`."""

    query_id: int
    status: int = 200
    """HTTP status: 400 for files that cannot be used, 404 for an unknown name, 503 while ranks are replaced."""
    message: str = ""
