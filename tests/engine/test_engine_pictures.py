"""Pictures in a prompt: the tokens of mlx-vlm alone, in chunks, from the prefix cache, and over ranks that die."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import psutil
import pytest
from msgspec.structs import replace
from safetensors.numpy import save

from pids import gone
from seeing import GRIDS, IMAGE, VISION, alone, prompt_with, seeing_model
from submitted import Killer, ask, check, submitted
from tandem import LLM, SamplingParams
from tandem.checkpoints.resolve import resolve
from tandem.engine.engine import Engine
from tandem.engine.pictures import FEATURE_BYTES, INPUT_BYTES
from tandem.engine.thread import Event
from tandem.errors import BrokenModel, OverloadedError, RequestError, ServerError
from tandem.loading.stage import load_stage
from tandem.models.description import describe, of_vision
from tandem.models.partition import split_layers
from tandem.models.shard import plan_shards
from tandem.processes.sandbox import Sandbox, SandboxEnded, TaskReply
from tandem.protocol.control import EngineMessage, NeedPicture, PictureContent
from tandem.protocol.pictures import EncodePicture, Picture, PictureEncoded, hashed
from tandem.protocol.request import EngineRequest
from tandem.protocol.step import InsertOp, PrefillOp
from tandem.runner.picture_inputs import PictureInputs
from tandem.runner.pictures import Encoder, EncoderProcess, PictureFeatures
from tandem.scheduler.sequence import Sequence
from tandem.testing import tiny_model
from thread_ranks import ThreadGroup, ThreadRank

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
BEFORE = [3 + (7 * i * i + 5 * i) % 290 for i in range(29)]
BETWEEN, AFTER = [9, 8, 7], [3 + (11 * i * i) % 290 for i in range(40)]


def request(name: str, family: str, *parts: list[int] | int) -> EngineRequest:
    tokens, pictures = prompt_with(family, *parts)
    return EngineRequest(request_id=name, prompt=tokens, params=PARAMS, pictures=pictures)


def answers(llm: LLM, *requests: EngineRequest, seen: Callable[[Event], object] = lambda _: None) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {one.request_id: [] for one in requests}
    for output in submitted(llm, requests, seen):
        found[output.request_id] += output.tokens
    return found


@pytest.mark.parametrize("family", VISION)
def test_pictures_are_seen_as_by_mlx_vlm_alone(tmp_path: Path, family: str) -> None:
    """One and two pictures beside text, in chunks that end inside of them, or are as long as one that is computed whole."""
    path = seeing_model(tmp_path, family)
    prompts: dict[str, tuple[list[int] | int, ...]] = {
        "one": (BEFORE, 1, AFTER[:9]),
        "other": (BEFORE, 2, AFTER[:9]),
        "two": (BEFORE, 2, BETWEEN, 1, AFTER[:9]),
        "twice": (BEFORE, 1, 1, AFTER[:9]),
    }
    want = {name: alone(path, family, PARAMS.max_tokens, *parts) for name, parts in prompts.items()}
    assert len({tuple(tokens) for tokens in want.values()}) == len(want)
    text = EngineRequest(request_id="text", prompt=BEFORE + AFTER, params=PARAMS)
    with LLM(str(path), prefill_chunk=7) as llm:
        plain = answers(llm, text)
        found = answers(llm, *(request(name, family, *parts) for name, parts in prompts.items()), replace(text, request_id="t2"))
        check(llm)
    assert found == {**want, "t2": plain["text"]}


@pytest.mark.parametrize(
    ("family", "before", "other", "again"),
    [("qwen3_vl", 40, 32, 64), ("glm4v", 40, 32, 64), ("gemma4", 105, 64, 64), ("llama4", 40, 0, 64)],
)
def test_cached_prefixes_are_of_one_picture(tmp_path: Path, family: str, before: int, other: int, again: int) -> None:
    """Placeholders are alike in all pictures: another picture in the same text hits what stands before it alone. No prefix ends
    inside a picture that is computed whole."""
    path = seeing_model(tmp_path, family)
    start = [3 + i % 290 for i in range(before)]
    asked = [request(name, family, start, seed, AFTER) for name, seed in (("first", 1), ("other", 2), ("again", 1))]
    with LLM(str(path), prefix_cache=0.25, kv_tokens=2000) as llm:
        outputs = {one.request_id: list(submitted(llm, [one])) for one in asked}
        held = ask(llm, lambda engine: list(engine.pictures._held))
    assert {name: found[0].cached_tokens for name, found in outputs.items()} == {"first": 0, "other": other, "again": again}
    for name, seed in (("other", 2), ("again", 1)):
        found = [token for output in outputs[name] for token in output.tokens]
        assert found == alone(path, family, PARAMS.max_tokens, start, seed, AFTER)
    assert held == [asked[1].pictures[0].key, asked[0].pictures[0].key]  # the one used last is evicted last
    assert hashed(asked[0].prompt, asked[0].pictures)[:before] == start
    twice, moved = ([replace(asked[0].pictures[0], start=at, length=5) for at in places] for places in ((40, 45), (40,)))
    whole = hashed([7] * 60, twice)
    assert whole != hashed([7] * 60, moved)
    assert whole == [one for at in range(0, 60, 4) for one in hashed([7] * 4, twice, at)], "a part is read like the whole"


@pytest.mark.parametrize("stages", [1, 2])
def test_features_keep_to_their_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    """With room for two pictures many are answered, twelve in one request too, also after preemption; features are encoded again
    where they left."""
    monkeypatch.setattr("tandem.engine.pictures.FEATURE_BYTES", budget := 24 * 4 * 64 * 4)
    path = seeing_model(tmp_path, "qwen3_vl")
    parts: list[tuple[list[int] | int, ...]] = [(BEFORE[i:], i, BETWEEN, i % 3 + 1, AFTER) for i in range(6)]
    parts += [(AFTER, *range(12), BETWEEN), (*range(3, 9), BEFORE)]
    requests = [request(str(i), "qwen3_vl", *one) for i, one in enumerate(parts)]
    most = []

    def disturb(_: Event) -> None:
        most.append(sum(llm.engine.pictures._held.values()))
        llm.engine.scheduler.batches.relieve()

    with LLM(str(path), prefill_chunk=16, prefix_cache=0.0, pipeline_parallel_size=stages) as llm:
        found = answers(llm, *requests, seen=disturb)
        preemptions = ask(llm, lambda engine: engine.scheduler.batches.preemptions)
        with pytest.raises(RequestError, match="no image_grid_thw that fits"):
            answers(llm, replace(requests[0], pictures=(replace(requests[0].pictures[0], length=11),)))
        monkeypatch.setattr("tandem.engine.pictures.FEATURE_BYTES", budget // 2 - 1)
        with pytest.raises(RequestError, match="features of picture 2 take .* send fewer or smaller ones"):
            answers(llm, request("large", "qwen3_vl", 2, 1, AFTER))
        check(llm)
    assert 0 < max(most) <= budget and preemptions
    assert found == {str(i): alone(path, "qwen3_vl", PARAMS.max_tokens, *one) for i, one in enumerate(parts)}


def test_pictures_of_a_cached_prefix_are_not_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation that grows by a picture a turn, as an agent's, with room for the features of two. Its api keeps their
    inputs until they are asked for."""
    monkeypatch.setattr("tandem.engine.pictures.FEATURE_BYTES", 24 * 4 * 64 * 4)
    path = seeing_model(tmp_path, "qwen3_vl")
    turns: list[tuple[list[int] | int, ...]] = [(BEFORE, 1, 2, 3, 4, 5, AFTER), (BEFORE, 1, 2, 3, 4, 5, AFTER, 6, BETWEEN)]
    encoded, sent, inputs = [], [], dict[str, bytes]()
    with LLM(str(path), prefix_cache=0.5, kv_tokens=2000) as llm:
        take = llm.engine.take_messages

        def answering() -> list[EngineMessage]:
            messages = take()
            for one in messages:
                if isinstance(one, NeedPicture):
                    sent.append(one.key)
                    llm.engine.pictures.give(PictureContent(one.key, inputs[one.key]))
            return messages

        monkeypatch.setattr(llm.engine, "take_messages", answering)
        encode = llm.engine.executor.encode
        monkeypatch.setattr(llm.engine.executor, "encode", lambda order: (encoded.append(order.key), encode(order)))
        for turn in turns:
            asked = request("turn", "qwen3_vl", *turn)
            inputs |= {one.key: one.inputs for one in asked.pictures}
            bare = tuple(replace(one, inputs=b"") for one in asked.pictures)
            assert answers(llm, replace(asked, pictures=bare))["turn"] == alone(path, "qwen3_vl", PARAMS.max_tokens, *turn)
    assert encoded == sent == [one.key for one in asked.pictures]


def test_pictures_outlive_a_rank(tmp_path: Path) -> None:
    """New ranks encode again what the request still has. The rank of the second stage is killed."""
    path = seeing_model(tmp_path, "qwen3_vl")
    prompts: dict[str, tuple[list[int] | int, ...]] = {"a": (BEFORE, 1, AFTER), "b": (BEFORE, 2, BETWEEN, 1), "text": (BEFORE,)}
    with LLM(str(path), pipeline_parallel_size=2, prefill_chunk=16, max_restarts=2) as llm:
        kept = ask(llm, lambda engine: [ready.picture_bytes for ready in engine.rank_group.ready])
        killer = Killer(llm)
        found = answers(llm, *(request(name, "qwen3_vl", *parts) for name, parts in prompts.items()), seen=killer)
        check(llm)
    assert killer.killed
    assert kept == [FEATURE_BYTES + INPUT_BYTES + describe(resolve(str(path))).vision_bytes, 0]
    for name in ("a", "b"):
        assert found[name] == alone(path, "qwen3_vl", PARAMS.max_tokens, *prompts[name])


def test_an_encoder_of_its_own_is_started_again_and_spares_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is answered while a picture is encoded. Killed while idle it costs nothing; a picture that ends it each time is
    refused."""
    path = seeing_model(tmp_path, "qwen3_vl")
    killer, slow = (request(name, "qwen3_vl", BEFORE, seed) for name, seed in (("killer", 5), ("slow", 8)))
    tried, answered = list[int](), threading.Event()

    class Dying(Sandbox):
        def ask(self, task: bytes, wall_s: float) -> TaskReply | SandboxEnded:
            if slow.pictures[0].key.encode() in task:
                assert answered.wait(240)
            if killer.pictures[0].key.encode() not in task:
                return super().ask(task, wall_s)
            tried.append(1)
            return SandboxEnded(False, "was ended by SIGSEGV")

    def encoders() -> list[psutil.Process]:
        return [one for one in psutil.Process().children() if not gone(one.pid) and "encoder" in one.cmdline()]

    monkeypatch.setattr("tandem.runner.pictures.Sandbox", Dying)
    text = EngineRequest(request_id="text", prompt=BEFORE, params=PARAMS)
    blank = Picture("0" * 64, 1, 12, 4, 3, inputs=save({"image_grid_thw": np.array([GRIDS[0]])}))
    with LLM(str(path), vision_rank="own", prefill_chunk=16) as llm:
        for seed, name in enumerate("ab"):
            found = answers(llm, request(name, "qwen3_vl", BEFORE, seed, AFTER), replace(text, request_id=f"beside {name}"))
            assert found[name] == alone(path, "qwen3_vl", PARAMS.max_tokens, BEFORE, seed, AFTER)
            [encoder] = encoders()
            assert [rank.encoder_pid for rank in ask(llm, Engine.status).ranks] == [encoder.pid]
            encoder.kill()
        ended = answers(llm, slow, text, seen=lambda event: event.finish_reason and event.request_id == "text" and answered.set())
        assert [len(tokens) for tokens in ended.values()] == [PARAMS.max_tokens] * 2
        with pytest.raises(RequestError, match="made no pixel_values") as broken:
            answers(llm, replace(text, pictures=(blank,)))
        with pytest.raises(ServerError, match="died 3 times in a row") as died:
            answers(llm, killer)
        assert len(answers(llm, text)["text"]) == PARAMS.max_tokens
        assert ask(llm, lambda engine: engine.rank_group.restarts) == 0
    assert (broken.value.status, died.value.status, died.value.code, sum(tried)) == (400, 500, "rank_failure", 3)
    assert not encoders()


def test_an_encoder_of_its_own_hands_over_the_bits(tmp_path: Path) -> None:
    """Features take as much memory as in the type that the model computes in."""
    files = resolve(str(seeing_model(tmp_path, "qwen3_vl")))
    [picture], insert = request("a", "qwen3_vl", 1).pictures, partial(InsertOp, "a", [], 12, PARAMS)
    order = EncodePicture(picture.key, [IMAGE] * picture.length, picture.inputs)
    own, taker = PictureFeatures(partial(Encoder, files, mx.bfloat16)), PictureFeatures(Encoder)
    assert own.encode(order) == ""
    features, path = own._held[picture.key], tmp_path / "features.safetensors"
    own.pack(picture.key, str(path))
    own._held[picture.key], taker._held[picture.key] = features, mx.load(str(path))
    assert path.stat().st_size < 2 * 4 * 64 * picture.length + 1000
    path.unlink()
    chunk = [PrefillOp("a", 0, picture.length, True)], [insert(pictures=[replace(picture.span, start=0)])], picture.length
    (want, places), (found, other) = own.of(*chunk), taker.of(*chunk)
    assert found.dtype == want.dtype == mx.bfloat16
    assert mx.array_equal(found, want) and mx.array_equal(other, places) and mx.any(places)


def test_pictures_are_checked_while_no_rank_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(seeing_model(tmp_path, "qwen3_vl")), dtype="float32") as llm:

        def submit(engine: Engine) -> None:
            with monkeypatch.context() as patched:  # as between the death of ranks and the start of others
                patched.setattr(engine.rank_group, "ready", [])
                engine.pictures.check(request("waits", "qwen3_vl", 0), ())

        ask(llm, submit)


def test_models_that_see_are_served_for_text_alone(tmp_path: Path) -> None:
    """With `--vision off` nothing is loaded or kept for pictures, and the prefix of the text is computed as ever."""
    path = seeing_model(tmp_path, "qwen3_vl")
    text = EngineRequest(request_id="text", prompt=BEFORE, params=PARAMS)
    found = []
    for vision in ("auto", "off"):
        with LLM(str(path), vision=vision) as llm:
            found.append(answers(llm, text))
            status, kept = ask(llm, lambda engine: (engine.status(), engine.rank_group.ready[0].picture_bytes))
    assert found[0] == found[1] and kept == 0 and "--vision off" in status.no_pictures
    files = resolve(str(path))
    stored = mx.load(str(path / "model.safetensors"))
    mx.save_safetensors(str(path / "model.safetensors"), {name: one for name, one in stored.items() if not of_vision(name)})
    with pytest.raises(BrokenModel, match="has no weights of a vision tower; get the whole model, or give --vision off"):
        EncoderProcess(None, files, mx.float32)


def test_a_picture_beyond_the_towers_positions_is_refused(tmp_path: Path) -> None:
    """mlx-vlm would read other memory there."""
    files = resolve(str(seeing_model(tmp_path, "pixtral")))
    large = {"pixel_values": np.zeros((1, 3, 20, 16), np.float32), "image_sizes": np.array([[20, 16]])}
    error = PictureFeatures(partial(Encoder, files, mx.float32)).encode(EncodePicture("0" * 64, [IMAGE] * 20, save(large)))
    assert "more than the 16 pixels" in error


@pytest.mark.parametrize(
    "family", [one for one in VISION if one not in ("idefics3", "kimi_k25", "mistral3", "pixtral", "qwen2_vl")]
)
@pytest.mark.parametrize("layout", [(2, 1), (3, 1), (1, 2)])
def test_each_layout_sees_alike(tmp_path: Path, layout: tuple[int, int], family: str) -> None:
    """The first stage puts the features in; the others need positions at most. So do all ranks that share layers."""
    stages, size = layout
    files = resolve(str(seeing_model(tmp_path, family)))
    description = describe(files)
    asked = request("a", family, BEFORE, 1, BETWEEN, 2, AFTER)
    tokens, pictures = asked.prompt, asked.pictures
    insert = InsertOp("a", tokens, len(tokens), PARAMS, pictures=[one.span for one in pictures])
    shards = plan_shards(description, size)

    def work(rank: ThreadRank) -> list[int]:
        parallel = {} if size == 1 else {"shard": shards[rank.rank], "tensor_parallel": rank}
        layers = split_layers(description.num_layers, stages, uncut=description.uncut)
        parts = [load_stage(files, description, one, **parallel) for one in layers]
        held = PictureFeatures(partial(Encoder, files, mx.float32))
        errors = [held.encode(EncodePicture(one.key, tokens[one.start :][: one.length], one.inputs)) for one in pictures]
        assert errors == ["", ""]
        caches, found = [part.make_caches() for part in parts], list[int]()
        inputs = [PictureInputs(part, description, held if part.is_first else None) for part in parts]
        sequence, ops = Sequence(asked, 1, whole_pictures=description.whole_pictures), list[PrefillOp]()
        sequence.features = {one.key for one in pictures}
        sequence.enter(0)
        while not sequence.decoding:
            ops.append(PrefillOp("a", sequence.computed, sequence.chunk(13), False))
            sequence.advance(ops[-1].count)
        while len(found) < PARAMS.max_tokens:
            op = ops.pop(0) if ops else None
            h = mx.array([tokens[op.start : op.start + op.count] if op else found[-1:]], mx.int32)
            for part, own in zip(inputs, caches, strict=True):
                if op:
                    part.choose_chunks([op], [insert], op.count)
                else:
                    part.choose_rows([insert])
                h = part.forward(h, own)
            found += [] if ops else [int(mx.argmax(parts[-1].head(h)[0, -1]))]
        return found

    found = ThreadGroup(size).run(work)
    assert found == [alone(files.path, family, PARAMS.max_tokens, BEFORE, 1, BETWEEN, 2, AFTER)] * size


def test_pictures_that_cannot_be_seen_are_refused_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine before they are queued, or by ranks, for the request with that picture; the others go on."""
    good = request("good", "gemma3", BEFORE, 1, AFTER)
    broken = replace(good.pictures[0], inputs=b"no safetensors", key="0" * 64)
    narrow = replace(good, request_id="narrow", prompt=good.prompt[:-1] + [5], pictures=(replace(broken, length=2),))
    with LLM(str(seeing_model(tmp_path / "a", "gemma3"))) as llm:
        for changes, words in (
            ({"start": len(good.prompt) - 1}, "does not lie in the prompt"),
            ({"key": "x"}, "has no key"),
            ({"size": INPUT_BYTES + 1}, "64 are allowed"),
        ):
            with pytest.raises(RequestError, match=words):
                answers(llm, replace(good, pictures=(replace(broken, **changes),)))
        with pytest.raises(RequestError, match="cannot be encoded") as refused:
            answers(llm, replace(narrow, pictures=(broken,)))
        assert (refused.value.status, refused.value.code) == (400, "picture_not_encoded")
        wrong = replace(good.pictures[0], key="1" * 64, length=3)  # another number of placeholders than features
        with pytest.raises(RequestError, match="cannot be encoded"):
            answers(llm, replace(good, pictures=(wrong,)))
        size = len(good.pictures[0].inputs)
        for most, refusal in ((size - 1, RequestError), (2 * size - 1, OverloadedError)):
            monkeypatch.setattr("tandem.engine.pictures.LIVE_BYTES", most)
            with pytest.raises(refusal):
                ask(llm, lambda engine: engine.pictures.check(good, [Sequence(good, 1)]))
        refusals: list[list[EngineMessage]] = []

        def fail(_: Event) -> None:  # when it is encoded again for another request, and this one needs it no more
            pictures, key = llm.engine.pictures, good.pictures[0].key
            pictures._held.clear()
            pictures.encoding = EncodePicture(key, [], b"")
            refusals.append(pictures.take(PictureEncoded(0, key, "no memory"), llm.engine.scheduler))

        assert len(answers(llm, good, seen=fail)["good"]) == PARAMS.max_tokens and not any(refusals)
    with LLM(str(tiny_model(tmp_path / "b"))) as llm, pytest.raises(RequestError, match="takes no pictures: it takes text alone"):
        answers(llm, good)
