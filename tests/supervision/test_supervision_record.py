from __future__ import annotations

import os
import stat

import pytest

from tandem.supervision import record
from tandem.supervision.record import Background, Record


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "state_dir", lambda: tmp_path)
    found = Background("one")
    found.path.mkdir(parents=True)
    return found


def test_a_log_that_grows_begins_anew_and_the_server_goes_on_writing(place):
    with place.fresh_log() as fd:
        os.write(fd, b"a" * 1000)
        assert not place.trim_log(1000)
        os.write(fd, b"b")
        assert place.trim_log(1000)
        os.write(fd, b"new")
    assert place.log.read_bytes() == b"new"
    assert (place.path / "log.1").read_bytes() == b"a" * 1000 + b"b"
    assert stat.S_IMODE((place.path / "log.1").stat().st_mode) == 0o600
    place.log.unlink()
    assert not place.trim_log(1000)


def test_a_record_is_for_its_user_alone_whatever_was_there_before(place):
    (place.path / "record.tmp").touch(mode=0o644)
    place.write(Record(1, "127.0.0.1", 8000, "m", 0.0, 30.0, "https"))
    path = place.path / "record.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = place.record()
    assert found is not None
    assert found.scheme == "https"
    path.write_bytes(b'{"pid":1,"host":"h","port":1,"model":"m","started_at":0,"drain_timeout":1}')
    older = place.record()
    assert older is not None
    assert older.scheme == "http", "a server of an earlier version"
