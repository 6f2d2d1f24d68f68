"""`tandem parity` over real ranks: passes where it should, fails where weights differ, and says what was misused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tandem.cli.main import main
from tandem.testing import tiny_model

EXACT = "PARITY PASS max_abs_diff=0.000e+00\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("llama", "gemma3_text", "gpt_oss")
    return {name: tiny_model(tmp_path_factory.mktemp(name) / "model", name, shards=2) for name in names}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    for name in ("MLX_RANK", "MLX_HOSTFILE", "MLX_WORLD_SIZE", "MLX_IBV_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options", "exact"),
    [
        ("llama", ["--pipeline-parallel-size", "2"], True),
        ("llama", ["--tensor-parallel-size", "2"], False),
        ("gemma3_text", ["--pipeline-parallel-size", "3", "--channel", "mlx"], True),
        ("gpt_oss", ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"], False),
    ],
    ids=["pp2", "tp2", "pp3", "tp2pp2"],
)
def test_every_layout_passes(
    models: dict[str, Path], references: Path, capsys: pytest.CaptureFixture[str], family: str, options: list[str], exact: bool
) -> None:
    reference = references / f"{family}.npz"
    code = main(["parity", str(models[family]), "--reference", str(reference), *options])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert printed.out == EXACT if exact else printed.out.startswith("PARITY PASS max_abs_diff=")
    assert "tokens equal" in printed.err


@pytest.mark.slow
def test_without_a_file_the_reference_goes_to_the_cache(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text("hello there\n\n[5, 6, 7]\n")
    options = ["--prompts", str(tmp_path / "prompts"), "--tokens", "3"]
    assert main(["parity", str(models["llama"]), *options]) == 0
    assert capsys.readouterr().out == EXACT
    [path] = (tmp_path / "cache" / "parity").iterdir()
    with np.load(path) as archive:
        metadata = json.loads(str(archive["metadata"]))
        assert metadata["prompts"][1] == [5, 6, 7]
        assert (metadata["dtype"], metadata["gpu"], set(metadata["versions"])) == ("float32", False, {"tandem", "mlx", "mlx-lm"})
        assert archive["logits_1"].shape == (5, 512)
        assert archive["tokens_1"].shape == (3,)


@pytest.mark.slow
def test_other_weights_in_one_file_fail(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import mlx.core as mx

    reference = str(tmp_path / "reference.npz")
    assert main(["parity", str(models["llama"]), "--reference", reference, "--tokens", "4"]) == 0
    changed = tmp_path / "changed"
    shutil.copytree(models["llama"], changed)
    [_, second] = sorted(changed.glob("*.safetensors"))
    arrays, metadata = mx.load(str(second), return_metadata=True)
    name = next(name for name in sorted(arrays) if "down_proj" in name)
    arrays[name] = arrays[name] + 0.02
    mx.save_safetensors(str(second), arrays, metadata)
    capsys.readouterr()
    for options in (["--pipeline-parallel-size", "2"], ["--tensor-parallel-size", "2"]):
        code = main(["parity", str(changed), "--reference", reference, "--tokens", "4", *options])
        printed = capsys.readouterr().out
        assert code == 1
        assert printed.startswith("PARITY FAIL max_abs_diff=")
        assert float(printed.split("=")[1]) > 1e-3
    # The user may allow it: all figures are within the largest logit's size.
    assert main(["parity", str(changed), "--reference", reference, "--tokens", "4", "--tolerance", "2"]) == 0


@pytest.mark.slow
def test_another_model_fails_and_the_reference_is_only_read(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = tmp_path / "reference.npz"
    other = tiny_model(tmp_path / "other", "llama", seed=1, shards=2)
    assert main(["parity", str(other), "--reference", str(reference), "--tokens", "2"]) == 0
    before = reference.read_bytes()
    assert main(["parity", str(models["llama"]), "--reference", str(reference), "--tokens", "2"]) == 1
    assert "in the reference and" in capsys.readouterr().err
    assert reference.read_bytes() == before


def _misuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["parity", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    return line


def test_misuse_is_one_line_and_code_2(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(models["llama"])
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"PK\x03\x04 not really")
    np.savez(tmp_path / "foreign.npz", a=np.zeros(2))
    empty = tmp_path / "empty"
    empty.write_text("\n")
    assert "has no lines" in _misuse(capsys, model, "--prompts", str(empty))
    for name in ("broken", "foreign"):
        assert f"{name}.npz: is not a reference" in _misuse(capsys, model, "--reference", str(tmp_path / f"{name}.npz"))
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts"))
    assert "MLX_RANK is 0" in _misuse(capsys, model)
    (tmp_path / "hosts").write_text('[["127.0.0.1:1"], ["127.0.0.1:2"]]')
    assert "there is no reference" in _misuse(capsys, model)
    assert "started 2 ranks, the layout has 3" in _misuse(capsys, model, "--tensor-parallel-size", "3")
    assert "leave out --channel" in _misuse(capsys, model, "--channel", "tcp")


def test_a_reference_for_another_question_is_refused(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tandem.checkpoints.resolve import resolve
    from tandem.diagnostics.parity.reference import Recording, describe, write
    from tandem.diagnostics.parity.runs import checked_workload, default_prompts

    def save(name: str, tokens: int, chunk: int) -> str:
        work = checked_workload(default_prompts(512, 4), tokens=tokens, prefill_chunk=chunk, vocab_size=512, max_context=512)
        logits = [np.zeros((work.rows(i), 512), dtype=np.float32) for i in range(2)]
        path = tmp_path / name
        write(path, Recording([[0] * tokens] * 2, logits, "float32", False), describe(resolve(str(models[name])), work))
        return str(path)

    path = save("llama", 8, 4)
    assert "another --tokens" in _misuse(
        capsys, str(models["llama"]), "--reference", path, "--tokens", "9", "--prefill-chunk", "4"
    )
    assert "other prompts" in _misuse(capsys, str(models["llama"]), "--reference", path, "--prefill-chunk", "5")
    assert "another model" in _misuse(capsys, str(models["gpt_oss"]), "--reference", path, "--prefill-chunk", "4")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["kimi_linear"], ["minimax_m3_vl"], ["deepseek_v3", "--expert-parallel"]], ids=lambda one: one[0]
)
def test_a_type_is_tried_with_ranks_that_share_layers(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One of them computes its sequences one by one."""
    [name, *flags] = options
    code = main(["parity", "--tiny", name, "--tensor-parallel-size", "2", "--tokens", "3", *flags])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert f"PASS {name}: 4 layers" in printed.out
    assert "PARITY PASS max_abs_diff=" in printed.out


def test_what_a_type_cannot_share_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--tiny", "qwen3", "--tensor-parallel-size", "2", "--expert-parallel"]) == 2
    assert "qwen3 has no experts that ranks could hold whole; leave it out" in capsys.readouterr().err
    assert main(["parity", "--tiny", "qwen3_moe", "--expert-parallel"]) == 2
    assert "give --tensor-parallel-size, or leave it out" in capsys.readouterr().err
