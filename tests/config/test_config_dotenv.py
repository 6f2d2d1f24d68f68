"""The file `.env` of the profile `ring`: what is read, what wins, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.config.legacy import read_dotenv
from tandem.errors import ConfigError

RING = """\
# Model Configuration
MODEL_REPO=mlx-community/DeepSeek-Coder-V2-Lite-Instruct-8bit
MODEL_CACHE_DIR=/Users/${USER}/.cache/huggingface/hub

export API_PORT=8100   # the API
KV_CACHE_MAX_SIZE=
LOG_LEVEL="INFO"
"""


def test_the_file_of_the_ring_project_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text(RING)
    monkeypatch.setenv("USER", "me")
    assert read_dotenv(tmp_path, {"API_PORT": "9000"}) == {
        "MODEL_REPO": "mlx-community/DeepSeek-Coder-V2-Lite-Instruct-8bit",
        "MODEL_CACHE_DIR": "/Users/me/.cache/huggingface/hub",
        "KV_CACHE_MAX_SIZE": "",
        "LOG_LEVEL": "INFO",
    }


def test_there_need_not_be_one(tmp_path: Path) -> None:
    assert read_dotenv(tmp_path, {}) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"MODEL_REPO=a\nTwo words\n", "line 2: 'Two words' is not followed by a value"),
        (b"\n\nAPI_KEY\n", "line 3: 'API_KEY' is not followed by a value: lines are NAME=VALUE"),
        (b"=3\n", "line 1"),
        (b"A=\xff\n", "is not UTF-8 text"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: bytes, words: str) -> None:
    (tmp_path / ".env").write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        read_dotenv(tmp_path, {})
    assert words in caught.value.message and "\n" not in caught.value.message


def test_a_value_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("A secret=sesame\n")
    with pytest.raises(ConfigError) as caught:
        read_dotenv(tmp_path, {})
    assert "sesame" not in caught.value.message


def test_a_directory_of_that_name_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ".env").mkdir()
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_dotenv(tmp_path, {})


def test_it_needs_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".env").write_text("MODEL_REPO=/nowhere\nMAX_SEQUENCE_LENGTH=long\n")
    monkeypatch.chdir(tmp_path)
    for name in ("MODEL_REPO", "MAX_SEQUENCE_LENGTH"):
        monkeypatch.setenv(name, "")  # so that what the command sets is taken away again
        monkeypatch.delenv(name)
    assert main(["serve"]) == 2
    assert "no model is given" in capsys.readouterr().err
    assert main(["serve", "--profile", "ring"]) == 2
    assert "MAX_SEQUENCE_LENGTH: 'long' is not a whole number" in capsys.readouterr().err
