"""Scripts of scripts/ that are Python: kept environments, planted faults, the way of a request."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from script_files import script

ROOT = Path(__file__).parents[1]


def test_an_environment_is_brought_back_for_another_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environments = script("environments")
    monkeypatch.setattr(environments, "CACHE", tmp_path / "cache")
    first, second = tmp_path / "one" / ".venv", tmp_path / "two" / ".venv"
    packages = Path("lib", "python3.11", "site-packages")
    (first / "bin").mkdir(parents=True)
    (first / packages).mkdir(parents=True)
    second.parent.mkdir()
    (first / "pyvenv.cfg").write_text(f"command = python -m venv {first}\n")
    (first / packages / "mlx_tandem.pth").write_text(f"{first.parent}/src\n")
    (first / packages / "library.py").write_text("VALUE = 1\n")
    (first / "bin" / "tandem").write_text(f"#!{first}/bin/python\n")
    (first / "bin" / "tandem").chmod(0o755)
    (first / ".tandem-stamp").write_text("an old stamp")

    monkeypatch.setattr(sys, "argv", ["environments", "restore", str(second), "abc"])
    assert environments.main() == 1 and "takes some minutes" in capsys.readouterr().err
    environments.keep(first, "abc")
    assert environments.restore(second, "abc")
    assert (second / packages / "mlx_tandem.pth").read_text() == f"{second.parent}/src\n"
    assert (second / "bin" / "tandem").read_text() == f"#!{second}/bin/python\n"
    assert (second / "bin" / "tandem").stat().st_mode & 0o777 == 0o755
    assert (second / packages / "library.py").read_text() == "VALUE = 1\n"
    assert not (second / ".tandem-stamp").exists()
    assert (first / "bin" / "tandem").read_text() == f"#!{first}/bin/python\n"

    for digest in ("def", "ghi"):
        environments.keep(first, digest)
    assert len(list((tmp_path / "cache").iterdir())) == environments.KEPT


def test_only_what_is_installed_counts_in_the_hash(tmp_path: Path) -> None:
    environments = script("environments")
    project = tmp_path / "pyproject.toml"

    def digest(dependency: str, width: int) -> str:
        project.write_text(
            f'[build-system]\nrequires = []\n[project]\ndependencies = ["{dependency}"]\n[tool.ruff]\nline-length = {width}\n'
        )
        return str(environments.hash_of([str(project), "cpu"]))

    assert digest("a", 100) == digest("a", 120)
    assert digest("a", 100) != digest("b", 100)


def test_planted_faults_come_back_and_can_be_compiled(tmp_path: Path) -> None:
    plant = script("plant_faults")
    faults = plant.faults(26, 60)
    assert len(faults) == 60
    assert {fault.area for fault in faults} == set(plant.AREAS)
    for fault in faults:
        path = ROOT / fault.path
        data = path.read_bytes()
        assert data[fault.start : fault.end].decode() == fault.before
        ast.parse(data[: fault.start] + fault.after.encode() + data[fault.end :])
    plant.plant(faults[0], tmp_path)
    changed = (tmp_path / faults[0].path).read_text()
    assert changed != (ROOT / faults[0].path).read_text()


def test_a_planted_fault_does_not_hang_on_the_lines_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant = script("plant_faults")
    monkeypatch.setattr(plant, "ROOT", tmp_path)
    monkeypatch.setattr(plant, "PACKAGE", tmp_path / "src" / "tandem")
    monkeypatch.setattr(plant, "AREAS", {"scheduler": (1, ("scheduler/*.py",))})
    path = tmp_path / "src" / "tandem" / "scheduler" / "a.py"
    path.parent.mkdir(parents=True)
    code = "def f(a, b):\n    c = a + 1\n    if a < b:\n        c = 2\n    return c\n"
    path.write_text(code)
    before = {fault.rank for fault in plant.faults(1, 3)}
    path.unlink()
    path.with_name("b.py").write_text("import os\n\n\n" + code)
    assert {fault.rank for fault in plant.faults(1, 3)} == before


def test_lines_count_that_hold_code() -> None:
    text = '''"""A module."""

import os  # a comment


def one(a: int) -> str:
    """Return it.

    More.
    """
    # a comment
    text = """two
    lines"""
    return (text
            + os.sep)
'''
    assert script("size").code_lines(text) == 6


def test_a_package_that_is_larger_than_it_may_be_fails_and_figures_only_fall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size, project = script("size"), tmp_path / "pyproject.toml"
    (tmp_path / "src" / "server").mkdir(parents=True)
    (tmp_path / "src" / "server" / "app.py").write_text("a = 1\nb = 2\n")
    monkeypatch.setattr(size, "SOURCE", tmp_path / "src")
    monkeypatch.setattr(size, "PROJECT", project)
    monkeypatch.setattr(sys, "argv", ["size"])
    for figures, code, told in (
        ("server = 2", 0, ""),
        ("server = 1", 1, "server has 2 lines"),
        ("old = 9\nserver = 2", 1, "no package old"),
        ("cli = 1", 1, "server has 2 lines"),
    ):
        project.write_text(f"[tool.tandem.size]\n{figures}\n")
        assert size.main() == code
        assert told in capsys.readouterr().err
    project.write_text("[tool.tandem.size]\nserver = 5  # for the page\n")
    monkeypatch.setattr(sys, "argv", ["size", "--update"])
    assert size.main() == 0
    assert project.read_text() == "[tool.tandem.size]\nserver = 2  # for the page\n"


def test_a_request_reads_down() -> None:
    """Files that one chat goes through, and how often its way changes between them: figures that only go down."""
    traced = subprocess.run(
        [sys.executable, ROOT / "scripts" / "trace_request"], capture_output=True, text=True, timeout=240, check=True
    ).stdout
    files, changes, whole = map(int, re.findall(r"\d+", traced))
    assert files <= 35 and changes <= 120 and whole <= 85, traced


def test_the_lock_is_of_these_requirements() -> None:
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    [ours] = [one for one in tomllib.loads((root / "uv.lock").read_text())["package"] if one["name"] == "mlx-tandem"]
    named = {
        Requirement(line).name.replace("_", "-") + str(Requirement(line).specifier)
        for line in [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    }
    locked = {
        one["name"] + str(Requirement(f"x{one.get('specifier', '')}").specifier) for one in ours["metadata"]["requires-dist"]
    }
    assert locked == named, "run `uv lock`"


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ('"""It is no more."""', "begins with 'It'"),
        ('"""The same by store."""', "begins with 'The same'"),
        ('class A:\n    b: int\n    """What a rank is told."""', "begins with 'What a rank is'"),
        ("def f(gangs: int) -> None: ...", "for gang say rank group"),
        ("class LaneBatch: ...", "for lane say micro-batch"),
    ],
)
def test_words_that_are_refused(source: str, remedy: str) -> None:
    assert [remedy in said for _, said in script("wording").mistakes(source)] == [True]


@pytest.mark.parametrize(
    "source",
    [
        '"""Return the tokens."""',
        '"""Tokens written, per KV store."""',
        '"""Items of a queue."""',
        "planes = in_flight = FRAMES_IN_FLIGHT = 1",
        'text = "It is a string, and no docstring"',
    ],
)
def test_words_that_are_taken(source: str) -> None:
    assert list(script("wording").mistakes(source)) == []


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("src/tandem/router/router.py", ["tests/router/test_a.py", "tests/router/test_b.py"]),
        ("src/tandem/router/inner/deep.py", ["tests/router/test_b.py"]),
        ("src/tandem/router/choice.py", ["tests/router/more/test_router_choice.py", "tests/router/test_a.py"]),
        ("src/tandem/router/__init__.py", ["tests/router/test_a.py", "tests/router/test_b.py"]),
        ("src/tandem/errors.py", ["tests/test_errors.py"]),
        ("tests/router/test_b.py", ["tests/router/test_b.py"]),
        ("tests/router/conftest.py", ["tests/router"]),
        ("docs/kv.md", ["tests/pages/test_pages_readme.py"]),
        ("LICENSE", []),
    ],
)
def test_what_changed_is_tested(changed: str, tests: list[str], tmp_path: Path) -> None:
    """By the test files that name a module or import it; by all of its folder when there are none."""
    folder = tmp_path / "tests" / "router"
    (folder / "more").mkdir(parents=True)
    (folder / "test_a.py").write_text("from tandem.router import other, choice\n")
    (folder / "test_b.py").write_text("import tandem.router.inner.deep\nfrom tandem.router.choices import A\n")
    (folder / "more" / "test_router_choice.py").write_text("from tandem.errors import Error\n")
    for name in ("test_errors.py", "test_log.py"):
        (folder.parent / name).touch()
    assert script("quick").tests_of(Path(changed), tmp_path) == [Path(name) for name in tests]


MAC = {
    "uname": 'case "$1" in -s) echo Darwin;; *) echo "${MACHINE:-arm64}";; esac',
    "sw_vers": 'echo "${RELEASE:-15.6}"',
    "xcode-select": '[ -z "${NO_TOOLS:-}" ]',
    "python3": 'case "$*" in *sys.exit*) exit "${INTEL:-0}";; *) exit 99;; esac',
}


@pytest.mark.parametrize(
    ("name", "variables", "words"),
    [
        ("setup", {"RELEASE": "13.6"}, "this is macOS 13.6 on arm64, MLX needs macOS 14 on Apple silicon"),
        ("setup", {"MACHINE": "x86_64"}, "on x86_64, MLX needs macOS 14 on Apple silicon"),
        ("vllm_env", {"RELEASE": "13.6"}, "torch and MLX need macOS 14"),
        ("vllm_env", {"MACHINE": "x86_64"}, "leave Rosetta"),
        ("vllm_env", {"NO_TOOLS": "1"}, "xcode-select --install"),
        ("vllm_env", {"INTEL": "1"}, "python3 is one for Intel"),
    ],
)
def test_what_cannot_work_on_a_mac_is_said_in_a_line_before_anything_is_installed(
    tmp_path: Path, name: str, variables: dict[str, str], words: str
) -> None:
    for tool, text in MAC.items():
        (tmp_path / tool).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / tool).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **variables}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / name)], env=environment, capture_output=True, text=True, check=False, timeout=20
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(("found", "code"), [("3, 10", 2), ("3, 15", 2)])
def test_a_python_that_torch_has_no_wheels_for_stops_vllm_env(tmp_path: Path, found: str, code: int) -> None:
    python = tmp_path / "python3"
    python.write_text(f"""#!/bin/sh
exec {sys.executable} -c "import sys, platform; sys.version_info = type('V', (tuple,), {{}})(({found}, 0))
platform.python_version = lambda: '.'.join(map(str, sys.version_info))
exec(sys.argv[1])" "$2"
""")
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "vllm_env")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert (done.returncode, "wheels for 3.11 to 3.14: put one of these first" in done.stderr) == (code, True)


def test_homebrew_leaves_the_names_of_libraries_in_wheels_alone() -> None:
    formula = (ROOT / "packaging" / "homebrew" / "mlx-tandem.rb.in").read_text()
    assert formula.index("preserve_rpath") < formula.index("def install")


def test_vllm_is_asked_for_on_linux_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    markers = [Requirement(text).marker for text in project["optional-dependencies"]["vllm"]]
    assert [marker.evaluate({"platform_system": "Darwin"}) for marker in markers if marker is not None] == [False]
