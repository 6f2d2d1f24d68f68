"""Limits of each client: in themselves with a clock of their own, and over HTTP."""

from __future__ import annotations

import re

import openai
import pytest
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from tandem.config.api_keys import ClientLimits
from tandem.config.settings import ServerSettings, Settings
from tandem.config.validation import validate
from tandem.errors import ConfigError, OverloadedError
from tandem.server.quotas import FORGET_ABOVE, Quotas, duration
from tandem.server.sse import EventStream

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def admit(quotas, group, prompt_tokens):
    lease = quotas.admit(group)
    try:
        lease.prompt(prompt_tokens)
    except OverloadedError:
        lease.end()
        raise
    return lease


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_requests_a_minute_come_back_evenly(clock):
    quotas = Quotas(ClientLimits(requests_per_minute=4), {}, clock)
    for _ in range(4):
        admit(quotas, "a", 10).end()
    with pytest.raises(OverloadedError, match=r"4 requests a minute \(requests_per_minute\), 0 are left") as caught:
        admit(quotas, "a", 10)
    assert caught.value.retry_after == 15
    assert caught.value.code == "rate_limit_exceeded"
    admit(quotas, "b", 10)
    clock.now += 15
    admit(quotas, "a", 10)
    with pytest.raises(OverloadedError):
        admit(quotas, "a", 10)
    clock.now += 3600
    for _ in range(4):
        admit(quotas, "a", 10)
    with pytest.raises(OverloadedError):
        admit(quotas, "a", 10)


@pytest.mark.parametrize("now", [0.0, 0.3, 86_400.7, 1e8 + 0.1])
@pytest.mark.parametrize("limit", [1, 7, 11, 49, 997])
def test_a_limit_is_met_to_the_last_one_within_an_instant(clock, limit, now):
    clock.now = now
    quotas = Quotas(ClientLimits(requests_per_minute=limit), {}, clock)
    for left in range(limit, 0, -1):
        assert dict(quotas.headers("a"))[b"x-ratelimit-remaining-requests"] == b"%d" % left
        quotas.admit("a")
    assert dict(quotas.headers("a"))[b"x-ratelimit-remaining-requests"] == b"0"
    with pytest.raises(OverloadedError):
        quotas.admit("a")


def test_answers_count_as_tokens(clock):
    quotas = Quotas(ClientLimits(tokens_per_minute=600), {}, clock)
    lease = admit(quotas, "a", 100)
    lease.spend(1100)
    lease.end()
    with pytest.raises(OverloadedError, match="600 tokens a minute") as caught:
        admit(quotas, "a", 100)
    assert caught.value.retry_after == 61, "600 overdrawn, one needed to be looked at, 10 a second"
    clock.now += 70
    admit(quotas, "a", 100)


def test_a_prompt_longer_than_the_limit_waits_for_a_whole_minute_of_it(clock):
    quotas = Quotas(ClientLimits(tokens_per_minute=60), {}, clock)
    admit(quotas, "a", 500)
    with pytest.raises(OverloadedError):
        admit(quotas, "a", 500)
    clock.now += 500
    admit(quotas, "a", 500)


def test_requests_at_once(clock):
    quotas = Quotas(ClientLimits(max_concurrent_requests=2), {"vip": ClientLimits()}, clock)
    first, _ = admit(quotas, "a", 1), admit(quotas, "a", 1)
    with pytest.raises(OverloadedError, match="2 requests are running, the limit is 2 at once"):
        admit(quotas, "a", 1)
    first.end()
    first.end()
    admit(quotas, "a", 1)
    with pytest.raises(OverloadedError):
        admit(quotas, "a", 1)
    for _ in range(10):
        admit(quotas, "vip", 1)


def test_a_prompt_that_is_refused_costs_no_tokens(clock):
    quotas = Quotas(ClientLimits(tokens_per_minute=100), {}, clock)
    admit(quotas, "a", 90)
    for _ in range(5):
        with pytest.raises(OverloadedError, match="tokens_per_minute"):
            admit(quotas, "a", 90)
    admit(quotas, "a", 5)


def test_a_request_counts_before_its_prompt_is_known(clock):
    quotas = Quotas(ClientLimits(requests_per_minute=2, tokens_per_minute=100), {}, clock)
    quotas.admit("a").prompt(100)
    with pytest.raises(OverloadedError, match="100 tokens a minute.*0 are left and 1 are needed"):
        quotas.admit("a")
    clock.now += 30
    quotas.admit("a")
    with pytest.raises(OverloadedError, match="requests_per_minute"):
        [quotas.admit("a") for _ in range(3)]
    quotas.admit("a", again=True)


def test_clients_that_have_gone_are_forgotten(clock):
    quotas = Quotas(ClientLimits(requests_per_minute=5), {}, clock)
    admit(quotas, "busy", 1)
    for i in range(FORGET_ABOVE):
        admit(quotas, f"client {i}", 1).end()
    clock.now += 61
    admit(quotas, "new", 1)
    assert len(quotas._clients) == 2


@pytest.mark.parametrize(("seconds", "text"), [(0, "0ms"), (0.0201, "21ms"), (1.5, "1.5s"), (59.9999, "1m0s"),
                                               (360, "6m0s"), (61.25, "1m1.25s")])  # fmt: skip
def test_durations_are_written_as_openai_does(seconds, text):
    assert duration(seconds) == text


def statuses(server, *addresses):
    return [
        server.http.post("/tokenize", json={"prompt": "a"}, headers={"x-forwarded-for": address}).status_code
        for address in addresses
    ]


def test_who_asks_is_told_by_the_connection_alone(serve, monkeypatch):
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    server = serve(requests_per_minute=2)
    assert statuses(server, *(f"10.9.8.{i}" for i in range(4))) == [200, 200, 429, 429]


def test_proxies_that_are_named_tell_who_asks(serve):
    server = serve(requests_per_minute=1, trusted_proxies=("127.0.0.0/8", "10.0.0.2"))
    chains = ("192.0.2.1", "192.0.2.1", "192.0.2.2, 10.0.0.2", "192.0.2.3, 192.0.2.2")
    assert statuses(server, *chains) == [200, 429, 200, 429]
    network = [f"2001:db8::{i}" for i in range(3)]
    assert statuses(server, *network, "2001:db8:0:1::1") == [200, 429, 429, 200], "a network of IPv6 is one client"
    assert statuses(server, "[2001:db8:0:2::1]:443", "unknown", "unknown") == [200, 200, 429]


def test_a_proxy_is_known_on_a_socket_for_both_families(serve):
    config = serve(trusted_proxies=("10.0.0.0/8", "2001:db8::5")).server.config
    trusted = ProxyHeadersMiddleware(config.app, config.forwarded_allow_ips).trusted_hosts
    for proxy, client in (("10.1.2.3", "11.1.2.3"), ("::ffff:10.1.2.3", "::ffff:11.1.2.3"), ("2001:db8::5", "2001:db8::6")):
        assert proxy in trusted and client not in trusted


@pytest.mark.parametrize("proxy", ["proxy.example.com", "10.0.0.1/24", "", "*"])
def test_a_proxy_is_named_by_its_address(proxy):
    with pytest.raises(ConfigError, match=f"--trusted-proxies: .*{re.escape(proxy)}.*such as 10.0.0.2"):
        validate(Settings(server=ServerSettings(trusted_proxies=(proxy,))))


def test_headers_and_refusal_over_http(serve):
    server = serve(requests_per_minute=3, tokens_per_minute=6000)
    first = server.chat()
    usage = first.json()["usage"]
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    assert first.headers["x-ratelimit-remaining-requests"] == "2"
    assert re.fullmatch(r"(1\d|20)(\.\d+)?s", first.headers["x-ratelimit-reset-requests"])
    assert first.headers["x-ratelimit-limit-tokens"] == "6000"
    left = int(first.headers["x-ratelimit-remaining-tokens"])
    assert 6000 - usage["total_tokens"] <= left < 6000
    with server.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
        assert stream.headers["x-ratelimit-remaining-requests"] == "1"
        stream.read()
    assert server.http.post("/v1/completions", json={"prompt": "x"}).headers["x-ratelimit-remaining-requests"] == "0"
    refused = server.chat()
    assert refused.status_code == 429
    assert 10 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    error = refused.json()["error"]
    assert error["type"] == "rate_limit_error" and error["code"] == "rate_limit_exceeded"
    assert "requests_per_minute" in error["message"]
    with server.openai() as client, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="default", **CHAT)
    assert "x-ratelimit-limit-requests" not in server.http.get("/v1/models").headers


def test_no_headers_without_limits(server):
    assert not [name for name in server.chat().headers if name.startswith("x-ratelimit")]


def test_keys_have_their_own_limits_and_weights(serve, engine, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("small requests_per_minute=1\nlarge weight=3 requests_per_minute=none\n")
    keys.chmod(0o600)
    server = serve(api_key_file=str(keys), requests_per_minute=2)
    codes = {"small": [], "large": []}
    for key, seen in codes.items():
        for _ in range(4):
            seen.append(server.http.post("/v1/chat/completions", json=CHAT, headers={"x-api-key": key}).status_code)
    assert codes == {"small": [200, 429, 429, 429], "large": [200] * 4}
    requests = list(engine.submitted.values())
    assert [request.weight for request in requests] == [1, 3, 3, 3, 3]
    assert len({request.group for request in requests}) == 2


def test_a_place_is_free_again_however_a_request_ends(serve, engine, wait_until):
    server = serve(max_concurrent_requests=1)
    engine.hold = True
    connection = server.raw(_bytes())
    wait_until(lambda: engine.submitted)
    busy = server.chat()
    assert busy.status_code == 429
    assert "1 at once" in busy.json()["error"]["message"]
    connection.close()
    wait_until(lambda: not server.api.live)
    engine.hold = False
    engine.refusal = (500, "no", None, None)
    assert server.chat().status_code == 500
    engine.refusal = None
    assert server.chat(temperature=-1).status_code == 400
    assert server.chat().status_code == 200


def test_the_place_of_a_stream_is_free_when_its_last_bytes_are_sent(serve, monkeypatch):
    server = serve(max_concurrent_requests=1)
    stream, live = EventStream.__call__, []

    async def watched(self, scope, receive, send):
        async def look(message):
            if not message.get("more_body", True):
                live.append(list(server.api.live))
            await send(message)

        await stream(self, scope, receive, look)

    monkeypatch.setattr(EventStream, "__call__", watched)
    for _ in range(3):
        assert server.chat(stream=True).status_code == 200
    assert live == [[]] * 3


def _bytes():
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
