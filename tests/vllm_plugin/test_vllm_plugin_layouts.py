"""Every layout under vLLM's own executors gives the greedy tokens of `tandem serve` and of mlx-lm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_helpers import PROMPTS, engine, expected_tokens, generate

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
OUTPUT = 16

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "one, synchronous": {"async_scheduling": False},
    "pp2": {"pipeline_parallel_size": 2},
    "pp2, synchronous": {"pipeline_parallel_size": 2, "async_scheduling": False},
    "tp2": {"tensor_parallel_size": 2},
    "tp2 x pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
FORM = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def logprobs_penalties_and_grammars(llm: Any) -> None:
    """What an engine says and does beside tokens; over two stages, as there it comes from the last."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams

    prompt = {"prompt_token_ids": PROMPTS[1]}
    [plain] = llm.generate(prompt, SamplingParams(**GREEDY, logprobs=3), use_tqdm=False)
    for token, found in zip(plain.outputs[0].token_ids, plain.outputs[0].logprobs, strict=True):
        best = max(found.values(), key=lambda one: one.logprob)
        assert len(found) == 3 and found[token].logprob == best.logprob and found[token].rank == 1
    [biased] = llm.generate(prompt, SamplingParams(**GREEDY, logit_bias={77: 100.0}), use_tqdm=False)
    assert list(biased.outputs[0].token_ids) == [77] * 8
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    once, again = (llm.generate(prompt, drawn, use_tqdm=False)[0].outputs[0].token_ids for _ in range(2))
    assert once == again != plain.outputs[0].token_ids
    params = SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=StructuredOutputsParams(json=FORM))
    outputs = llm.generate([prompt] * 3, params, use_tqdm=False)
    for output in outputs:
        assert json.loads(output.outputs[0].text)["a"] in ("x", "y")
    with pytest.raises(VLLMValidationError, match="bad_words is not supported"):
        llm.generate(prompt, SamplingParams(bad_words=["x"]), use_tqdm=False)
    with pytest.raises(VLLMValidationError, match="log probabilities of the prompt"):
        llm.generate(prompt, SamplingParams(prompt_logprobs=1), use_tqdm=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_tokens_of_a_layout(tiny: Path, expected: list[list[int]], layout: str) -> None:
    with engine(tiny, **LAYOUTS[layout], max_num_batched_tokens=64, max_num_seqs=8) as llm:
        scheduling = llm.llm_engine.vllm_config.scheduler_config
        assert scheduling.async_scheduling == ("synchronous" not in layout)
        assert generate(llm, PROMPTS, OUTPUT) == expected
        # Again, now that vLLM takes the prompts for cached.
        assert generate(llm, PROMPTS, OUTPUT) == expected
        if layout == "pp2":
            logprobs_penalties_and_grammars(llm)


def test_the_first_scheduling_contract_works_as_well(
    tiny: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with engine(tiny, pipeline_parallel_size=2, num_gpu_blocks_override=17) as llm:
        assert generate(llm, PROMPTS * 3, OUTPUT) == expected * 3


@pytest.mark.demo
def test_the_demo_model_with_uneven_heads(demo: Path) -> None:
    prompts = [[504, 3575, 282, 4649, 314], [19, 28, 216, 34]]
    found = expected_tokens(demo, prompts, 12)
    with engine(demo, tensor_parallel_size=3) as llm:
        assert generate(llm, prompts, 12) == found["served"]


def test_drafts_change_nothing(tiny: Path, expected: list[list[int]]) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    with engine(tiny, speculative_config=NGRAM, max_num_seqs=8, disable_log_stats=False) as llm:
        assert generate(llm, PROMPTS, OUTPUT) == expected
        prompt = {"prompt_token_ids": PROMPTS[1]}
        forced = StructuredOutputsParams(regex="(ab){12}")
        for penalty in (0.0, 0.5):  # with a penalty nothing is drafted
            params = SamplingParams(temperature=0.0, max_tokens=64, frequency_penalty=penalty, structured_outputs=forced)
            [repeated] = llm.generate(prompt, params, use_tqdm=False)
            assert repeated.outputs[0].text == "ab" * 12
            accepted = [one.value for one in llm.get_metrics() if one.name == "vllm:spec_decode_num_accepted_tokens"]
            assert 3 <= accepted[0] < 24
        [plain] = llm.generate(prompt, SamplingParams(**{**GREEDY, "max_tokens": OUTPUT}, logprobs=2), use_tqdm=False)
        assert list(plain.outputs[0].token_ids) == expected[1]
        for token, found in zip(plain.outputs[0].token_ids, plain.outputs[0].logprobs, strict=True):
            assert found[token].rank == 1 and found[token].logprob == max(one.logprob for one in found.values())
        params = SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=StructuredOutputsParams(json=FORM))
        [formed] = llm.generate(prompt, params, use_tqdm=False)
        assert json.loads(formed.outputs[0].text)["a"] in ("x", "y")


def test_the_table_of_overrides_is_needed() -> None:
    """Each entry stands for a defect of the versions that are installed; without the defect it must go."""
    import inspect

    import torch
    from vllm.distributed import parallel_state

    from tandem.vllm_plugin.compat import OVERRIDES

    targets = {override.target for override in OVERRIDES}
    assert targets == {
        "torch.accelerator.empty_cache",
        "torch.accelerator.empty_host_cache",
        "vllm.engine.arg_utils.EngineArgs.create_model_config",
        "vllm.config.VllmConfig._validate_v2_model_runner",
        "vllm.v1.engine.utils.CoreEngineActorManager.__init__",
    }
    source = inspect.getsource(parallel_state.cleanup_dist_env_and_memory)
    assert "torch.accelerator.empty_cache()" in source and "torch.accelerator.empty_host_cache()" in source
    if not torch.accelerator.is_available():
        with pytest.raises(RuntimeError, match="accelerator"):
            torch._C._accelerator_emptyCache()
    import ray
    from vllm.config import vllm as config_module
    from vllm.v1.engine.utils import CoreEngineActorManager

    assert "ray.init()" in inspect.getsource(CoreEngineActorManager.__init__)
    assert "set_sigterm_handler(" in inspect.getsource(ray.init)
    assert "Model Runner V2 requires Triton" in inspect.getsource(config_module)


def test_a_silent_fallback_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    run = subprocess.run(
        [sys.executable, "-c", "from vllm.plugins import load_general_plugins as f; f()"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode != 0
    assert "VLLM_TARGET_DEVICE=cpu makes vLLM ignore platform plugins" in run.stderr
