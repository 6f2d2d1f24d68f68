"""Files that a command line names, and that are none: each ends the command at once, with one line that says it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import FrameType

import pytest

from tandem.bench.workload import PromptSource
from tandem.cli.address import api_key
from tandem.cli.arguments import load_settings
from tandem.cli.main import build_parser, main
from tandem.config.validation import api_keys
from tandem.errors import UsageError
from tandem.testing import tiny_model

PATIENCE_S = 240


def pipe(path: Path) -> str:
    os.mkfifo(path)  # whoever opens it would wait for a writer
    return "a pipe"


def device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "a device"


def directory(path: Path) -> str:
    path.mkdir()
    return "irectory"


def endless(path: Path) -> str:
    path.touch()
    os.truncate(path, 1 << 40)
    return "more than"


def locked(path: Path) -> str:
    path.touch(0o000)
    if os.geteuid() == 0:
        pytest.skip("root may read all files")
    return "ermission denied"


COMMANDS = {
    "--profile": ["plan", "MODEL", "--profile", "FILE"],
    "plan --hostfile": ["plan", "MODEL", "--hostfile", "FILE"],
    "--hardware-profile": ["serve", "MODEL", "--port", "0", "--hardware-profile", "FILE"],
    "--hostfile": ["serve", "MODEL", "--hostfile", "FILE"],
    "bench --hostfile": ["bench", "comm", "--hostfile", "FILE"],
    "doctor --hostfile": ["doctor", "--hostfile", "FILE"],
    "--write-profile": ["bench", "comm", "--ranks", "2", "--write-profile", "FILE"],
    "--config": ["serve", "MODEL", "--config", "FILE"],
    "--api-key-file": ["serve", "MODEL", "--api-key-file", "FILE"],
    "cache --api-key-file": ["cache", "list", "--api-key-file", "FILE"],
    "--warmup-prompts": ["serve", "MODEL", "--warmup-prompts", "FILE"],
    "cache warm": ["cache", "warm", "FILE"],
    "--chat-template": ["generate", "MODEL", "--local", "--chat-template", "FILE", "--prompt", "hello"],
    "serve --chat-template": ["serve", "MODEL", "--port", "0", "--chat-template", "FILE"],
    "serve further --chat-template": ["serve", "MODEL", "--port", "0", "--config", "SEVERAL"],
    "api --chat-template": ["api", "--port", "0", "--chat-template", "FILE"],
    "MODEL": ["generate", "FILE", "--local", "--prompt", "hello"],
    "--generation-config": ["serve", "MODEL", "--port", "0", "--generation-config", "FILE"],
    "--tls-cert": ["serve", "MODEL", "--tls-cert", "FILE"],
    "--token-file": ["rank", "--join", "localhost:1", "--token-file", "FILE"],
    "head --token-file": ["serve", "MODEL", "-pp", "2", "--launcher", "manual", "--token-file", "FILE"],
    "batch": ["batch", "FILE", "OTHER"],
    "batch OUT": ["batch", "GOOD", "FILE"],
    "--prompts": ["parity", "MODEL", "--prompts", "FILE"],
    "--reference": ["parity", "MODEL", "--reference", "FILE"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("files") / "model"))


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    def over(number: int, frame: FrameType | None) -> None:
        raise AssertionError("the command waits for what does not come")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(PATIENCE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


ALL_KINDS = ("--profile", "--hostfile", "--config", "--api-key-file", "cache warm", "--tls-cert", "--token-file", "batch")


@pytest.mark.parametrize(
    ("name", "make"), [*((name, pipe) for name in COMMANDS), *product(ALL_KINDS, (device, directory, endless, locked))]
)
def test_what_is_no_file_is_refused_in_one_line(
    name: str, make: Callable[[Path], str], model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    why = make(tmp_path / "it")
    (tmp_path / "good").write_text('{"custom_id": "a", "url": "/v1/completions", "method": "POST", "body": {"prompt": "a"}}\n')
    (tmp_path / "several.toml").write_text(f"""
[models.one]
model = "{model}"
[models.two]
model = "{model}"
chat_template = "{tmp_path / "it"}"
""")
    words = {
        "MODEL": model,
        "FILE": str(tmp_path / "it"),
        "OTHER": str(tmp_path / "out"),
        "GOOD": str(tmp_path / "good"),
        "SEVERAL": str(tmp_path / "several.toml"),
    }
    assert main([words.get(word, word) for word in COMMANDS[name]]) == 2
    told = capfd.readouterr()
    assert told.out == ""
    line = told.err.splitlines()[-1]
    assert "Traceback" not in told.err
    assert str(tmp_path / "it") in line
    assert why in line


def test_what_is_no_template_is_refused_before_anything_starts(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.jinja").write_text("{% for %}")
    assert main(["serve", model, "--port", "0", "--chat-template", str(tmp_path / "t.jinja")]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert f"--chat-template {tmp_path}/t.jinja: not a valid chat template" in line


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "chat_template.json",
        "model.safetensors.index.json",
    ],
)
def test_what_is_no_file_in_a_model_is_refused_in_one_line(
    name: str, model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "m")
    if name == "chat_template.json":  # it counts where nothing else has a template
        (tmp_path / "m" / "tokenizer_config.json").unlink()
    (tmp_path / "m" / name).unlink(missing_ok=True)
    pipe(tmp_path / "m" / name)
    assert main(["generate", str(tmp_path / "m"), "--local", "--prompt", "hello"]) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert f"m/{name}: cannot be read: it is a pipe" in line


def test_a_benchmark_waits_for_no_tokenizer(tmp_path: Path) -> None:
    pipe(tmp_path / "tokenizer.json")
    with pytest.raises(UsageError, match="it is a pipe"):
        PromptSource(tmp_path)


@pytest.mark.parametrize("command", [["serve", "MODEL", "--port", "0"], ["cache", "list"]])
def test_a_key_that_a_command_prints_goes_into_the_environment(
    command: list[str], model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()  # as `--api-key-file <(vault read ...)` gives it
    os.write(writing, b"secret\n")
    words = [word.replace("MODEL", model) for word in command]
    assert main([*words, "--api-key-file", f"/dev/fd/{reading}"]) == 2
    os.close(reading)
    os.close(writing)
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"tandem: --api-key-file: cannot read /dev/fd/{reading}: it is a pipe; give a file, or the key itself as TANDEM_API_KEY"
    )
    monkeypatch.setenv("TANDEM_API_KEY", "secret")
    arguments = build_parser().parse_args(words)
    assert (
        [api_key(arguments, "http://127.0.0.1:9")] if command[0] == "cache" else list(api_keys(load_settings(arguments).settings))
    ) == ["secret"]
