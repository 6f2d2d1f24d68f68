"""`tandem engine` and `tandem api`, started manually or as children of `tandem serve`, and the server of `tandem up`.

Child processes (`python -m tandem.cli.processes engine`) get their settings as a line of JSON on standard input, so that API
keys never appear in process lists. They exit when standard input closes.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

import msgspec

from tandem.checkpoints.catalogue import find
from tandem.checkpoints.resolve import known, resolve
from tandem.cli.arguments import exit_code, fail, load_settings, unknown_home
from tandem.config.api_keys import ClientLimits
from tandem.config.loading import from_json
from tandem.config.settings import ModelsSettings, Settings
from tandem.config.several import alone, settings_of
from tandem.crash_guard import own_process, start_thread
from tandem.descriptors import raise_limit
from tandem.errors import ConfigError, LayoutError, RankFailure, UsageError
from tandem.launchers.registry import launcher_kind
from tandem.loading.mlx_lm_models import import_models_only
from tandem.log import set_up
from tandem.models.description import describe
from tandem.models.shard import plan_shards
from tandem.planner.hosts import room
from tandem.processes.child import receive_payload, watch_lifeline
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.payloads import ApiPayload, EnginePayload
from tandem.supervision.children import LAST_WORDS
from tandem.supervision.control_socket import control_path
from tandem.supervision.record import Background, Record, digest

log = logging.getLogger("tandem.cli")

LOOK_S = 10.0
"""Seconds between two checks of the size of a background server's log."""


def prepared(arguments: argparse.Namespace, *, quiet: bool = False) -> Settings:
    """Return a command's settings; also set up logging and log warnings about the settings. Raises UsageError.

    `quiet`: on a terminal, unless the settings differ, log from WARNING up and drain for 5 seconds.
    """
    loaded = load_settings(arguments)
    settings = loaded.settings
    if quiet and sys.stderr.isatty():
        at_terminal = {"log_level": "WARNING", "drain_timeout": 5.0, **loaded.given("process")}
        settings = replace(settings, process=replace(settings.process, **at_terminal))
    set_up(settings.process.log_level, log_format=settings.process.log_format)
    for warning in loaded.warnings:
        log.warning("%s", warning)
    settings = _named(settings, getattr(arguments, "quant", None))
    return _laid_out(settings) if loaded.sources.get("tensor_parallel_size") == "NUM_DEVICES" else settings


def _named(settings: Settings, quant: str | None = None) -> Settings:
    """Return the settings with the hub id for a model that is named as in the catalogue, and print which one.

    A model without a copy in the format `quant` is converted into the cache. Raises UsageError.
    """
    model, found = settings.model, find(settings.model.model)
    chosen = known(model.model, partial(room, settings), quant if found is not None and quant in found[0].copies else None)
    if quant is not None and (chosen is None or chosen.quant != quant):
        from tandem.cli.model import fetched  # imports the screen's library

        path = fetched(model.model, model.revision, quant)
        names = model.served_name or (path.name.rpartition("-")[0],)
        return replace(settings, model=replace(model, model=str(path), revision=None, served_name=names))
    if chosen is None:
        return settings
    print(f"tandem: {chosen.line}", file=sys.stderr)
    return replace(settings, model=replace(settings.model, model=chosen.id))


def _laid_out(settings: Settings) -> Settings:
    """Return the settings of a NUM_DEVICES, with pipeline stages if the model cannot run tensor-parallel.

    Raises UsageError, also if the ranks have no machines.
    """
    parallel, model, size = settings.parallel, settings.model, settings.parallel.tensor_parallel_size
    if size == 1 or not model.model:
        return settings
    if launcher_kind(parallel).here:
        raise ConfigError(
            f"NUM_DEVICES={size}: WORKER_HOSTS and WORKER_SSH name no other machine; set them, or NUM_DEVICES=1 "
            f"(for ranks that share this machine: --tensor-parallel-size {size})",
            param="tensor_parallel_size",
        )
    try:
        description = describe(resolve(model.model, revision=model.revision, weights=False))
        plan_shards(description, size, dequantize=model.dequantize != "no")
    except LayoutError as error:
        log.warning("NUM_DEVICES=%d cannot share each layer (%s); machines get layers of their own", size, error.message)
        return replace(settings, parallel=replace(parallel, tensor_parallel_size=1, pipeline_parallel_size=size))
    return settings


def run_engine_command(arguments: argparse.Namespace) -> int:
    """Run `tandem engine`. Raises UsageError."""
    from tandem.engine.engine_process import run_engine

    settings = prepared(arguments)
    count = settings.parallel.data_parallel_size
    if settings.models != ModelsSettings() or settings.named:
        raise UsageError(
            "several models ([models], --extra-models) are for `tandem serve`; an engine has one", param="extra_models"
        )
    if count > 1:
        raise UsageError(
            f"--data-parallel-size {count}: `tandem engine` is one replica; `tandem serve` starts several",
            param="data_parallel_size",
        )
    import_models_only()
    return run_engine(settings)


def run_api_command(arguments: argparse.Namespace) -> int:
    """Run `tandem api`. Raises UsageError."""
    from tandem.server.api_process import engine_endpoint, run_api
    from tandem.server.chats.texts import check_templates
    from tandem.server.engines.replicas import Replicas
    from tandem.server.engines.router import Router

    settings = alone(prepared(arguments))
    check_templates(settings)
    run_api(settings, Replicas(Router(), {0: engine_endpoint(settings)}))
    return 0


def _engine_child(settings: Settings, lending: ClusterKeys | None) -> int:
    from tandem.engine.engine_process import run_engine

    import_models_only()
    return run_engine(settings, lifeline=True, report=_last_words, lending=lending)


def _last_words(message: str) -> None:
    """Report the reason of this process's exit to the supervisor. The pipe has room for it, so this never blocks."""
    os.write(int(sys.argv[2]), message.encode()[:LAST_WORDS])


def _api_child(settings: Settings, keys: dict[str, ClientLimits], fd: int, *, served: bool, succeeds: bool) -> int:
    from tandem.server.api_process import run_api
    from tandem.server.cache.warm_file import warm_bodies
    from tandem.server.engines.model_pool import ModelPool
    from tandem.server.engines.replicas import Replicas
    from tandem.server.engines.router import Router
    from tandem.server.engines.served_model import Served
    from tandem.server.engines.supervisor import SupervisorLink

    control = control_path(settings.server.port)
    try:
        warm_bodies(settings)
    except UsageError as error:
        if not served:
            raise
        log.error("Skipping warm-up prompts: %s", error.message)
        settings = replace(settings, server=replace(settings.server, warmup_prompts=()))

    def replicas(model: Settings, link: SupervisorLink | None = None) -> Replicas:
        return Replicas(Router(affinity=model.scheduler.prefix_cache > 0), link=link, patience_s=model.scheduler.start_timeout)

    engines: Replicas | ModelPool
    if settings.named:
        models = [settings_of(settings, named) for named in settings.named]
        engines = ModelPool(
            [Served(model, replicas(model)) for model in models], SupervisorLink(control), max_loaded=settings.models.max_loaded
        )
    else:
        engines = replicas(settings, SupervisorLink(control))

    def orphaned() -> None:
        # A killed supervisor cannot remove it. The file is still this server's, since this process holds the port.
        control.unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGTERM)

    watch_lifeline(orphaned)
    run_api(settings, engines, keys=keys, fd=fd, announce=False, succeeds=succeeds)  # the supervisor announces the server
    return 0


def _server(settings: Settings, name: str) -> int:
    """Run the server that `tandem up` starts and return its exit code. This process holds the name's lock until it exits."""
    from tandem.cli.serve import serve

    place = Background(name)

    def keep_log_short() -> None:
        while True:
            time.sleep(LOOK_S)
            with suppress(OSError):  # the disk is full: the log stays as it is, and the next check tries again
                if place.trim_log():
                    log.info("Log rotated; the older lines are in %s.1", place.log)

    start_thread(keep_log_short, name="log", on_failure=lambda _: None)

    def write_down(bound: Settings) -> None:
        file = bound.server.api_key_file or ""
        place.write(
            Record(
                os.getpid(),
                bound.server.host,
                bound.server.port,
                ", ".join(model.name for model in bound.named) or bound.model.model,
                time.time(),
                bound.process.drain_timeout,
                "http" if bound.server.tls_cert is None else "https",
                digest(settings),
                file and os.path.abspath(file),
            )
        )

    try:
        return exit_code(partial(serve, settings, write_down))
    finally:
        place.forget()


def main() -> int:
    """Run the process named by the first argument (server, engine or api) and return its exit code."""
    own_process()
    raise_limit()
    kind, content, lending = sys.argv[1], receive_payload(), None
    if kind == "server":
        settings = from_json(content)
        set_up(settings.process.log_level, log_format=settings.process.log_format)
        return _server(settings, sys.argv[2])
    if kind == "engine":
        payload = msgspec.json.decode(content, type=EnginePayload)
        content, lending = bytes(payload.settings), payload.lending
    else:
        api = msgspec.json.decode(content, type=ApiPayload)
        content, keys, succeeds = bytes(api.settings), api.keys, api.succeeds
    settings = from_json(content)
    number = " " + sys.argv[3] if kind == "engine" and len(sys.argv) > 3 else ""
    set_up(settings.process.log_level, prefix=f"[{kind}{number}]", log_format=settings.process.log_format)
    wait = float(sys.argv[4]) if kind == "api" else 0.0
    try:
        return (
            _engine_child(settings, lending)
            if kind == "engine"
            else _api_child(settings, keys, int(sys.argv[3]), served=wait > 0, succeeds=succeeds)
        )
    except UsageError as error:
        _last_words(error.message)
        code = fail(error.message)
        if wait:  # an API process has served before, so the cause may be temporary
            from tandem.server.api_process import serve_unavailable

            log.error("The api cannot start: answering 503, and trying again in %.3g s", wait)
            serve_unavailable(settings, int(sys.argv[3]), error, wait)
        return code
    except RankFailure as error:
        _last_words(error.message)
        fail(error.message)
        return 3
    except RuntimeError as error:
        _last_words(message := unknown_home(error))
        return fail(message)


if __name__ == "__main__":
    sys.exit(main())
