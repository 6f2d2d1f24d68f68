"""Every command of README.md and docs/ is run: here, page by page, or by the test that commands.toml names.

One that can run nowhere here stands there with its reason; a new command that stands nowhere is run, and must work.
The demo model and those of the hub are tiny random ones here. scripts/readme runs README with the real one.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters import tiny_adapter
from pages.commands import LANGUAGES, PAGES, ROOT, Shell, blocks, commands, name_of, runs_here, table
from served import served
from tandem.testing import tiny_model

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="only in a checkout")
HERE = [page for page in PAGES if any(runs_here(page, one) for one in commands(page))]


def test_the_table_names_commands_that_are_there_and_tests_that_exist() -> None:
    for entry in [*table()["never"], *table()["elsewhere"]]:
        there = commands(ROOT / entry["page"])
        gone = [name for name in entry["commands"] if not any(one.is_called(name) for one in there)]
        assert gone == [], f"no longer on {entry['page']}"
    assert all(len(entry["reason"]) > 10 for entry in table()["never"])
    for entry in table()["elsewhere"]:
        path, _, function = entry["test"].partition("::")
        assert re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE), entry["test"]
    for page, words in table()["put"].items():
        text = (ROOT / page).read_text()
        assert all(written in text for written in words), page


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page: Path) -> None:
    assert {language for language, _ in blocks(page)} <= LANGUAGES


def test_a_command_that_nobody_runs_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\ntandem serve demo   # all\ntandem \\\n  versoin\n```\n")
    known = [one.name for one in commands(page)]
    assert known == ["tandem serve demo", "tandem versoin"]
    with Shell(tmp_path, {}, {}, "") as shell, pytest.raises(AssertionError, match="did you mean version"):
        shell.run(commands(page)[1])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a demo model, and a hub's cache, both of tiny models; and files that pages speak of."""
    directory = tmp_path_factory.mktemp("models")
    tiny = tiny_model(
        directory / "cache" / "demo" / "SmolLM2-135M-Instruct",
        layers=3,
        config={
            "max_position_embeddings": 8192,
            "hidden_size": 288,
            "head_dim": 32,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    )
    (tiny / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 32}')
    work = directory / "work"
    for name in ("base", "my-model", "my-small-model", "small-model"):
        shutil.copytree(tiny, work / name)
    for name in ("adapters", "sql", "chat"):
        tiny_adapter(tiny, work / name)
    (work / "keys").write_text("sk-one\n")
    (work / "keys").chmod(0o600)
    shutil.copy(work / "keys", work / "key")
    (work / "hosts.json").write_text(json.dumps([{"ssh": "localhost"}, {"ssh": "localhost"}]))
    return directory


@pytest.fixture(scope="module")
def shared(models: Path) -> Iterator[str]:
    """The address of a server for pages that have none of their own."""
    demo = str(next((models / "cache" / "demo").iterdir()))
    with served(demo, "--extra-models", f"small={demo}", "--journal", models / "journal", "--default-max-tokens", "32") as url:
        yield url


@pytest.mark.slow
@pytest.mark.parametrize("page", HERE, ids=name_of)
def test_the_commands_of_a_page(page: Path, models: Path, shared: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    shutil.copytree(models / "work", here)
    shutil.copytree(models / "cache", tmp_path / "cache")
    variables = {
        "TANDEM_CACHE": str(tmp_path / "cache"),
        "TANDEM_STATE_DIR": str(here / "state"),
        "TANDEM_PORT": "0",
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    with Shell(here, variables, table()["put"].get(name_of(page), {}), shared) as shell:
        for command in commands(page):
            if runs_here(page, command):
                shell.run(command)
