from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from tandem.config.settings import ServerSettings, Settings
from tandem.config.validation import is_among, validate
from tandem.errors import ConfigError, RequestError
from tandem.server.origins import Origins, check_content_type


def refusal(origins, **headers):
    """Code of the refusal; None for none."""
    try:
        origins.check(Headers(headers))
    except RequestError as error:
        assert error.status == 403
        return error.code
    return None


HERE = Origins("127.0.0.1", (), ())


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000",
        "localhost:8000",
        "LOCALHOST",
        "[::1]:8000",
        "192.168.1.7:8000",
        "[2001:db8::1]",
        "app.localhost",
        "mac-studio.local:8000",
        "gpu1",
        "tandem:8000",
        "tandem.default.svc.cluster.local",
        "node.internal",
        "localhost.",
        "host.docker.internal:8000",
        "box.home.arpa",
    ],
)
def test_names_that_no_stranger_can_have_are_this_servers(host):
    assert refusal(HERE, host=host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.com",
        "evil.com:8000",
        "127.0.0.1.evil.com",
        "localhost.evil.com",
        "1.2.3.4.5",
        "evil.com:x",
        "",
        "[::1",
        "a@evil.com",
        "evil.com@localhost:8000",
        "evil.com@",
        "localhost/evil.com",
    ],
)
def test_a_name_that_anyone_can_point_here_is_not(host):
    assert refusal(HERE, host=host) == "host_not_allowed"


def test_further_names_are_a_setting():
    origins = Origins("gpu.example.com", ("llm.example.org", "*.corp.example"), ())
    assert refusal(origins, host="gpu.example.com:8000") is None
    assert refusal(origins, host="LLM.example.org") is None
    assert refusal(origins, host="a.b.corp.example:80") is None
    assert refusal(origins, host="corp.example") == "host_not_allowed"
    assert refusal(origins, host="evilcorp.example") == "host_not_allowed"
    assert refusal(Origins("127.0.0.1", ("*",), ()), host="evil.com") is None


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "https://localhost",
        "http://127.0.0.1:5173",
        "http://[::1]:80",
        "http://app.localhost",
        "http://192.168.1.7:8000",
        "app://obsidian.md",
        "tauri://localhost",
        "vscode-webview://1a2b",
        "chrome-extension://abcdef",
        "file://",
    ],
)
def test_pages_of_this_machine_of_this_server_and_applications_may(origin):
    assert refusal(HERE, host="192.168.1.7:8000", origin=origin) is None


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.com",
        "https://evil.com",
        "null",
        "http://192.168.1.7",
        "http://",
        "http://localhost.evil.com",
        "http://192.168.1.8:8000",
        "https://192.168.1.7",
        "http://evil.com@localhost",
    ],
)
def test_pages_of_others_may_not(origin):
    assert refusal(HERE, host="192.168.1.7:8000", origin=origin) == "origin_not_allowed"


@pytest.mark.parametrize(
    ("site", "code"),
    [("cross-site", "origin_not_allowed"), ("same-site", "origin_not_allowed"), ("same-origin", None), ("none", None)],
)
def test_pages_that_do_not_say_their_origin_are_told_by_the_browser(site, code):
    fetched = {"host": "localhost:8000", "sec-fetch-site": site}
    assert refusal(HERE, **fetched) == code
    assert refusal(HERE, **fetched, origin="http://localhost:3000") is None
    assert refusal(Origins("127.0.0.1", (), ("https://chat.example.com",)), **fetched) == code
    assert refusal(Origins("127.0.0.1", (), ("*",)), **fetched) is None


def test_pages_that_may_are_a_setting():
    origins = Origins("127.0.0.1", (), ("https://chat.example.com", "http://other.example/"))
    assert refusal(origins, host="localhost", origin="https://Chat.example.com") is None
    assert refusal(origins, host="localhost", origin="http://other.example") is None
    assert refusal(origins, host="localhost", origin="http://chat.example.com") == "origin_not_allowed"
    assert refusal(Origins("127.0.0.1", (), ("*",)), host="localhost", origin="null") is None


def test_a_page_that_points_its_own_name_here_is_found_out_by_that_name():
    assert refusal(HERE, host="evil.com:8000", origin="http://evil.com:8000") == "host_not_allowed"


@pytest.mark.parametrize(
    ("kind", "origin"),
    [
        ("application/json", None),
        ("application/json; charset=utf-8", "http://localhost:3000"),
        ("APPLICATION/JSON", None),
        ("application/vnd.api+json", None),
        (None, None),
        ("application/x-www-form-urlencoded", None),
    ],
)
def test_bodies_of_clients_as_people_have_them_are_read(kind, origin):
    given = {"content-length": "2", "content-type": kind, "origin": origin}
    check_content_type("POST", Headers({name: value for name, value in given.items() if value is not None}))


@pytest.mark.parametrize(
    ("kind", "origin"),
    [
        ("text/plain", None),
        ("text/plain;charset=UTF-8", "http://localhost:3000"),
        ("multipart/form-data; boundary=x", None),
        ("application/x-www-form-urlencoded", "http://localhost:3000"),
        ("application/jsonx", None),
        ("", None),
    ],
)
def test_bodies_as_a_foreign_page_can_send_them_are_not(kind, origin):
    given = {"content-length": "2", "content-type": kind, "origin": origin}
    headers = Headers({name: value for name, value in given.items() if value is not None})
    with pytest.raises(RequestError, match="Content-Type: application/json") as refused:
        check_content_type("POST", headers)
    assert refused.value.status == 415


def test_a_request_without_a_body_may_call_it_what_it_likes():
    check_content_type("POST", Headers({"content-type": "text/plain", "content-length": "0"}))
    check_content_type("POST", Headers({"content-type": "text/plain"}))
    check_content_type("GET", Headers({"content-type": "text/plain", "content-length": "3"}))
    with pytest.raises(RequestError):
        check_content_type("POST", Headers({"content-type": "text/plain", "transfer-encoding": "chunked"}))


BODY = '{"prompt":"a","max_tokens":1}'
EVIL = {"Host": "evil.com", "Origin": "http://evil.com", "Content-Type": "text/plain"}


def test_a_foreign_page_can_do_nothing_without_a_key(shared):
    refused = shared.http.post("/v1/completions", content=BODY, headers=EVIL)
    assert refused.status_code == 403
    error = refused.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("permission_error", "host_not_allowed", None)
    assert "--allowed-host evil.com" in error["message"]
    refused = shared.http.post("/v1/completions", content=BODY, headers={**EVIL, "Host": "localhost"})
    assert refused.status_code == 403
    assert "--allowed-origin http://evil.com" in refused.json()["error"]["message"]
    refused = shared.http.post("/v1/completions", content=BODY, headers={"Content-Type": "text/plain"})
    assert refused.status_code == 415
    assert refused.json()["error"]["code"] == "unsupported_content_type"
    refused = shared.http.post("/v1/completions", content=BODY, headers={"Content-Encoding": "gzip"})
    assert refused.status_code == 415, "not read as if it were plain, nor taken for broken text"
    assert refused.json()["error"]["code"] == "unsupported_content_encoding"
    assert "'gzip'" in refused.json()["error"]["message"]
    refused = shared.http.get("/v1/models", headers={"Host": "evil.com"})
    assert refused.status_code == 403
    refused = shared.http.post("/v1/messages", content=BODY, headers={"Origin": "http://evil.com"})
    assert refused.json()["error"]["type"] == "permission_error"
    assert refused.json()["type"] == "error"


def test_what_people_use_goes_on_working_without_a_key(shared):
    for headers in (
        {"Content-Type": "application/x-www-form-urlencoded"},  # curl -d
        {"Content-Type": "application/json", "Origin": shared.url},  # the page at /ui
        {"Content-Type": "application/json", "Origin": "http://localhost:3000"},
        {"Host": "my-mac.local:8000"},
        {},
    ):
        assert shared.http.post("/v1/completions", content=BODY, headers=headers).status_code == 200, headers
    foreign = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}  # a link to here
    assert shared.http.get("/", headers={"Accept": "text/html", **foreign}).status_code == 307, "to /ui"
    assert shared.http.get("/v1/models", headers=foreign).status_code == 403
    assert shared.http.get("/ui", headers={"Host": "evil.com", **foreign}).status_code == 200  # shows what calls get
    assert shared.http.get("/health", headers={"Host": "lb.example.com"}).status_code == 200


def test_with_a_key_host_and_origin_say_nothing(serve):
    server = serve(api_key=("k",))
    headers = {"Host": "evil.com", "Origin": "http://evil.com", "x-api-key": "k", "Content-Type": "application/json"}
    assert server.http.post("/v1/completions", content=BODY, headers=headers).status_code == 200
    assert server.http.post("/v1/completions", content=BODY, headers=EVIL | {"x-api-key": "k"}).status_code == 415
    assert server.http.post("/v1/completions", content=BODY, headers=EVIL).status_code == 401


def test_names_and_origins_can_be_allowed(serve):
    server = serve(allowed_host=("evil.com",), allowed_origin=("http://a.example",), cors_origin=("http://b.example",))
    for origin in ("http://a.example", "http://b.example"):
        headers = {"Host": "evil.com", "Origin": origin, "Content-Type": "application/json"}
        answer = server.http.post("/v1/completions", content=BODY, headers=headers)
        assert answer.status_code == 200
        assert ("access-control-allow-origin" in answer.headers) == (origin == "http://b.example")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("allowed_host", ("http://a.example",), "without scheme and port"),
        ("allowed_host", ("a:80",), "without scheme"),
        ("allowed_host", ("",), "not the name"),
        ("image_hosts", ("https://a.example",), "without scheme and port, such as images"),
        ("image_hosts", ("*",), "not the name of a host"),
        ("image_hosts", ("*.a.*",), "not the name of a host"),
        ("allowed_origin", ("a.example",), "scheme and host"),
        ("allowed_origin", ("https://a.example/x",), "scheme and host"),
        ("tls_key", "k.pem", "needs --tls-cert"),
        ("tls_cert", "", "must not be empty"),
        ("max_connections", 0, "1 or more"),
        ("max_connections_per_address", 0, "1 or more"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(field, value, words):
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}.*{words}"):
        validate(Settings(server=ServerSettings(**{field: value})))


def test_hosts_by_name_and_by_domain():
    hosts = ("A.example", "*.B.example")
    found = [is_among(name, hosts) for name in ("a.example", "x.a.example", "b.example", "x.y.b.example", "xb.example")]
    assert found == [True, False, False, True, False]
