"""Types of every kind behind one address over two stages, over two ranks, and over both: mlx-lm's own text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import mlx.core as mx
import openai
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step

from served import served
from tandem.models.families.sharding import SHARDING
from tandem.testing import EOS, tiny_model

pytestmark = pytest.mark.slow

TYPES = ("deepseek_v32", "kimi_k25", "qwen3_5_moe", "minimax_m2", "gemma4", "lfm2", "kimi_linear", "mistral3")
"""tests/engine/test_engine_prefix.py has others."""
BOTH = ("dbrx", "longcat_flash", "minimax_m3_vl", "recurrent_gemma")
"""Experts in a list; two attentions a layer; an index, and one by one; a kv head that every rank has, and gates."""
SHARDED = tuple(one for one in TYPES if one in SHARDING)[::2]
LAYOUTS = {"pp": tuple(one for one in TYPES if one not in SHARDED), "tp": SHARDED, "both": BOTH}
"""Each type in one layout: tests/loading has each over stages, and over ranks as it is cut."""

PROMPTS = ("Once upon a time", "the rain in Spain stays mainly in the plain, and so does the river " * 2)
MESSAGES = [{"role": "user", "content": "the other one"}]
TOKENS = 10


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for family in TYPES + BOTH:
        tiny_model(path / family, family)
    return path


@pytest.fixture(scope="module")
def url(models: Path) -> Iterator[str]:
    """One server; a model is loaded when a request names it, and goes for the next but one."""
    pp, tp = "pipeline_parallel_size = 2\n", "tensor_parallel_size = 2\n"
    sizes = {"pp": pp, "tp": tp, "both": pp + tp}
    tables = [
        f'[models."{family}.{layout}"]\nmodel = "{models / family}"\n{sizes[layout]}kv_tokens = 2000\n'
        for layout, families in LAYOUTS.items()
        for family in families
    ]
    config = models / "tandem.toml"
    config.write_text(
        f'[model]\nmodel = "{models / TYPES[0]}"\n[scheduler]\nself_check = false\nkv_tokens = 2000\n'
        "[models]\nmax_loaded = 2\n" + "\n".join(tables)
    )
    with served(str(models / TYPES[0]), "--config", str(config)) as address:
        yield address


@cache
def expected(path: Path) -> tuple[list[str], str]:
    """Greedy texts of mlx-lm: of PROMPTS, and the answer to MESSAGES."""
    model, tokenizer = load(str(path))
    model.set_dtype(mx.float32)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    prompts.append(tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True))
    texts = []
    for prompt in prompts:
        tokens = [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=TOKENS)]
        tokens = tokens[: tokens.index(EOS)] if EOS in tokens else tokens
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return texts[:-1], texts[-1]


@pytest.mark.parametrize(("family", "layout"), [(one, layout) for layout, each in LAYOUTS.items() for one in each])
def test_mlx_lms_text_through_http(family: str, layout: str, models: Path, url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240)
    name = f"{family}.{layout}"
    texts, answer = expected(models / family)
    for _ in range(2):  # again, from what was kept of the prompts
        reply = client.completions.create(model=name, prompt=list(PROMPTS), max_tokens=TOKENS, temperature=0)
        assert [one.text for one in reply.choices] == texts
    chat = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=TOKENS, temperature=0)
    assert chat.choices[0].message.content == answer
    stream = client.completions.create(model=name, prompt=PROMPTS[1], max_tokens=TOKENS, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in stream if part.choices) == texts[1]
