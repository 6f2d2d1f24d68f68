"""`tandem distributed_launcher`: the command line of vllm-mlx's launcher."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tandem.cli.arguments import load_settings
from tandem.cli.main import build_parser, main
from tandem.cli.options.vllm_mlx import NEEDLESS, RENAMED, translate
from tandem.config.settings import Settings


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_RANK", raising=False)


def settings(*words: str) -> Settings:
    return load_settings(build_parser().parse_args(words)).settings


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (
            "--hostfile F --backend jaccl -- --model M --continuous-batching --host 0.0.0.0 --port 8000",
            "M --hostfile F --backend jaccl --host 0.0.0.0 --port 8000",
        ),
        (
            "--model M --max-tokens=9 --timeout 3 --disable-prefix-cache --enable-metrics",
            "M --default-max-tokens 9 --request-timeout 3 --prefix-cache 0 --enable-metrics",
        ),
        (
            "--model M --tool-call-parser hermes --enable-auto-tool-choice --max-num-seqs 4 --rate-limit 7",
            "M --tool-parser hermes --max-batch-size 4 --requests-per-minute 7",
        ),
        (
            "--model M --completion-batch-size 3 --prefill-step-size 64 --max-kv-size 512 --served-model-name x y",
            "M --max-batch-size 3 --prefill-chunk 64 --kv-tokens 512 --served-name x,y",
        ),
    ],
)
def test_it_means_the_same(there: str, here: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": ["10.0.0.2"]}]))
    there, here = (text.replace("--hostfile F", f"--hostfile {hosts}") for text in (there, here))
    assert settings("distributed_launcher", *there.split()) == settings("serve", *here.split())


def test_all_that_is_renamed_exists() -> None:
    flags = build_parser()._actions[-1].choices["serve"]._option_string_actions  # type: ignore[index,call-overload]
    for words in RENAMED.values():
        assert words[0] in flags
    assert not {*RENAMED, *NEEDLESS} & set(flags)


def test_values_that_look_like_flags_of_the_launcher_stay() -> None:
    assert translate(["--model", "M", "--", "--", "--max-tokens=3"]) == ["--model", "M", "--", "--default-max-tokens=3"]


def test_there_is_a_rank_for_each_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 3))
    assert main(["distributed_launcher", "--hostfile", str(hosts), "--", "--model", "M", "--port", "x"]) == 2
    first, last = capsys.readouterr().err.splitlines()
    words = f"--hostfile {hosts} --model M --port x --tensor-parallel-size 3"
    assert first == f"tandem: this is `tandem serve {words}`"
    assert "--port" in last


def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["distributed_launcher", "--model", "M", "--mcp-config", "f"])
    assert "unrecognized arguments: --mcp-config" in capsys.readouterr().err
    assert main(["distributed_launcher", "--hostfile", "nowhere.json", "--", "--model", "M"]) == 2
    assert "nowhere.json: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_by_hand_is_told_the_commands_with_the_host_and_the_number_of_ranks(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = tmp_path / "mlx_ibv_devices.json"
    devices.write_text(json.dumps([[None, "rdma_en2"], ["rdma_en2", None]]))
    monkeypatch.setenv("MLX_RANK", str(rank))
    monkeypatch.setenv("MLX_JACCL_COORDINATOR", "machine-a:12345")
    monkeypatch.setenv("MLX_IBV_DEVICES", str(devices))
    assert main(["distributed_launcher", "--model", "my models/M", "--continuous-batching", "--port", "8001"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tandem: MLX_RANK={rank} starts a rank by hand")
    serve, join = (shlex.split(words) for words in re.findall(r"`tandem ([^`]*)`", line))
    found = settings(*serve)
    assert (found.model.model, found.server.port, found.parallel.tensor_parallel_size) == ("my models/M", 8001, 2)
    assert (found.parallel.chosen_launcher, found.parallel.token_file) == ("manual", "token")
    joined = build_parser().parse_args(join)
    assert (joined.command, joined.join, joined.token_file) == ("rank", "machine-a", "token")
    devices.unlink()
    assert main(["distributed_launcher", "--model", "M"]) == 2
    assert "MLX_RANK is" in (said := capsys.readouterr().err) and "No such file" in said


def test_a_rank_of_a_ring_by_hand_is_told_the_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_RANK", "0")
    assert main(["distributed_launcher", "--model", "M"]) == 2
    assert "--join THAT-MACHINE" in (said := capsys.readouterr().err) and "--tensor-parallel-size N`" in said
    hosts = tmp_path / "ring.json"
    hosts.write_text(json.dumps([["10.0.0.1:5000"], ["10.0.0.2:5000"], ["10.0.0.3:5000"]]))
    monkeypatch.setenv("MLX_HOSTFILE", str(hosts))
    assert main(["distributed_launcher", "--model", "M"]) == 2
    assert "--tensor-parallel-size 3`" in capsys.readouterr().err
