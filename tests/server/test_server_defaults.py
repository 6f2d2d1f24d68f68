"""What a request does not say, the model's generation_config.json does, in every API."""

from __future__ import annotations

import pytest

from tandem.protocol.request import SamplingDefaults

OWN = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1, max_tokens=7)
MESSAGES = [{"role": "user", "content": "hi"}]
APIS = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 7},
}


def params_of(server, engine, path, **fields):
    engine.submitted.clear()
    response = server.http.post(path, json={**APIS[path], **fields})
    assert response.status_code == 200, response.text
    (request,) = engine.submitted.values()
    return request.params, response.json()


@pytest.fixture
def own(engine, serve):
    engine.set_status(defaults=OWN)
    return serve


@pytest.mark.parametrize("path", APIS)
def test_every_api_takes_the_models_defaults(own, engine, path):
    server = own()
    params, answer = params_of(server, engine, path)
    for name, value in OWN.given().items():
        assert getattr(params, name) == value, name
    if path == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)
    params, _ = params_of(server, engine, path, temperature=0, top_p=1)
    assert (params.temperature, params.top_p, params.top_k) == (0, 1, 20)


def test_what_a_request_turns_off_is_off(own, engine):
    params, _ = params_of(own(), engine, "/v1/completions", top_k=-1, min_p=0, repetition_penalty=1, max_tokens=3)
    assert (params.top_k, params.min_p, params.repetition_penalty, params.max_tokens) == (0, 0, 1, 3)


def test_the_servers_limit_goes_before_the_models_and_both_are_shown(own, engine):
    server = own(default_max_tokens=5)
    assert params_of(server, engine, "/v1/completions")[0].max_tokens == 5
    info = server.http.get("/model/info").json()
    assert info["max_tokens"] == 5
    assert info["generation_config"] == "auto"
    assert info["default_sampling_params"] == {**OWN.given(), "max_tokens": 5}
