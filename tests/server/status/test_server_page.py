"""The page's files: what is served, what they may do, and that those of others are as their projects made them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

import tandem
from tandem.server.status.page import FILES

FOLDER = Path(tandem.__file__).parent / "server" / "ui"
VENDORED = FOLDER / "vendored"


def test_files_of_others_have_version_licence_and_checksum() -> None:
    text = (VENDORED / "VENDORED.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| \S+ [\d.]+, .*\(`(LICENSE-\w+)`\) \| `(\w{64})` \|$", text, re.MULTILINE)
    assert {name for name, _, _ in rows} == {file.name for file in VENDORED.glob("*.js")}
    for name, licence, digest in rows:
        assert hashlib.sha256((VENDORED / name).read_bytes()).hexdigest() == digest, name
        assert len((VENDORED / licence).read_text()) > 1000


def test_no_file_of_ours_has_a_script_or_style_in_markup() -> None:
    page = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=|javascript:", page) == []
    for name in set(re.findall(r"/ui/([\w.]+)", "".join(file.read_text() for file in FOLDER.glob("*.*")))):
        assert name in FILES, f"{name} is named and not there"


def test_it_is_open_but_shows_nothing_without_a_key(serve) -> None:
    server = serve(api_key=("secret",))
    page = server.http.get("/ui")
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"] and "tiny" not in page.text
    assert {server.http.get(f"/ui/{name}").status_code for name in FILES} == {200}
    assert server.http.get("/v1/status").status_code == server.http.get("/v1/events").status_code == 401
    for path in ("..%2fapp.py", "none.js", "VENDORED.md"):
        assert server.http.get(f"/ui/{path}").status_code in (401, 404)


@pytest.mark.parametrize("query", ["", "?x=1"])
def test_the_planner_names_its_choices(shared, query: str) -> None:
    answer = shared.http.get(f"/v1/plan/choices{query}")
    if query:
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "x"
        return
    found = answer.json()
    assert "m4-max" in [one["name"] for one in found["chips"]] and found["max_hosts"] == 8
    assert "thunderbolt5-tcp" in [one["name"] for one in found["links"]] and "latency" in found["goals"]
