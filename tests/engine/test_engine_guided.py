"""Structured output in every layout, through a replay and through preemption; a thousand outputs all validate."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from submitted import Killer, submitted
from tandem import LLM, SamplingParams, StructuredOutputs
from tandem.errors import RequestError
from tandem.guided.compile_probe import trouble
from tandem.guided.grammar import grammar_of
from tandem.protocol.request import EngineRequest
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2 mlx": {"pipeline_parallel_size": 2, "channel": "mlx"},
    "tp2": {"tensor_parallel_size": 2},
    "tp1,2": {"parallel": (1, 2)},
}
FORMATS = jsonschema.FormatChecker(["email", "ipv4", "ipv6", "uuid"])
RECORD = {
    "type": "object",
    "required": ["id", "tags", "ok"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string", "pattern": "^[A-F]{3}-[0-9]{4}$"},
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 16, "maxItems": 20},
    },
}
GUIDED = SamplingParams(max_tokens=300, temperature=1.0, seed=11, structured_outputs=StructuredOutputs(json=RECORD))
PROMPTS = [[(7 * i + j) % 400 + 3 for j in range(length)] for i, length in enumerate((1, 4, 9, 30, 3, 50))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    with LLM(str(model)) as llm:
        outputs = llm.generate(PROMPTS, GUIDED)
    for output in outputs:
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), RECORD)
    assert len({output.text for output in outputs}) > 2
    return [output.text for output in outputs]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_valid_outputs(model: Path, expected: list[str], layout: str) -> None:
    with LLM(str(model), prefill_chunk=16, **LAYOUTS[layout]) as llm:
        assert [output.text for output in llm.generate(PROMPTS, GUIDED)] == expected


def test_a_rank_that_dies_changes_nothing(model: Path, expected: list[str]) -> None:
    with LLM(str(model), pipeline_parallel_size=2) as llm:
        form = llm._session._checked(GUIDED)
        tokens: dict[str, list[int]] = {str(i): [] for i in range(len(PROMPTS))}
        requests = [
            EngineRequest(request_id=name, prompt=prompt, params=form) for name, prompt in zip(tokens, PROMPTS, strict=True)
        ]
        count = itertools.count()
        for message in submitted(llm, requests, Killer(llm, lambda _: next(count) > 40)):
            tokens[message.request_id] += message.tokens[:-1] if message.stop_token else message.tokens
        assert llm.engine.restarts == 1
        assert [llm.tokenizer.decode(one, skip_special_tokens=False) for one in tokens.values()] == expected


def test_preemption_changes_nothing(model: Path, expected: list[str]) -> None:
    with LLM(str(model), kv_tokens=410) as llm:
        assert [output.text for output in llm.generate(PROMPTS, GUIDED)] == expected
        assert llm.engine.scheduler.batches.preemptions > 0


def test_a_request_from_a_lost_replica_goes_on(model: Path, expected: list[str]) -> None:
    with LLM(str(model)) as llm:
        form = llm._session._checked(GUIDED)
        whole = [
            token
            for message in submitted(llm, [EngineRequest(request_id="a", prompt=PROMPTS[0], params=form)])
            for token in message.tokens
        ]
        assert llm.tokenizer.decode(whole) == expected[0]
        for cut in (1, len(whole) // 2, len(whole) - 2):
            moved = EngineRequest(request_id=f"b{cut}", prompt=PROMPTS[0], params=form, produced=whole[:cut])
            assert [token for message in submitted(llm, [moved]) for token in message.tokens] == whole[cut:]


def ended(llm: LLM, requests: list[EngineRequest]) -> dict[str, str]:
    """Texts of those that ended by themselves."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ends = set()
    for message in submitted(llm, requests):
        tokens[message.request_id] += message.tokens[:-1] if message.stop_token else message.tokens
        if message.stop_token:
            ends.add(message.request_id)
    return {name: llm.tokenizer.decode(tokens[name], skip_special_tokens=False) for name in ends}


def test_a_thousand_outputs_validate(model: Path) -> None:
    schemas = json.loads((Path(__file__).parents[1] / "guided" / "schemas.json").read_text())
    requests = [
        EngineRequest(
            request_id=f"{name}/{i}",
            prompt=[5, 6, 7 + i],
            params=SamplingParams(max_tokens=450, temperature=1.0, seed=7, structured_outputs=StructuredOutputs(json=schema)),
        )
        for name, schema in schemas.items()
        for i in range(25)
    ]
    validators = {name: jsonschema.Draft202012Validator(schema, format_checker=FORMATS) for name, schema in schemas.items()}
    with LLM(str(model), max_batch_size=128) as llm:
        texts = ended(llm, requests)
    for name, text in texts.items():
        assert not list(validators[name.rpartition("/")[0]].iter_errors(json.loads(text))), (name, text)
    assert len(texts) > 0.97 * len(requests) > 970, "few are cut off by max_tokens"


def test_outputs_of_the_schemas_of_json_schemas_test_suite_validate(model: Path) -> None:
    suite = json.loads((Path(__file__).parents[1] / "guided" / "suite" / "draft2020-12.json").read_text())
    grammars = [
        (group["schema"], grammar_of(StructuredOutputs(json=group["schema"]))) for groups in suite.values() for group in groups
    ]
    grammars = [(schema, grammar) for schema, grammar in grammars if not trouble(grammar, {})]
    with LLM(str(model), max_batch_size=128) as llm:
        # Without it a random model seldom ends what may have any length.
        closing = dict.fromkeys([2, *(llm.tokenizer.encode(text, False)[0] for text in '"}]')], 4.0)
        common: Any = {"max_tokens": 150, "temperature": 1.5, "logit_bias": closing}
        texts = ended(
            llm,
            [
                EngineRequest(
                    request_id=str(i),
                    prompt=[5, 6, 7],
                    params=SamplingParams(**common, seed=i, structured_outputs=StructuredOutputs(grammar=grammars[i // 8][1])),
                )
                for i in range(8 * len(grammars))
            ],
        )
    for name, text in texts.items():
        schema = grammars[int(name) // 8][0]
        validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
        assert not list(validator.iter_errors(json.loads(text))), (schema, text)
    assert len(texts) > 1000


def test_the_python_api_takes_every_form_and_refuses_what_cannot_be(model: Path) -> None:
    with LLM(str(model)) as llm:

        def ask(**form: Any) -> str:
            params = SamplingParams(max_tokens=200, structured_outputs=StructuredOutputs(**form))
            return llm.generate([[5, 6]], params)[0].text

        assert ask(choice=("red", "green")) in ("red", "green")
        assert re.fullmatch("[a-c]{2,4}!", ask(regex="[a-c]{2,4}!"))
        assert ask(grammar='start: "f(" ("x" | "y") ")"') in ("f(x)", "f(y)")
        assert ask(json=json.dumps({"const": [1, None]})).replace(" ", "").replace("\n", "") == "[1,null]"
        with pytest.raises(RequestError, match="Unimplemented") as caught:
            ask(json={"not": {}})
        assert caught.value.param == "structured_outputs"
        with pytest.raises(RequestError, match="exactly one"):
            ask(choice=("a",), regex="b")
        with pytest.raises(RequestError, match="min_tokens"):
            llm.generate([[5]], SamplingParams(min_tokens=2, structured_outputs=StructuredOutputs(json_object=True)))
