"""Bytes that come from another process: a message of the expected kind, or TransportError, and nothing else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statuses import STATUS
from tandem.diagnostics.doctor.probe_messages import Request, RunRank
from tandem.diagnostics.tasks import TimingTask
from tandem.errors import TransportError
from tandem.protocol import blob_messages as blobs
from tandem.protocol import control, hosts
from tandem.protocol import supervisor_messages as supervisor
from tandem.protocol.codec import Decoder
from tandem.protocol.logprobs import TokenLogprob
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.step import InsertOp, PrefillOp, RankStep, SavePrefixOp, StepPlan, StepResult
from tandem.transport.channel import FrameHeader

FUZZ = settings(max_examples=100, derandomize=True, deadline=None, database=None)
PARAMS = SamplingParams(max_tokens=5, logit_bias={3: 1.5}, stop=("a",), stop_token_ids=(7,), seed=1, logprobs=2)
RANK = control.RankInfo(rank=0, stage=0, layers=(0, 4), pid=1, host="h", weight_bytes=1, peak_bytes=2, step_s=0.1)
PLAN = StepPlan(
    7,
    0,
    removes=["a"],
    inserts=[InsertOp("b", [1, 2], 2, PARAMS)],
    restores=[SavePrefixOp("b", "k", 1)],
    decode=["c"],
    prefill=[PrefillOp("b", 0, 2, True)],
    sampling_seeds={"b": 9},
    fingerprint="00",
)
FACTS = hosts.HostFacts(
    name="n",
    machine="m",
    pid=1,
    address="10.0.0.1",
    versions={},
    system="s",
    chip="",
    memory_bytes=1,
    usable_bytes=1,
    cores=1,
    gpus=[],
)
LOGPROB = TokenLogprob(1, -0.5, [(1, -0.5)])
SAMPLES = {
    "api": (
        control.ApiMessage,
        [
            control.Submit(EngineRequest(request_id="r", prompt=[1, 2, 3], params=PARAMS)),
            control.Abort("r"),
            control.QuarantineAck("r", resting=True),
            control.QueryStatus(1),
            control.QueryMetrics(2),
            control.Detach(),
        ],
    ),
    "engine": (
        control.EngineMessage,
        [
            control.Output("r", [1], [LOGPROB], "stop", True, 3),
            control.Refused("r", 400, "no"),
            control.MetricsText(1, b"x 1\n"),
            msgspec.structs.replace(STATUS, ranks=[RANK]),
        ],
    ),
    "command": (control.RankCommand, [control.Plan(PLAN), control.Stop(), control.Connect(["tcp://a:1"])]),
    "rank": (
        control.RankMessage,
        [
            control.Hello(0, 1, "h", {"mlx": "1"}, "e"),
            control.LoadProgress(0, 1, 2),
            control.Stepped(RankStep(0, 1, 0.1, 2, digest=(1, 2)), 5, StepResult(1, 0, [4], {"r": [LOGPROB]})),
            control.Failure(0, "E", "m", "t"),
        ],
    ),
    "supervisor": (
        supervisor.SupervisorRequest,
        [supervisor.ListReplicas(), supervisor.AddReplica(), supervisor.DrainReplica(1)],
    ),
    "replies": (
        supervisor.SupervisorReply,
        [
            supervisor.ReplicaList([supervisor.ReplicaInfo(0, "ipc://x", "running", 1, 0)]),
            supervisor.Done(1),
            supervisor.ControlRefused("no"),
        ],
    ),
    "blob requests": (blobs.BlobRequest, [blobs.ListFiles(1), blobs.ReadRange(2, blobs.Range("f", 0, 10))]),
    "blob answers": (
        blobs.BlobAnswer,
        [blobs.FileList(1, [blobs.BlobFile("f", 10, 5, "s")]), blobs.Chunk(2, b"d" * 16), blobs.Refusal(3, "no")],
    ),
    "node agents": (
        hosts.HostMessage,
        [
            hosts.Join(
                facts=FACTS,
                host_id="h",
                attempt=1,
                head="10.0.0.1",
                slot=0,
                mlx=hosts.MlxProcessGroup(rank=0, hostfile=[["a:1"]]),
            ),
            hosts.Ports(1, [2]),
            hosts.RankExited(1, 2, "so"),
            hosts.HostPong(1),
            hosts.Leave(),
        ],
    ),
    "head": (
        hosts.HeadMessage,
        [
            hosts.Welcome(8.0),
            hosts.Refuse("no"),
            hosts.ReservePorts(1, "10.0.0.1", 2),
            hosts.StartRank(1, 0, b"{}", {"A": "b"}, {"MLX_RANK": "0"}, {"MLX_HOSTFILE": "[]"}, 1),
            hosts.KeepStandby(0, b"{}", {"A": "b"}, 1),
            hosts.DropStandby(),
            hosts.Release(),
        ],
    ),
    "frames": (FrameHeader, [FrameHeader(4, "float32", (1, 2, 3))]),
}
Edit = st.tuples(st.integers(0, 10**6), st.integers(0, 4), st.binary(max_size=6))


def damaged(data: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """`data` with some bytes put in, replaced and left out."""
    for place, length, piece in edits:
        at = place % (len(data) + 1)
        data = data[:at] + piece + data[at + length :]
    return data


def accept(kind: object, data: bytes) -> bool:
    """True for a message, which then survives another round; False for TransportError."""
    try:
        message = Decoder[object](kind).decode(data)
    except TransportError:
        return False
    assert Decoder[object](kind).decode(msgspec.msgpack.encode(message)) is not None
    return True


@pytest.mark.parametrize("name", SAMPLES)
@FUZZ
@given(data=st.data())
def test_damaged_messages_are_refused_or_are_other_messages(name: str, data: st.DataObject) -> None:
    kind, samples = SAMPLES[name]
    whole = msgspec.msgpack.encode(data.draw(st.sampled_from(samples)))
    assert accept(kind, whole)
    accept(kind, damaged(whole, data.draw(st.lists(Edit, min_size=1, max_size=4))))


@pytest.mark.parametrize("name", SAMPLES)
@FUZZ
@given(data=st.binary(max_size=64))
def test_bytes_of_any_kind(name: str, data: bytes) -> None:
    accept(SAMPLES[name][0], data)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize(
    "opening",
    [
        b"\x91",
        b"\x81\xa1x",
        b"\xdc\x00\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
    ],
)
def test_nesting_and_lengths_without_end(name: str, opening: bytes) -> None:
    kind, samples = SAMPLES[name]
    assert not accept(kind, opening * 100_000)
    tagged = msgspec.msgpack.encode(samples[0])
    if tagged[0] & 0xF0 == 0x80:  # a map: one more key, which is unknown, holds it
        assert not accept(kind, bytes([tagged[0] + 1]) + tagged[1:] + b"\xa1?" + opening * 100_000)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "..", "", "X\n", "X\0"])
def test_a_rank_is_given_no_file_outside_of_its_directory(name: str) -> None:
    order = hosts.StartRank(1, 0, b"", {}, {}, {name: "content"}, 1)
    with pytest.raises(TransportError, match="files"):
        Decoder[hosts.HeadMessage](hosts.HeadMessage).decode(msgspec.msgpack.encode(order))
    with pytest.raises(msgspec.ValidationError, match="files"):
        msgspec.json.decode(msgspec.json.encode(RunRank(TimingTask(), {}, {name: "content"}, 1.0)), type=Request)
