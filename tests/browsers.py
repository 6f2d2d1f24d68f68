"""Browsers for tests of the page: Chromium through its driver; Firefox without one: it speaks WebDriver BiDi itself."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

WAIT_S = 240


class Window:
    """A Chromium window on the page."""

    def __init__(self, driver: WebDriver) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """The page anew, once it has shown what it keeps."""
        self.driver.get("about:blank")
        self.driver.get(f"{url}/ui")
        self.until(lambda: self.run("return document.body.dataset.ready === 'yes'"), "the page is ready")

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def shown(self, selector: str) -> bool:
        """There is such an element, and it can be seen."""
        return bool(
            self.run(
                "const e = document.querySelector(arguments[0]);"
                "return e !== null && e.checkVisibility({visibilityProperty: true})",
                selector,
            )
        )

    def texts(self, selector: str) -> list[str]:
        """In one go: the page draws itself anew every second."""
        found = self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)
        assert isinstance(found, list)
        return found

    def text(self, selector: str) -> str:
        return " ".join(self.texts(selector))

    def click(self, selector: str) -> None:
        """Whatever lies over it: where things lie is no test's subject, and they are drawn anew."""
        self.run("document.querySelector(arguments[0]).click()", selector)

    def press(self, selector: str, *keys: str) -> None:
        """Press keys where the focus is put; it stays there when what has it is drawn anew."""
        self.run("document.querySelector(arguments[0]).focus()", selector)
        ActionChains(self.driver).send_keys(*keys).perform()

    def ask(self, text: str) -> None:
        """Write it into the box, and send it."""
        self.run(
            "const q = document.getElementById('question'); q.value = arguments[0];"
            "q.dispatchEvent(new Event('input')); document.getElementById('send').click()",
            text,
        )

    def until(self, condition: Callable[[], Any], what: str = "") -> None:
        WebDriverWait(self.driver, WAIT_S, poll_frequency=0.1).until(lambda _: condition(), what)

    def view(self, name: str) -> None:
        self.click(f"#tab-{name}")
        self.until(lambda: self.shown(f"#{name}"), name)

    def picture(self, name: str) -> None:
        """Keep a screenshot for the docs, if somebody asked for them."""
        if directory := os.environ.get("TANDEM_SCREENSHOTS"):
            assert self.driver.save_screenshot(str(Path(directory) / f"{name}.png"))

    def pictures(self, name: str, view: str, height: int = 960) -> None:
        """Keep screenshots of a view in both themes and on a phone, where nothing may be wider than the screen."""
        self.driver.set_window_size(1280, height)
        self.run("document.getElementById(arguments[0]).scrollTop = 0; document.activeElement.blur()", view)
        for theme in ("light", "dark"):
            self.run("document.documentElement.dataset.theme = arguments[0]", theme)
            self.picture(f"{name}-{theme}")
        with self.phone():
            assert self.run("return document.getElementById(arguments[0]).scrollWidth - innerWidth", view) <= 1
            self.picture(name.replace("page", "page-phone", 1) + "-dark")

    def complaints(self) -> list[str]:
        """What the browser called severe since this was asked last, but for requests that were refused."""
        log = self.driver.execute("getLog", {"type": "browser"})["value"]
        found = [entry["message"] for entry in log if entry["level"] == "SEVERE"]
        return [one for one in found if "Failed to load resource" not in one]

    @contextmanager
    def phone(self, width: int = 390) -> Iterator[None]:
        """A small screen for a while."""
        size = {"width": width, "height": 844, "deviceScaleFactor": 2, "mobile": True}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@contextmanager
def chromium(address: str | None = None) -> Iterator[Window]:
    """A window, which is closed at the end; its browser runs where the driver at `address` does."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,960"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver: WebDriver
    if address is None:
        driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    else:
        driver = webdriver.Remote(address, options=options)
    try:
        yield Window(driver)
    finally:
        driver.quit()


class Firefox:
    """A page in Firefox, by WebDriver BiDi over its own port."""

    def __init__(self, address: str) -> None:
        import websocket

        self._socket = websocket.create_connection(f"{address}/session", timeout=WAIT_S, suppress_origin=True)
        self._numbers = itertools.count(1)
        self.call("session.new", capabilities={})
        self._context = self.call("browsingContext.getTree")["contexts"][0]["context"]

    def close(self) -> None:
        """Leave it."""
        self._socket.close()

    def call(self, method: str, **params: Any) -> Any:
        """What a command answers."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == number:
                assert answer["type"] == "success", answer
                return answer["result"]

    def open(self, url: str) -> None:
        """The page anew."""
        self.call("browsingContext.navigate", context=self._context, url="about:blank", wait="complete")
        self.call("browsingContext.navigate", context=self._context, url=f"{url}/ui", wait="complete")
        self.until("document.body.dataset.ready === 'yes'")

    def run(self, expression: str) -> Any:
        """What an expression, or the promise that it is, gives as JSON."""
        promise = f"Promise.resolve({expression}).then(v => JSON.stringify(v ?? null))"
        result = self.call("script.evaluate", expression=promise, target={"context": self._context}, awaitPromise=True)
        assert result["type"] == "success", result
        return json.loads(result["result"]["value"])

    def until(self, expression: str) -> None:
        """Wait, in the page, until an expression is true."""
        self.run(f"new Promise(done => {{ const look = () => ({expression}) ? done(true) : setTimeout(look, 50);look(); }})")

    def type(self, *keys: str) -> None:
        """Press keys, one after the other."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("input.performActions", context=self._context, actions=[{"type": "key", "id": "keys", "actions": actions}])


@contextmanager
def firefox() -> Iterator[Firefox]:
    """A page, whose Firefox is ended at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        program = shutil.which("firefox-esr") or shutil.which("firefox") or "firefox"
        command = [program, "--headless", "--no-remote", "--profile", profile, "--remote-debugging-port", "0"]
        log = Path(profile) / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stderr=file, stdout=file, start_new_session=True, env={**os.environ, "HOME": profile}
            )
        page, deadline = None, time.monotonic() + WAIT_S
        try:
            while (found := re.search(r"(ws://\S+)\n", log.read_text())) is None:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield (page := Firefox(found[1]))
        finally:
            if page is not None:
                page.close()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its content processes too
            process.wait()
