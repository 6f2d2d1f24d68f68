"""The load generator against a server that answers from a script, in odd pieces."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tandem.bench.client import CHAT, BenchRequest, Target, Timed, send
from tandem.bench.plot import svg
from tandem.bench.summary import lines, ratios, samples, summary
from tandem.bench.workload import DATASETS, Mix, PromptSource, offer
from tandem.testing import write_tokenizer

JOB = BenchRequest("hi", 4)


def chunked(body: bytes, size: int) -> bytes:
    """A chunked body in chunks of `size` bytes, whatever they cut through."""
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])


def events(*objects: object) -> bytes:
    return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in objects) + b"data: [DONE]\n\n"


ANSWER = events(
    {"choices": [{"text": "Wört"}]}, {"choices": [{"text": ""}]}, {"choices": [{"text": " zwei"}]},
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4,
                              "prompt_tokens_details": {"cached_tokens": 2}}},
)  # fmt: skip
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


class Script:
    """A server that reads a request and answers with `reply`."""

    def __init__(self) -> None:
        self.reply = b""
        self.requests: list[tuple[bytes, dict[str, object]]] = []
        self.open = self.most_open = 0
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._answer, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            self.requests.append((head, json.loads(await reader.readexactly(length))))
            await asyncio.sleep(0.02)
            writer.write(self.reply)
            await writer.drain()
            self.open -= 1

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(240)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def script() -> Iterator[Script]:
    server = Script()
    yield server
    server.close()


def ask(script: Script, **fields: object) -> Timed:
    fields.setdefault("model", "m")
    return asyncio.run(send(Target(base_url=script.url, **fields), JOB))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 3, 17, 10_000])
def test_an_answer_in_chunks_of_any_size(script: Script, size: int) -> None:
    script.reply = OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(ANSWER, size)
    answer = ask(script, api_key="k", body={"temperature": 0.5})
    assert not answer.error
    assert (answer.text, len(answer.pieces)) == ("Wört zwei", 2)
    assert (answer.tokens, answer.prompt_tokens, answer.cached_tokens) == (4, 7, 2)
    assert 0.015 < answer.ttft <= answer.e2e
    head, body = script.requests[0]
    assert b"POST /v1/completions HTTP/1.1" in head and b"Authorization: Bearer k\r\n" in head
    assert body["prompt"] == "hi" and body["temperature"] == 0.5 and body["max_tokens"] == 4


def test_chat_without_usage_or_chunks(script: Script) -> None:
    deltas = [{"choices": [{"delta": {"reasoning_content": "hm"}}]}, {"choices": [{"delta": {"content": "a"}}]}]
    script.reply = OK + b"\r\n" + events(*deltas).replace(b"\n", b"\r\n")
    answer = ask(script, endpoint=CHAT)
    assert (answer.text, answer.tokens, answer.error) == ("hma", 2, "")
    assert script.requests[0][1]["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"", "Error"),
        (b"nonsense\r\n\r\n", "Error"),
        (b"HTTP/1.1 429 Too Many\r\n\r\n" + b'{"error": "slow down"}', "HTTP 429: .*slow down"),
        (OK + b"\r\n" + events(), "without text"),
        (OK + b"\r\ndata: {nope\n", "JSONDecodeError"),
        (OK + b"\r\n" + events({"choices": [{"text": "a"}]}, {"error": {"message": "rank died"}}), "rank died"),
        (OK + b"transfer-encoding: chunked\r\n\r\n" + chunked(ANSWER, 9)[:40], "Error"),
        (OK + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", "ValueError"),
    ],
)
def test_failures_are_answers_too(script: Script, reply: bytes, words: str) -> None:
    script.reply = reply
    assert re.search(words, ask(script).error)


def test_a_server_that_hangs_or_is_not_there(script: Script) -> None:
    assert "no end within" in ask(script, timeout_s=0.001).error
    target = Target(base_url="http://127.0.0.1:1", model="m")
    assert "Error" in asyncio.run(send(target, JOB)).error


def test_concurrency_is_limited_and_order_kept(script: Script) -> None:
    script.reply = OK + b"\r\n" + ANSWER
    jobs = [BenchRequest(str(i), 1) for i in range(12)]
    seen: list[Timed] = []
    target = Target(base_url=script.url, model="m")
    answers = asyncio.run(offer(target, jobs, concurrency=3, progress=seen.append))
    assert [a.job for a in answers] == jobs and len(seen) == 12
    assert script.most_open <= 3


def test_a_rate_spreads_requests(script: Script) -> None:
    script.reply = OK + b"\r\n" + ANSWER
    answers = asyncio.run(offer(Target(base_url=script.url, model="m"), [JOB] * 20, rate=50, seed=1))
    gaps = [b.sent - a.sent for a, b in zip(answers, answers[1:], strict=False)]
    assert sum(gaps) > 0.2  # 19 gaps of 20 ms on average
    assert len({round(gap, 3) for gap in gaps}) > 3


def made(sent: float, *pieces: float, tokens: int = 0, error: str = "") -> Timed:
    return Timed(JOB, sent, list(pieces), (pieces or (sent,))[-1], tokens or len(pieces), 10, 5, "x", error)


def test_the_summary() -> None:
    answers = [made(0.0, 0.1, 0.2, 0.3), made(0.0, 0.3, 0.5, 1.0, tokens=5), made(0.5, error="HTTP 500")]
    result = summary(answers, [50, 100], {"ttft": 150, "tpot": 120})
    assert (result["completed"], result["failed"], result["duration"]) == (2, 1, 1.0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 8)
    assert result["request_goodput"] == 1.0
    assert result["mean_ttft_ms"] == pytest.approx(200) and result["p100_ttft_ms"] == pytest.approx(300)
    assert result["mean_tpot_ms"] == pytest.approx((100 + 175) / 2)
    assert result["p50_itl_ms"] == pytest.approx(150)
    assert result["mean_e2el_ms"] == pytest.approx(650)
    assert ratios(result, {**result, "output_throughput": 16.0})["output_throughput"] == 2.0
    text = "\n".join(lines(result, ["ttft", "itl"]))
    assert "Time to first token (ms)" in text and "P100" in text and "End-to-end" not in text
    assert "no samples" in "\n".join(lines(summary([made(0, error="x"), made(1, error="x")], [99], {}), ["ttft"]))


def test_the_picture_is_svg() -> None:
    from xml.etree import ElementTree

    tree = ElementTree.fromstring(svg("a < b", {"one & two": samples([made(0, 1, 2, 3)]), "none": {}}))
    assert tree.tag.endswith("svg")
    assert len([node for node in tree.iter() if node.tag.endswith("polyline")]) == 4


@pytest.mark.parametrize("dataset", DATASETS)
def test_mixes_have_the_lengths_that_were_asked_for(dataset: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    from tokenizers import Tokenizer

    count = Tokenizer.from_file(str(directory / "tokenizer.json")).encode
    mix = Mix(dataset=dataset, count=40, input_len=30, output_len=9, prefix_len=50, suffix_len=10, num_prefixes=4,
              long_len=200, long_share=0.25, range_ratio=0.5)  # fmt: skip
    jobs = mix.jobs(PromptSource(directory, 3))
    assert jobs == mix.jobs(PromptSource(directory, 3)) != mix.jobs(PromptSource(directory, 4))
    lengths = [len(count(job.prompt).ids) for job in jobs]
    assert len(jobs) == 40
    if dataset == "random":
        assert min(lengths) >= 14 and max(lengths) <= 46 and len(set(lengths)) > 5
        assert {job.max_tokens for job in jobs} <= set(range(5, 14))
    elif dataset == "sharegpt":
        assert 50 < sum(lengths) / 40 < 600 and max(lengths) <= 1025
    elif dataset == "prefix_repetition":
        assert len({job.prompt[:60] for job in jobs}) == 4 and len({job.prompt for job in jobs}) == 40
    else:
        assert sum(length > 150 for length in lengths) == 10
        for share, long in ((0.75, 30), (0.4, 16), (0.0, 0), (1.0, 40)):
            jobs = replace(mix, long_share=share).jobs(PromptSource(directory, 3))
            assert sum(len(count(job.prompt).ids) > 150 for job in jobs) == long
    assert all(job.prompt for job in mix.jobs(PromptSource(None, 3)))


def test_an_answer_that_arrives_at_once_has_no_rate() -> None:
    assert made(0.0, 0.5, 1.0, 1.5).decode_rate == 2.0
    assert made(0.0, 0.5, tokens=9).decode_rate == 0.0
    assert made(0.0, 0.5, 0.5, tokens=9).decode_rate == 0.0
