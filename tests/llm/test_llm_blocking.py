"""One `LLM` for several callers: nothing of an answer is lost, and what nobody waits for is stopped."""

from __future__ import annotations

import _thread
import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llm.conftest import BROKEN, ENDLESS, LAYOUTS, eventually_idle, greedy, live
from processors import encoded, noise
from seeing import IMAGE, served_model
from submitted import ask, submitted
from tandem import LLM, SamplingParams
from tandem.engine.thread import Event
from tandem.errors import RequestError, ServerError, UnavailableError
from tandem.processes.interpreter import code_command
from tandem.protocol.control import Output
from tandem.protocol.request import EngineRequest

PROMPTS = [[5, 9, 70, 3, 42], [7] * 40, [11, 12, 13], [300, 4, 8, 15, 16, 23]]


def texts(llm: LLM, tokens: int = 60) -> list[str]:
    """Each prompt's answer alone."""
    return [llm.generate([prompt], greedy(tokens))[0].text for prompt in PROMPTS]


def test_streams_that_are_read_by_turns(llm: LLM) -> None:
    expected = texts(llm)
    streams = [llm.stream(prompt, greedy(60)) for prompt in PROMPTS]
    pieces: list[list[str]] = [[] for _ in PROMPTS]
    live = set(range(len(PROMPTS)))
    while live:
        for number in list(live):
            piece = next(streams[number], None)
            if piece is None:
                live.remove(number)
            else:
                pieces[number].append(piece)
    assert ["".join(one) for one in pieces] == expected
    assert all(len(one) > 1 for one in pieces)


@pytest.mark.parametrize("tokens", [300, 8], ids=["it goes on meanwhile", "it ends meanwhile"])
def test_a_half_read_stream_beside_generate(llm: LLM, tokens: int) -> None:
    whole, other = llm.generate([PROMPTS[0]], greedy(tokens))[0].text, llm.generate([PROMPTS[1]], greedy(60))[0].text
    stream = llm.stream(PROMPTS[0], greedy(tokens))
    begun = [next(stream), next(stream)]
    assert llm.generate([PROMPTS[1]], greedy(60))[0].text == other
    assert len(llm.embed([PROMPTS[2]])) == 1
    assert "".join([*begun, *stream]) == whole


def test_threads_share_one(llm: LLM) -> None:
    expected = texts(llm)

    def work(number: int) -> bool:
        prompt, text = PROMPTS[number % 4], expected[number % 4]
        return (
            llm.generate([prompt], greedy(60))[0].text == text
            and "".join(llm.stream(prompt, greedy(60))) == text
            and len(llm.embed([prompt])[0]) > 0
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(24)))


@contextmanager
def ctrl_c(after_s: float) -> Iterator[None]:
    """The block is ended by it."""
    gc.disable()  # Hypothesis has the collector call it, and what is raised there Python drops
    timer = threading.Timer(after_s, _thread.interrupt_main)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        timer.join()
        gc.enable()


def test_ctrl_c_stops_what_it_ends(llm: LLM) -> None:
    with ctrl_c(0.5):
        llm.generate([PROMPTS[0]] * 3, ENDLESS)
    eventually_idle(llm)
    assert llm.generate([PROMPTS[0]], greedy(5))[0].finish_reason == "length"


def test_ctrl_c_in_a_stream(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], ENDLESS)
    next(stream)
    with ctrl_c(0.3):
        for _ in stream:
            pass
    eventually_idle(llm)


def test_a_prompt_that_is_refused_at_the_door_stops_the_others(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no tokens"):
        llm.generate([PROMPTS[0], []], ENDLESS)
    assert live(llm) == 0


@pytest.mark.parametrize(
    "prompt", [None, 5, 1.5, {"a": 1}, b"text", [None], ["a", None], [1.5], [["x"]], [{"role": "user", "content": "a"}]], ids=repr
)
def test_what_is_no_prompt_is_refused_in_words(llm: LLM, prompt: Any) -> None:
    for call in (llm.generate, llm.embed):
        with pytest.raises(RequestError, match=r"a text or a list of token ids, not .*chat\(\)"):
            call(prompt)


@pytest.mark.parametrize("messages", ["", "Hello", [], None, 5, ["Hello"], {"role": "user", "content": "a"}], ids=repr)
def test_what_is_no_conversation_is_refused_in_words(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages must be a list"):
        llm.chat(messages)


def shown(*pictures: object) -> list[dict[str, object]]:
    parts = [{"type": "image_url", "image_url": one} for one in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]


def test_pictures_are_refused_by_a_model_that_takes_none(llm: LLM) -> None:
    with pytest.raises(RequestError, match="this model takes no pictures: it takes text alone"):
        llm.chat(shown("a.png"))


def test_pictures_are_read_from_paths_and_data_uris_and_bad_ones_refused(tmp_path: Path) -> None:
    raw = encoded(noise(16, 16))
    (tmp_path / "a.png").write_bytes(raw)
    (tmp_path / "b.png").write_bytes(encoded(noise(16, 16, seed=1)))
    given = ({"url": f"data:image/png;base64,{b64encode(raw).decode()}", "detail": "low"}, str(tmp_path / "a.png"))
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with LLM(str(served_model(tmp_path / "sees"))) as seeing:
        first, *others = [seeing.chat(shown(one), params) for one in (*given, tmp_path / "b.png")]
        whole = [{"role": "user", "content": [{"type": "image", "image": tmp_path / "a.png"}, {"type": "text", "text": "?"}]}]
        others.append(seeing.chat(whole, params))
        assert first.prompt_token_ids.count(IMAGE) == 4
        assert [one.token_ids == first.token_ids for one in others] == [True, False, True]
        assert "".join(seeing.stream(shown(*given), params))
        for bad, words in (
            ("https://a.b/c.png", "cannot be read .nothing is fetched from URLs.; .*a data URI"),
            ({"url": given[1], "detail": "ultra"}, "has detail 'ultra'; give auto or low or high or original"),
            (None, "cannot"),
            (__file__, "of an unknown kind"),
        ):
            with pytest.raises(RequestError, match=f"picture 2 .*{words}"):
                seeing.chat(shown(given[1], bad), params)
        for kind in ("input_image", "video", ["image"]):
            with pytest.raises(RequestError, match=r"messages\[0\]: content parts of type .* are not taken; give 'text', 'im"):
                seeing.chat([{"role": "user", "content": [{"type": kind, "image_url": given[1]}]}], params)
        with pytest.raises(RequestError, match="maximum context length"):
            seeing.chat(shown(*[given[1]] * 2000), params)


def test_half_a_character_is_refused_where_a_text_is_meant(llm: LLM) -> None:
    params = SamplingParams(stop=("a\ud800",))
    for call, name in (
        (lambda: llm.generate("a\ud800"), "prompt"),
        (lambda: llm.embed(["b", "\udfff"]), "prompt"),
        (lambda: llm.chat([{"role": "user", "content": [{"text": "\ud800"}]}]), "messages"),
        (lambda: llm.generate("a", params), "params"),
    ):
        with pytest.raises(RequestError, match=f"{name}: .* is half a character"):
            call()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 5}, "must be SamplingParams, not dict"),
        (SamplingParams(temperature="x"), "temperature"),
        (SamplingParams(stop=5), "stop"),
        (SamplingParams(max_tokens=2.5), "max_tokens"),
    ],
    ids=repr,
)  # type: ignore[arg-type]
def test_parameters_of_another_type_are_refused_in_words(llm: LLM, params: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(PROMPTS[0], params)


def test_one_text_is_one_stop_string(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, temperature=0))[0].text
    cut = llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, temperature=0, stop=whole[2:5]))[0]  # type: ignore[arg-type]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(whole[2:5])], "stop")


def test_a_prompt_that_fails_while_it_runs_stops_the_others(llm: LLM) -> None:
    with pytest.raises(ServerError, match="finite"):
        llm.generate([*PROMPTS[:3], [5, BROKEN]], ENDLESS)
    eventually_idle(llm)
    with pytest.raises(ServerError, match="finite"):
        llm.embed([PROMPTS[0], [BROKEN]])


def test_what_is_forgotten_is_stopped(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], ENDLESS)
    next(stream)
    assert live(llm) == 1
    circle: list[object] = [stream]
    circle.append(circle)  # only the garbage collector, in whatever thread, finds it
    del stream, circle
    gc.collect()
    eventually_idle(llm)


def test_a_stream_that_is_never_read_does_nothing(llm: LLM) -> None:
    assert llm.stream(PROMPTS[0], ENDLESS) is not None
    assert live(llm) == 0


def test_a_stop_string_ends_its_request_alone(llm: LLM) -> None:
    text = llm.generate([PROMPTS[0]], greedy(40))[0].text
    stopping = msgspec.structs.replace(ENDLESS, stop=(text[20:24],))
    cut = llm.generate([PROMPTS[0], PROMPTS[0]], stopping)
    assert [(one.text, one.finish_reason) for one in cut] == [(text[: text.index(text[20:24])], "stop")] * 2
    eventually_idle(llm)


def test_prompts_beyond_the_queue_wait_for_room(tiny: str) -> None:
    with LLM(tiny, max_queued_requests=2, max_batch_size=1, kv_tokens=1000) as llm:
        outputs = llm.generate([[5, i] for i in range(3, 20)], greedy(3))
        assert [one.prompt_token_ids for one in outputs] == [[5, i] for i in range(3, 20)]
        assert all(one.finish_reason == "length" for one in outputs)
        with pytest.raises(RequestError, match="maximum context length"):
            llm.generate([[5, 6]] * 9 + [[5] * 100_000], greedy(3))
        eventually_idle(llm)


@pytest.mark.parametrize("layout", ["inline", pytest.param("pp2", marks=pytest.mark.slow)])
def test_with_left_by_an_exception_ends_everything(tiny: str, layout: str) -> None:
    outcome: list[object] = []

    def other() -> None:
        try:
            llm.generate([PROMPTS[0]], ENDLESS)
        except UnavailableError as error:
            outcome.append(error.message)

    thread = threading.Thread(target=other)
    with suppress(ZeroDivisionError), LLM(tiny, log_level="WARNING", **LAYOUTS[layout]) as llm:
        stream = llm.stream(PROMPTS[0], ENDLESS)
        next(stream)
        thread.start()
        while live(llm) < 2:
            time.sleep(0.01)
        pids = [one for one in llm.engine.executor.pids if one != os.getpid()]
        raise ZeroDivisionError
    thread.join(240)
    assert outcome == ["this LLM is closed"]
    with pytest.raises(UnavailableError, match="this LLM is closed"):
        for _ in stream:  # what had come before
            pass
    with pytest.raises(UnavailableError, match="this LLM is closed"):
        llm.generate([PROMPTS[0]])
    assert len(pids) == LAYOUTS[layout].get("pipeline_parallel_size", 0)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    llm.close()


@pytest.mark.slow
def test_one_that_is_forgotten_ends_its_ranks(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    llm = LLM(tiny, pipeline_parallel_size=2, self_check=False)
    assert "INFO" not in capfd.readouterr().err  # of the ranks
    pids = llm.engine.executor.pids
    del llm
    gc.collect()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_ctrl_c_while_it_loads_leaves_nothing(tiny: str) -> None:
    begun = []

    def interrupt(*progress: object) -> None:
        if not begun:
            begun.append(progress)
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        LLM(tiny, pipeline_parallel_size=2, self_check=False, log_level="WARNING", progress=interrupt)
    assert threading.active_count() <= before + 1  # that which starts children stays


SCRIPT = """
import sys
from tandem import LLM, SamplingParams
llm = LLM(sys.argv[1], log_level="WARNING")
print(len(llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids))
stream = llm.stream([5, 6], SamplingParams(max_tokens=60000, ignore_eos=True))
next(stream)
"""


@pytest.mark.slow
def test_a_program_that_closes_nothing_ends(tiny: str) -> None:
    done = subprocess.run(code_command(SCRIPT, tiny), capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "3", "")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forking is what Linux does")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_is_told(tiny: str) -> None:
    with LLM(tiny, log_level="WARNING") as llm:
        if (child := os.fork()) == 0:
            try:
                llm.generate([[5, 6]], greedy(3))
            except UnavailableError as error:
                os._exit(7 if "forked" in error.message else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert llm.generate([[5, 6]], greedy(3))[0].finish_reason == "length"


@pytest.mark.slow
def test_a_rank_that_dies_is_not_seen_by_any_caller(tiny: str) -> None:
    with LLM(tiny, pipeline_parallel_size=2, self_check=False, log_level="WARNING") as llm:
        expected = texts(llm)
        streams = [llm.stream(prompt, greedy(60)) for prompt in PROMPTS]
        begun = [next(stream) for stream in streams]
        os.kill(llm.engine.executor.pids[0], signal.SIGKILL)
        assert [first + "".join(stream) for first, stream in zip(begun, streams, strict=True)] == expected
        assert llm.generate([PROMPTS[0]], greedy(60))[0].text == expected[0]


def test_an_id_that_is_in_use_is_refused_and_its_owner_goes_on(llm: LLM) -> None:
    first = EngineRequest(request_id="same", prompt=[5, 6], params=greedy(400))
    started = submitted(llm, [first])
    next(started)
    others = [EngineRequest(request_id="other", prompt=[5], params=greedy(9)), first]
    with pytest.raises(RequestError, match="'same' is in use"):
        next(submitted(llm, others))
    assert sum(len(output.tokens) for output in started) == 399
    assert live(llm) == 0


def test_an_id_that_waits_for_room_is_refused_and_its_owner_goes_on(tiny: str) -> None:
    with LLM(tiny, max_queued_requests=1, max_batch_size=1, kv_tokens=100_000) as llm:
        engine = llm._session.engine

        def submit(name: str, params: SamplingParams) -> queue.SimpleQueue[Event]:
            events: queue.SimpleQueue[Event] = queue.SimpleQueue()
            engine.submit([EngineRequest(request_id=name, prompt=[5, 6], params=params)], events.put).result()
            return events

        submit("running", ENDLESS)
        submit("queued", greedy(9))
        first, second = submit("same", greedy(9)), submit("same", greedy(9))
        assert ask(llm, lambda engine: "same" not in engine.scheduler.sequences), "it is held"
        engine.abort(["running"])
        refused = second.get(timeout=240)
        assert isinstance(refused, RequestError) and "'same' is in use" in refused.message
        tokens = 0
        while tokens < 9:
            event = first.get(timeout=240)
            assert isinstance(event, Output)
            tokens += len(event.tokens)
