"""The journal's file: torn, damaged, of another kind, full disks, crashes at any moment, room given back."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from system_packages import require
from tandem.errors import ConfigError, ServerError, UnavailableError
from tandem.server.store.batches import BatchRecord
from tandem.server.store.files import File
from tandem.server.store.journal import KEPT_OPEN, LINE, LINE_BYTES, Entry, Journal, told


def accept(journal, name, body=b"{}", refusal=None, **changes):
    values = {"group": "g", "key": f"key-{name}", "digest": b"d", "route": "/v1/completions", "created": 1000.0}
    entry = Entry(number=0, id=name, background=0, **{**values, **changes})
    with journal.transaction():
        return journal.accept(entry, body, everybody=False, refusal=refusal)


def answer(journal, entry, status, body):
    with journal.transaction():
        journal.answer(entry, status, body)


def find(journal, name, group="g", everybody=False):
    with journal.transaction():
        return journal.find(group, name, everybody=everybody)


def drop(journal, entry):
    with journal.transaction():
        journal.drop(entry)


def overwrite_a_page(directory):
    """The database, with one page of it overwritten: that of the row with <150>."""
    path = directory / "journal.db"
    data = bytearray(path.read_bytes())
    at = data.index(b"<150>" * 200) // 4096 * 4096
    data[at : at + 8] = b"\xff" * 8
    path.write_bytes(data)
    return path


def contents(journal):
    """What can be had of r0, r1, ...: (body, status, answer) by id; None in the place of what is damaged."""
    found = {}
    for number in range(400):
        entry = find(journal, f"r{number}")
        if entry is not None:
            body, reply = None, None
            with contextlib.suppress(ServerError):
                body = journal.request(entry)
            with contextlib.suppress(ServerError):
                reply = journal.reply(entry) if entry.status is not None else b""
            found[entry.id] = (body, entry.status, reply)
    return found


def snapshot(directory, to):
    """The files as a crash would leave them."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(directory, to)
    return to / "journal.db"


@pytest.fixture
def journal(tmp_path):
    one = Journal(tmp_path / "j")
    entries = [accept(one, f"r{number}", b"x" * number) for number in range(4)]
    answer(one, entries[0], 200, b"zero")
    answer(one, entries[1], 500, b"one")
    drop(one, entries[2])
    yield one
    one.close()


HELD = {"r0": (b"", 200, b"zero"), "r1": (b"x", 500, b"one"), "r3": (b"xxx", None, b"")}


def test_what_was_written_is_there_again(journal, tmp_path):
    snapshot(journal.path.parent, tmp_path / "copy")
    again = Journal(tmp_path / "copy")
    assert contents(again) == HELD == contents(journal)
    assert [entry.id for entry in again.pending()] == ["r3"]
    assert find(again, "key-r3") == find(again, "r3") == find(journal, "r3")
    assert find(again, "r3", group="h") is None and find(again, "r3", group="h", everybody=True) is not None
    assert not (tmp_path / "copy" / "journal.damaged").exists()
    again.close()
    for path in journal.path.parent.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    assert journal.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_key_is_accepted_once_and_found_whatever_else_is_refused(journal):
    refusal = UnavailableError("not now")
    first = find(journal, "r0")
    assert accept(journal, "other", key="key-r0", refusal=refusal) == first
    with pytest.raises(UnavailableError, match="not now"):
        accept(journal, "other", key="new", refusal=refusal)
    assert find(journal, "other") is None and find(journal, "") is None
    assert accept(journal, "other", key="key-r0", group="h").id == "other", "another client's key is another key"


def test_an_answer_to_what_was_dropped_is_kept_nowhere(journal):
    gone = find(journal, "r3")
    drop(journal, gone)
    later = accept(journal, "later")
    answer(journal, gone, 200, b"too late")
    assert find(journal, "r3") is None and find(journal, "later") == later


def test_torn_anywhere(tmp_path):
    """The last file that is written is cut off at any byte: what stood before the cut is there, in order."""
    whole = Journal(tmp_path / "j")
    sizes = []
    for number in range(6):
        entry = accept(whole, f"r{number}", b"y" * 5000 * number)
        answer(whole, entry, 200, b"z" * number)
        sizes.append(whole.path.with_name("journal.db-wal").stat().st_size)
    data = snapshot(tmp_path / "j", tmp_path / "copy").with_name("journal.db-wal").read_bytes()
    whole.close()
    rng = random.Random(1)
    for cut in sorted({0, 31, 33, *sizes, *(size - 1 for size in sizes), *rng.sample(range(len(data)), 20)}):
        (tmp_path / "torn").mkdir()
        shutil.copy(tmp_path / "copy" / "journal.db", tmp_path / "torn")
        (tmp_path / "torn" / "journal.db-wal").write_bytes(data[:cut])
        again = Journal(tmp_path / "torn")
        known = contents(again)
        assert list(known) == [f"r{number}" for number in range(len(known))]
        assert len(known) >= sum(size <= cut for size in sizes)
        for number in range(sum(size <= cut for size in sizes)):
            assert known[f"r{number}"] == (b"y" * 5000 * number, 200, b"z" * number)
        accept(again, "after")
        again.close()
        after = Journal(tmp_path / "torn")
        assert contents(after) == known and find(after, "after") is not None
        after.close()
        shutil.rmtree(tmp_path / "torn")


KILLED = """
import sys
from pathlib import Path
from tandem.server.store.journal import Entry, Journal
journal = Journal(Path(sys.argv[1]))
start = int(sys.argv[2])
for number in range(start, start + 10**6):
    entry = Entry(0, f"r{number}", "g", f"k{number}", b"d", "/v1/completions", 1.0, 0)
    with journal.transaction():
        entry = journal.accept(entry, b"b" * (number * 977 % 20000), everybody=False, refusal=None)
    print("accepted", number, flush=True)
    with journal.transaction():
        journal.answer(entry, 200, b"%d" % number)
    print("answered", number, flush=True)
"""


def test_what_was_said_to_be_kept_is_there_after_kill_9_at_any_moment(tmp_path):
    accepted, answered = set(), set()
    for kill_after in (1, 2, 7, 20, 33):
        start = 50 * len(accepted)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", KILLED, str(tmp_path / "j"), str(start)], stdout=subprocess.PIPE, text=True
        )
        said = [process.stdout.readline() for _ in range(kill_after)]
        process.send_signal(signal.SIGKILL)
        said += process.stdout.read().splitlines(keepends=True)
        process.stdout.close()
        process.wait()
        for word, number in (line.split() for line in said if line.endswith("\n")):  # the last one may be torn
            (accepted if word == "accepted" else answered).add(int(number))
        journal = Journal(tmp_path / "j")
        for number in accepted:
            entry = find(journal, f"k{number}")
            assert len(journal.request(entry)) == number * 977 % 20000
            if number in answered:
                assert (entry.status, journal.reply(entry)) == (200, b"%d" % number)
        journal.close()


@pytest.mark.parametrize("seed", range(30))
def test_damage_anywhere_shows_nobody_anything_else(tmp_path, seed):
    rng = random.Random(seed)
    journal = Journal(tmp_path / "j")
    for number in range(12):
        entry = accept(journal, f"r{number}", rng.randbytes(rng.choice([10, 900, 9000])))
        if number % 3:
            answer(journal, entry, 200, rng.randbytes(rng.choice([10, 9000])))
    before = contents(journal)
    journal.close()
    path = tmp_path / "j" / "journal.db"
    data = bytearray(path.read_bytes())
    hit = rng.randrange(100, len(data))  # what stands before tells SQLite what file it is
    data[hit : hit + 1] = bytes([data[hit] ^ rng.randrange(1, 256)])
    if seed % 3 == 0:
        data[hit : hit + 4096] = rng.randbytes(len(data[hit : hit + 4096]))
    path.write_bytes(data)
    again = Journal(tmp_path / "j")
    for name, (body, status, reply) in contents(again).items():
        assert body in (before[name][0], None)
        assert status in (before[name][1], None)
        assert reply in (before[name][2], None) or status is None
    if (tmp_path / "j" / "journal.damaged").exists():
        assert (tmp_path / "j" / "journal.damaged").read_bytes() == bytes(data)
    accept(again, "after", b"fine")
    again.close()
    after = Journal(tmp_path / "j")
    assert after.request(find(after, "key-after")) == b"fine"
    after.close()


def test_damage_costs_only_what_it_hits(tmp_path, caplog):
    journal = Journal(tmp_path / "j")
    for number in range(300):
        answer(journal, accept(journal, f"r{number}", b"<%03d>" % number * 1500), 200, b"[%03d]" % number * 500)
    before = contents(journal)
    journal.close()
    path = tmp_path / "j" / "journal.db"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"<150>" * 400, b"<150>" * 399 + b"<151>", 1))
    again = Journal(tmp_path / "j")
    assert not (tmp_path / "j" / "journal.damaged").exists()
    found = contents(again)
    assert [name for name in before if found[name] != before[name]] == ["r150"]
    again.close()
    damaged = bytearray(data)
    at = data.index(b"<150>" * 200) // 4096 * 4096  # a page of the tree of requests or answers, or of a row's rest
    for page in range(at, at + 3 * 4096, 4096):
        damaged[page : page + 8] = b"\xff" * 8
    path.write_bytes(damaged)
    again = Journal(tmp_path / "j")
    found = contents(again)
    whole = [name for name in before if found.get(name) == before[name]]
    assert 280 <= len(whole) < 300
    assert (tmp_path / "j" / "journal.damaged").read_bytes() == bytes(damaged)
    assert "journal.damaged is the file as it was" in caplog.text
    again.close()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The bytes of a journal after a clean stop, and what is in it."""
    journal = Journal(tmp_path_factory.mktemp("full"))
    for number in range(20):
        answer(journal, accept(journal, f"r{number}", b"<%03d>" % number * 400), 200, b"ok")
    before = contents(journal)
    journal.close()
    return journal.path.read_bytes(), before


@pytest.mark.parametrize(
    "byte", [0, 15, 16, 17, 18, 19, 20, 21, 23, 28, 30, 31, 34, 43, 47, 52, 56, 60, 63, 64, 68, 71, 95, 99, 100, 104, 4088]
)
def test_a_changed_byte_of_the_first_page_costs_nothing(tmp_path, stopped, byte):
    data, before = bytearray(stopped[0]), stopped[1]
    data[byte] ^= 0x40
    (tmp_path / "journal.db").write_bytes(data)
    with contextlib.closing(Journal(tmp_path)) as again:
        assert contents(again) == before
        accept(again, "after", b"fine")
    copy = tmp_path / "journal.damaged"
    assert not copy.exists() or copy.read_bytes() == bytes(data)


def test_what_was_written_last_is_copied_before_it_is_mended(tmp_path, stopped):
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "journal.db").write_bytes(stopped[0])
    journal = Journal(tmp_path / "j")
    accept(journal, "late", b"late")
    path = snapshot(tmp_path / "j", tmp_path / "copy")
    journal.close()
    wal = path.with_name("journal.db-wal").read_bytes()
    data = bytearray(path.read_bytes())
    at = data.index(b"<010>" * 200) // 4096 * 4096
    data[at : at + 8] = b"\xff" * 8
    path.write_bytes(data)
    with contextlib.closing(Journal(tmp_path / "copy")) as again:
        assert find(again, "late") is not None
    assert path.with_name("journal.damaged").read_bytes() == bytes(data)
    assert path.with_name("journal.damaged-wal").read_bytes() == wal


@pytest.mark.parametrize("step", ["shutil.copy", "os.replace"])
def test_a_repair_that_is_interrupted_begins_anew(tmp_path, monkeypatch, step):
    journal = Journal(tmp_path / "j")
    for number in range(200):
        accept(journal, f"r{number}", b"<%03d>" % number * 400)
    before = contents(journal)
    journal.close()
    overwrite_a_page(tmp_path / "j")
    with monkeypatch.context() as patch:
        patch.setattr(f"tandem.server.store.database.{step}", interrupted)
        with pytest.raises(Interrupted):
            Journal(tmp_path / "j")
    again = Journal(tmp_path / "j")
    found = contents(again)
    assert sum(found.get(name) == before[name] for name in before) >= 198
    again.close()


def test_a_number_that_the_disk_has_changed_does_not_make_the_repair_endless(tmp_path):
    journal = Journal(tmp_path / "j")
    for number in range(200):
        accept(journal, f"r{number}", b"<%03d>" % number * 400)
    journal._database.execute("UPDATE requests SET number = 1 << 60 WHERE id = 'r199'")
    journal._database.execute("UPDATE requests SET number = -(1 << 60) WHERE id = 'r0'")
    journal.close()
    overwrite_a_page(tmp_path / "j")
    again = Journal(tmp_path / "j")
    assert 190 <= len(contents(again)) < 199
    again.close()


class Interrupted(BaseException):
    pass


def interrupted(*_):
    raise Interrupted


def test_files_of_another_kind_are_left_alone(tmp_path):
    path = tmp_path / "journal.db"
    path.write_bytes(b"some letters of great value " * 400)
    with pytest.raises(ConfigError, match=r"--journal: .*journal.db is not a journal .* move it away"):
        Journal(tmp_path)
    assert path.read_bytes() == b"some letters of great value " * 400
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE letters(text)")
    data = path.read_bytes()
    with pytest.raises(ConfigError, match="is not a journal that this version can read; move it away"):
        Journal(tmp_path)
    assert path.read_bytes() == data


def test_a_journal_of_the_version_before_is_read_on(journal, tmp_path):
    journal._database.executescript("DROP TABLE records; PRAGMA user_version = 1")
    journal.close()
    path = snapshot(journal.path.parent, tmp_path / "copy")
    for _ in range(2):
        with contextlib.closing(Journal(path.parent)) as again:
            assert contents(again) == HELD
            with again.transaction():
                again.put(record("file-1"))
    assert not path.with_name("journal.damaged").exists()


def record(name, **changes):
    return File(
        **{
            "id": name,
            "owner": "g",
            "created_at": 1.0,
            "filename": "a",
            "purpose": "batch",
            "bytes": 3,
            "expires_at": 9.0,
            **changes,
        }
    )


def test_records_are_replaced_kept_in_a_repair_and_not_shown_when_damaged(tmp_path):
    """As the rows of requests are."""
    journal = Journal(tmp_path / "j")
    for number in range(200):
        answer(journal, accept(journal, f"r{number}", b"<%03d>" % number * 400), 200, b"ok")
    with journal.transaction():
        for number in range(3):
            journal.put(record(f"file-{number}"))
        journal.put(record("file-1", bytes=7))
        journal.remove("file-0", "file-none")
    kept = [record("file-1", bytes=7), record("file-2")]
    assert journal.records(File) == kept and journal.records(BatchRecord) == []
    journal.close()
    path = overwrite_a_page(tmp_path / "j")
    with contextlib.closing(Journal(tmp_path / "j")) as again:
        assert again.records(File) == kept and path.with_name("journal.damaged").exists()
        again._database.execute("UPDATE records SET body = CAST(replace(body, 'batch', 'BATCH') AS BLOB) WHERE id = 'file-2'")
        assert again.records(File) == kept[:1]


def test_lines_of_batches_are_no_requests_of_clients(journal):
    """They are found, taken up and dropped with their batch alone."""
    lines = [(Entry(0, f"line{number}", "g", "batch_1", b"", "/v1/x", KEPT_OPEN, LINE), b"x" * 10) for number in range(3)]
    with journal.transaction():
        journal.add_lines(lines)
    entries = journal.open_lines("batch_1", "g", 0)
    assert [entry.id for entry in entries] == ["line0", "line1", "line2"]
    assert journal.open_lines("batch_1", "h", 0) == [] == journal.open_lines("batch_2", "g", 0)
    answer(journal, entries[1], 200, b"yes")
    for name in ("batch_1", "line0"):
        assert find(journal, name, everybody=True) is None
    assert [entry.id for entry in journal.pending()] == ["r3"]
    journal.tidy(0.0)
    assert journal.count_lines("batch_1", "g") == (1, 0, 33 + 3 * LINE_BYTES) and find(journal, "r0") is None
    assert [entry.id for entry in journal.open_lines("batch_1", "g", entries[0].number)] == ["line2"]
    assert journal.batches_with_lines() == [("batch_1", "g", 33 + 3 * LINE_BYTES)]
    assert [journal.drop_lines("batch_1", "g"), journal.drop_lines("batch_1", "g")] == [True, False]
    assert find(journal, "r3") is not None


@pytest.mark.parametrize("size", [200, 1500, 4200])
def test_lines_of_batches_cost_nobody_an_answer(tmp_path, size):
    with contextlib.closing(Journal(tmp_path / "j", max_bytes=2**20, clock=lambda: 1000.0)) as journal:
        for number in range(20):
            answer(journal, accept(journal, f"r{number}", key=""), 200, b"yes")
        with journal.transaction():
            journal.add_lines(
                [
                    (Entry(0, f"line{number}", "g", "batch_1", b"", "/v1/x", KEPT_OPEN, LINE), b"x" * size)
                    for number in range(1500)
                ]
            )
        for entry in journal.open_lines("batch_1", "g", 0):
            answer(journal, entry, 200, b"y" * size)
        *_, taken = journal.count_lines("batch_1", "g")
        assert not journal.tidy(1e9, taken)
        assert all(find(journal, f"r{number}") is not None for number in range(20))


def test_one_server_at_a_time(journal):
    with pytest.raises(ConfigError, match="another server uses"):
        Journal(journal.path.parent)


def test_directories_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--journal: cannot use"):
        Journal(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be a directory"):
        Journal(Path("a\0b"))


def test_the_server_says_so_before_anything_is_started(tmp_path):
    (tmp_path / "file").write_text("")
    ended = subprocess.run(
        [sys.executable, "-m", "tandem", "serve", str(tmp_path), "--port", "0", "--journal", str(tmp_path / "file")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr == f"tandem: --journal: cannot use {tmp_path / 'file'}: File exists\n"


@contextlib.contextmanager
def largest_file(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_size_limit_leaves_the_file_whole(journal, tmp_path):
    with largest_file(journal.path.with_name("journal.db-wal").stat().st_size + 40), pytest.raises(sqlite3.Error) as caught:
        accept(journal, "big", b"y" * 100_000)
    refused = told(caught.value)
    assert (refused.status, refused.code) == (503, "journal_unavailable")
    assert contents(journal) == HELD and find(journal, "big") is None
    accept(journal, "later")
    snapshot(journal.path.parent, tmp_path / "copy")
    again = Journal(tmp_path / "copy")
    assert contents(again) == HELD and find(again, "later") is not None
    again.close()


@pytest.mark.parametrize("gone", ["journal.db", "journal.db-wal", "."])
def test_files_that_are_removed_or_replaced_are_not_written_to(journal, tmp_path, gone):
    """What only this process could read would be lost with it."""
    place, away = journal.path.parent / gone, tmp_path / "away"
    place.rename(away)
    with pytest.raises(sqlite3.Error) as caught:
        accept(journal, "lost")
    assert "removed or replaced" in told(caught.value).message
    away.rename(place)
    assert accept(journal, "kept").id == "kept", "they are back"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a file system")
def test_a_full_disk(tmp_path):
    require("mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", disk], check=False).returncode:
        pytest.skip("may not mount a file system")
    try:
        fill_and_reopen(disk / "j")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def fill_and_reopen(directory):
    journal = Journal(directory)
    with pytest.raises(sqlite3.Error) as caught:
        fill(journal)
    assert "the disk is full" in told(caught.value).message
    written = len(contents(journal))
    assert written > 5
    journal.close()
    again = Journal(directory)
    assert contents(again) == {f"r{number}": (b"y" * 3000, None, b"") for number in range(written)}
    again.close()


def fill(journal):
    for number in range(1000):
        accept(journal, f"r{number}", b"y" * 3000)


def test_old_answers_expire_open_requests_do_not_and_their_room_is_given_back(tmp_path):
    journal = Journal(tmp_path / "j", clock=lambda: 5000.0)
    for number in range(60):
        answer(journal, accept(journal, f"old{number}", b"y" * 2**20), 200, b"")
    accept(journal, "open", created=1000.0)
    answer(journal, accept(journal, "new", created=4500.0), 200, b"")
    before = journal.size()
    for _ in range(20):
        journal.tidy(1000.0)
    assert find(journal, "old0") is None and find(journal, "old59") is None
    assert find(journal, "open").status is None and find(journal, "new").status == 200
    journal.close()
    assert before > 60 * 2**20 and journal.size() < 20 * 2**20


def test_the_oldest_answers_are_found_without_reading_the_others(journal):
    """And so are keys, ids and bodies: a look costs the same in a large journal."""
    plans = []
    journal._database.set_trace_callback(plans.append)
    find(journal, "key-r0")
    journal.open_lines("batch_1", "g", 0)
    journal.count_lines("batch_1", "g")
    journal.drop_lines("batch_1", "g")
    journal.tidy(1e9)
    journal._database.set_trace_callback(None)
    queries = {query for query in plans if query.lstrip().startswith(("SELECT", "DELETE"))}
    assert queries
    for query in queries:
        steps = [row[-1] for row in journal._database.execute(f"EXPLAIN QUERY PLAN {query}")]
        assert not [step for step in steps if step.startswith("SCAN")]


def test_with_everysec_a_look_around_takes_everything_to_the_disk(tmp_path):
    journal = Journal(tmp_path / "j", "everysec")
    accept(journal, "r0")
    journal.tidy(1e9)
    shutil.copytree(tmp_path / "j", tmp_path / "copy", ignore=shutil.ignore_patterns("*-wal"))
    again = Journal(tmp_path / "copy")
    assert find(again, "r0") is not None
    again.close()
    journal.close()


# --- what SQLite raises ---


def full(journal, _):
    journal._database.execute(f"PRAGMA max_page_count = {journal._database.execute('PRAGMA page_count').fetchone()[0]}")


def read_only(journal, _):
    journal._database.execute("PRAGMA query_only = ON")


def damaged(journal, _):
    journal.close()
    path, copy = journal.path, bytearray(journal.path.read_bytes())
    copy[4096 * 2 :] = b"\xff" * (len(copy) - 4096 * 2)
    path.write_bytes(copy)
    journal._database = sqlite3.connect(path, isolation_level=None)


def locked(journal, stack):
    journal.close()
    other = stack.enter_context(contextlib.closing(sqlite3.connect(journal.path, isolation_level=None)))
    other.execute("BEGIN IMMEDIATE")
    journal._database = sqlite3.connect(journal.path, isolation_level=None, timeout=0)


def failing_disk(journal, stack):
    stack.enter_context(largest_file(10))


def too_large(journal, _):
    journal._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 50_000)


def gone(journal, _):
    journal.close()
    shutil.rmtree(journal.path.parent)
    journal._database = sqlite3.connect(":memory:")
    journal._database.close()
    journal._database = _Unopened(journal.path)


class _Unopened:
    """A connection that is made only when it is used, as SQLite's own are."""

    def __init__(self, path):
        self._path = path

    def execute(self, _):
        sqlite3.connect(self._path)

    def close(self):
        pass


@pytest.mark.parametrize(
    ("provoke", "words"),
    [
        (full, r"the disk is full \(SQLITE_FULL\)"),
        (read_only, r"it cannot be written to \(SQLITE_READONLY\)"),
        (damaged, r"it is damaged; a restart of the server keeps what is whole \(SQLITE_CORRUPT\)"),
        (locked, r"another process has locked it \(SQLITE_BUSY\)"),
        (failing_disk, r"the disk fails \(SQLITE_IOERR_WRITE\)"),
        (too_large, r"this is larger than a row may be \(SQLITE_TOOBIG\)"),
        (gone, r"it cannot be opened \(SQLITE_CANTOPEN\)"),
    ],
)
def test_each_failure_of_sqlite_is_told_in_plain_words(journal, provoke, words):
    with contextlib.ExitStack() as stack:
        provoke(journal, stack)
        journal._places = journal._files()  # some of it makes them anew
        with pytest.raises(sqlite3.Error) as caught:
            accept(journal, "r9", b"y" * 100_000)
    failure = told(caught.value)
    assert (failure.status, failure.code, failure.retry_after) == (503, "journal_unavailable", 30.0)
    with pytest.raises(type(failure), match=words):
        raise failure


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(sqlite3).values() if isinstance(kind, type) and issubclass(kind, sqlite3.Error)]
)
def test_every_kind_of_sqlites_errors_has_words(kind):
    failure = told(kind("anything"))
    assert failure.code == "journal_unavailable" and kind.__name__ in failure.message
    assert "anything" not in failure.message
