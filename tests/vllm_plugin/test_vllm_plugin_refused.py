"""What cannot run is refused when vLLM is configured, in one sentence, which is the last of the log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_helpers import SEES, VLLM

from tandem.errors import ConfigError, UnsupportedModel
from tandem.testing import tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
DP = {"data_parallel_size": 2}
DP_RAY = {**DP, "data_parallel_backend": "ray"}


def configured(model: Path, **options: Any) -> Any:
    """What vLLM makes of its arguments before it starts anything."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(str(model), **{"max_model_len": 128, **options}).create_engine_config()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_lora": True}, "LoRA"),
        ({"speculative_config": NGRAM, "pipeline_parallel_size": 2}, "speculative decoding is supported for one rank"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "uni"),
        ({"kv_cache_dtype": "fp8"}, "KV cache"),
        (DP_RAY | {"pipeline_parallel_size": 2}, "with --data-parallel-backend ray a replica is one rank"),
        (DP_RAY | {"tensor_parallel_size": 2}, "with --data-parallel-backend ray a replica is one rank"),
        (DP_RAY | {"speculative_config": NGRAM}, "speculative decoding is not served with --data-parallel-backend ray"),
        (DP | {"data_parallel_size_local": 0}, "--data-parallel-size-local 0 is not supported"),
        (DP | {"data_parallel_size_local": 1}, "replicas on other machines need --data-parallel-backend ray"),
        (
            DP_RAY | {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True},
            "--data-parallel-hybrid-lb and --data-parallel-external-lb are not supported",
        ),
    ],
)
def test_what_cannot_run_is_refused_at_configuration(tiny: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^Tandem's vLLM platform: .*{words}"):
        configured(tiny, **options)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}, "'whisper' is not supported"),
        ({"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"]}, "deepseek_v41 is not supported: its"),
        ({"model_type": "no_such", "architectures": ["NoSuchForCausalLM"]}, "'no_such' is not supported"),
    ],
)
def test_what_tandem_lacks_is_refused_before_vllm_looks_at_it(
    tmp_path: Path, config: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=words):
        configured(tmp_path)
    assert "inspect" not in caplog.text


def test_models_that_see_are_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2VLForConditionalGeneration"]}))
    with pytest.raises(UnsupportedModel, match="Qwen2VLForConditionalGeneration takes images, video or sound"):
        configured(tmp_path)


def test_types_that_see_are_refused(monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path) -> None:
    """As docs/models-list.md says: vLLM counts the architectures of their checkpoints among those that see or hear."""
    from tandem.vllm_plugin import unsupported
    from tandem.vllm_plugin.compat import _is_multimodal

    monkeypatch.setattr(unsupported, "describe", lambda files: None)
    monkeypatch.setattr(unsupported, "require_dry_run", lambda path, description: None)
    for file in tiny.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    for family, architecture in SEES.items():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "architectures": [architecture]}))
        with pytest.raises(UnsupportedModel, match=f"{architecture} takes images, video or sound"):
            unsupported.refuse_model(str(tmp_path), None, _is_multimodal)


@pytest.mark.parametrize("options", [DP, DP_RAY])
def test_replicas_of_a_mixture_of_experts_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="data parallelism of a mixture of experts is not supported"):
        configured(tiny_model(tmp_path, "qwen3_moe"), **options)


def test_replicas_on_this_machine_are_taken(tiny: Path) -> None:
    parallel = configured(tiny, **DP, pipeline_parallel_size=2).parallel_config
    assert (parallel.data_parallel_size, parallel.world_size) == (2, 2)


def test_variables_of_vllm_metal_are_known(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from vllm.engine.arg_utils import EngineArgs as E; import sys; E(sys.argv[1]).create_engine_config()"
    for name, value in (
        ("MEMORY_FRACTION", "0.5"),
        ("RING_BASE_PORT", "32323"),
        ("VISIBLE_DEVICES", "0"),
        ("USE_PAGED_ATTENTION", "1"),
        ("NO_SUCH", "1"),
    ):
        monkeypatch.setenv(f"VLLM_METAL_{name}", value)
    done = subprocess.run([sys.executable, "-c", code, str(tiny)], capture_output=True, text=True, timeout=240, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert [line.rsplit(": ", 1)[1] for line in said.splitlines() if "Unknown vLLM environment" in line] == ["VLLM_METAL_NO_SUCH"]
    assert said.count("VLLM_METAL_USE_PAGED_ATTENTION has no effect: the KV cache is Tandem's own") == 1


def test_the_sentence_is_the_last_of_the_log(tiny: Path) -> None:
    done = subprocess.run(
        [str(VLLM), "serve", str(tiny), "--enable-lora", "--port", "0"], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "vllm: Tandem's vLLM platform: LoRA adapters are not supported; merge the adapter into the model"
    )
    assert "Traceback" not in done.stdout + done.stderr
