"""Entry point of a rank process: `python -m tandem.executors.worker`, with its payload on standard input.

With the argument `standby` the process waits to become a rank (`--standby-ranks`).

An idle rank waits on a socket, never in a collective. It executes plans. Any error ends the process, after a `Failure` on the
bus where possible.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tandem.checkpoints.files import ModelFiles
from tandem.checkpoints.stored import path_here
from tandem.comm.blas import preload_blas
from tandem.crash_guard import own_process, start_thread
from tandem.descriptors import raise_limit
from tandem.env import set_variables
from tandem.errors import RankFailure, TandemError
from tandem.executors.weight_source import Head, obtain_adapter, obtain_files, obtain_inputs
from tandem.loading.mlx_lm_models import import_models_only
from tandem.log import set_up
from tandem.models.footprint import dequantizes
from tandem.processes.child import guarded_lifeline, receive_payload, watch_lifeline
from tandem.protocol.adapters import AdapterLoaded, LoadAdapter
from tandem.protocol.control import Begin, Connect, Failure, Hello, LoadProgress, Ping, Plan, Pong, Ready, Stepped, Stop
from tandem.protocol.kv_blocks import Fetch, Survey, UseRemoteStores
from tandem.protocol.layout import StageSpec
from tandem.protocol.payloads import STANDBY, WorkerPayload
from tandem.protocol.pictures import EncodePicture, PictureEncoded
from tandem.system.awake import keep_awake
from tandem.system.cuda import prepare_cuda
from tandem.system.metal import prepare_metal
from tandem.transport.bus import RankBus
from tandem.transport.channel import TcpChannel
from tandem.transport.mailbox import Mailbox
from tandem.version import __version__

if TYPE_CHECKING:
    from tandem.executors.rank_loop import Event, RankLoop, Report
    from tandem.loading.stage import StageModel
    from tandem.runner.links import StageLink
    from tandem.runner.pictures import PictureFeatures
    from tandem.runner.runner import Runner

log = logging.getLogger("tandem.executors.worker")

VERSIONED = ("mlx", "mlx-lm")
HELLO_SECONDS = 2.0
"""Seconds between repeated `Hello`s: the first may be lost while the engine's socket opens."""


Wrap = Callable[["StageModel"], "StageModel"]


class Worker:
    """One rank from `Hello` to exit: connect, load, execute steps."""

    def __init__(self, payload: WorkerPayload, bus: RankBus, wrap: Wrap | None = None) -> None:
        """Store the collaborators. `wrap` may replace the loaded stage; it is called in the thread that owns MLX."""
        self._wrap = wrap
        self._payload = payload
        self._spec = payload.spec
        self._bus = bus
        self._blas: str | None = None

    def run(self) -> None:
        """Run the rank until the engine sends `Stop`."""
        spec = self._spec
        channel = None
        if spec.channel == "tcp" and spec.stages > 1:
            channel = TcpChannel(self._payload.keys, self._payload.channel_host)
        command = self._greet(channel)
        if not isinstance(command, Connect):
            return
        self._blas = preload_blas(spec.blas)
        from tandem.executors.rank_loop import RankLoop
        from tandem.loading.memory import memory_use  # imports mlx, so must follow the BLAS

        mailbox = Mailbox["Event"]()
        loop = RankLoop(spec.rank, partial(self._build, command, channel, mailbox), mailbox, memory_use)
        self._serve(loop, mailbox)

    def _build(
        self, command: Connect, channel: TcpChannel | None, mailbox: Mailbox[Event], progress: Report
    ) -> tuple[Runner, Ready]:
        """Connect to other ranks and load the model; return runner and `Ready`. Runs in the thread that owns MLX."""
        from tandem.comm.group import StageGroup
        from tandem.executors.assembly import build_runner, load_slice, require_memory
        from tandem.executors.gpu_probe import probe_gpu
        from tandem.kv.remote import Lending
        from tandem.loading.memory import choose_device, on_gpu

        choose_device(self._spec.device)
        probe_gpu(mailbox.put)
        with guarded_lifeline():
            link = self._connect(command, channel)
            group = StageGroup(self._spec.backend, self._spec.tp_size) if self._spec.tp_size > 1 else None
        if not on_gpu():
            log.info("linear algebra: %s", self._blas or "MLX's own (slow: install OpenBLAS, or give --blas)")
        endpoint = self._payload.weights_endpoint
        head = Head(endpoint, self._payload.keys) if endpoint else None
        files = obtain_files(self._spec, head, partial(progress, "fetch"), accept=partial(require_memory, self._spec))
        stage = load_slice(self._spec, partial(progress, "load"), group, files)
        if self._wrap is not None:
            stage = self._wrap(stage)
        keys = self._payload.lending
        lending = Lending(keys, self._payload.lending_host) if keys is not None else None
        return build_runner(self._spec, stage, link, group, files, mailbox.put, lending)

    def _greet(self, channel: TcpChannel | None) -> object:
        hello = Hello(
            rank=self._spec.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            versions={"tandem": __version__, **{name: version(name) for name in VERSIONED}},
            endpoint=channel.endpoint if channel else "",
        )
        while True:
            self._bus.send(hello)
            if (command := self._bus.receive(HELLO_SECONDS)) is not None:
                return command

    def _connect(self, command: Connect, channel: TcpChannel | None) -> StageLink | None:
        if channel is not None:
            from tandem.runner.links import ChannelLink

            channel.connect([command.endpoints[rank] for rank in self._spec.downstream])
            return ChannelLink(channel)
        if self._spec.stages == 1:
            return None
        from tandem.comm.group import RingLink

        return RingLink(self._spec.stages)

    def _serve(self, loop: RankLoop, mailbox: Mailbox[Event]) -> None:
        """Pass commands from the bus to the loop and reports back, until `Stop`."""
        from tandem.executors.rank_loop import Loaded

        while True:
            self._bus.wait(mailbox.socket)
            for event in mailbox.take():
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, Loaded):
                    self._bus.send(LoadProgress(self._spec.rank, event.done, event.total, event.phase))
                elif isinstance(event, Stepped) and not self._spec.samples:
                    self._bus.send(Stepped(event.step, event.peak_bytes, used_bytes=event.used_bytes))
                else:
                    self._bus.send(event)
            while (command := self._bus.receive(0.0)) is not None:
                if isinstance(command, Stop):
                    return
                if isinstance(command, Plan):
                    loop.submit(command.plan)
                elif isinstance(command, Fetch | UseRemoteStores | Survey):
                    loop.fetch(command)
                elif isinstance(command, EncodePicture) or (isinstance(command, LoadAdapter) and command.weights_endpoint):
                    start_thread(partial(self._fetch, command, loop, mailbox), name="fetch")
                elif isinstance(command, LoadAdapter):
                    there = path_here(command.adapter.path, self._spec.home)
                    loop.submit(msgspec.structs.replace(command, directory=str(there)))
                elif isinstance(command, Begin):
                    log.info("Post-load barrier passed")
                    log.info("BatchGenerator created, entering StepPlan loop")
                elif isinstance(command, Ping):
                    self._bus.send(Pong(self._spec.rank, command.number, *loop.where()))

    def _fetch(self, order: LoadAdapter | EncodePicture, loop: RankLoop, mailbox: Mailbox[Event]) -> None:
        """Fetch an adapter's files or a picture's inputs beside the computation, then queue the order."""
        keys, rank = self._payload.keys, self._spec.rank
        try:
            loop.submit(obtain_adapter(order, keys) if isinstance(order, LoadAdapter) else obtain_inputs(order, keys))
        except TandemError as error:
            if isinstance(order, LoadAdapter):
                mailbox.put(AdapterLoaded(rank, order.adapter.index, error=str(error)))
            else:
                mailbox.put(PictureEncoded(rank, order.key, str(error), died=True))


def encode_picture(spec: StageSpec, files: ModelFiles, dtype: str, key: str, tokens: list[int], path: str) -> PictureEncoded:
    """Encode a picture in a process beside the rank of `spec`, and return the rank's report. `dtype`: that of the rank; `path`:
    the file of the inputs, in which features replace them."""
    features = _encoding(spec, files, dtype)
    error = features.encode(EncodePicture(key, tokens, Path(path).read_bytes()))
    features.pack(key, path)
    return PictureEncoded(spec.rank, key, error or "", pid=os.getpid())


@cache
def _encoding(spec: StageSpec, files: ModelFiles, dtype: str) -> PictureFeatures:
    preload_blas(spec.blas)
    import_models_only()
    import mlx.core as mx

    from tandem.loading.memory import choose_device, on_gpu
    from tandem.runner.pictures import Encoder, PictureFeatures

    choose_device(spec.device)
    return PictureFeatures(partial(Encoder, files, getattr(mx, dtype), dequantize=dequantizes(spec.dequantize, gpu=on_gpu())))


def main(*words: str) -> None:
    """Run a rank until its engine stops it, it fails, or the engine exits."""
    if STANDBY in words:
        stand_by()
    run_rank(msgspec.json.decode(receive_payload(), type=WorkerPayload))


def stand_by() -> None:
    """Run a standby process: import everything a rank needs, then wait for its payload. Ends the process.

    Standard input delivers the specification of the rank it may replace, then environment variables, then a worker payload.
    """
    spec = msgspec.json.decode(receive_payload(), type=StageSpec)
    prepare(spec)
    preload_blas(spec.blas)
    for module in ("tandem.executors.rank_loop", "tandem.executors.assembly", "tandem.runner.links"):
        import_module(module)
    set_variables(msgspec.json.decode(receive_payload(), type=dict[str, str]))
    serve(msgspec.json.decode(receive_payload(), type=WorkerPayload))


def run_rank(payload: WorkerPayload, wrap: Wrap | None = None) -> None:
    """Run a rank with this payload; for entry points with other arguments. Ends the process."""
    prepare(payload.spec)
    serve(payload, wrap)


def prepare(spec: StageSpec) -> None:
    """Prepare the process before MLX is imported."""
    raise_limit()
    own_process()
    import_models_only()
    # A terminal sends Ctrl-C to all its processes, and the engine ends its ranks itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_up(spec.log_level, prefix=f"[Rank {spec.rank}]", log_format=spec.log_format)
    # A layer usually sums twice: after attention and after its MLP.
    sums = 2 * len(range(*spec.layers)) if spec.rank == 0 and spec.tp_size > 1 else 0
    prepare_metal(spec.fast_fences and spec.device != "cpu", sums)
    if spec.tp_size > 1 or spec.channel == "mlx":
        prepare_cuda()


def serve(payload: WorkerPayload, wrap: Wrap | None = None) -> None:
    """Join the rank group and run as a rank. Ends the process."""
    keep_awake()
    watch_lifeline()
    spec = payload.spec
    log.info("%s, pid %d", spec.label, os.getpid())
    bus = RankBus(payload.bus_endpoint, payload.keys, spec.rank, payload.generation)
    try:
        Worker(payload, bus, wrap).run()
    except Exception as error:  # noqa: BLE001 - the border of the process: failures cross it as data
        message = str(error) or repr(error)
        log.error("%s: %s; this rank ends, and the engine decides what follows", type(error).__name__, message)
        details = error.details if isinstance(error, RankFailure) else ""
        trace = "".join(traceback.format_exception(error))
        bus.send(Failure(spec.rank, type(error).__name__, message, trace + details))
        bus.close()
        os._exit(1)
    bus.close()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
