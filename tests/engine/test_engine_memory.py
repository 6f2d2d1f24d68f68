"""Room for KV: by the machine that ranks share, not by its name, and less what each keeps for reuse."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tandem.config.settings import SchedulerSettings, Settings
from tandem.engine.sizing import make_limits
from tandem.errors import OutOfMemory
from tandem.protocol.control import Ready

GIB = 2**30


def ready(rank: int, machine: str, **changes) -> Ready:
    return Ready(**{"rank": rank, "weight_bytes": 60 * GIB, "kv_bytes_per_token": 2**18, "memory_bytes": 96 * GIB,
                    "peak_bytes": 0, "gpu": True, "host": "Mac", "machine": machine, "pid": 1, "trimmable": True,
                    **changes})


def room(*ranks: Ready, fraction: float = 0.85) -> int:
    layout = SimpleNamespace(max_context=1 << 20, lanes=1,
                             description=SimpleNamespace(eos_token_ids=(), vocab_size=9))
    settings = Settings(scheduler=SchedulerSettings(memory_fraction=fraction))
    return make_limits(settings, layout, ranks, shrink=False).kv_tokens


def test_two_macs_with_one_name_have_memory_each():
    assert room(ready(0, "a"), ready(1, "b")) == int((0.85 * 96 - 60) * GIB) // 2**18


def test_two_ranks_of_one_mac_share_it_though_its_name_changed_between_their_starts():
    with pytest.raises(OutOfMemory):
        room(ready(0, "a"), ready(1, "a", host="Mac.lan"))


def test_buffers_that_are_kept_for_reuse_have_room_in_what_is_left_over():
    kept = ready(0, "a", cache_bytes=2 * GIB)
    assert room(ready(0, "a")) == room(kept)
    assert room(ready(0, "a"), fraction=0.99) - room(kept, fraction=0.99) == int((0.99 * 96 - 94) * GIB) // 2**18
