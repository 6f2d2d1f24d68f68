"""KV that is kept on disk: whoever takes it up, in whichever layout, says what a cold start says."""

from __future__ import annotations

import dataclasses
import os
import queue
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from served import wait_until
from submitted import ask, check, submitted
from tandem import LLM, SamplingParams
from tandem.engine.build_layout import plan_layout
from tandem.errors import UsageError
from tandem.protocol.cached_prefixes import CacheReport, QueryCache
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE
from tandem.protocol.request import EngineRequest
from tandem.testing import tiny_model

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2},
    "pp3": {"pipeline_parallel_size": 3, "layer_split": (1, 2, 1)},
}
KIND: dict[str, Any] = {"layers": 4, "dtype": "float32", "config": {"max_position_embeddings": 1024}}
PROMPT = [random.Random(7).randrange(3, 500) for _ in range(2 * DISK_BLOCK_SIZE + 40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("kv") / "model", **KIND))


@pytest.fixture(scope="module")
def expected(model: str) -> Any:
    with LLM(model, prefix_cache=0.0) as llm:
        return llm.generate([PROMPT], PARAMS)[0]


@pytest.fixture
def serve(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    # A model as small as this computes about as fast as a busy machine's disk reads.
    monkeypatch.setattr("tandem.kv.disk.DiskTier._pays", lambda self, tokens, gain: True)
    return lambda layout, **more: LLM(model, kv_disk=str(tmp_path / "kv"), prefill_chunk=64, **LAYOUTS[layout], **more)


def answers(llm: LLM, expected: Any) -> int:
    """The answer is the right one; returns how much of the prompt was not computed."""
    got = llm.generate([PROMPT], PARAMS)[0]
    assert got.token_ids == expected.token_ids
    assert [e.logprob for e in got.logprobs] == pytest.approx([e.logprob for e in expected.logprobs], abs=1e-4)
    check(llm)
    return int(got.cached_tokens)


def asked(llm: LLM, query: QueryCache) -> CacheReport:
    reports: queue.SimpleQueue[CacheReport] = queue.SimpleQueue()
    ask(llm, lambda engine: engine.query_cache(query, reports.put))
    return reports.get(timeout=120)


def files(directory: Path) -> list[Path]:
    return sorted((directory / "kv").glob("*/*.kv"))


@pytest.mark.slow
def test_a_prefix_outlives_its_server(serve, expected, tmp_path):
    with serve("tp2") as llm:
        assert answers(llm, expected) == 0
        wait_until(lambda: len(files(tmp_path)) == 2 * 2)
    assert all(path.stat().st_mode & 0o077 == 0 for path in files(tmp_path))
    with serve("one") as llm:
        assert answers(llm, expected) == 2 * DISK_BLOCK_SIZE
        assert hits(llm) == 2 * DISK_BLOCK_SIZE


def test_what_is_damaged_or_gone_is_computed(serve, expected, tmp_path):
    before = set(threading.enumerate())
    with serve("one") as llm:
        assert answers(llm, expected) == 0
    wait_until(lambda: not any(thread.name == "kv disk" for thread in set(threading.enumerate()) - before))
    assert len(files(tmp_path)) == 2  # that thread ends with the engine, and has written all before
    first, second = files(tmp_path)
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 4
    first.write_bytes(data)
    with serve("one") as llm:
        got = answers(llm, expected)
        # Of which disk block that file is: with the first, nothing of the prefix is of use.
        assert got in (0, DISK_BLOCK_SIZE)
        assert ask(llm, lambda engine: engine.scheduler.disk.counts.failures) == 1
    for path in files(tmp_path):
        path.write_bytes(b"TDMKV")
    with serve("one") as llm:
        for path in files(tmp_path):
            path.unlink()
        assert answers(llm, expected) == 0
        wait_until(lambda: len(files(tmp_path)) == 2)  # and kept anew
    with serve("one") as llm:
        assert answers(llm, expected) == 2 * DISK_BLOCK_SIZE


def test_another_model_or_type_finds_nothing(serve, expected, model, tmp_path):
    with serve("one") as llm:
        answers(llm, expected)
        wait_until(lambda: len(files(tmp_path)) == 2)
    other = str(tiny_model(tmp_path / "other", seed=5, **KIND))
    for directory, more in ((other, {}), (model, {"dtype": "bfloat16"})):
        with LLM(directory, kv_disk=str(tmp_path / "kv"), **more) as llm:
            assert llm.generate([PROMPT], PARAMS)[0].cached_tokens == 0


def test_a_part_of_a_prompt_and_several_who_ask_at_once(serve, expected, tmp_path):
    with serve("one") as llm:
        private = EngineRequest(request_id="private", prompt=[9] * 300, params=PARAMS, on_disk=False)
        assert list(submitted(llm, [private]))
        answers(llm, expected)
        report = asked(llm, QueryCache(1, tokens=PROMPT))  # once all that waits is written
        assert (report.memory_has, report.disk_has) == (len(PROMPT) // 32 * 32, 2 * DISK_BLOCK_SIZE)
        assert len(files(tmp_path)) == 2
        assert asked(llm, QueryCache(2, tokens=private.prompt)).memory_has == 288
    branch = PROMPT[: DISK_BLOCK_SIZE + 30] + [11] * 300
    with serve("one") as llm:
        first, second, third = llm.generate([PROMPT, branch, PROMPT], PARAMS)
        assert first.token_ids == third.token_ids == expected.token_ids
        assert [one.cached_tokens for one in (first, second, third)] == [
            2 * DISK_BLOCK_SIZE,
            DISK_BLOCK_SIZE,
            2 * DISK_BLOCK_SIZE,
        ]
        check(llm)


def test_the_warning_of_a_full_disk_has_a_remedy(serve, expected, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tandem.kv.files.DiskBlockFiles.write", full)
    with serve("one") as llm:
        answers(llm, expected)
        words = "No space left on device; if full, free space or lower --kv-disk-gb; pausing for 60 s"
        wait_until(lambda: words in caplog.text)


def test_room_for_less_than_a_disk_block_is_none(serve):
    with pytest.raises(UsageError, match="--kv-disk-gb 5e-05: 64 tokens .* take 6.6e-05; give at least 0.00013"):
        serve("one", kv_disk_gb=0.00005).close()


def test_a_disk_that_says_nothing_keeps_nobody_waiting(serve, expected, tmp_path, monkeypatch):
    with serve("one") as llm:
        answers(llm, expected)
        wait_until(lambda: len(files(tmp_path)) == 2)
    monkeypatch.setattr("tandem.engine.engine.FETCH_S", 0.3)
    monkeypatch.setattr("tandem.kv.store.KVDisk.take_order", lambda self, order: None)
    with serve("one") as llm:
        assert answers(llm, expected) == 0


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "gemma3_text", "llama4"])
def test_a_checkpoint_of_states_or_windows_outlives_its_server(tmp_path, monkeypatch, family):
    monkeypatch.setattr("tandem.kv.disk.DiskTier._pays", lambda self, tokens, gain: True)
    directory = str(tiny_model(tmp_path / "model", family, **{**KIND, "layers": 4}))
    with LLM(directory, prefix_cache=0.0, prefill_chunk=64) as llm:
        first = llm.generate([PROMPT], PARAMS)[0]
        second_turn = [*PROMPT, *first.token_ids, *range(3, 43)]
        second = llm.generate([second_turn], PARAMS)[0]

    def turn(prompt: list[int], expected: Any, layout: str = "one") -> tuple[int, int]:
        """Positions that were not computed, and prefixes on disk that could not be used."""
        with LLM(directory, kv_disk=str(tmp_path / "kv"), prefill_chunk=64, **LAYOUTS[layout]) as llm:
            got = llm.generate([prompt], PARAMS)[0]
            assert got.token_ids == expected.token_ids
            asked(llm, QueryCache(1, tokens=prompt))  # answered once all that waits is written
            return int(got.cached_tokens), ask(llm, lambda engine: engine.scheduler.disk.counts.failures)

    assert turn(PROMPT, first) == (0, 0)
    at = 2 * DISK_BLOCK_SIZE
    [checkpoint] = [path for path in files(tmp_path) if len(path.name.split(".")[0]) == 34]
    data = checkpoint.read_bytes()
    assert turn(second_turn, second, "pp2" if family == "qwen3_next" else "one") == (at, 0)
    if family != "qwen3_next":
        return
    later = next(path for path in files(tmp_path) if len(path.name.split(".")[0]) == 34 and path.stem != checkpoint.stem)
    for damaged in (data[:-9] + bytes([data[-9] ^ 4]) + data[-8:], data[:-8], later.read_bytes()):  # a bit, a cut, another's
        checkpoint.write_bytes(damaged)
        assert turn(PROMPT, first) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "tp2"])
def test_a_prompt_is_warmed_and_dropped_on_all_ranks(serve, expected, tmp_path, layout):
    warming = EngineRequest(request_id="warm", prompt=PROMPT, params=SamplingParams(max_tokens=0), warms=True)
    with serve(layout) as llm:
        for drop, there in (("", 0), ("memory", 2 * DISK_BLOCK_SIZE)):
            asked(llm, QueryCache(1, drop=drop))
            [output] = submitted(llm, [warming])
            assert (output.tokens, output.cached_tokens, output.disk_tokens) == ([], there, there)
        assert asked(llm, QueryCache(1, tokens=PROMPT)).disk_has == 2 * DISK_BLOCK_SIZE
        assert answers(llm, expected) == len(PROMPT) // 32 * 32
        text = ask(llm, lambda engine: engine.metrics.text()).decode()
        assert f'tandem_prefix_cache_hits_total{{tier="disk"}} {2 * DISK_BLOCK_SIZE:.1f}' in text
        assert f'tandem_prefix_cache_hits_total{{tier="memory"}} {len(PROMPT) // 32 * 32:.1f}' in text
        report = asked(llm, QueryCache(1, drop="all"))
        assert (report.count, report.tokens) == (0, 0)
        assert (report.disk.tokens, report.disk.bytes, report.disk.machines) == (0, 0, 1)
        assert report.dropped_bytes > 0
        assert not files(tmp_path)
        assert answers(llm, expected) == 0
        # What is in memory and not on disk is written when it is warmed.
        assert asked(llm, QueryCache(1, tokens=PROMPT)).disk_has == 2 * DISK_BLOCK_SIZE
        for path in files(tmp_path):
            path.unlink()
        assert asked(llm, QueryCache(1, tokens=PROMPT)).disk_has == 0
        assert list(submitted(llm, [warming]))
        assert asked(llm, QueryCache(1, tokens=PROMPT)).disk_has == 2 * DISK_BLOCK_SIZE


@pytest.mark.slow
def test_after_a_fault_a_long_prompt_is_read_and_not_computed(serve, expected, tmp_path):
    with serve("pp2") as llm:
        assert answers(llm, expected) == 0
        wait_until(lambda: len(files(tmp_path)) == 4)
        for rank in (0, 1):
            os.kill(ask(llm, lambda engine, rank=rank: engine.executor.pids[rank]), signal.SIGKILL)
            assert answers(llm, expected) == 2 * DISK_BLOCK_SIZE
        assert ask(llm, lambda engine: engine.restarts) == 2
        assert ask(llm, lambda engine: engine.scheduler.disk.counts.hit_tokens) == 4 * DISK_BLOCK_SIZE
        (tmp_path / "kv").rename(tmp_path / "away")
        (tmp_path / "kv").write_text("no directory")
        os.kill(ask(llm, lambda engine: engine.executor.pids[0]), signal.SIGKILL)
        assert answers(llm, expected) == 0  # a server goes on without its disk
        assert ask(llm, lambda engine: engine.status()).kv_disk.startswith("off: --kv-disk")
    with pytest.raises(UsageError, match="^--kv-disk .*: is not a directory; give another$"):  # but none begins so
        serve("pp2").close()


@pytest.mark.slow
def test_kv_of_weights_that_have_changed_under_a_server_is_not_used(model, tmp_path, serve):
    other = tiny_model(tmp_path / "other", seed=5, **KIND)
    mine = shutil.copytree(model, tmp_path / "mine")
    with LLM(str(other), prefix_cache=0.0) as llm:
        new = llm.generate([PROMPT], PARAMS)[0].token_ids
    with LLM(str(mine), kv_disk=str(tmp_path / "kv"), **LAYOUTS["pp2"]) as llm:
        old = llm.generate([PROMPT], PARAMS)[0].token_ids
        assert asked(llm, QueryCache(1, tokens=PROMPT)).disk_has == 2 * DISK_BLOCK_SIZE
        for path in other.glob("*.safetensors"):
            shutil.copy(path, mine)
        os.kill(ask(llm, lambda engine: engine.executor.pids[0]), signal.SIGKILL)  # the next ranks load the new ones
        got = llm.generate([PROMPT], PARAMS)[0]
        assert (got.token_ids, got.cached_tokens) == (new, 0)
        assert got.token_ids != old
        assert asked(llm, QueryCache(1, tokens=PROMPT)).disk_has == 2 * DISK_BLOCK_SIZE


def handed_over(llm: LLM, request: EngineRequest, count: int) -> tuple[list[int], int]:
    """The tokens of a request that leaves after at least so many, and how many positions are on disk then."""
    tokens: list[int] = []

    def taken(output: Any) -> None:
        """In the engine's thread, so that no other has to be quick."""
        before, now = len(tokens), len(tokens) + len(output.tokens)
        tokens.extend(output.tokens)
        if before < count <= now:
            llm._session.engine.call(lambda engine: engine.hand_over(request.request_id))

    llm._session.engine.submit([request], taken).result()
    wait_until(lambda: not ask(llm, lambda engine: engine.scheduler.sequences))
    check(llm)
    known = [*request.prompt, *request.produced, *tokens]
    return tokens, asked(llm, QueryCache(1, tokens=known)).disk_has


@pytest.mark.parametrize("family", ["lfm2", "gpt_oss"])
def test_a_running_sequence_moves_with_its_states_or_windows(tmp_path, monkeypatch, family):
    monkeypatch.setattr("tandem.kv.disk.DiskTier._pays", lambda self, tokens, gain: True)
    directory = str(tiny_model(tmp_path / "model", family, **KIND))
    params = SamplingParams(max_tokens=400, temperature=0.9, seed=5, ignore_eos=True)
    prompt = PROMPT[: 2 * DISK_BLOCK_SIZE - 12]
    with LLM(directory, prefix_cache=0.0) as llm:
        whole = llm.generate([prompt], replace(params, max_tokens=160))[0].token_ids
    disk = {"kv_disk": str(tmp_path / "kv"), "prefill_chunk": 64}
    with LLM(directory, **disk, **LAYOUTS["pp2"]) as first, LLM(directory, **disk) as second:
        for leaves, count, at in ((False, 30, 3 * DISK_BLOCK_SIZE), (True, 1000, DISK_BLOCK_SIZE)):
            for llm in (first, second):
                asked(llm, QueryCache(1, drop="all"))
            before = hits(second)
            request = EngineRequest(request_id=f"moves-{leaves}", prompt=prompt, params=params, leaves=leaves)
            tokens, kept = handed_over(first, request, count)
            assert kept == at  # the end of the next block when it was to leave, or of the prompt's last whole one
            moved = replace(request, produced=tokens, kept=kept, params=replace(params, max_tokens=len(tokens) + 10))
            rest = [token for output in submitted(second, [replace(moved, leaves=False)]) for token in output.tokens]
            assert [*tokens, *rest] == whole[: len(tokens) + 10]
            assert hits(second) == before + at


@pytest.fixture
def engine_pool(serve) -> Iterator[dict[str, LLM]]:
    """Engines of unlike layouts that have one directory; those of a single rank are the replicas of DP 2."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(serve(name.partition("-")[0])) for name in ("tp2", "pp2", "pp3", "one-first", "one-second")
        }


def hits(llm: LLM) -> int:
    return int(ask(llm, lambda engine: engine.scheduler.disk.counts.hit_tokens))


@pytest.mark.slow
def test_what_any_layout_keeps_serves_any_other(engine_pool, expected, model, tmp_path, monkeypatch):
    for writer in tuple(engine_pool.values())[:4]:
        asked(writer, QueryCache(1, drop="all"))
        assert answers(writer, expected) == 0
        assert asked(writer, QueryCache(1, tokens=PROMPT)).disk_has == 2 * DISK_BLOCK_SIZE  # once all that waits is written
        for name, reader in engine_pool.items():
            asked(reader, QueryCache(1, drop="memory"))  # and looks at the disk
            before = hits(reader)
            assert answers(reader, expected) == 2 * DISK_BLOCK_SIZE, name
            assert hits(reader) == before + 2 * DISK_BLOCK_SIZE
    # A running sequence: its second disk block ends in what was answered, and is written when it leaves.
    params = SamplingParams(max_tokens=400, temperature=0.9, seed=5, ignore_eos=True)
    prompt = PROMPT[: 2 * DISK_BLOCK_SIZE - 12]
    with LLM(model, prefix_cache=0.0) as llm:
        whole = llm.generate([prompt], params)[0].token_ids
    pairs = [*permutations(tuple(engine_pool)[:4], 2), ("one-first", "one-second")]
    for number, (first, second) in enumerate(pairs):
        asked(engine_pool[first], QueryCache(1, drop="all"))
        asked(engine_pool[second], QueryCache(1, drop="memory"))
        before = hits(engine_pool[second])
        request = EngineRequest(request_id=f"moves-{number}", prompt=prompt, params=params)
        tokens, kept = handed_over(engine_pool[first], request, 20)
        assert kept == 2 * DISK_BLOCK_SIZE, (first, second)
        moved = replace(request, produced=tokens, kept=kept, params=replace(params, max_tokens=len(tokens) + 10))
        rest = [token for output in submitted(engine_pool[second], [moved]) for token in output.tokens]
        assert [*tokens, *rest] == whole[: len(tokens) + 10], (first, second)
        assert hits(engine_pool[second]) == before + 2 * DISK_BLOCK_SIZE
        check(engine_pool[second])
    # The directory goes while a sequence runs: it leaves all the same, and is computed again.
    monkeypatch.setattr("tandem.engine.engine.WRITE_S", 0.5)
    asked(engine_pool["pp2"], QueryCache(1, drop="all"))
    asked(engine_pool["tp2"], QueryCache(1, drop="memory"))
    shutil.rmtree(tmp_path / "kv")
    tokens, kept = handed_over(engine_pool["pp2"], replace(request, request_id="homeless"), 20)
    moved = replace(request, produced=tokens, kept=2 * DISK_BLOCK_SIZE, params=replace(params, max_tokens=len(tokens) + 10))
    rest = [token for output in submitted(engine_pool["tp2"], [moved]) for token in output.tokens]
    assert [*tokens, *rest] == whole[: len(tokens) + 10]
    assert (kept, (tmp_path / "kv").exists()) == (0, False)


@pytest.mark.slow
def test_ranks_with_disks_of_their_own_borrow_from_one_another(serve, expected, tmp_path, monkeypatch):
    def apart(settings):
        layout = plan_layout(settings)
        return dataclasses.replace(
            layout, ranks=tuple(replace(spec, kv_disk=f"{spec.kv_disk}/{spec.rank}") for spec in layout.ranks)
        )

    monkeypatch.setattr("tandem.llm.session.plan_layout", apart)
    with serve("tp2") as llm:
        assert answers(llm, expected) == 0
        wait_until(lambda: len(list((tmp_path / "kv").glob("*/*/*.kv"))) == 4)
    with serve("pp3") as llm:
        report = asked(llm, QueryCache(1, tokens=PROMPT))
        assert report.disk_has == 2 * DISK_BLOCK_SIZE, "what others have counts"
        assert answers(llm, expected) == 2 * DISK_BLOCK_SIZE
        assert ask(llm, lambda engine: engine.scheduler.disk.counts.failures) == 0
        os.kill(ask(llm, lambda engine: engine.executor.pids[0]), signal.SIGKILL)
        assert answers(llm, expected) == 2 * DISK_BLOCK_SIZE
        for path in (tmp_path / "kv").glob("*/*/*.kv"):
            path.unlink()
        asked(llm, QueryCache(1, drop="memory"))
        assert answers(llm, expected) == 0
