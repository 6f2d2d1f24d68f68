"""What README says of itself and of models, and that links of all pages lead somewhere."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jargon import jargon
from pages.commands import PAGES, ROOT, name_of
from tandem.cli.main import main
from tandem.planner.presets import presets

README = ROOT / "README.md"
GROUPS = ("Use it", "Several machines", "Operate it")

pytestmark = pytest.mark.skipif(not README.is_file(), reason="only in a checkout")


def advice() -> list[tuple[int, str, str]]:
    """Machines, memory of each and model, of the table of models that fit."""
    if not README.is_file():
        return []
    found = []
    for memory, names in re.findall(r"^\| ([^|]*GB[^|]*) \| ([^|]*) \|$", README.read_text(), re.MULTILINE):
        for count, size in re.findall(r"(?:(\d) x )?(\d+) GB", memory):
            found += [(int(count or 1), f"{size}GB", name) for name in names.split(", ")]
    return found


def test_the_table_has_models_for_one_machine_and_for_two() -> None:
    assert len(advice()) > 12 and {count for count, _, _ in advice()} == {1, 2}


@pytest.mark.parametrize(("count", "memory", "name"), advice())
def test_a_model_of_the_table_fits(count: int, memory: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (model,) = [one for one in presets() if one.endswith(f"/{name}")]
    quant = [] if name.startswith("gpt-oss") else ["--quant", "4bit"]  # published at 4 bits
    hosts = [f"h{index}={memory}:m3-ultra" for index in range(count)]
    layout = "single" if count == 1 else f"pp={count}"
    assert main(["plan", model, *quant, "--hosts", *hosts, "--layout", layout, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_what_a_newcomer_reads_needs_no_glossary() -> None:
    first, rest = README.read_text().split("\n## Which model fits\n")
    page = (ROOT / "docs" / "two-machines.md").read_text()
    evening = page[page.index("#### On the second Mac") : page.index("#### What you should see")]
    assert jargon(first) == jargon(evening) == set()
    assert jargon(rest) != set()  # where links to docs/ may say what they lead to


def test_every_page_stands_in_one_of_three_groups() -> None:
    text = README.read_text()
    parts = re.split(r"^\*\*(.+?)\*\*", text[text.index("## More") :], flags=re.MULTILINE)
    groups = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert list(groups)[:3] == list(GROUPS)
    linked = {name for group in groups.values() for name in re.findall(r"\]\(docs/([\w-]+\.md)", group)}
    pages = {page.name for page in PAGES if page != README} - {"index.md"}
    assert pages <= linked
    indexed = re.findall(r"\]\(([\w-]+\.md)", (ROOT / "docs" / "index.md").read_text())
    assert pages <= set(indexed)


def test_the_picture_is_there_in_light_and_dark() -> None:
    text = README.read_text()
    for name in ("docs/images/tandem-light.svg", "docs/images/tandem-dark.svg"):
        assert name in text
        assert (ROOT / name).stat().st_size < 20_000
        root = ElementTree.parse(ROOT / name).getroot()
        assert root.find("{http://www.w3.org/2000/svg}title") is not None


def test_package_indexes_get_no_relative_link() -> None:
    hook = runpy.run_path(str(ROOT / "packaging" / "long_description.py"))
    text = README.read_text()
    runner = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "o/r", "GITHUB_REF_NAME": "v1"}
    at_home, elsewhere = (hook["long_description"](text, hook["repository"](one)) for one in (runner, {}))
    for made in (at_home, elsewhere):
        assert re.findall(r"\]\((?!https?:)|srcset|src=\"(?!https:)", made) == []
        assert "[MLX](https://github.com/ml-explore/mlx)" in made
    assert at_home.count("](http") == text.count("](")
    assert "[The page at /ui and the terminal](https://github.com/o/r/blob/v1/docs/terminal.md)" in at_home
    assert 'src="https://github.com/o/r/raw/v1/docs/images/tandem-light.svg"' in at_home
    assert "- The page at /ui and the terminal (`docs/terminal.md`): chat" in elsewhere


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    made = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert made.returncode == 0, made.stderr
    assert {page.with_suffix(".html").name for page in PAGES if page != README} <= {
        page.name for page in (tmp_path / "site").iterdir()
    }


def anchors(page: Path) -> set[str]:
    """What a link may have behind `#`."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        there = page.parent / target if target else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), f"{target}#{anchor}"
