"""What requests say of the prefix cache reaches the engine, in every dialect that has words for it."""

from __future__ import annotations

import msgspec
import pytest

HELLO = [{"role": "user", "content": "hi"}]
BODIES = {"/v1/chat/completions": {"messages": HELLO}, "/v1/completions": {"prompt": "hi"}, "/v1/responses": {"input": "hi"}}


def test_usage_says_what_was_read_from_disk(server, engine):
    for cached, disk, said in ((3, 0, {"cached_tokens": 3}), (3, 2, {"cached_tokens": 3, "disk_cached_tokens": 2})):
        engine.cached = cached, disk
        assert server.chat(model="tiny").json()["usage"]["prompt_tokens_details"] == said
        answer = server.http.post("/v1/responses", json={"model": "tiny", "input": "hi"}).json()
        assert answer["usage"]["input_tokens_details"] == {**said, "cache_write_tokens": 0}


@pytest.mark.parametrize("limits", [{"requests_per_minute": 2}, {"tokens_per_minute": 5}, {"max_concurrent_requests": 1}])
def test_limits_of_clients_do_not_hold_up_the_prompts_of_warm(serve, engine, tmp_path, limits):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": {list(range(8, 12 + i))}}}\n' for i in range(3)))
    server = serve(warmup_prompts=(str(path),), **limits)
    assert [len(request.prompt) for request in engine.submitted.values()] == [4, 5, 6]
    assert server.chat(model="tiny").status_code == 200, "the client has all of its own"


def test_prompts_of_warm_go_on_behind_the_last_that_was_computed(serve, engine, tmp_path, wait_until):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": {list(range(8, 12 + i))}}}\n' for i in range(3)))
    engine.hold = True
    server = serve(warmup_prompts=(str(path),), ready=False)
    wait_until(lambda: len(engine.submitted) == 1)
    engine.refusal = (429, "full", "overloaded", 1.0)
    engine.hold = False
    wait_until(lambda: len(engine.submitted) > 3)
    engine.refusal = None
    server.wait_ready()
    lengths = [len(request.prompt) for request in engine.submitted.values()]
    assert lengths == [4, *[5] * (len(lengths) - 2), 6]
    engine.set_status(ranks=[msgspec.structs.replace(engine.status.ranks[0], pid=2)])
    wait_until(lambda: len(engine.submitted) == len(lengths) + 3)


@pytest.mark.parametrize(("route", "body"), BODIES.items())
def test_key_and_retention_reach_the_engine(shared, route, body):
    for fields, said in (
        ({}, ("", True)),
        ({"prompt_cache_key": "agent"}, ("agent", True)),
        ({"prompt_cache_retention": "in_memory"}, ("", False)),
        ({"prompt_cache_retention": "24h", "prompt_cache_key": None}, ("", True)),
    ):
        shared.engine.submitted.clear()
        answer = shared.http.post(route, json={"model": "tiny", **body, **fields})
        assert answer.status_code == 200, answer.text
        assert "x-tandem-ignored-fields" not in answer.headers
        [request] = shared.engine.submitted.values()
        assert (request.cache_key, request.on_disk) == said
    for field, value in (("prompt_cache_retention", "7d"), ("prompt_cache_key", 5), ("prompt_cache_key", "k" * 2000)):
        refused = shared.http.post(route, json={"model": "tiny", **body, field: value})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field
