"""/v1/rerank and /v1/score, over an engine that answers from a script."""

from __future__ import annotations

import math
import struct

import pytest

from tandem.server.openai.rerank import END, START

DOCUMENTS = ["a long one about nothing at all", "short", {"text": "not so long", "id": 3}]
TEXTS = ["a long one about nothing at all", "short", "not so long"]


def probability(
    engine, query, document, instruction="Given a web search query, retrieve relevant passages that answer the query"
):
    """Of "yes" against "no", as the engine answers Qwen3-Reranker's prompt."""
    body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    prompt = [token for text in (START, body, END) for token in engine.tokenizer.encode(text, False)]
    yes, no = struct.unpack("<2f", engine.labels_of(prompt, 2))
    return math.exp(yes) / (math.exp(yes) + math.exp(no))


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_by_their_probability(judge, path):
    answer = judge.http.post(path, json={"model": "judge", "query": "what?", "documents": DOCUMENTS}).json()
    expected = sorted(((probability(judge.engine, "what?", text), index) for index, text in enumerate(TEXTS)), reverse=True)
    assert [(one["index"], one["document"]["text"]) for one in answer["results"]] == [(i, TEXTS[i]) for _, i in expected]
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx([score for score, _ in expected])
    request = judge.engine.last
    yes, no = (judge.engine.tokenizer.encode(word, False)[0] for word in ("yes", "no"))
    assert (request.label_token_ids, request.pooling, request.params.max_tokens) == ((yes, no), "last", 0)
    assert answer["usage"]["prompt_tokens"] > 0 and answer["model"] == "judge"


def test_the_first_ones_alone_and_another_task(judge):
    asked = {"query": "what?", "documents": DOCUMENTS, "top_n": 1, "return_documents": False, "instruction": "Find it"}
    [result] = judge.http.post("/v1/rerank", json=asked).json()["results"]
    assert result == {"index": 1, "relevance_score": pytest.approx(probability(judge.engine, "what?", "short", "Find it"))}


def test_scores_of_one_with_many_and_of_pairs(judge):
    def scores(**fields):
        return [one["score"] for one in judge.http.post("/v1/score", json=fields).json()["data"]]

    expected = [probability(judge.engine, "q", text) for text in TEXTS]
    assert scores(text_1="q", text_2=TEXTS) == pytest.approx(expected)
    assert scores(queries="q", documents=TEXTS[1]) == pytest.approx(expected[1:2])
    assert scores(text_1=["q", "r"], text_2=TEXTS[:2]) == pytest.approx([expected[0], probability(judge.engine, "r", TEXTS[1])])


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/v1/rerank", {"query": "q", "documents": ["a"] * 10_000}, "documents", "at most 2048 items"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents", "at least 1"),
        ("/v1/rerank", {"query": "q" * 20_000, "documents": ["a"] * 2048}, "documents", "send fewer at once"),
        ("/v1/rerank", {"query": "q", "documents": ["a", "b" * 800]}, "documents[1]", "maximum context length"),
        ("/v1/rerank", {"query": "q", "documents": [{"image": "x"}]}, "documents[0]", "string"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n", "greater"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "give one"),
        ("/v1/score", {"text_1": "a"}, "text_2", "Missing"),
    ],
)
def test_bad_requests_are_named(judge, path, fields, param, words):
    response = judge.http.post(path, json=fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_a_long_list_goes_in_parts_and_ends_with_its_client(judge, wait_until):
    judge.engine.submitted.clear()
    judge.engine.hold = True
    try:
        asked = {"query": "q", "documents": [f"document {i}" for i in range(50)], "timeout": 0.5}
        assert judge.http.post("/v1/rerank", json=asked).status_code == 504
        assert len(judge.engine.submitted) == 4
        wait_until(lambda: not judge.api.live and judge.engine.aborted >= set(judge.engine.submitted))
    finally:
        judge.engine.hold = False


def test_a_model_that_does_not_rerank(shared):
    error = shared.http.post("/v1/rerank", json={"query": "q", "documents": ["a"]}).json()["error"]
    assert (error["code"], error["param"]) == ("rerank_unsupported", "model") and "Qwen3-Reranker" in error["message"]


def test_sound_is_served_elsewhere(shared):
    response = shared.http.post("/v1/audio/transcriptions", files={"file": b"RIFF"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "unknown_url" and "mlx-audio" in error["message"]
