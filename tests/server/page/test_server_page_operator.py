"""What the page shows of models, ranks, links and events, in a browser, over a server that says what a test wants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browsers import Window, chromium
from system_packages import missing
from tandem.protocol.control import LoadProgress, RankInfo
from tandem.protocol.events import History

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing("chromium", "chromedriver")), reason=missing("chromium", "chromedriver")),
]
GIB = 2**30


def rank(number: int, layers: tuple[int, int], host: str, memory: int, **more: Any) -> RankInfo:
    return RankInfo(
        rank=number,
        stage=number,
        layers=layers,
        pid=1,
        host=host,
        weight_bytes=8 * GIB,
        peak_bytes=12 * GIB,
        step_s=0.02,
        kv_bytes=GIB,
        memory_bytes=memory * GIB,
        used_bytes=10 * GIB,
        **more,
    )


@pytest.fixture(scope="module")
def page(scripted: Any) -> Iterator[Window]:
    with chromium() as window:
        window.open(scripted.url)
        yield window
        assert window.complaints() == []


@pytest.fixture
def engine(scripted: Any) -> Iterator[Any]:
    before = scripted.engine.status
    yield scripted.engine
    scripted.engine.status = before
    scripted.wait_ready()  # the api hears of it with its next heartbeat, and the next test may ask before


def test_ranks_layers_and_memory_are_drawn_to_scale_with_their_links(page: Window, engine: Any) -> None:
    engine.set_status(
        num_layers=40, stages=2, ranks=[rank(0, (0, 10), "studio", 64), rank(1, (10, 40), "mini", 16, stage_latency_s=0.0013)]
    )
    page.view("cluster")
    page.until(lambda: len(page.texts(".rank")) == 2 and "studio" in page.text(".rank"), "two ranks")
    assert "stage 2/2, layers 10–39, 20.0 ms a step" in page.texts(".rank")[1]
    assert page.texts(".layers span") == ["0–9", "10–39"] and "1.3 ms" in page.text(".link")
    few, many = page.run("return [...document.querySelectorAll('.layers span')].map(e => e.offsetWidth)")
    assert many / few == pytest.approx(3, rel=0.05)
    large, small = page.run("return [...document.querySelectorAll('.rank .memory')].map(e => e.style.width)")
    assert (large, small) == ("100%", "25%"), "a quarter of the memory"
    weights = page.run("return [...document.querySelectorAll('.rank .weights')].map(e => e.style.width)")
    assert weights == ["12.5%", "50%"]


def test_a_dead_rank_is_red_and_a_slow_one_is_marked(page: Window, engine: Any) -> None:
    history = History()
    history.note("replica_ready", "my-model can be used on 3 rank(s); loading took 21 s")
    history.note(
        "rank_lost",
        "rank 1 (pid 4711) was killed (SIGKILL); all ranks are replaced",
        level="error",
        rank=1,
        remedy="Nothing to do if it stays at this once.",
    )
    engine.set_status(
        state="recovering",
        detail="replacing the ranks after: rank 1 was killed (SIGKILL)",
        num_layers=36,
        stages=3,
        events=history.after(),
        ranks=[
            rank(0, (0, 20), "studio", 64, state="waiting"),
            rank(1, (20, 30), "mini", 24, state="lost", stage_latency_s=0.0009),
            rank(2, (30, 36), "air", 16, state="waiting", stage_latency_s=0.0031, slowdown=4.0),
        ],
    )
    page.view("cluster")
    page.until(lambda: page.texts(".rank.lost .mark") == ["lost"], "the lost rank")
    red = page.run(
        "const e = document.createElement('i'); e.style.color = 'var(--bad)'; document.body.append(e);"
        "const c = getComputedStyle(e).color; e.remove();"
        "return c === getComputedStyle(document.querySelector('.rank.lost')).borderTopColor"
    )
    assert red and page.texts(".rank.waiting .mark") == ["waiting", "waiting"]
    page.until(lambda: page.texts("#events .error"), "the event")
    page.picture("page-cluster")
    page.click("#theme")
    page.picture("page-cluster-dark")
    page.click("#theme")
    assert "killed (SIGKILL)" in page.text("#detail") and page.text("#state") == "recovering"
    engine.set_status(
        state="ready",
        detail="",
        degraded="1 of 2 ranks: mini is not in the network",
        ranks=[rank(0, (0, 20), "studio", 64, slowdown=6.5)],
    )
    page.until(lambda: page.texts(".rank.slow .mark") == ["6.5× slower"], "the slow rank")
    assert "mini is not in the network" in page.text("#detail")


def test_what_happened_is_listed_with_reason_and_remedy(page: Window, engine: Any) -> None:
    history = History()
    history.note(
        "rank_lost",
        "rank 1 was killed (SIGKILL) <img src=x>; all ranks are replaced",
        level="error",
        rank=1,
        remedy="Nothing to do if it stays at this once.",
    )
    history.note("ranks_replaced", "2 rank(s) serve again after 1.5 s; 3 request(s) go on")
    engine.set_status(events=history.after())
    page.view("cluster")
    page.until(lambda: "go on" in page.text("#events .event:first-child"), "the latest event")
    latest, first = page.texts("#events .event")[:2]
    assert "ranks replaced" in latest and "3 request(s) go on" in latest
    assert "SIGKILL) <img src=x>" in first and "Nothing to do" in first
    assert page.texts("#events .event:nth-child(2).error b") == ["rank lost"]
    history.note("rank_slow", "rank 0 is slow", level="warning", rank=0)
    engine.set_status(events=history.after())
    page.until(lambda: "rank 0 is slow" in page.text("#events .event:first-child"), "the latest comes first")


def test_downloads_and_loading_are_shown_with_progress(page: Window, engine: Any) -> None:
    engine.set_status(
        state="starting",
        detail="loading the model",
        ranks=[],
        loading=[LoadProgress(0, GIB, 4 * GIB, "fetch"), LoadProgress(1, 3 * GIB, 4 * GIB, "load")],
    )
    page.view("models")
    page.until(lambda: len(page.texts("progress")) == 2, "two ranks load")
    assert "starting" in page.text(".model .badge") and "rank 0: download 1.0 GiB of 4.0 GiB" in page.text(".progress")
    assert page.run("return [...document.querySelectorAll('progress')].map(e => e.position)") == [0.25, 0.75]
    engine.set_status(loading=[LoadProgress(0, 2 * GIB, 4 * GIB, "fetch")])
    page.until(lambda: page.run("return document.querySelector('progress').position") == 0.5, "it goes on")


def test_a_request_in_flight_can_be_cancelled(page: Window, engine: Any, scripted: Any) -> None:
    engine.hold = True
    try:
        page.view("chat")
        page.ask("Wait for it")
        page.view("cluster")
        page.until(lambda: page.texts("#requests button") == ["Cancel"], "it is listed")
        page.click("#requests button")
        page.until(lambda: "The request was cancelled." in page.text(".assistant .error"), "its client is told")
        page.until(lambda: page.texts("#requests tbody td") == ["none"], "it is gone")
    finally:
        engine.hold = False


def test_a_server_that_does_not_answer_is_told_from_one_that_idles(page: Window) -> None:
    page.view("cluster")
    page.run("window.fetched = window.fetch; window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    page.until(lambda: page.text("#state") == "unreachable", "it is told")
    assert "does not answer" in page.text("#detail") and "stale" in page.run("return document.body.className")
    page.run("window.fetch = window.fetched")
    page.until(lambda: page.text("#state") == "healthy", "and it is back")
    page.run(
        "window.timeout = AbortSignal.timeout; AbortSignal.timeout = () => timeout.call(AbortSignal, 1);"
        "window.fetch = (_, { signal }) => new Promise((_, failed) => {"
        "  signal?.addEventListener('abort', () => failed(signal.reason)) })"
    )
    page.until(lambda: page.text("#state") == "unreachable", "it hangs")
    page.run("window.fetch = window.fetched; AbortSignal.timeout = timeout")
    page.until(lambda: page.text("#state") == "healthy", "and it is back again")


def test_the_narrowest_phone_has_room_for_long_names(page: Window, engine: Any) -> None:
    name = "<b>a-model-with-a-name-that-is-longer-than-a-phone-is-wide-4bit</b>"
    engine.set_status(model=name, num_layers=4, detail=name, degraded=name, ranks=[rank(0, (0, 4), name, 64, slowdown=4.0)])
    with page.phone(320):
        page.view("cluster")
        page.until(lambda: name in page.text("#detail") and name in page.text(".rank"), "it is there")
        for view in ("chat", "models", "cluster", "plan"):
            page.view(view)
            if view == "chat":
                page.run(
                    "const option = new Option(arguments[0], 'x', true, true);"
                    "document.getElementById('chat-model').append(option)",
                    name,
                )
            if view == "plan":
                page.until(lambda: page.texts(".machine"), "the machines")
            wide = page.run(
                "const e = document.querySelector('main > :not([hidden])'); return [e.scrollWidth -"
                "e.clientWidth, document.documentElement.scrollWidth - innerWidth]"
            )
            assert wide == [0, 0], view
        page.run("document.querySelector('#chat-model [value=x]').remove()")
        assert not page.texts("main b b"), "names are text"


def test_events_of_another_server_take_the_place_of_those_before(page: Window) -> None:
    page.view("cluster")
    page.run("""
        window.fetched ??= window.fetch;
        window.server = name => {
          const data = [1, 2, 3].map(number => (
            { number, time: name.length, level: 'info', kind: 'k', text: name + number }));
          window.fetch = (path, options) => !path.startsWith('/v1/events') ? window.fetched(path, options)
            : Promise.resolve(Response.json({ data: data.filter(one => one.number > Number(path.split('=')[1])) }));
        };
        server('first')""")
    page.until(lambda: page.texts("#events .event p") == ["first3", "first2", "first1"], "those of one")
    page.run("server('another')")
    page.until(lambda: page.texts("#events .event p") == ["another3", "another2", "another1"], "those of the other")
    page.run("window.fetch = window.fetched")


def test_an_api_key_that_no_header_can_have_is_not_sent(page: Window) -> None:
    page.run(
        "window.fetched ??= window.fetch; window.fetch = (path, options) =>"
        "  options?.headers?.Authorization === 'Bearer good' ? window.fetched(path, options)"
        "  : Promise.resolve(Response.json({error: {message: 'A key, please.'}}, {status: 401}))"
    )
    page.until(lambda: page.shown("#login") and page.text("#login-reason") == "A key, please.", "it is asked for")
    key = page.find("#key")
    key.send_keys("“good”\n")
    assert page.shown("#login") and not page.run("return document.getElementById('key').validity.valid")
    key.clear()
    key.send_keys(" good\n")
    page.until(lambda: page.text("#state") == "healthy" and not page.shown("#login"), "this one will do")
    page.run("window.fetch = window.fetched")
