"""The page's conversations in a real browser, over a server whose model says what a test wants."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browsers import Window, chromium
from system_packages import missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing("chromium", "chromedriver")), reason=missing("chromium", "chromedriver")),
]
LOREM = "Some words that fill a line, and then another one, and one more.\n\n"
THOUGHT = "<think>\nA function with two arguments will do.\n</think>\n\n"
CODE = """Here it is:

```python
def add(a, b):
    # adds
    return a + b
```

It adds *two* numbers.

"""
QUOTE = "> quoted\n\n"


@pytest.fixture(scope="module")
def window(scripted: Any) -> Iterator[Window]:
    with chromium() as window:
        yield window


@pytest.fixture
def page(window: Window, scripted: Any) -> Iterator[Window]:
    """The page as somebody sees it who was never there."""
    scripted.engine.reply = scripted.engine.tokenizer.encode("Hello.")
    scripted.engine.hold, scripted.engine.tokens_per_output = False, 1
    scripted.engine.submitted.clear()
    scripted.engine.aborted.clear()
    window.driver.get(f"{scripted.url}/ui/icon.svg")
    window.run(
        "localStorage.clear(); sessionStorage.clear(); const gone = indexedDB.deleteDatabase('tandem');"
        "return new Promise((done, failed) => { gone.onsuccess = () => done(); gone.onerror = failed })"
    )
    window.open(scripted.url)
    window.until(lambda: window.text("#state") == "healthy", "healthy")
    yield window
    scripted.engine.hold = False
    assert window.complaints() == []


def says(scripted: Any, text: str, each: int = 1) -> None:
    scripted.engine.reply = scripted.engine.tokenizer.encode(text)
    scripted.engine.tokens_per_output = each


def answered(page: Window, count: int = 1) -> None:
    page.until(
        lambda: page.run("return document.querySelectorAll('.assistant[data-done]').length") == count and page.shown("#send"),
        f"{count} answers",
    )


def pdf(text: str, *, locked: bool = False) -> bytes:
    """A PDF of one page with a line of text, or with a password that nobody has."""
    drawn = f"BT /F1 12 Tf 20 20 Td ({text}) Tj ET"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 99 99] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    body, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(body))
        body += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    keys = f"<{'00' * 32}>"
    lock = f"/ID [<00> <00>] /Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O {keys} /U {keys} >>" if locked else ""
    end = f"xref\n0 6\n0000000000 65535 f \n{table}trailer\n<< /Size 6 /Root 1 0 R {lock} >>\nstartxref\n{len(body)}\n%%EOF\n"
    return (body + end).encode()


def prompt(scripted: Any) -> str:
    """What the model was shown last."""
    return str(scripted.engine.tokenizer.decode(list(scripted.engine.submitted.values())[-1].prompt, skip_special_tokens=False))


def distance(page: Window) -> float:
    """Pixels from what is seen to the end of the conversation."""
    return float(page.run("const s = document.getElementById('scroller');return s.scrollHeight - s.scrollTop - s.clientHeight"))


def test_it_follows_a_growing_answer_until_the_reader_leaves_the_end(page: Window, scripted: Any) -> None:
    says(scripted, LOREM * 12, each=40)
    for number in range(1, 5):
        page.ask(f"Question {number}?")
        answered(page, number)
        assert distance(page) < 60, f"after question {number}"
    scripted.engine.hold = True
    page.ask("And now?")
    page.until(lambda: page.shown(".message:last-child .pending"), "it waits")
    page.run("document.getElementById('scroller').scrollTop = 0")
    page.until(lambda: page.shown("#latest"), "the way to the end")
    scripted.engine.hold = False
    answered(page, 5)
    assert page.run("return document.getElementById('scroller').scrollTop") == 0, "who reads is left in peace"
    page.click("#latest")
    assert distance(page) < 60 and not page.shown("#latest")


def test_reasoning_is_folded_and_no_part_of_the_answer(page: Window, scripted: Any) -> None:
    says(scripted, "<think>\nTwo and two, <b>hm</b>.\n</think>\n\nFour.")
    page.ask("2 + 2?")
    answered(page)
    assert page.text(".assistant .markdown").strip() == "Four."
    assert page.shown(".thinking summary") and not page.shown(".thinking .text")
    assert page.text(".thinking summary").startswith("Thought for ")
    page.click(".thinking summary")
    page.until(lambda: "Two and two, <b>hm</b>." in page.text(".thinking .text"), "the reasoning")
    page.ask("And?")
    answered(page, 2)
    assert "hm" not in prompt(scripted), "what it thought is not sent back"
    says(scripted, "<think>\nOn and on")
    page.ask("More?")
    answered(page, 3)
    assert page.text(".message:last-child .markdown") == ""
    page.ask("So?")
    answered(page, 4)
    assert all(text in prompt(scripted) for text in ("More?", "So?")), "an answer that is but a thought is one"


def test_an_answer_that_was_cut_says_so_and_goes_on(page: Window, scripted: Any) -> None:
    says(scripted, "One two three four five six seven eight.")
    page.click("#open-settings")
    page.find("#max_tokens").send_keys("6")
    page.click("#settings [value='done']")
    page.ask("Count.")
    answered(page)
    begun = page.text(".assistant .markdown").strip()
    assert "Cut off" in page.text(".end") and "limit is 6 tokens" in page.text(".end")
    assert page.text(".assistant footer small").startswith("6 tokens")
    page.run("[...document.querySelectorAll('.tools button')].find(b => b.textContent === 'Continue').click()")
    page.until(lambda: page.text(".assistant footer small").startswith("12 tokens"), "it has gone on")
    page.until(lambda: page.shown("#send"), "it is done")
    assert prompt(scripted).endswith(begun), "it goes on behind what there was"
    text = page.text(".assistant .markdown").strip()
    assert text.startswith(begun) and len(text) > len(begun)
    page.click("#open-settings")
    page.find("#max_tokens").clear()
    page.click("#settings [value='done']")
    page.ask("Count again.")
    answered(page, 2)
    assert not page.shown(".message:last-child .end"), "an emptied field is no limit of 0"


def test_a_long_answer_is_drawn_once_a_frame(page: Window, scripted: Any) -> None:
    """Frames come when the test says so: whatever comes in between is drawn with one of them, or at the end."""
    says(scripted, "First block.\n\n" + "word " * 3000 + "\n\nLast block.", each=2)
    page.run(
        "window.frames = []; window.animate = window.requestAnimationFrame;"
        "window.requestAnimationFrame = f => window.frames.push(f)"
    )
    scripted.engine.hold = True
    page.ask("Tell me.")
    page.until(lambda: page.shown(".message:last-child .pending"), "it waits")
    scripted.engine.hold = False
    page.until(lambda: page.run("return window.frames.length") == 1, "one is asked for")
    page.run("window.frames[0]()")
    page.run("const b = document.querySelector('.markdown .block'); if (b) b.dataset.seen = 'yes'")
    answered(page)
    assert page.run("return window.frames.length") <= 2, "one at a time"
    assert page.texts(".markdown .block")[-1].strip() == "Last block." and len(page.texts(".markdown .block")) == 3
    page.run("window.requestAnimationFrame = window.animate")


def test_finished_blocks_are_not_made_again(page: Window) -> None:
    kept = page.run("""
        return import('/ui/markdown.js').then(({ Markdown }) => {
          const place = document.createElement('div');
          const one = new Markdown(place);
          one.draw('# Title\\n\\nFirst.\\n\\nSec', false);
          const [title, first] = place.children;
          one.draw('# Title\\n\\nFirst.\\n\\nSecond, longer.\\n\\n- a\\n- b', false);
          const same = title === place.children[0] && first === place.children[1];
          one.draw('short', true);
          return [same, place.textContent.trim(), place.children.length];
        })""")
    assert kept == [True, "short", 1]


def test_what_a_parser_cannot_follow_is_shown_as_it_stands(page: Window) -> None:
    """As when a model repeats itself; and what a link leads to may come last."""
    kept = page.run("""
        return import('/ui/markdown.js').then(({ Markdown }) => {
          const place = document.createElement('div');
          const one = new Markdown(place);
          const texts = [900, 3000, 20000].flatMap(n => ['>'.repeat(n) + 'x', '*'.repeat(n) + 'x' + '*'.repeat(n)]);
          const shown = texts.map(text => { one.draw(text, true); return place.textContent.includes('x') });
          one.draw('word '.repeat(999) + '$x$ and \\\\(' + 'y'.repeat(5000) + '\\\\)', true);
          const formulas = [...place.querySelectorAll('.math')].map(made => made.title);
          one.draw('See [it][r].\\n\\nMore.', false);
          one.draw('See [it][r].\\n\\nMore.\\n\\n[r]: https://example.org', true);
          return [shown, formulas, place.querySelector('a')?.href];
        })""")
    assert kept == [[True] * 6, ["$x$"], "https://example.org/"]


def test_mathematics_is_drawn_and_what_cannot_be_read_stands(page: Window) -> None:
    texts = [
        r"So $x = \frac{a_1}{b_1} * c_1 * d$ holds.",
        r"$$\int_0^\infty e^{-x^2}\,dx$$",
        r"$a < b & c$",
        r"Then \( a^2+b^2=c^2 \) too.",
        "\\[ \\begin{aligned} E &= mc^2 \\\\\n- m &= 0 \\\\\n\\end{aligned} \\]",
        r"As \[ a_b * c_d * e \] says",
        "It is $$x + y_1 * z_1 *$$ here",
        r"$\href{javascript:window.hit=1}{x} \includegraphics{/v1/status}$",
    ]
    kept = page.run(
        """
        const [texts] = arguments;
        return import('/ui/markdown.js').then(async ({ Markdown }) => {
          const drawn = [];
          for (const text of texts) {
            const place = document.createElement('div');
            document.body.append(place);
            new Markdown(place).draw(text, true);
            await new Promise(done => window.katex ? done()
              : new MutationObserver(done).observe(place, { childList: true, subtree: true }));
            const found = name => place.querySelector(name);
            drawn.push([found('annotation')?.textContent.trim() ?? null, found('math')?.getAttribute('display') ?? null,
              place.querySelectorAll('em, li, strong, a, img').length]);
            if (!place.querySelector('math')) drawn.at(-1)[0] = place.innerText.trim();
            place.remove();
          }
          return drawn;
        })""",
        texts,
    )
    assert kept == [
        [r"x = \frac{a_1}{b_1} * c_1 * d", None, 0],
        [r"\int_0^\infty e^{-x^2}\,dx", "block", 0],
        ["$a < b & c$", None, 0],
        ["a^2+b^2=c^2", None, 0],
        [texts[4][2:-2].strip(), "block", 0],
        ["a_b * c_d * e", "block", 0],
        ["x + y_1 * z_1 *", "block", 0],
        [kept[-1][0], None, 0],
    ]


def test_what_is_no_mathematics_stays_markdown(page: Window) -> None:
    text = (
        "It costs $5 and *more* than $10-$20.\n\n`$a` *b* `c$`\n\n```\n$$\n*x*\n$$\n```\n\n- [x] done\n"
        "- [ ] to do\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\nand\n\n7. seven"
    )
    kept = page.run(
        """
        const [text] = arguments;
        return import('/ui/markdown.js').then(({ Markdown }) => {
          const place = document.createElement('div');
          new Markdown(place).draw(text, true);
          return [[...place.querySelectorAll('em')].map(e => e.textContent),
            place.querySelector('pre').textContent.trim(),
            [...place.querySelectorAll('input')].map(e => e.checked),
            place.querySelectorAll('td')[1].align, place.querySelector('ol').start];
        })""",
        text,
    )
    assert kept == [["more", "b"], "$$\n*x*\n$$", [True, False], "right", 7]


def test_several_chats_are_answered_at_once(page: Window, scripted: Any) -> None:
    page.ask("The first")
    answered(page)
    scripted.engine.hold = True
    for name in ("The second", "The third"):
        page.click("#new")
        page.ask(name)
        page.until(lambda: page.shown("#stop"), "it is asked")
    page.click("#talk-list .open[title='The first']")
    assert not page.shown("#busy") and len(page.texts("#talk-list .answering")) == 2
    page.click("[aria-label='Regenerate']")
    page.until(lambda: len(page.texts("#talk-list .answering")) == 3, "all three are answered")
    page.click("[aria-label='Edit']")
    page.click(".editing .primary")
    assert page.text("#busy") == "The answer is not finished: stop it, or wait for its end."
    page.find("body").send_keys("\ue00c")
    assert not page.shown(".editing") and page.shown("#stop"), "Escape ends an edit, wherever the focus is"
    for name in ("The fourth", "The fifth"):
        page.click("#new")
        page.ask(name)
    assert page.text("#busy").startswith("4 conversations are being answered")
    assert page.find("#question").get_property("value") == "The fifth" and page.shown("#empty")
    page.click("#talk-list .open[title='The third']")
    page.click("#stop")
    answered(page)
    assert page.text(".end") == "Stopped." and len(page.texts("#talk-list .answering")) == 3
    scripted.engine.hold = False
    page.until(lambda: len(page.texts("#talk-list .news")) == 3, "the others are answered while this one is read")
    page.click("#talk-list .open[title='The second']")
    assert page.text(".assistant .markdown").strip() == "Hello."


def test_conversations_and_settings_are_kept(page: Window, scripted: Any, tmp_path: Path) -> None:
    page.click("#open-settings")
    page.find("#system").send_keys("Be brief.")
    page.find("#temperature").send_keys("0.3")
    page.click("#settings [value='done']")
    page.ask("Who are you?")
    answered(page)
    assert "Be brief." in prompt(scripted)
    assert list(scripted.engine.submitted.values())[-1].params.temperature == pytest.approx(0.3)
    page.click("#new")
    assert page.shown("#empty")
    page.ask("A second one")
    answered(page)
    page.until(lambda: page.texts("#talk-list .open") == ["A second one", "Who are you?"], "both are listed")
    page.open(scripted.url)
    assert page.texts(".user .text") == ["A second one"] and page.find("#system").get_property("value") == "Be brief."
    page.click("#talk-list li:last-child .open")
    assert page.texts(".user .text") == ["Who are you?"] and page.text(".markdown").strip() == "Hello."
    page.ask("Go on.")
    answered(page, 2)
    assert all(text in prompt(scripted) for text in ("Who are you?", "Hello.", "Go on."))
    page.click("[aria-label='Delete A second one']")
    page.until(lambda: page.texts("#talk-list .open") == ["Who are you?"], "deleted")
    page.click("#undo")
    page.until(lambda: len(page.texts("#talk-list .open")) == 2 and page.texts(".user .text") == ["A second one"], "it is back")
    page.click("[aria-label='Rename A second one']")
    page.find("#talk-list input").send_keys("Another name\n")
    page.until(lambda: "Another name" in page.texts("#talk-list .open"), "renamed")
    page.run("const f = document.getElementById('find'); f.value = 'GO on'; f.dispatchEvent(new Event('input'))")
    assert page.texts("#talk-list .open") == ["Who are you?"], "found by what is said in it"
    page.run("const f = document.getElementById('find'); f.value = ''; f.dispatchEvent(new Event('input'))")
    page.run("URL.createObjectURL = blob => { blob.text().then(text => { window.exported = text }); return '#' }")
    page.click("#export")
    page.until(lambda: page.run("return window.exported"), "exported")
    exported = tmp_path / "talks.json"
    exported.write_text(page.run("return window.exported"))
    page.run("window.confirm = () => true; document.getElementById('forget').click()")
    page.until(lambda: not page.texts("#talk-list .open"), "all deleted")
    page.open(scripted.url)
    assert page.shown("#empty") and not page.texts("#talk-list .open")
    (tmp_path / "odd.json").write_text('{"talks": [{"id": "x", "messages": [{"role": "user", "content": {}}]}, null]}')
    page.find("#import-file").send_keys(str(tmp_path / "odd.json"))
    page.until(lambda: "odd.json holds no conversations" in page.text("#import-told"), "a file of nonsense is refused")
    odd = {"id": "x", "messages": [{"role": "assistant", "chosen": "length", "answers": [{"content": ""}]}]}
    for talk in (odd, odd | {"messages": [{"role": "assistant", "chosen": 0, "answers": [{"content": "", "rate": "fast"}]}]}):
        (tmp_path / "worse.json").write_text(json.dumps({"talks": [talk]}))
        page.run("document.getElementById('import-told').textContent = ''")
        page.find("#import-file").send_keys(str(tmp_path / "worse.json"))
        page.until(lambda: "worse.json holds no conversations" in page.text("#import-told"), "nor what could not be drawn")
    twice = json.loads(exported.read_text())
    exported.write_text(json.dumps({"talks": twice["talks"] * 2}))
    page.find("#import-file").send_keys(str(exported))
    page.until(lambda: page.texts("#talk-list .open") == ["Another name", "Who are you?"], "imported")
    assert page.text("#import-told") == "2 conversations added."


def test_a_conversation_that_is_deleted_while_it_is_answered_stays_away(page: Window, scripted: Any) -> None:
    scripted.engine.hold = True
    page.ask("Are you there?")
    page.until(lambda: page.texts("#talk-list .open") == ["Are you there?"], "it is listed")
    page.click("[aria-label='Delete Are you there?']")
    page.until(lambda: page.shown("#send") and page.shown("#empty"), "it is stopped")
    assert page.texts("#talk-list .open") == []
    page.open(scripted.url)
    assert page.texts("#talk-list .open") == [] and page.shown("#empty")


def test_two_tabs_have_the_same_conversations(page: Window, scripted: Any) -> None:
    page.ask("In the first")
    answered(page)
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    second = page.driver.current_window_handle
    try:
        page.open(scripted.url)
        scripted.engine.hold = True
        page.ask("In the second")
        page.driver.switch_to.window(first)
        page.until(lambda: "In the second" in page.texts(".user .text"), "the question is here")
        page.ask("At the same time")
        assert "Another tab answers this conversation" in page.text("#busy"), "of two answers one would be lost"
        page.driver.switch_to.window(second)
        scripted.engine.hold = False
        answered(page, 2)
        page.driver.switch_to.window(first)
        page.until(lambda: page.texts(".user .text") == ["In the first", "In the second"], "it is here too")
        page.click("[aria-label='Delete In the first']")
        page.driver.switch_to.window(second)
        page.until(lambda: page.shown("#empty") and not page.texts("#talk-list .open"), "and deleted in both")
    finally:
        page.driver.switch_to.window(second)
        page.driver.close()
        page.driver.switch_to.window(first)


def test_a_browser_that_keeps_nothing_or_nonsense_is_good_enough(page: Window, scripted: Any) -> None:
    page.run("""return new Promise((done, failed) => {
        const asked = indexedDB.open('tandem', 1);
        asked.onsuccess = () => {
          const writing = asked.result.transaction(['talks', 'settings'], 'readwrite');
          writing.objectStore('settings').put(5, 'settings');
          const odd = { role: 'assistant', chosen: 3, answers: [] };
          [{ id: 'a' }, { id: 'b', messages: [null] }, { id: 'c', messages: [odd] }]
            .forEach(one => writing.objectStore('talks').put(one));
          writing.objectStore('settings').put('b', 'open');
          writing.oncomplete = done;
          writing.onabort = failed;
        };
        asked.onerror = failed;
      })""")
    page.open(scripted.url)
    page.ask("Still there?")
    answered(page)
    assert page.texts("#talk-list .open") == ["Still there?"]
    page.run("IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError') }")
    page.ask("And now?")
    answered(page, 2)
    page.until(lambda: "no room" in page.text("#kept"), "it is told")
    denied = page.driver.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument",
        {
            "source": """
        for (const name of ['localStorage', 'sessionStorage', 'indexedDB']) {
          Object.defineProperty(window, name, { get() { throw new DOMException('denied', 'SecurityError') } });
        }"""
        },
    )
    try:
        page.open(scripted.url)
        page.ask("Do you forget?")
        answered(page)
        page.click("#theme")
        assert page.text(".assistant .markdown").strip() == "Hello." and "no room" in page.text("#kept")
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", denied)


def test_regenerate_edit_and_copy(page: Window, scripted: Any) -> None:
    page.run("Object.defineProperty(navigator.clipboard, 'writeText', {value: async text => { window.copied = text }})")
    page.ask("Say something.")
    answered(page)
    says(scripted, "Another **one**.")
    page.click(".assistant [aria-label='Regenerate']")
    page.until(lambda: page.text(".assistant .turns") == "2 of 2" and page.shown("#send"), "a second answer")
    assert page.text(".assistant .markdown").strip() == "Another one."
    assert "Hello." not in prompt(scripted), "the first answer is no part of the question"
    page.click(".assistant [aria-label='Copy']")
    page.until(lambda: page.run("return window.copied") == "Another **one**.", "its Markdown is copied")
    page.click("[aria-label='Earlier answer']")
    assert page.text(".assistant .markdown").strip() == "Hello." and page.text(".assistant .turns") == "1 of 2"
    page.click(".user [aria-label='Edit']")
    area = page.find(".user textarea")
    assert area.get_property("value") == "Say something."
    area.clear()
    area.send_keys("Say it again.\n")
    answered(page)
    assert page.texts(".user .text") == ["Say it again."] and len(page.texts(".assistant")) == 1
    assert "Say something." not in prompt(scripted)
    page.click(".user [aria-label='Earlier version']")
    assert page.texts(".user .text") == ["Say something."] and page.text(".assistant .turns") == "1 of 2", "the branch is kept"
    page.ask("And more?")
    answered(page, 2)
    assert all(text in prompt(scripted) for text in ("Say something.", "Hello.", "And more?"))
    page.open(scripted.url)
    page.click(".user [aria-label='Later version']")
    assert page.texts(".user .text") == ["Say it again."]
    page.click(".user [aria-label='Earlier version']")
    assert page.texts(".user .text") == ["Say something.", "And more?"]


def test_settings_of_a_chat_files_and_calls_reach_the_model(page: Window, scripted: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("The sky is green.\n```\n")
    for name, data in (
        ("paper", pdf("The sea is red.")),
        ("scan", pdf("")),
        ("locked", pdf("x", locked=True)),
        ("cut", b"%PDF-1.7"),
    ):
        (tmp_path / f"{name}.pdf").write_bytes(data)
    page.click("#open-settings")
    page.find("#talk-system").send_keys("Answer as a pirate.")
    page.find("#stops").send_keys("END\n\\n\\n")
    page.find("#preset-name").send_keys("short")
    page.click("#keep-preset")
    page.click("#defaults")
    assert page.find("#stops").get_property("value") == ""
    page.run("[...document.querySelectorAll('#presets button')].find(b => b.textContent === 'short').click()")
    page.find("#tools").send_keys("[{")
    assert "Write a list" in page.text("#tools-told")
    page.picture("page-settings")
    page.click("#settings [value='done']")
    assert page.shown("#tools-told"), "the dialog stays open with what is wrong"
    page.find("#tools").send_keys("\ue003\ue003")  # Backspace
    page.click("#settings [value='done']")
    assert not page.shown("#settings")
    assert not page.run("return performance.getEntriesByName(location.origin + '/ui/pdf.js').length"), "not before a PDF comes"
    names = ("notes.txt", "paper.pdf", "scan.pdf", "locked.pdf", "cut.pdf")
    page.find("#attach-file").send_keys("\n".join(str(tmp_path / name) for name in names))
    page.until(lambda: "cut.pdf" in page.text("#attach-told"), "all are read")
    told = page.text("#attach-told")
    assert (
        "scan.pdf has no text" in told and "locked.pdf is locked with a password: save" in told and "cut.pdf is damaged" in told
    )
    assert page.texts("#attached .file button") == ["", ""] and "notes.txt" in page.text("#attached")
    page.run("""
        const [gone, more] = ['gone.txt', 'more.txt'].map(name => new File(['x'], name));
        gone.text = () => Promise.reject(new DOMException('', 'NotFoundError'));
        return import('/ui/attachments.js').then(({ take }) => take([gone, more]))""")
    assert "gone.txt cannot be read" in page.text("#attach-told") and "more.txt" in page.text("#attached")
    page.until(lambda: page.shown("#thinking"), "the model thinks")
    page.run("const t = document.getElementById('thinking'); t.value = 'off'; t.dispatchEvent(new Event('change'))")
    page.ask("What colour is it?")
    answered(page)
    sent = list(scripted.engine.submitted.values())[-1]
    assert all(
        text in prompt(scripted)
        for text in ("Answer as a pirate.", "notes.txt:\n````\nThe sky is green.", "The sea is red.", "What colour")
    )
    assert sent.params.stop == ("END", "\n\n") or list(sent.params.stop) == ["END", "\n\n"]
    assert "notes.txt" in page.text(".user .files") and not page.text("#attached")
    assert re.fullmatch(r"[\d,]+ of 16,384 tokens", page.text("#context-meter small"))
    page.run("""
        const calls = [[{index: 0, id: 'c1', function: {name: 'weather', arguments: '{"city": '}}],
          [{index: 0, function: {arguments: '"Rome"}'}}]];
        const events = [...calls.map(tool_calls => ({choices: [{delta: {tool_calls}}]})),
          {choices: [{delta: {}, finish_reason: 'tool_calls'}]}];
        const fetched = window.fetch;
        window.sent = [];
        window.fetch = (path, options) => {
          if (!path.includes('/chat/completions')) return fetched(path, options);
          window.sent.push(JSON.parse(options.body));
          const done = [{choices: [{delta: {content: 'Sunny.'}, finish_reason: 'stop'}]}];
          return Promise.resolve(new Response((window.sent.length === 1 ? events : done)
            .map(one => `data: ${JSON.stringify(one)}\\n\\n`).join('')));
        }""")
    page.ask("And the weather?")
    answered(page, 2)
    assert page.text(".call .code-head b") == "weather" and page.text(".call pre") == '{\n  "city": "Rome"\n}'
    page.find(".call textarea").send_keys("22 degrees")
    page.click(".calls .primary")
    answered(page, 3)
    assert page.run("return window.sent[0].enable_thinking") is False
    called, result = page.run("return window.sent[1].messages.slice(-2)")
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "22 degrees"}
    assert page.text(".message:last-child .markdown").strip() == "Sunny." and not page.shown(".call textarea")
    page.picture("page-chat-tools")


def test_code_is_coloured_and_copied_and_speed_is_told(page: Window, scripted: Any) -> None:
    page.run("Object.defineProperty(navigator.clipboard, 'writeText', {value: async text => { window.copied = text }})")
    says(scripted, THOUGHT + CODE + QUOTE)
    scripted.engine.delay = 0.01
    page.run("let now = 0; performance.now = () => now += 25")  # pieces that come together have a rate too
    page.ask("Write a function that adds two numbers.")
    answered(page)
    scripted.engine.delay = 0.0
    page.picture("page-chat")
    assert page.texts(".markdown .code-head span") == ["python"]
    assert page.texts(".markdown .hljs-keyword") == ["def", "return"]
    assert page.texts(".markdown .hljs-comment") == ["# adds"]
    page.click(".markdown .code-head button")
    code = "def add(a, b):\n    # adds\n    return a + b"
    page.until(lambda: page.run("return window.copied") == code, "the code alone")
    stats = page.text(".assistant footer small")
    assert "tokens/s" in stats and "first token after" in stats
    assert stats.startswith(f"{len(scripted.engine.reply) + 1} tokens"), "the end counts as one"
    bar, back = page.run(
        "const q = getComputedStyle(document.querySelector('.markdown blockquote'));return [q.borderLeftWidth, q.borderLeftStyle]"
    )
    assert (bar, back) == ("3px", "solid")


def test_an_empty_page_offers_examples_and_code_that_runs(page: Window, scripted: Any) -> None:
    assert len(page.texts(".example")) == 4
    page.picture("page-empty")
    assert page.texts("#empty [role='tab']") == ["curl", "openai", "LangChain", "Open WebUI", "Claude Code"]
    found = {}
    for number, name in enumerate(page.texts("#empty [role='tab']")):
        page.click(f"#empty-tab-{number}")
        found[name] = page.text("#empty pre")
        assert scripted.url in found[name], name
    done = subprocess.run(found["curl"], shell=True, capture_output=True, text=True, timeout=240, check=False)
    assert '"content":"Hello."' in done.stdout.replace(" ", ""), done
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(found["openai"], "snippet", "exec"), {"__name__": "snippet"})
    assert printed.getvalue() == "Hello."
    page.click("#connect")
    assert page.shown("#clients") and scripted.url in page.text("#clients pre")
    page.click("#clients .primary")
    page.click(".example:nth-child(2)")
    answered(page)
    assert "palindrome" in page.text(".user .text") and not page.shown("#empty")


HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 1"> <svg onload="window.hit = 1"></svg>

<style>body { display: none }</style> <iframe src="/v1/status"></iframe> <form action="/v1/x"><input name=a></form>

<div id="question" class="message user" style="position:fixed">Not the person</div> <base href="https://example.org/">

![pixel](URL/pixel.png) ![data](data:image/png;base64,AAAA) [script](javascript:window.hit=1) [page](data:text/html,hit)
[VB](vbscript:x) [fine](https://example.org/a?b=1) <https://example.org> [relative](/v1/events) [ref][r]

[r]: javascript:window.hit=1

```html"onmouseover="window.hit=1
<script>window.hit = 1</script>
```

- [x] done <a href="https://example.org" onclick="window.hit=1" target="_self">anchor</a>

| a | b |
|---|---|
| <b onclick="window.hit=1">c</b> | &lt;img src=x onerror=window.hit=1&gt; |

<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=window.hit=1&gt;">
"""


def test_what_a_hostile_model_writes_does_nothing(page: Window, scripted: Any) -> None:
    says(scripted, HOSTILE.replace("URL", scripted.url), each=7)
    page.ask("<img src=x onerror='window.hit = 1'> [mine](javascript:window.hit=1)")
    answered(page)
    page.click("#tab-cluster")
    page.click("#tab-chat")
    assert page.run("return window.hit ?? null") is None
    live = "script, img, svg:not(.icon), style, iframe, form, base, math, object, video, audio, source"
    assert page.texts(f".markdown :is({live})") == []
    assert (
        page.run(
            "return [...document.querySelectorAll('.markdown *')].flatMap(e => [...e.attributes]).filter(a =>"
            "a.name.startsWith('on') || a.name === 'style' || a.name === 'id' || a.name === 'name')"
            ".map(a => a.name)"
        )
        == []
    )
    links = page.run(
        "return [...document.querySelectorAll('.markdown a[href]')].map(a => [a.getAttribute('href'),a.target, a.rel])"
    )
    assert {href for href, _, _ in links} == {"https://example.org/a?b=1", "https://example.org"}
    assert {(target, rel) for _, target, rel in links} == {("_blank", "noopener noreferrer nofollow")}
    assert page.run("return document.querySelectorAll('#question').length") == 1
    assert "Not the person" not in page.text(".user .text")
    fetched = page.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert not [one for one in fetched if "pixel" in one or "example.org" in one]
    assert page.run("return document.baseURI").startswith(scripted.url)
    assert page.text(".user .text").startswith("<img src=x"), "what a person writes is text"


def test_failures_are_told_and_nothing_is_lost(page: Window, scripted: Any) -> None:
    scripted.engine.refusal = (429, "the queue is full", None, 1.0)
    try:
        page.ask("Is anybody there?")
        answered(page)
        assert "the queue is full" in page.text(".assistant .error")
        assert page.find("#question").get_property("value") == "Is anybody there?"
    finally:
        scripted.engine.refusal = None
    page.click(".assistant [aria-label='Regenerate']")
    page.until(lambda: page.text(".assistant .markdown").strip() == "Hello.", "it answers after all")
    page.click("#new")
    scripted.engine.refusal = (429, "the queue is full", None, 1.0)
    try:
        page.ask("And now?")
        answered(page)
    finally:
        scripted.engine.refusal = None
    page.click("#send")
    answered(page, 2)
    assert prompt(scripted).count("And now?") == 1, "a question that had no answer is not asked twice"


def test_pictures_are_pasted_dropped_shown_and_sent(page: Window, scripted: Any) -> None:
    """The model of this server takes text alone: the message comes back as it was written."""
    page.run(
        """window.sent = []; const before = window.fetch;
        window.fetch = (url, options) => (options?.body && sent.push(JSON.parse(options.body)), before(url, options));
        window.give = (kind, place, type) => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array([1, 2])], "a", { type }));
          const event = new Event(kind, { bubbles: true, cancelable: true });
          event.clipboardData = event.dataTransfer = data;
          document.querySelector(place).dispatchEvent(event);
          return event.defaultPrevented;
        }"""
    )
    assert page.run("return give('paste', '#question', 'image/png')") is True
    assert page.run("return give('dragover', '#talk', 'image/gif')") is True
    assert page.run("return give('drop', '#messages', 'image/gif')") is True
    for kind in ("dragover", "drop"):
        for place in ("header", "#talks"):
            assert page.run(f"return give('{kind}', '{place}', 'image/gif')") is True, "the browser would leave the page"
    for kind, words in (("svg+xml", "a is an SVG; send PNG, JPEG"), ("bmp", "a is of an unknown kind (image/bmp); send PNG")):
        page.run(f"give('drop', '#messages', 'image/{kind}')")
        page.until(lambda words=words: words in page.text("#attach-told"), words)
    page.until(lambda: len(page.texts("#attached img")) == 2, "two thumbnails")
    page.ask("What is this?")
    page.until(lambda: page.shown(".assistant .error"), "an error")
    assert "takes text alone" in page.text(".assistant .error")
    assert len(page.texts(".user .files img")) == len(page.texts("#attached img")) == 2
    assert page.run("return document.getElementById('question').value") == "What is this?"
    [asked] = page.run("return sent.at(-1).messages")
    urls = sorted(one["image_url"]["url"] for one in asked["content"][1:])
    assert asked["content"][0] == {"type": "text", "text": "What is this?"}
    assert urls == ["data:image/gif;base64,AQI=", "data:image/png;base64,AQI="]
    page.click("#attached button")
    assert len(page.texts("#attached img")) == 1


def test_an_answer_that_broke_off_goes_on(page: Window, scripted: Any) -> None:
    page.run("""
        const fetched = window.fetch;
        window.fetch = path => {
          window.fetch = fetched;
          return Promise.resolve(new Response(new ReadableStream({ start: to => {
            const first = 'data: {"choices": [{"delta": {"content": "Hel"}}]}\\n\\n';
            to.enqueue(new TextEncoder().encode(first));
            setTimeout(() => to.error(new TypeError('network error')));
          } })));
        };
        document.getElementById('question').value = 'Who is there?';
        document.getElementById('ask').requestSubmit()""")
    answered(page)
    assert "broke off" in page.text(".assistant .error") and page.text(".assistant .markdown").strip() == "Hel"
    says(scripted, "lo again.")
    page.run("[...document.querySelectorAll('.tools button')].find(b => b.textContent === 'Continue').click()")
    page.until(lambda: page.text(".assistant .markdown").strip() == "Hello again." and page.shown("#send"), "more")
    assert not page.shown(".assistant .error")
    assert prompt(scripted).endswith("Hel")


def test_code_for_clients_is_sound_whatever_a_model_is_called(page: Window) -> None:
    name = "it's <b>$(touch x)"
    code = page.run(
        """return import('/ui/snippets.js').then(({ snippets }) => {
        const made = snippets(arguments[0], 'x');
        made.querySelector('#x-tab-4').click();
        return made.querySelector('pre').textContent;
      })""",
        name,
    )
    code = code.replace("\nclaude", '\nprintf %s "$ANTHROPIC_MODEL"')
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == name


def test_the_keyboard_does_it_all_and_everything_has_a_name(page: Window, scripted: Any) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    body = page.find("body")
    page.run("document.activeElement.blur()")
    body.send_keys("?")
    page.until(lambda: page.shown("#shortcuts"), "the list of keys")
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.until(lambda: not page.shown("#shortcuts"), "it is closed")
    for digit, view in (("3", "cluster"), ("2", "models"), ("4", "plan"), ("1", "chat")):
        ActionChains(page.driver).key_down(Keys.ALT).send_keys(digit).key_up(Keys.ALT).perform()
        page.until(lambda view=view: page.shown(f"#{view}"), view)
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    page.until(lambda: page.shown("#models"), "the next tab")
    page.driver.switch_to.active_element.send_keys("/")
    page.until(lambda: page.run("return document.activeElement.matches('textarea')"), "the box is there to write into")
    scripted.engine.hold = True
    page.driver.switch_to.active_element.send_keys("First", Keys.SHIFT + Keys.ENTER, Keys.NULL, "second", Keys.ENTER)
    page.until(lambda: page.shown("#stop"), "it is asked")
    assert page.texts(".user .text") == ["First\nsecond"]
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    answered(page)
    assert page.text(".end") == "Stopped."
    page.until(lambda: scripted.engine.aborted, "the model hears of it")
    scripted.engine.hold = False
    page.driver.switch_to.active_element.send_keys(Keys.ALT + "r")
    page.until(lambda: page.text(".assistant .turns") == "2 of 2" and page.shown("#send"), "answered again")
    assert page.text("#said").startswith("Answer: Hello."), "screen readers are told the answer once"
    page.run("Object.defineProperty(navigator, 'platform', {value: 'MacIntel', configurable: true})")
    page.driver.switch_to.active_element.send_keys(Keys.ALT + "n")
    assert page.shown(".user"), "in a field of a Mac it is a letter"
    page.run("delete navigator.platform")
    page.driver.switch_to.active_element.send_keys(Keys.ALT + "n")
    page.until(lambda: page.shown("#empty"), "a new conversation")
    nameless = page.run("""return [...document.querySelectorAll('button, input, select, textarea, a[href], [role=img]')]
        .filter(e => !(e.labels?.length || e.getAttribute('aria-label') || e.textContent.trim() || e.title))
        .map(e => e.outerHTML)""")
    assert nameless == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(page: Window, scripted: Any, theme: str) -> None:
    says(scripted, CODE + "| a | b | c |\n|---|---|---|\n| " + "long words in a cell " * 4 + "| x | y |\n")
    page.run("document.documentElement.dataset.theme = arguments[0]", theme)
    with page.phone():
        for view in ("chat", "models", "cluster", "plan"):
            page.view(view)
            if view == "chat":
                page.run("let now = 0; performance.now = () => now += 25")
                page.ask("A table, please.")
                answered(page)
                assert page.texts(".markdown td")[1:] == ["x", "y"]
            wide, inside = page.run(
                "const e = document.querySelector('main > :not([hidden])');"
                "return [document.documentElement.scrollWidth - innerWidth,"
                "e.scrollWidth - e.clientWidth]"
            )
            assert wide <= 0 and inside <= 1, view
            page.picture(f"page-phone-{view}-{theme}")
        back = page.run("return getComputedStyle(document.body).backgroundColor")
        assert back == {"light": "rgb(247, 247, 245)", "dark": "rgb(19, 21, 24)"}[theme]
        page.view("chat")
        assert not page.shown("#talks")
        page.click("#show-talks")
        page.until(lambda: page.shown("#talks") and page.shown("#veil"), "the drawer opens")
        page.click("#new")
        page.until(lambda: not page.shown("#talks") and page.shown("#empty"), "and closes")
