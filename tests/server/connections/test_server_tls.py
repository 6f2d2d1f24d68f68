from __future__ import annotations

import logging
import os
import socket
import ssl
import subprocess
import sys

import httpx
import pytest

from system_packages import require
from tandem.errors import ConfigError, UsageError
from tandem.server.connections import tls
from tandem.server.connections.tls import Certificate
from tandem.system.http_client import ServerClient


def make_certificate(folder, name, *, password=None):
    """A self-signed certificate for localhost, as docs/operate.md makes one: paths of certificate and key."""
    require("openssl")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    secret = ["-pass", f"pass:{password}", "-aes256"] if password else []
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", *secret, "-out", key],
        check=True,
        capture_output=True,
    )
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-key",
            key,
            "-days",
            "30",
            "-subj",
            f"/CN={name}",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-out",
            cert,
            *(["-passin", f"pass:{password}"] if password else []),
        ],
        check=True,
        capture_output=True,
    )
    return str(cert), str(key)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"), "first")


def replace(path, other):
    """As tools that renew certificates do: write beside it, and rename."""
    fresh = f"{path}.new"
    with open(other, "rb") as source, open(fresh, "wb") as file:
        file.write(source.read())
    os.replace(fresh, path)


def subject(address):
    """Common name of the certificate that the server shows."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(address, 240) as plain, context.wrap_socket(plain) as secure:
        shown = secure.getpeercert(binary_form=True)
    return "second" if b"second" in shown else "first"


def test_https_is_served_and_a_renewed_certificate_taken_without_a_restart(
    serve, pair, tmp_path, monkeypatch, wait_until, caplog
):
    monkeypatch.setattr(tls, "LOOK_S", 0.1)
    monkeypatch.setattr("tandem.server.api_process.LOOK_S", 0.1)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    replace(cert, pair[0])
    replace(key, pair[1])
    server = serve(tls_cert=str(cert), tls_key=str(key), ready=False)
    with httpx.Client(
        base_url=server.url.replace("http:", "https:"), verify=ssl.create_default_context(cafile=cert), trust_env=False
    ) as client:
        wait_until(lambda: client.get("/health/ready").status_code == 200)
        with pytest.raises(UsageError, match="set SSL_CERT_FILE to its certificate"):
            ServerClient(server.url.replace("http:", "https:")).get("/health")
        headers = {"Origin": server.url.replace("http:", "https:")}
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=headers)
        assert answer.status_code == 200
        second = make_certificate(tmp_path, "second")
        replace(cert, second[0])  # the key is not there yet
        wait_until(lambda: any("key is not that of the certificate" in one.getMessage() for one in caplog.records))
        assert subject(server.address) == "first"
        replace(key, second[1])
        wait_until(lambda: subject(server.address) == "second")
        assert client.get("/health/live").status_code == 200, "an open connection stays as it is"
    # What does not speak TLS is turned away without a word in the log.
    caplog.clear()
    with socket.create_connection(server.address, 240) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert plain.recv(100)[:5] != b"HTTP/"
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_handshakes_that_do_not_come_make_room_for_those_that_do(serve, pair, wait_until):
    server = serve(tls_cert=pair[0], tls_key=pair[1], max_connections_per_address=5, ready=False)
    flood = [socket.create_connection(server.address, 240) for _ in range(40)]
    assert subject(server.address) == "first"
    for one in flood:
        one.close()
    [door] = server.server._acceptors
    wait_until(lambda: not door.slots.open.total() and not any(door.slots.idle.values()))


def test_one_line_says_what_is_wrong_with_a_certificate(pair, tmp_path):
    cert, key = pair
    other_key = make_certificate(tmp_path, "other")[1]
    secret_key = make_certificate(tmp_path, "secret", password="abcd")
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("hello")
    for arguments, words in (
        (("/nowhere/c.pem", key), "--tls-cert /nowhere/c.pem: cannot be read .No such file"),
        ((cert, "/nowhere/k.pem"), "--tls-key /nowhere/k.pem: cannot be read"),
        ((cert, other_key), f"--tls-cert {cert}, --tls-key {other_key}: the key is not that of the certificate"),
        ((str(nothing), key), "in PEM format"),
        ((cert, str(nothing)), "in PEM format"),
        ((cert, None), "in PEM format"),
        (secret_key, "the key is encrypted; .openssl pkey"),
    ):
        with pytest.raises(ConfigError, match=words) as refused:
            Certificate(*arguments)
        assert "\n" not in refused.value.message


def test_a_certificate_that_ends_soon_is_warned_of_once_a_day(pair, monkeypatch, caplog):
    certificate = Certificate(*pair)
    monkeypatch.setattr(tls, "WARN_DAYS", 60)
    for _ in range(3):
        certificate.look()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"{pair[0]} ends at 20" in warning and "clients refuse the server" in warning
    now = tls.time.time()
    monkeypatch.setattr(tls.time, "time", lambda: now + tls.DAY_S + 1)
    certificate.look()
    monkeypatch.setattr(tls, "WARN_DAYS", 14)
    Certificate(*pair).look()
    assert caplog.text.count("ends at") == 2


@pytest.mark.slow
def test_tandem_serve_refuses_a_certificate_before_it_starts_anything(tmp_path):
    command = [sys.executable, "-m", "tandem", "serve", str(tmp_path), "--tls-cert", "/nowhere/cert.pem"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == ("tandem: --tls-cert /nowhere/cert.pem: cannot be read (No such file or directory)")
