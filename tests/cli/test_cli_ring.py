"""A `.env` of the ring project, `--profile ring`: the layout, the hub's cache, machines that cannot be used, `restart`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.cli.hosts import sync
from tandem.cli.main import build_parser, main
from tandem.cli.processes import prepared
from tandem.config.settings import ParallelSettings
from tandem.system.identity import machine_id
from tandem.testing import tiny_model

WORKER = "NUM_DEVICES=2\nWORKER_HOSTS=10.0.0.2\nWORKER_SSH=me@10.0.0.2\n"


@pytest.fixture
def dotenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.setattr(os, "environ", {**os.environ, "TANDEM_STATE_DIR": str(tmp_path / "state")})
    monkeypatch.chdir(tmp_path)
    return lambda text: (tmp_path / ".env").write_text(text) and None


def layout() -> ParallelSettings:
    return prepared(build_parser().parse_args(["serve", "--profile", "ring"])).parallel


def test_layers_are_shared_where_the_model_lets_them_else_divided_into_stages(
    dotenv: Callable[[str], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dotenv(f"MODEL_REPO={tiny_model(tmp_path / 'llama')}\n{WORKER}")
    assert (layout().tensor_parallel_size, layout().pipeline_parallel_size) == (2, 1)
    os.environ["MODEL_REPO"] = str(tiny_model(tmp_path / "plamo", "plamo"))
    with caplog.at_level(logging.WARNING):
        assert (layout().tensor_parallel_size, layout().pipeline_parallel_size) == (1, 2)
    assert "NUM_DEVICES=2 cannot share each layer (plamo does not run tensor-parallel" in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NUM_DEVICES=2\n", "NUM_DEVICES=2: WORKER_HOSTS and WORKER_SSH name no other machine; set them, or NUM_DEVICES=1"),
        (
            "WORKER_HOSTS=127.0.0.1\nWORKER_SSH=me@127.0.0.1\n",
            "WORKER_HOSTS: 127.0.0.1 is this machine's own address; start on a machine",
        ),
    ],
)
@pytest.mark.parametrize("command", ["serve", "up"])
def test_machines_that_cannot_be_used_are_refused_before_anything_starts(
    dotenv: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str, command: str
) -> None:
    dotenv(f"MODEL_REPO={tiny_model(tmp_path / 'llama')}\n{text}")
    assert main([command, "--profile", "ring"]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_two_names_of_one_machine_are_refused(
    dotenv: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dotenv(f"MODEL_REPO={tiny_model(tmp_path / 'llama')}\nWORKER_HOSTS=10.0.0.2,10.0.0.3\nWORKER_SSH=me@10.0.0.2,mac\n")
    for machines, words in (
        (["other", "other"], "host mac: is the same machine as me@10.0.0.2"),
        ([machine_id(), "other"], "host me@10.0.0.2: is the same machine as 127.0.0.1"),
    ):
        monkeypatch.setattr(sync, "install", lambda *_, found=machines: [(one, "") for one in found])
        assert main(["up", "--profile", "ring"]) == 2
        assert words in capsys.readouterr().err


def test_the_directory_for_models_is_the_hubs_cache_unless_that_is_set(dotenv: Callable[[str], None], tmp_path: Path) -> None:
    dotenv("MODEL_CACHE_DIR=/Users/${USER}/.cache/huggingface/hub\n")
    os.environ |= {"USER": "me"}
    os.environ.pop("HF_HUB_CACHE", None)
    layout()
    assert os.environ["HF_HUB_CACHE"] == "/Users/me/.cache/huggingface/hub"
    os.environ["HF_HUB_CACHE"] = "/models"
    layout()
    assert os.environ["HF_HUB_CACHE"] == "/models"


def test_settings_kept_by_an_earlier_version_are_an_error(
    dotenv: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "state" / "servers" / "default" / "settings.json"
    kept.parent.mkdir(parents=True)
    kept.write_text('{"settings": {}, "keys": 0}')
    assert main(["restart"]) == 2
    assert "default was never started by this version: `tandem up MODEL` starts a server" in capsys.readouterr().err
