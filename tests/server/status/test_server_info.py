from __future__ import annotations

import msgspec
import pytest
from starlette.testclient import TestClient

from tandem.config.settings import ModelSettings, ServerSettings, Settings
from tandem.protocol.control import Timing
from tandem.protocol.supervisor_messages import ModelInfo, ReplicaList
from tandem.server.app import create_app
from tandem.server.engines.model_pool import ModelPool
from tandem.server.engines.replicas import Replicas
from tandem.server.engines.router import Router
from tandem.server.engines.served_model import Served
from tandem.version import __version__

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def locked(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("filekey\n\n")
    keys.chmod(0o600)
    return serve(api_key=("first", "second"), api_key_file=str(keys))


@pytest.mark.parametrize("key", ["first", "second", "filekey"])
def test_right_keys(locked, key):
    assert locked.http.post("/v1/chat/completions", json=CHAT, headers={"x-api-key": key}).status_code == 200
    with locked.openai(api_key=key) as client:
        assert client.models.list().data


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": "Basic first"},
        {"authorization": "first"},
        {"x-api-key": "firs"},
        {"authorization": b"Bearer \xff\xfe"},
    ],
)
def test_wrong_keys(locked, headers, caplog):
    for path in ("/v1/chat/completions", "/tokenize"):
        response = locked.http.post(path, json=CHAT, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.json()["error"]["code"] == "invalid_api_key"
    for path in ("/metrics", "/v1/status", "/", "/nope", "/model/info", "/version"):
        assert locked.http.get(path, headers=headers).status_code == 401
    assert locked.http.get("/health/live").status_code == 200
    for path in ("/health/ready", "/ping", "/ui/"):
        assert locked.http.get(path).status_code == 200
    assert locked.http.get("/health").json() == {"status": "healthy"}
    assert "wrong" not in caplog.text


def test_health_with_a_key(locked):
    body = locked.http.get("/health", headers={"x-api-key": "first"}).json()
    assert body["model_name"] == "tiny"
    assert body["config"]["cors_enabled"] is False


def test_one_client_cannot_see_or_cancel_anothers_request(locked, engine, wait_until):
    import threading

    engine.hold = True
    post = {"url": "/v1/chat/completions", "json": CHAT, "headers": {"x-api-key": "first"}}
    thread = threading.Thread(target=lambda: locked.http.post(**post))
    thread.start()
    wait_until(lambda: engine.submitted and locked.api.live)
    request_id = next(iter(locked.api.live))
    assert locked.http.get("/v1/status", headers={"x-api-key": "second"}).json()["requests"] == []
    path = f"/v1/requests/{request_id}/cancel"
    assert locked.http.post(path, headers={"x-api-key": "second"}).status_code == 404
    assert locked.http.post(path, headers={"x-api-key": "first"}).status_code == 200
    thread.join()
    groups = {request.group for request in engine.submitted.values()}
    assert groups
    assert "first" not in groups


def test_service_and_health(server):
    body = server.http.get("/").json()
    assert {"name", "version", "endpoints"} <= body.keys()
    assert {"health", "model_info", "chat"} <= body["endpoints"].keys()
    assert server.http.get("/health/live").json() == {"status": "alive"}
    assert server.http.get("/health/ready").json() == server.http.post("/ping").json() == {"status": "ready"}
    assert server.http.get("/version").json() == {"version": body["version"]}
    body = server.http.get("/health").json()
    assert body["status"] == "healthy"
    assert body["api"] == "ready"
    assert body["model_loaded"] is True
    assert body["model_type"] == "llm"
    assert body["engine_type"] == "batched"
    assert body["available_models"] == ["tiny"]
    assert body["mcp"] is None
    assert body["config"]["port"] == server.address[1]
    assert body["world_size"] == 1
    assert body["ranks"][0]["layers"] == [0, 4]


def test_model_info_and_models(server):
    body = server.http.get("/model/info").json()
    facts = {"id", "model", "max_context_length", "max_tokens", "backend", "num_devices"}
    assert facts <= body.keys()
    assert set(body["models"][0]) == facts
    listed = server.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert {"id", "object", "created", "owned_by"} <= listed["data"][0].keys()
    assert server.http.get("/v1/models/org%2Ftiny").json()["id"] == "tiny"


def test_a_model_of_several_names_is_listed_under_each_and_answers_under_the_first(serve):
    server = serve(model=ModelSettings(model="org/tiny", served_name=("tiny", "gpt-4o")))
    listed = server.http.get("/v1/models").json()["data"]
    assert [(one["id"], one["root"], one["parent"]) for one in listed] == [("tiny", "tiny", None), ("gpt-4o", "tiny", None)]
    assert server.chat(model="gpt-4o").json()["model"] == server.http.get("/v1/models/gpt-4o").json()["id"] == "tiny"


def test_status(server):
    body = server.http.get("/v1/status").json()
    assert body["engine"]["state"] == "ready"
    assert body["requests"] == []
    assert "source" not in body["engine"]


def test_metrics(server, serve):
    server.chat()
    server.chat(temperature=9)
    server.http.get("/made/up")
    text = server.http.get("/metrics").text
    assert 'tandem_engine_up{model="tiny",replica="0"} 1' in text
    assert f'tandem_build_info{{version="{__version__}"}} 1.0' in text
    assert "_created" not in text
    assert 'tandem_http_requests_total{method="POST",route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'tandem_http_requests_total{method="POST",route="/v1/chat/completions",status="400"} 1.0' in text
    assert 'route="unmatched",status="404"' in text
    assert "made" not in text
    assert "tandem_http_requests_in_flight 1.0" in text
    assert serve(enable_metrics=False).http.get("/metrics").status_code == 404


def test_tokenize_and_detokenize(server, engine):
    ids = engine.tokenizer.encode("hé漢")
    body = server.http.post("/tokenize", json={"prompt": "hé漢", "return_token_strs": True}).json()
    assert body["tokens"] == ids
    assert body["count"] == len(ids)
    assert body["max_model_len"] == 256
    assert len(body["token_strs"]) == len(ids)
    chat = server.http.post("/tokenize", json=CHAT).json()
    assert chat["tokens"] == engine.tokenizer.render_chat(CHAT["messages"])
    assert chat["token_strs"] is None
    assert server.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "hé漢"}
    assert server.http.post("/detokenize", json={"tokens": [512]}).json()["error"]["param"] == "tokens"
    assert server.http.post("/tokenize", json={}).status_code == 400
    assert server.http.post("/tokenize", json={"prompt": "a", **CHAT}).status_code == 400
    longer = "word " * 400
    assert server.http.post("/tokenize", json={"prompt": longer}).json()["count"] > 400, "may be more than the context"


def test_cors_only_for_configured_origins(server, serve):
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in server.http.get("/v1/models", headers=ask).headers
    open_server = serve(cors_origin=("https://a.example",), api_key=("k",))
    preflight = open_server.http.options("/v1/chat/completions", headers=ask)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    refused = open_server.http.get("/v1/models", headers=ask)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    other = open_server.http.get("/v1/models", headers={"origin": "https://b.example", "x-api-key": "k"})
    assert "access-control-allow-origin" not in other.headers


def test_openapi_describes_bodies(server):
    schema = server.http.get("/openapi.json").json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    assert "messages" in schema["components"]["schemas"]["ChatRequest"]["properties"]
    assert "Message" in schema["components"]["schemas"]
    references = [text.split('"')[0] for text in msgspec.json.encode(schema).decode().split('"$ref":"#/')[1:]]
    for reference in references:
        node = schema
        for part in reference.split("/"):
            node = node[part]


def lines_of(caplog, count, wait_until):
    """Members of the lines about requests, once there are so many."""
    told = lambda: [record.fields for record in caplog.records if hasattr(record, "fields")]  # noqa: E731
    wait_until(lambda: len(told()) >= count)
    return told()


def test_each_request_has_one_line_without_its_text(serve, engine, caplog, wait_until):
    caplog.set_level("INFO", logger="tandem")
    server = serve()
    engine.timing = Timing(0.25, 0.5)
    server.chat(messages=[{"role": "user", "content": "my secret"}])
    server.http.post("/v1/chat/completions", json={"messages": 5}, headers={"x-request-id": "look-for-me"})
    server.http.get("/health/ready")
    server.http.get("/v1/status")
    server.http.get("/v1/no%0Ae?key=secret")
    chat, bad, lost = lines_of(caplog, 3, wait_until)
    assert (chat["path"], chat["status"], chat["model"], chat["replica"]) == ("/v1/chat/completions", 200, "tiny", 0)
    assert (chat["client"], chat["queue_s"], chat["completion_tokens"]) == ("127.0.0.1", 0.25, len(engine.reply) + 1)
    assert chat["request_id"].startswith("req_") and chat["first_token_s"] <= chat["seconds"]
    assert (bad["request_id"], bad["status"], bad["error"]) == ("look-for-me", 400, "invalid_type")
    assert (lost["path"], lost["status"], lost["error"]) == ("/v1/no%0Ae", 404, "unknown_url")
    assert "POST /v1/chat/completions 400 request_id=look-for-me client=127.0.0.1 " in caplog.text
    assert "secret" not in caplog.text and engine.text() not in caplog.text


def test_a_client_that_leaves_is_told_apart_in_the_log(serve, engine, caplog, wait_until):
    caplog.set_level("INFO", logger="tandem")
    server = serve()
    engine.hold = True
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    connection = server.raw(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    wait_until(lambda: engine.submitted)
    connection.close()
    [line] = lines_of(caplog, 1, wait_until)
    assert (line["status"], line["error"]) == (499, "client_disconnected")


def test_lines_name_keys_by_their_names_alone(serve, tmp_path, caplog, wait_until):
    caplog.set_level("INFO", logger="tandem")
    (tmp_path / "keys").write_text("sk-first\nsk-second name=alice\n")
    (tmp_path / "keys").chmod(0o600)
    server = serve(api_key_file=str(tmp_path / "keys"))
    for key in ("sk-first", "sk-second", "sk-wrong"):
        server.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    lines = lines_of(caplog, 3, wait_until)
    assert [line["client"] for line in lines] == ["key1", "alice", "127.0.0.1"]
    assert [line.get("error") for line in lines] == [None, None, "invalid_api_key"]
    assert "sk-" not in caplog.text


def test_lines_about_requests_can_be_switched_off(serve, caplog):
    caplog.set_level("INFO", logger="tandem")
    server = serve(log_requests=False)
    server.chat()
    server.http.get("/v1/models")
    assert "/v1/" not in caplog.text


def test_the_status_is_that_of_now_and_not_of_the_last_heartbeat(serve, engine):
    server = serve()
    for running in range(1, 20):
        engine.set_status(running=running)
        assert server.http.get("/v1/status").json()["num_running"] == running


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def test_a_browser_is_led_to_the_page_and_a_client_gets_json(server, locked):
    for one in (server, locked):
        led = one.http.get("/", headers={"accept": BROWSER})
        assert (led.status_code, led.headers["location"]) == (307, "/ui")
    for accept in ("*/*", "application/json", "application/json, text/html"):
        assert server.http.get("/", headers={"accept": accept}).json()["name"] == "Tandem"
    assert locked.http.get("/").status_code == 401


class Supervisor:
    """Says that two models could be loaded, and keeps what it is told."""

    def __init__(self):
        self.commands, self.events = [], []

    async def start(self, listed, reached):
        models = [ModelInfo(name, "unloaded", "", {}, 4096, False, None) for name in ("a", "b")]
        await listed(ReplicaList([], models))

    def tell(self, command):
        self.commands.append(command)

    async def close(self):
        pass


@pytest.fixture
def several(tmp_path):
    """A client of a server with two models, none of them loaded, and its supervisor."""
    switches = ServerSettings(enable_tokenizer_info_endpoint=True)
    own = [Settings(model=ModelSettings(model=str(tmp_path / name), served_name=(name,))) for name in ("a", "b")]
    link = Supervisor()
    models = ModelPool([Served(one, Replicas(Router(), {})) for one in own], link, max_loaded=1)
    with TestClient(create_app(Settings(server=switches), models), base_url="http://localhost") as client:
        yield client, link


def test_nothing_that_is_only_asked_for_loads_a_model(several):
    client, link = several
    planned = client.get("/v1/plan", params={"hosts": "a=64GB", "model": "b", "context": 4097})
    assert planned.status_code == 400 and "4097 is more than the 4096 tokens" in planned.text
    planned = client.get("/v1/plan", params={"hosts": "a=64GB", "model": "b"})
    assert planned.status_code == 400 and "no such directory" in planned.text, "a worker looked for it"
    info = client.get("/tokenizer_info", params={"model": "b"})
    assert info.status_code == 503 and "POST /v1/models/b/load" in info.text
    assert client.get("/v1/models/b").json()["max_model_len"] == 4096
    assert link.commands == []


@pytest.mark.parametrize("hosts", [["a=1GB"] * 9, [",".join(["a=1GB"] * 9)], ["a=1GB,b=1GB"] * 5])
def test_a_plan_is_for_eight_machines_at_most(shared, hosts):
    refused = shared.http.get("/v1/plan", params={"hosts": hosts})
    assert refused.status_code == 400
    assert "machines; name at most 8" in refused.json()["error"]["message"]
