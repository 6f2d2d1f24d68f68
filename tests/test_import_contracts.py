"""The import contracts in pyproject.toml name every package."""

from __future__ import annotations

import tomllib
from pathlib import Path

import tandem

SOURCE = Path(tandem.__file__).parent
ARRAYS = {"firstlight", "llm", "vllm_plugin", "doctor", "bench", "parity", "engine", "executors", "runner", "loading",
          "comm", "testing", "__main__"}
"""Packages that hold arrays, or that start what does: they may reach mlx."""


def contract(kind: str, words: str) -> dict:
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    [found] = [one for one in pyproject["tool"]["importlinter"]["contracts"]
               if one["type"] == kind and words in one["name"]]
    return found


def packages() -> set[str]:
    return {path.stem for path in SOURCE.iterdir()
            if path.suffix == ".py" and path.stem != "__init__" or (path / "__init__.py").is_file()}


def test_each_package_may_reach_mlx_or_may_not():
    pure = {name.removeprefix("tandem.") for name in contract("forbidden", "never reach mlx")["source_modules"]}
    assert not pure & ARRAYS
    assert pure | ARRAYS == packages()


def test_each_package_has_its_floor():
    floors = contract("layers", "below")
    assert floors["exhaustive"], "then lint-imports refuses a package that no floor names"
    named = {name.strip(" ()") for floor in floors["layers"] for name in floor.split("|")}
    assert named | set(floors["exhaustive_ignores"]) == packages()
