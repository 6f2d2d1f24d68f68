"""The page at /ui in a real browser, over a real server: what a person sees and does there."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

from served import served
from system_packages import missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.demo,
    pytest.mark.skipif(bool(missing("chromium", "chromedriver")), reason=missing("chromium", "chromedriver")),
]
KEY = {"Authorization": "Bearer secret"}
WAIT_S = 240


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    with served("demo", "-pp", "2", "--api-key-file", keys) as address:
        yield address


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[WebDriver]:
    """A window that has given the API key."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--window-size=1200,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        driver.get(f"{url}/ui")
        key = WebDriverWait(driver, WAIT_S).until(lambda d: shown(d, "#key"))
        key.send_keys("secret", Keys.ENTER)
        until(driver, lambda: driver.find_element(By.ID, "state").text == "healthy")
        yield driver
    finally:
        driver.quit()


def shown(driver: WebDriver, selector: str):
    found = driver.find_elements(By.CSS_SELECTOR, selector)
    return found[0] if found and found[0].is_displayed() else None


def until(driver: WebDriver, condition) -> None:
    WebDriverWait(driver, WAIT_S).until(lambda _: condition())


def texts(driver: WebDriver, selector: str) -> list[str]:
    """In one go: the page draws itself anew every second."""
    found = driver.execute_script("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", selector)
    assert isinstance(found, list)
    return found


def picture(driver: WebDriver, name: str) -> None:
    """Keep a screenshot for the docs, if somebody asked for them."""
    if directory := os.environ.get("TANDEM_SCREENSHOTS"):
        assert driver.save_screenshot(str(Path(directory) / f"{name}.png"))


def open_view(driver: WebDriver, name: str) -> None:
    driver.execute_script("document.getElementById(arguments[0]).click()", f"tab-{name}")
    until(driver, lambda: shown(driver, f"#{name}") is not None)


def test_a_chat_by_keyboard_is_streamed_and_shown_as_markdown(browser: WebDriver) -> None:
    browser.find_element(By.ID, "tab-cluster").click()
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    until(browser, lambda: shown(browser, "#chat") is not None)
    browser.find_element(By.TAG_NAME, "summary").click()
    temperature = browser.find_element(By.ID, "temperature")
    temperature.clear()
    temperature.send_keys("0")
    browser.find_element(By.TAG_NAME, "summary").click()
    browser.find_element(By.ID, "question").send_keys("What is the capital of France?", Keys.ENTER)
    until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, ".assistant[data-done]"))
    [answer] = browser.find_elements(By.CSS_SELECTOR, ".assistant")
    assert "Paris" in answer.text and re.search(r"\d+ tokens in", answer.text)
    assert answer.find_elements(By.TAG_NAME, "p")
    picture(browser, "chat")


def test_markup_of_the_model_does_nothing(browser: WebDriver) -> None:
    script = "return DOMPurify.sanitize(marked.parse(arguments[0]))"
    made = browser.execute_script(script, "**a** <img src=x onerror=alert(1)> <script>1</script>")
    assert "<strong>a</strong>" in made and "onerror" not in made and "<script" not in made


def test_the_cluster_is_shown_with_ranks_and_speed(browser: WebDriver) -> None:
    open_view(browser, "cluster")
    until(browser, lambda: len(texts(browser, ".rank b")) == 2)
    assert "stage 1/2, layers 0–14" in texts(browser, ".rank")[0] and "GiB" in texts(browser, ".rank")[1]
    assert browser.find_element(By.ID, "model").text == "SmolLM2-135M-Instruct"
    until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#spark polyline"))


def test_a_request_in_flight_can_be_cancelled(browser: WebDriver, url: str) -> None:
    open_view(browser, "cluster")
    until(browser, lambda: texts(browser, "#requests tbody td") == ["none"])
    ended: list[httpx.Response] = []
    body = {"model": "default", "prompt": "Count:", "max_tokens": 1500, "ignore_eos": True}
    thread = threading.Thread(target=lambda: ended.append(
        httpx.post(f"{url}/v1/completions", json=body, headers=KEY, timeout=240)))
    thread.start()
    until(browser, lambda: texts(browser, "#requests button") == ["Cancel"])
    until(browser, lambda: re.fullmatch(r"[\d.]*[1-9][\d.]*", texts(browser, "#figures dd")[0]))
    picture(browser, "cluster")
    browser.execute_script("document.querySelector('#requests button').click()")
    thread.join(240)
    assert ended, texts(browser, "#requests td")
    assert ended[0].status_code == 409 and ended[0].json()["error"]["code"] == "request_cancelled"
    until(browser, lambda: texts(browser, "#requests tbody td") == ["none"])


def test_the_planner_compares_layouts_and_says_what_is_wrong(browser: WebDriver) -> None:
    open_view(browser, "plan")
    hosts = browser.find_element(By.ID, "hosts")
    hosts.send_keys("a=64GB:m4-max\nb=128GB:m3-ultra")
    browser.find_element(By.CSS_SELECTOR, "#planner button").click()
    until(browser, lambda: texts(browser, "#answer tbody tr"))
    assert len(texts(browser, "#answer tr.chosen")) == 1
    picture(browser, "plan")
    hosts.clear()
    hosts.send_keys("a=lots")
    browser.find_element(By.CSS_SELECTOR, "#planner button").click()
    until(browser, lambda: "'lots' is not a memory size" in "".join(texts(browser, "#answer .error")))


@pytest.mark.parametrize("view", ["cluster", "chat", "plan"])
def test_a_small_dark_screen_needs_no_sideways_scrolling(browser: WebDriver, view: str) -> None:
    browser.set_window_size(400, 850)
    try:
        if browser.execute_script("return document.documentElement.dataset.theme") != "dark":
            browser.find_element(By.ID, "theme").click()
        open_view(browser, view)
        assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"
        wide, window = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide <= window
        picture(browser, f"{view}-small-dark")
    finally:
        browser.set_window_size(1200, 900)


def test_the_browser_has_nothing_to_complain_about(browser: WebDriver) -> None:
    """Last, so that it sees what the others caused; the refused calls are the missing key and the wrong host, and the
    handler is the hostile one that is taken out of Markdown (newer browsers tell that they did not run it)."""
    complaints = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    expected = ("401", "/v1/plan", "/ui/purify.js 4 Executing inline event handler violates")
    assert [one for one in complaints if not any(text in one for text in expected)] == []


def test_the_page_is_open_but_shows_nothing_without_a_key(url: str) -> None:
    page = httpx.get(f"{url}/ui", timeout=240)
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    assert "SmolLM2" not in page.text and httpx.get(f"{url}/v1/status", timeout=240).status_code == 401
    missing = httpx.get(f"{url}/ui/..%2fapp.py", timeout=240)
    assert missing.status_code in (401, 404) and httpx.get(f"{url}/ui/none.js", timeout=240).status_code in (401, 404)
