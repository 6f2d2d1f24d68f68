"""The import contracts in pyproject.toml name every package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import tandem

SOURCE = Path(tandem.__file__).parent
ARRAYS = {"llm", "vllm_plugin", "diagnostics", "distributed", "engine", "executors", "runner", "kv", "loading", "comm", "testing",
          "__main__"}  # fmt: skip
"""Packages that hold arrays, or that start what does: they may reach mlx."""


def contract(kind: str, words: str) -> dict:
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    [found] = [one for one in pyproject["tool"]["importlinter"]["contracts"] if one["type"] == kind and words in one["name"]]
    return found


def packages() -> set[str]:
    return {
        path.stem
        for path in SOURCE.iterdir()
        if path.suffix == ".py" and path.stem != "__init__" or (path / "__init__.py").is_file()
    }


def test_each_package_may_reach_mlx_or_may_not():
    pure = {name.removeprefix("tandem.") for name in contract("forbidden", "never reach mlx")["source_modules"]}
    modules = {name for name in pure if "." in name}
    assert not pure & ARRAYS
    assert (pure - modules) | ARRAYS == packages()
    assert modules == {f"kv.{path.stem}" for path in (SOURCE / "kv").glob("*.py")} - {"kv.__init__", "kv.store"}


def floors() -> list[set[str]]:
    layers = contract("layers", "below")
    assert layers["exhaustive"], "then lint-imports refuses a package that no floor names"
    return [{name.strip(" ()") for name in floor.split("|")} for floor in layers["layers"]]


def test_each_package_has_its_floor():
    assert set().union(*floors()) | {"__main__", "testing"} == packages()


def test_the_page_about_the_structure_draws_these_floors():
    page = (Path(__file__).parents[1] / "docs" / "structure.md").read_text(encoding="utf-8")
    drawn = page[page.index("\ndistributed*\n") + 1 :].split("\n```")[0].split("\n")
    assert [{name.strip() for name in floor.split("|")} for floor in drawn] == [
        {name + "*" * (name in ARRAYS) for name in floor} for floor in floors()
    ]


def test_the_way_down_names_files_that_are_there_and_none_twice():
    page = (Path(__file__).parents[1] / "docs" / "structure.md").read_text(encoding="utf-8")
    way = page[page.index("A chat's way down") : page.index("Of all files that a prompt's calls")]
    names = re.findall(r"`([\w/]+\.py)`", way)
    assert len(names) > 25 and len(set(names)) == len(names)
    assert [name for name in names if not any(SOURCE.rglob(name))] == []
