"""The page at /ui in real browsers, over real servers: what a person sees and does there.

tests/server/page has the rest, over a scripted model.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from browsers import Firefox, Window, chromium, firefox
from fake_hub import FakeHub
from served import Server, serving
from system_packages import missing
from tandem.testing import tiny_model

NO_CHROMIUM = pytest.mark.skipif(bool(missing("chromium", "chromedriver")), reason=missing("chromium", "chromedriver"))
NO_FIREFOX = pytest.mark.skipif(bool(missing("firefox")), reason=missing("firefox"))
pytestmark = [pytest.mark.slow, pytest.mark.demo]


REBOUND = """
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1], headers={"Host": "elsewhere.example"}), timeout=60)
"""


class Locked(Server):
    """A server that wants a key."""

    def __init__(self, process, url: str) -> None:
        super().__init__(process, url, "secret")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    with serving("demo", "-pp", "2", "--api-key-file", keys, kind=Locked) as server:
        yield server


@pytest.fixture(scope="module")
def page(server: Locked) -> Iterator[Window]:
    """A window that has given the API key."""
    with chromium() as window:
        window.open(server.url)
        window.until(lambda: window.shown("#key"), "the page asks for the key")
        window.find("#key").send_keys("secret", Keys.ENTER)
        window.until(lambda: window.text("#state") == "healthy", "healthy")
        yield window
        assert window.complaints() == []


@NO_CHROMIUM
def test_a_chat_by_keyboard_is_streamed_and_goes_on_over_the_death_of_a_rank(
    page: Window, server: Locked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "secret")
    page.view("cluster")
    page.driver.switch_to.active_element.send_keys(Keys.ALT + "1")
    page.until(lambda: page.shown("#chat"), "the chat")
    page.click("#open-settings")
    page.find("#temperature").send_keys("0")
    page.find("#max_tokens").send_keys("60")
    page.click("#settings [value='done']")
    page.driver.switch_to.active_element.send_keys("/")
    page.find("#question").send_keys("What is the capital of France?", Keys.ENTER)
    page.until(lambda: page.shown(".assistant[data-done]"), "the answer")
    assert "Paris" in page.text(".assistant .markdown") and "tokens" in page.text(".assistant footer small")
    page.find("#question").send_keys("Tell me more about it.", Keys.ENTER)
    page.until(lambda: page.text(".message:last-child .markdown"), "the second answer begins")
    os.kill(server.get("/v1/status")["engine"]["ranks"][1]["pid"], signal.SIGKILL)
    page.until(lambda: len(page.texts(".assistant[data-done]")) == 2, "the second answer ends")
    assert page.texts(".assistant .error:not([hidden])") == []
    page.until(lambda: not page.shown("#thinking"), "no choice for a model that does not think")
    page.view("cluster")
    page.until(
        lambda: (
            page.text("#state") == "healthy" and "rank lost" in page.text("#events") and "ranks replaced" in page.text("#events")
        ),
        "what happened is told",
    )
    assert "SIGKILL" in page.text("#events .error")
    for words in (
        server.command("status", "--port", server.port, "--interval", "0").stdout,
        server.command("top", "--port", server.port, "--once", "--interval", "0.2").stdout,
    ):
        assert "lately" in words and "SIGKILL" in words, words


@NO_CHROMIUM
def test_the_cluster_is_shown_with_ranks_and_speed(page: Window) -> None:
    page.view("cluster")
    page.until(lambda: len(page.texts(".rank b")) == 2, "two ranks")
    assert "stage 1/2, layers 0–14" in page.texts(".rank")[0] and "GiB" in page.texts(".rank")[1]
    assert page.text("#model") == "SmolLM2-135M-Instruct"
    page.until(lambda: page.run("return document.querySelectorAll('#spark polyline').length"), "the last minutes")


@NO_CHROMIUM
def test_the_planner_compares_layouts_and_gives_the_command(page: Window) -> None:
    page.view("plan")
    page.until(
        lambda: len(page.texts(".machine")) == 1 and len(page.texts("#link option")) > 3, "this cluster's machine, and lists"
    )
    assert page.text("#machines-told").startswith("The machines of this cluster")
    page.click("#add-machine")
    page.run("[...document.querySelectorAll('.machine input')].forEach((one, i) => { one.value = 'ab'[i] })")
    page.find("#streams").clear()
    page.find("#streams").send_keys("8")
    page.click("#planner .primary")
    page.until(lambda: page.texts("#answer tbody tr"), "the layouts")
    page.picture("page-plan")
    assert len(page.texts("#answer tr.chosen")) == 1 and "weights" in page.text(".plan-memory")
    assert "tandem serve demo" in page.text("#answer pre") and "30" in page.text("#answer tr.chosen")
    page.click(".machine [aria-label='Remove']")
    page.click(".machine [aria-label='Remove']")
    page.click("#planner .primary")
    page.until(lambda: "Add a machine first." in page.text("#answer .error"), "there must be one")
    page.click("#add-machine")
    page.run("document.querySelector('.machine input').value = 'a=b'")
    page.click("#planner .primary")
    page.until(lambda: page.text("#answer .error") not in ("", "Add a machine first."), "the server's own words")


@NO_CHROMIUM
def test_models_are_loaded_and_unloaded(tmp_path: Path) -> None:
    one, two = tiny_model(tmp_path / "alpha"), tiny_model(tmp_path / "two", seed=1)
    with serving(one, "--extra-models", f"beta={two}") as server, chromium() as page:
        page.open(server.url)
        page.view("models")
        badge = "[data-model='beta'] .badge"
        page.until(lambda: page.text(badge) == "unloaded", "beta is not loaded")
        assert page.texts(".model h3") == ["alpha", "beta"] and "for models" in page.text("#budget")
        assert page.texts("[data-model='beta'] .memory") and "MiB" in page.text("[data-model='beta'] .facts")
        page.picture("page-models")
        page.click("[aria-label='Load beta']")
        page.until(lambda: page.shown("[aria-label='Unload beta']:not(:disabled)"), "it can be unloaded")
        assert page.text(badge) == "loaded"
        page.click("[aria-label='Unload beta']")
        page.until(lambda: page.text(badge) == "unloaded", "unloaded")
        page.view("cluster")
        page.until(lambda: "model unloaded" in page.text("#events") and "model loading" in page.text("#events"), "told")
        assert page.complaints() == []


@NO_FIREFOX
def test_firefox_chats_and_keeps_the_conversation(server: Locked) -> None:
    def chat(page: Firefox) -> None:
        page.open(server.url)
        page.until("document.getElementById('login').open")
        page.type(*"secret", "\ue007")
        page.until("document.getElementById('state').textContent === 'healthy'")
        page.run("(document.getElementById('max_tokens').value = '12', document.getElementById('question').focus())")
        page.type(*"What is the capital of France?", "\ue007")
        page.until("document.querySelector('.assistant[data-done]')")
        assert "Paris" in page.run("document.querySelector('.assistant .markdown').textContent")
        page.open(server.url)
        assert page.run("document.querySelector('.user .text').textContent") == "What is the capital of France?"
        page.run("document.getElementById('tab-cluster').click()")
        page.until("document.querySelectorAll('.rank b').length === 2")

    with firefox() as page:
        chat(page)


@NO_CHROMIUM
def test_two_machines_are_paired_fetch_a_model_and_serve_it_from_the_page_of_an_agent(make_machines, tmp_path: Path) -> None:
    """The page of `tandem agent --page` in a browser on its machine; the other machine is found by its announcement."""
    machines = make_machines(2)
    hub = FakeHub(tiny_model(tmp_path / "hub", shards=2), machines.address)
    hub.stalled = "-00001-of-00002.safetensors"  # the client tells of whole files alone where they are small
    for name in machines.names:
        machines.set_variables(name, {"HF_ENDPOINT": hub.url, "TANDEM_CACHE": str(machines[name].home / "cache")})

    def started(name: str, *command: str, until: str) -> str:
        """What a command on a machine prints, up to a line that matches."""
        text, process = "", machines.start(name, command, stdout=subprocess.PIPE)
        while re.search(until, text) is None:
            assert process.stdout is not None and (line := process.stdout.readline()), text
            text += line
        return text

    driver = ("chromedriver", "--port=9515", "--allowed-ips=", "--allowed-origins=*")
    here = started("h0", "tandem", "agent", "--name", "here", "--page", until="page: .*\n")
    near = started("h1", "tandem", "agent", "--name", "near", until="code .*\n")
    started("h0", *driver, until="started successfully")
    page = re.search(r"page: (http://\S+/ui)(#key=\S+)", here)
    with chromium(f"http://{machines['h0'].address}:9515") as window:
        window.driver.get(page[1] + "#start")
        window.until(lambda: window.text("#state") == "no model", "a page without a server says so")
        assert "tandem up" in window.find("#state").get_attribute("title") and not window.shown("#tab-start")
        assert window.run("return fetch('/v1/agent').then(answer => answer.status)") == 403, "not without the key"
        with pytest.raises(AssertionError, match="403"):  # as a page of another site would ask, whose name leads here
            machines.run("h0", ["python", "-c", REBOUND, page[1]])
        window.driver.get("about:blank")
        window.driver.get("".join(page.groups()))
        _find_and_pair(window, machines["h1"].address, re.search(r"code (\d{3} \d{3}):", near)[1])
        window.press("#start-search", Keys.ENTER)
        _fetch(window, hub, machines["h0"].home)
        window.find("#start-context").clear()
        window.press("#start-context", "64", Keys.ENTER)
        both = "[aria-label='Start PP 2 (here | near)']"
        window.until(lambda: window.shown(both) and window.shown("[aria-label='Start single (here)']"), "layouts side by side")
        window.pictures("page-start", "start", 1500)
        window.press(both, Keys.ENTER)
        window.until(lambda: "runs, or is being loaded" in window.text("#start-state"), "how far it is stands elsewhere")
        window.until(lambda: window.text("#state") == "healthy", "it is loaded")
        window.view("cluster")
        window.until(lambda: len(window.texts(".rank b")) == 2, "two ranks")
        assert ["h0" in rank or "h1" in rank for rank in window.texts(".rank")] == [True, True]
        assert list(machines["h1"].home.rglob("snapshots/*/*.safetensors")), "the other machine has fetched its part"
        window.view("chat")
        window.press("#question", "Who are you?", Keys.ENTER)
        window.until(lambda: window.shown(".assistant[data-done] small"), "it answers through the page")
        window.view("start")
        window.until(lambda: window.shown("#start-state button"), "it can be stopped")
        window.press("#start-state button", Keys.ENTER)
        window.until(lambda: window.text("#state") == "no model", "the page outlives the server")
        assert window.complaints() == []


def _find_and_pair(window: Window, address: str, code: str) -> None:
    """Find the machine `near`, pair with it by its code after codes that are none, and check both."""
    other = "#start-machines [aria-label='Code that near shows']"
    for _ in range(10):  # on a busy machine an agent may answer after the seconds that are listened for
        window.until(lambda: window.text("#start-find") == "Find machines" and window.texts("#start-machines li"), "found")
        if window.shown(other):
            break
        window.press("#start-find", Keys.SPACE)
    assert window.text("#start-machines label") == "here"
    window.run("document.querySelector('#start-pair').parentElement.open = true")
    window.find("#start-address").send_keys(address)
    window.press("#start-code", "12", Keys.ENTER)
    window.until(lambda: "the code has 6 digits" in window.text("#start-now"), "a code that is none")
    window.run("document.querySelector('#start-pair').parentElement.open = false")
    window.press(other, "000000" if code != "000 000" else "000001", Keys.ENTER)
    window.until(lambda: "the code is wrong" in window.text("#start-now"), "a wrong code")
    window.find(other).clear()
    window.press(other, code, Keys.ENTER)
    window.until(lambda: "near" in window.texts("#start-machines label"), "paired")
    assert window.run("return [...document.querySelectorAll('#start-machines input')].every(one => one.checked)")
    window.press("#start-check", Keys.ENTER)
    window.until(lambda: window.texts("#start-findings .ok"), "both machines are checked")
    assert "sums that 2 machines make together" in window.text("#start-findings")


def _fetch(window: Window, hub: FakeHub, home: Path) -> None:
    """Search models for two machines; fetch, cancel and fetch again, into the head's `home`; choose what has come."""
    hub.goes_on.clear()
    window.until(lambda: "qwen3:8b" in window.texts("#catalogue-list b"), "the catalogue")
    assert "told for the 2 machines chosen" in window.text("#catalogue-told")
    assert window.text("#catalogue-list [data-model-id='mlx-community/Qwen3-8B-8bit'] .badge") == "fits"
    assert "does not fit: needs about" in window.text("#catalogue-list")
    window.press("#catalogue-words", "org/none", Keys.ENTER)
    window.until(lambda: window.shown("[aria-label='Fetch org/none']"), "a hub id that no search finds can be tried")
    window.press("[aria-label='Fetch org/none']", Keys.ENTER)
    window.until(lambda: "no such model on the hub" in window.text("[data-fetch='org/none'] .error"), "it is not there")
    window.press("[aria-label='Dismiss org/none']", Keys.ENTER)
    window.press("[aria-label='Fetch org/tiny']", Keys.ENTER)
    window.until(lambda: window.run("return document.querySelector('[data-fetch] progress')?.value"), "how much has come")
    assert "download" in window.text("[data-fetch='org/tiny'] .progress")
    window.until(lambda: list(home.rglob("*.incomplete")), "a part has come")
    window.find("#catalogue-words").clear()
    window.press("#catalogue-words", "qwen3", Keys.ENTER)
    window.until(lambda: "org/none" not in window.texts("#catalogue-list b"), "one can search while it goes on")
    window.pictures("page-models-fetch", "models")
    window.press("[aria-label='Cancel org/tiny']", Keys.ENTER)
    window.until(lambda: window.shown("[aria-label='Fetch org/tiny']") and not window.texts("#fetches li"), "cancelled")
    window.until(lambda: not list(home.rglob("*.incomplete")), "no partial file is left")
    hub.goes_on.set()
    window.press("[aria-label='Fetch org/tiny']", Keys.ENTER)
    window.until(lambda: window.shown("[aria-label='Use org/tiny']"), "it is on this disk")
    assert window.text("[data-fetch='org/tiny'] .badge") == "fetched"
    window.press("[aria-label='Use org/tiny']", Keys.ENTER)
    window.until(lambda: window.find("#start-name").get_property("value") == "org/tiny", "it is the one to start")
