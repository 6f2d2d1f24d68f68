"""The journal's bytes: torn, damaged, forged, full disks, rewriting."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess

import pytest

from tandem.errors import ConfigError
from tandem.server.journal.journal import MAGIC, START, Accepted, Answered, Dropped, Journal, JournalError


def accepted(name, body=b"{}", **changes):
    values = {"group": "g", "key": f"key-{name}", "digest": b"d", "route": "/v1/completions", "created": 1000.0}
    return Accepted(id=name, body=body, background=False, **{**values, **changes})


@pytest.fixture
def journal(tmp_path):
    one = Journal(tmp_path / "j")
    for number in range(4):
        one.append(accepted(f"r{number}", b"x" * number))
    one.append(Answered("r0", 200, b"zero"))
    one.append(Answered("r1", 500, b"one"))
    one.append(Dropped("r2"))
    yield one
    one.close()


def reopened(directory, data):
    """A journal over a copy of the file."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / "journal").write_bytes(data)
    return Journal(directory)


def test_what_was_written_is_there_again(journal, tmp_path):
    directory = tmp_path / "copy"
    again = reopened(directory, journal.path.read_bytes())
    assert list(again.entries) == ["r0", "r1", "r3"]
    assert again.load(again.entries["r0"].answer) == Answered("r0", 200, b"zero")
    assert again.load(again.entries["r3"].request) == accepted("r3", b"xxx")
    assert again.entries["r3"].answer is None and again.entries["r3"].key == "key-r3"
    assert again.damaged == 0 and not (directory / "journal.damaged").exists()
    assert (directory / "journal").stat().st_size == again.end
    again.close()
    assert journal.path.stat().st_mode & 0o777 == 0o600 and journal.path.parent.stat().st_mode & 0o777 == 0o700


def test_torn_anywhere(journal, tmp_path):
    data = journal.path.read_bytes()
    ends = sorted({sum(span) for span in journal.spans()})
    for cut in range(len(data)):
        again = reopened(tmp_path / "copy", data[:cut])
        known = set(again.entries)
        assert {entry.id for entry in journal.entries.values() if sum(entry.request) <= cut} <= known
        again.append(accepted("after"))
        again.close()
        after = Journal(tmp_path / "copy")
        assert set(after.entries) == known | {"after"}
        assert after.damaged == 0
        after.close()
    assert ends[-1] <= len(data)


@pytest.mark.parametrize("seed", range(40))
def test_damage_costs_only_the_records_that_it_hits(journal, tmp_path, seed):
    rng = random.Random(seed)
    data = bytearray(journal.path.read_bytes())
    hit = rng.randrange(START, len(data))
    data[hit] ^= rng.randrange(1, 256)
    if rng.random() < 0.5:  # bytes that are lost or come in
        data[hit:hit + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
    again = reopened(tmp_path / "copy", bytes(data))
    whole = {entry.id for entry in journal.entries.values() if not entry.request[0] <= hit < sum(entry.request) + 4}
    assert whole - {"r0"} <= set(again.entries) | {"r2"}
    assert set(again.entries) <= {"r0", "r1", "r2", "r3"}
    assert (tmp_path / "copy" / "journal.damaged").read_bytes() == bytes(data)
    again.append(accepted("after"))
    again.close()


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_journal(tmp_path, seed):
    rng = random.Random(seed)
    head = Journal(tmp_path / "j")
    head.close()
    noise = b"".join(rng.choice([MAGIC, rng.randbytes(rng.randrange(40))]) for _ in range(50))
    again = reopened(tmp_path / "copy", head.path.read_bytes() + noise)
    assert again.entries == {} and again.damaged == len(noise)
    again.close()


def test_a_file_of_another_kind_is_left_alone(tmp_path):
    with pytest.raises(ConfigError, match="move it away"):
        reopened(tmp_path / "copy", b"some letters of great value")
    assert (tmp_path / "copy" / "journal").read_bytes() == b"some letters of great value"


def test_a_record_inside_a_body_is_not_taken_for_one(tmp_path):
    """Even where the record around it is damaged: another journal's checksums do not hold here."""
    other = Journal(tmp_path / "other")
    other.append(accepted("forged"))
    other.close()
    forged = other.path.read_bytes()[START:]
    journal = Journal(tmp_path / "j")
    journal.append(accepted("carrier", forged))
    journal.append(accepted("next"))
    journal.close()
    data = bytearray(journal.path.read_bytes())
    data[START + 5] ^= 1
    again = reopened(tmp_path / "copy", bytes(data))
    assert set(again.entries) == {"next"}
    again.close()


def test_one_server_at_a_time(journal):
    with pytest.raises(ConfigError, match="another server uses"):
        Journal(journal.path.parent)


def test_directories_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--journal: cannot use"):
        Journal(tmp_path / "file")


def test_a_size_limit_leaves_the_file_whole(journal):
    before = journal.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, hard))
    try:
        with pytest.raises(JournalError, match="cannot be written") as caught:
            journal.append(accepted("big", b"y" * 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.status == 503
    assert journal.path.read_bytes() == before
    assert "big" not in journal.entries
    journal.append(accepted("later"))
    assert "later" in journal.entries


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="needs root to mount a file system")
def test_a_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], check=False).returncode:
        pytest.skip("may not mount a file system")
    try:
        fill_and_reopen(disk / "j")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def fill_and_reopen(directory):
    journal = Journal(directory)
    with pytest.raises(JournalError, match="No space left"):
        fill(journal)
    written = len(journal.entries)
    assert written > 5
    journal.close()
    again = Journal(directory)
    assert len(again.entries) == written and again.damaged == 0
    compaction = again.compaction()
    with pytest.raises(OSError, match="No space left"):
        compaction.copy(list(again.spans()))
    compaction.abandon()
    assert again.load(again.entries["r0"].request).id == "r0"
    again.close()


def fill(journal):
    for number in range(1000):
        journal.append(accepted(f"r{number}", b"y" * 3000))


def test_rewriting_keeps_what_is_needed(journal):
    journal.append(accepted("large", b"z" * 100_000))
    journal.append(Dropped("large"))
    assert journal.dead > 100_000
    compaction = journal.compaction()
    compaction.copy(list(journal.spans()))
    journal.append(accepted("meanwhile"))
    journal.append(Answered("r3", 200, b"three"))
    journal.replace(compaction)
    assert journal.dead == 0 and journal.path.stat().st_size == journal.end < 2000
    assert journal.load(journal.entries["r3"].answer) == Answered("r3", 200, b"three")
    journal.append(accepted("after"))
    journal.close()
    again = Journal(journal.path.parent)
    assert set(again.entries) == {"r0", "r1", "r3", "meanwhile", "after"} and again.damaged == 0
    assert again.load(again.entries["r1"].answer) == Answered("r1", 500, b"one")
    journal.__dict__.update(again.__dict__)


def test_what_is_dropped_while_it_is_copied_stays_dropped(journal):
    kept = set(journal.entries) - {"r0"}
    compaction = journal.compaction()
    compaction.copy(list(journal.spans()))
    journal.append(Dropped("r0"))
    journal.replace(compaction)
    journal.close()
    again = Journal(journal.path.parent)
    assert set(again.entries) == kept and again.damaged == 0
    journal.__dict__.update(again.__dict__)


def test_old_answers_expire_and_open_requests_do_not(tmp_path):
    journal = Journal(tmp_path / "j", clock=lambda: 5000.0)
    for name, created in (("old", 1000.0), ("open", 1000.0), ("new", 4500.0)):
        journal.append(accepted(name, created=created))
    journal.append(Answered("old", 200, b""))
    journal.append(Answered("new", 200, b""))
    assert [entry.id for entry in journal.expire(1000.0)] == ["old"]
    assert set(journal.entries) == {"open", "new"}
    journal.close()
