"""The catalogue of names: what is in it, what a name stands for, and what is said of one that nobody knows."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
import time
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from tandem.checkpoints import catalogue as names
from tandem.checkpoints.hub import _explained
from tandem.checkpoints.resolve import HUB_ID, expect, known, name_of, resolve
from tandem.checkpoints.stored import hub_dir
from tandem.cli.main import main
from tandem.cli.processes import _named
from tandem.config.loading import load
from tandem.errors import ModelNotFound, UsageError
from tandem.models.families.table import FAMILIES, REFUSED
from tandem.planner.presets import presets
from tandem.server.context import Api

GIB = 1 << 30


def test_the_catalogue_is_dated_and_each_id_has_a_source():
    found = names.catalogue()
    assert date(2026, 1, 1) < date.fromisoformat(found.checked) <= date.today()
    for model in found.models:
        assert HUB_ID.match(model.base) and model.type in FAMILIES and model.type not in REFUSED, model
        for quant, copy in model.copies.items():
            assert HUB_ID.match(copy.id) and quant in names.BITS and copy.seen, copy
            assert {re.sub(r"^text-\d+$", "text-N", word) for word in copy.seen.split()} <= found.sources.keys(), copy
            assert 0.5 < model.nbytes(quant) / (model.parameters * 1e9 * names.BITS[quant] / 8) < 1.6, copy
    ids = [copy.id for model in found.models for copy in model.copies.values()]
    keys = [names._key(name) for model in found.models for name in model.names]
    assert len(ids) == len(set(ids)) > 100 and len(names._names()) == len(set(keys)) > 150
    assert all(names.find(name)[0] is model for model in found.models for name in model.names)


@pytest.mark.parametrize(
    ("name", "gib", "copy"),
    [
        ("llama3.2", 9, "mlx-community/Llama-3.2-3B-Instruct-8bit"),
        ("llama3.2:latest", 4, "mlx-community/Llama-3.2-3B-Instruct-4bit"),
        ("Qwen3-32B", 40, "mlx-community/Qwen3-32B-4bit"),
        ("qwen3:32b", 400, "mlx-community/Qwen3-32B-8bit"),
        ("QWEN3_8B-4bit", 400, "mlx-community/Qwen3-8B-4bit"),
        ("gpt-oss:20b", 1, "mlx-community/gpt-oss-20b-MXFP4-Q8"),
    ],
)
def test_a_name_is_the_copy_that_suits_the_memory(name, gib, copy):
    chosen = known(name, lambda: gib * GIB)
    assert chosen.id == copy and chosen.line.startswith(f"{chosen.model.names[0]} is {copy}: {chosen.quant}, ")
    assert ("does not fit: needs about 12.8 GiB, 1.0 GiB may be used" in chosen.line) == (gib == 1)
    assert copy in names.copies_of(copy) == names.copies_of(name), "the id and the name are one model"


def test_a_quantisation_without_a_copy_says_how_to_make_one():
    with pytest.raises(UsageError, match=r"phi3.5:3.8b: the catalogue has no 8bit copy, only 4bit; .*convert microsoft/Phi"):
        known("phi3.5-8bit", lambda: GIB)


def test_paths_and_hub_ids_are_what_they_were(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "phi4").mkdir()
    assert known("phi4", lambda: GIB) is known("Qwen/Qwen3-8B", lambda: GIB) is known("demo", lambda: GIB) is None
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        resolve("phi4")
    assert name_of("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("command", [["pull"], ["run"], ["serve"], ["plan"], ["generate", "-p", "x"], ["show"]])
def test_an_unknown_name_has_its_neighbours_before_any_network(command, monkeypatch, capsys):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("the network was asked"))
    assert main([*command, "lama3.2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "lama3.2: no such directory or file, not a hub id (org/name)" in line
    assert "did you mean llama3.2:3b or llama3.2:1b" in line and line.endswith("`tandem search WORDS` finds models")
    with pytest.raises(ModelNotFound, match="catalogue of 20"):
        expect("lama3.2")
    expect("llama3.2")


def test_the_hosts_file_says_how_much_memory_there_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tandem.planner.hosts.this_device", lambda _: SimpleNamespace(memory_bytes=12 * GIB))
    hosts = tmp_path / "hosts.json"
    for facts, copy in (("", "4bit"), ('"memory": "64GB", "chip": "m4-max", ', "8bit")):
        hosts.write_text(f'[{{{facts}"ssh": "a", "ips": ["10.0.0.1"]}}, {{{facts}"ssh": "b", "ips": ["10.0.0.2"]}}]')
        settings = load({"model": ["qwen3:32b"], "hostfile": [str(hosts)]}).settings
        assert _named(settings).model.model == f"mlx-community/Qwen3-32B-{copy}"
        assert "GiB may be used" in capsys.readouterr().err
    assert _named(load({"model": ["org/name"]}).settings).model.model == "org/name"


def test_a_request_may_name_the_model_as_people_do():
    served = SimpleNamespace(
        settings=SimpleNamespace(model=SimpleNamespace(served_name=())),
        names=lambda: iter(["mlx-community/Llama-3.2-3B-Instruct-4bit"]),
        client=SimpleNamespace(adapters={}),
    )
    assert Api.find(SimpleNamespace(served=[served]), "llama3.2") is served


def test_models_that_are_planned_for_by_name_are_in_the_catalogue():
    both = [preset for preset in presets() if names.find(preset.rpartition("/")[2])]
    assert len(both) > 25


@pytest.fixture
def hub(monkeypatch):
    """A mirror of the hub whose search answers what the test puts into it; paths that were asked for."""

    class Mirror(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.server.asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.server.body)))
            self.end_headers()
            for byte in self.server.body if self.server.slow else ():
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)
            self.wfile.write(b"" if self.server.slow else self.server.body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    server.asked, server.body, server.slow = [], b"[]", False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("tandem.checkpoints.hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr("tandem.checkpoints.hub.build_hf_headers", dict)  # the client's own asks the hub for more, and keeps it
    monkeypatch.setattr("tandem.checkpoints.hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("tandem.planner.hosts.this_device", lambda _: SimpleNamespace(memory_bytes=12 * GIB))
    yield server
    server.shutdown()
    server.server_close()


def test_a_search_has_the_catalogue_and_what_the_hub_finds_with_what_fits(hub, capsys):
    twice = "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit"
    found = [
        {"id": "org/coder", "safetensors": {"parameters": {"BF16": 1 << 30, "U32": 1 << 28}}},
        {"id": "org/unsized"},
        *({"id": one} for one in ("org/\x1b]0;title\x07\x1b[31mred", "org/two\nlines", "-rf", "<img src=x>/x")),
        *({"id": "org/odd", "safetensors": {"parameters": {"F32": one}}} for one in (math.nan, -5, 10**400, 1e300)),
        {"id": twice},
    ]
    hub.body = json.dumps(found).encode()
    assert main(["search", "qwen3", "coder", "30b"]) == 0
    table = capsys.readouterr()
    assert re.search(r"qwen3-coder:30b +mlx-community/\S+-4bit +qwen3_moe +16.0 GiB +does not fit: needs about", table.out)
    assert re.search(r"org/coder +- +3.0 GiB +fits", table.out) and "size unknown" in table.out
    assert "red" not in table.out and "lines" not in table.out and "img" not in table.out, (
        "names that are no hub ids are left out"
    )
    assert len(re.findall(r"org/odd +- +- +size unknown", table.out)) == 4, "sizes that cannot be are unknown"
    assert table.out.count(twice) == 1 and "search=qwen3+coder+30b&filter=mlx" in hub.asked[0]
    assert main(["search"]) == 0 and len(hub.asked) == 1, "the hub is not asked for everything"
    assert capsys.readouterr().out.count("mlx-community/") > 80
    assert main(["search", "llama3.2", "--max-memory", "half"]) == 2


@pytest.mark.parametrize("body", [b"<html>", b'[{"name": 1}]', b'[{"id": "a/b", "safetensors": {"parameters": 1}}]', None])
def test_without_the_hub_the_catalogue_is_searched(hub, body, monkeypatch, capsys):
    hub.body = body or b""
    if body is None:
        monkeypatch.setattr("tandem.checkpoints.hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert main(["search", "phi4-mini"]) == 0
    table = capsys.readouterr()
    assert "mlx-community/Phi-4-mini-instruct" in table.out and "the hub's own search is left out" in table.err
    assert main(["search", "qwen3:9b"]) == 1
    assert "nothing is found (did you mean qwen3" in capsys.readouterr().err


def test_a_mirror_that_drips_is_not_waited_for(hub, monkeypatch, capsys):
    monkeypatch.setattr("tandem.checkpoints.hub.SEARCH_S", 0.4)
    hub.body, hub.slow = b" " * 100, True
    assert main(["search", "phi4-mini"]) == 0
    assert "left out: it has not answered whole within" in capsys.readouterr().err


def test_a_mirror_that_answers_something_else_is_told_in_one_line():
    with pytest.raises(ModelNotFound, match="the hub cannot be reached"), _explained("org/model", None):
        [].__getattribute__("get")  # as the hub's client does with an answer that is a list


def test_the_hub_cache_is_where_the_hub_client_has_it(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub_dir() == tmp_path / "huggingface" / "hub"


def test_a_cache_that_is_full_or_cannot_be_written_says_what_to_do(monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("tandem.checkpoints.hub.snapshot_download", fail)
    error = OSError(28, "No space left on device")
    with pytest.raises(ModelNotFound, match=f"the disk of {hub_dir()} is full.*run the command again"):
        resolve("org/name")
    error = OSError(30, "Read-only file system", "/cache/hub")
    with pytest.raises(ModelNotFound, match=r"cache cannot be used \(Read-only file system: '/cache/hub'\); set HF_HUB_CACHE"):
        resolve("org/name")
