"""Whatever pyzmq, msgspec, huggingface_hub, Ray and MLX raise at our calls leaves them as an error of ours."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.errors
import msgspec
import pytest
import zmq
import zmq.error

from tandem.checkpoints import hub
from tandem.checkpoints.safetensors import read_header
from tandem.config.loading import from_json
from tandem.diagnostics.doctor import model_files
from tandem.engine.ipc_server import IPCServer
from tandem.errors import RankFailure, TandemError, TransportError, UsageError
from tandem.executors.inline import InlineExecutor
from tandem.executors.rank_loop import RankLoop
from tandem.launchers.agent import trust
from tandem.launchers.manual import read_token
from tandem.loading import weights
from tandem.protocol import codec
from tandem.protocol.control import EngineStatus
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.supervisor_messages import ListReplicas
from tandem.supervision import control_socket
from tandem.supervision.record import Background
from tandem.transport.blobs import BlobServer
from tandem.transport.bus import EngineBus, HeadEnd
from tandem.transport.channel import TcpChannel
from tandem.transport.mailbox import Mailbox


def classes(module: Any) -> list[type[Exception]]:
    """All exceptions of a module, in the order of their names."""
    found = {
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, Exception) and not issubclass(one, Warning)
    }
    return sorted(found, key=lambda one: one.__name__)


def made(kind: type[Exception]) -> Exception:
    """One of them, whatever its constructor asks for."""
    error = kind.__new__(kind)
    Exception.__init__(error, "as the library says")
    return error


def raiser(error: BaseException) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise error

    return call


def expect(kind: type[TandemError], error: Exception, call: Callable[[], object]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert caught.value is not error


# --- pyzmq ---

MADE: dict[type[Exception], Exception] = {
    zmq.ZMQError: zmq.ZMQError(24),
    zmq.Again: zmq.Again(),
    zmq.ContextTerminated: zmq.ContextTerminated(),
    zmq.error.InterruptedSystemCall: zmq.error.InterruptedSystemCall(),
    zmq.ZMQVersionError: zmq.ZMQVersionError("4", "5"),
}
ZMQ = [MADE.get(one) or made(one) for one in classes(zmq.error)]
STATUS = EngineStatus(
    query_id=0,
    state="ready",
    detail="",
    model="m",
    source="",
    max_context=1,
    vocab_size=1,
    queued=0,
    running=0,
    kv_tokens_used=0,
    kv_tokens_total=1,
    restarts=0,
    stages=1,
    micro_batches=1,
    ranks=[],
)


@pytest.mark.parametrize("error", ZMQ, ids=lambda one: type(one).__name__)
def test_what_pyzmq_raises_is_ours_when_it_leaves(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ClusterKeys.generate()
    path = tmp_path / "a.sock"
    bind = zmq.Socket.bind
    with monkeypatch.context() as broken:
        broken.setattr(
            zmq.Socket, "bind", lambda socket, address: bind(socket, address) if "inproc" in address else raiser(error)()
        )
        expect(UsageError, error, lambda: IPCServer(path, STATUS, lambda: b""))
        expect(UsageError, error, lambda: control_socket.ControlServer(path, raiser(error)))
        expect(TransportError, error, lambda: EngineBus(keys))
        expect(TransportError, error, lambda: HeadEnd(keys, "127.0.0.1", 0))
        expect(TransportError, error, lambda: TcpChannel(keys))
        expect(TransportError, error, lambda: BlobServer([], keys))
    with monkeypatch.context() as broken:
        broken.setattr(zmq.Context, "socket", raiser(error))
        expect(UsageError, error, lambda: IPCServer(path, STATUS, lambda: b""))
    bus, head = EngineBus(keys), HeadEnd(keys, "127.0.0.1", 0)
    with monkeypatch.context() as broken:
        broken.setattr(zmq.Socket, "send_multipart", raiser(error))
        expect(TransportError, error, lambda: bus.send(b"0:g", None))  # type: ignore[arg-type]
        expect(TransportError, error, lambda: head.send(b"x", None))  # type: ignore[arg-type]
    bus.close()
    head.close()
    with monkeypatch.context() as broken:
        broken.setattr(control_socket, "is_heard", lambda _: True)
        broken.setattr(zmq.Socket, "connect", raiser(error))
        expect(UsageError, error, lambda: control_socket.ask(path, ListReplicas()))


# --- msgspec ---

MSGSPEC = [*(made(one) for one in classes(msgspec)), RecursionError(), made(UnicodeDecodeError), ValueError("x")]


@pytest.mark.parametrize("error", MSGSPEC, ids=lambda one: type(one).__name__)
def test_what_msgspec_raises_is_ours_when_it_leaves(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = codec.Decoder[EngineStatus](EngineStatus)
    decoder._decode = raiser(error)
    token, weight = tmp_path / "token", tmp_path / "model.safetensors"
    token.touch(mode=0o600)
    weight.write_bytes(struct.pack("<Q", 2) + b"{}")
    monkeypatch.setattr("tandem.supervision.record.state_dir", lambda: tmp_path)
    place = Background("one")
    place.path.mkdir(parents=True)
    (place.path / "record.json").write_bytes(b"{}")
    if isinstance(error, UnicodeDecodeError):
        error = UnicodeDecodeError("utf-8", b"x", 0, 1, "as the library says")
        decoder._decode = raiser(error)
    expect(TransportError, error, lambda: decoder.decode(b""))
    monkeypatch.setattr(msgspec.json, "decode", raiser(error))
    expect(UsageError, error, lambda: from_json(b"{}"))
    expect(UsageError, error, lambda: read_token(str(token)))
    expect(UsageError, error, lambda: read_header(weight))
    expect(UsageError, error, lambda: trust._read(token, dict))
    assert place.record() is None


# --- huggingface_hub ---

HUB = [*(made(one) for one in classes(huggingface_hub.errors)), RuntimeError("the downloader in Rust"), OSError("x")]


@pytest.mark.parametrize("error", HUB, ids=lambda one: type(one).__name__)
def test_what_the_hubs_client_raises_is_ours_when_it_leaves(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "snapshot_download", raiser(error))
    expect(UsageError, error, lambda: hub.download("org/name", None, ["*.json"]))
    monkeypatch.setattr(hub, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(hub, "weight_names", lambda _: ["model.safetensors"])
    monkeypatch.setattr(hub, "get_session", raiser(error))
    expect(UsageError, error, lambda: hub.download_headers("org/name", tmp_path, ["*.safetensors"]))
    monkeypatch.setattr(hub.HfApi, "list_repo_files", raiser(error))
    assert hub._matching("org/name", tmp_path, ["*.safetensors"]) == []
    monkeypatch.setattr("huggingface_hub.snapshot_download", raiser(error))
    assert model_files._hub_copy("org/name") is None


# --- MLX ---

MLX = [one("as MLX says") for one in weights.MLX_ERRORS]


@pytest.mark.parametrize("error", MLX, ids=lambda one: type(one).__name__)
def test_what_mlx_raises_is_a_broken_model_or_a_failure_of_the_rank(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with monkeypatch.context() as broken:
        broken.setattr(weights.mx, "load", raiser(error))
        expect(UsageError, error, lambda: weights.load_file(path))
    executor = InlineExecutor.__new__(InlineExecutor)
    executor._mailbox = Mailbox()
    executor._loop = RankLoop(0, raiser(error), executor._mailbox, lambda: (0, 0))
    expect(RankFailure, error, lambda: executor._wait(20.0))
    executor.close()


# --- Ray ---


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
def test_what_ray_raises_is_ours_when_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    import ray.exceptions

    from tandem.launchers.ray import driver_process
    from tandem.protocol.payloads import HostEnded, PlaceRanks

    for kind in classes(ray.exceptions):
        error = made(kind)
        with monkeypatch.context() as broken:
            broken.setattr(ray, "init", raiser(error))
            expect(UsageError, error, lambda: driver_process._connect("auto"))
        driver = driver_process.Driver.__new__(driver_process.Driver)
        said: list[Any] = []
        driver._closing = False
        driver._send = said.append
        driver._watch(1, 0, "here", raising(error))
        assert isinstance(said[0], HostEnded)
        assert said[0].reason.strip()
        assert "\n" not in said[0].reason
        driver._actors, driver._group = [], None
        driver._place = raiser(error)
        with pytest.raises(SystemExit, match="tandem: the Ray cluster does not go on"):
            driver.serve([msgspec.json.encode(PlaceRanks(number=1, payloads=[], patience_s=0.0, avoid=[]))])


def raising(error: Exception) -> Any:
    raise error
    yield
