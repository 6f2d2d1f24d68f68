"""`mx.split` as slices, which MLX's rotary kernel for CUDA needs."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tandem.loading.seams import split_by_slices

CASES = ((2, 0), (3, 1), (1, 2), (2, -1), ([1], -1), ([1, 3], 2), ([1], -2), ([], 0), ([5, 2], -1))


@pytest.fixture
def sliced(monkeypatch):
    theirs = mx.split, mx.array.split
    monkeypatch.setattr(mx, "split", mx.split)  # put back afterwards
    monkeypatch.setattr(mx.array, "split", mx.array.split)
    split_by_slices()
    return theirs


def test_the_values_and_errors_are_those_of_mlx(sliced):
    function, method = sliced
    a = mx.arange(24).reshape(2, 3, 4)
    for where, axis in CASES:
        known = function(a, where, axis)
        for found in (
            mx.split(a, where, axis),
            mx.split(a, indices_or_sections=where, axis=axis),
            a.split(where, axis),
            method(a, where, axis),
        ):
            assert len(found) == len(known)
            assert all(x.shape == y.shape and mx.array_equal(x, y) for x, y in zip(found, known, strict=True))
    for where, axis in ((5, 0), (0, 0), ([1], 3), ([1], -4)):
        with pytest.raises((ValueError, IndexError)) as theirs:
            function(a, where, axis)
        with pytest.raises(type(theirs.value), match=r"split"):
            mx.split(a, where, axis)


def test_it_is_put_in_once(sliced):
    ours = mx.split, mx.array.split
    split_by_slices()
    assert ours == (mx.split, mx.array.split)


@pytest.mark.skipif(not mx.cuda.is_available(), reason="the kernel is of CUDA")
@pytest.mark.parametrize(("rows", "length"), [(1, 512), (8, 1), (2, 33)])
def test_what_is_rotated_of_a_part_stays_within_its_memory(rows, length, sliced):
    made = mx.random.normal((rows, length, 2112)).astype(mx.bfloat16)
    others = [mx.full((64 * 1024,), i, mx.bfloat16) for i in range(64)]
    mx.eval(made, others)
    part = mx.split(made, [1536, 2048], axis=-1)[-1][:, None]
    known = mx.fast.rope(mx.contiguous(part), 64, traditional=True, base=1e4, scale=1.0, offset=3)
    found = mx.fast.rope(part, 64, traditional=True, base=1e4, scale=1.0, offset=3)
    mx.eval(found, part)
    assert mx.array_equal(found, known)
    assert all(mx.all(one == i) for i, one in enumerate(others))
