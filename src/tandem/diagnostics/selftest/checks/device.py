"""Checks of MLX on this machine's device: threads, streams and failures (mlx)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np

from tandem.diagnostics.selftest.check import Differs, NotApplicable
from tandem.diagnostics.tasks import Figures, Task
from tandem.loading.memory import choose_device, on_gpu, on_metal

ROUNDS = 1000
READERS = 3
SIDE = 64
_BROKEN = "this is no source of a kernel;"


def threads(task: Task) -> Figures:
    """Check that one thread can dispatch steps while others read earlier results, as ranks do."""
    choose_device("auto")
    matrix = mx.eye(SIDE) * 1.0
    side = mx.new_stream(mx.cpu)

    def read(index: int, array: mx.array, copied: mx.array) -> str:
        listed: Any = array.tolist() if index % 2 else np.array(copied)
        value = float(listed[0][0])
        return "" if value == index else f"step {index} gave {index}, expected; {value}, seen"

    wrong: list[str] = []
    with ThreadPoolExecutor(READERS) as pool:
        waiting = []
        for index in range(ROUNDS):
            product = (matrix * index) @ matrix
            copied = product + 0
            mx.async_eval(product, copied)  # type: ignore[no-untyped-call]
            waiting.append(pool.submit(read, index, product, copied))
            if index % 50 == 0:  # a separate stream, as links use
                mx.eval(mx.add(matrix, index, stream=side))
        wrong += [problem for answer in waiting if (problem := answer.result())]
    if wrong:
        raise Differs(wrong[0], {"steps that differ": len(wrong)})
    return {"steps": ROUNDS, "reading threads": READERS, "streams of other threads": _elsewhere()}


def _elsewhere() -> bool:
    """Return True if a thread with its own stream computes correctly. Raises Differs."""
    sums: list[object] = []

    def compute() -> None:
        with mx.stream(mx.new_stream(mx.default_device())):
            sums.append((mx.ones((8, 8)) @ mx.ones((8, 8))).sum().item())

    with ThreadPoolExecutor(1) as pool:
        pool.submit(compute).result()
    if sums != [512.0]:
        raise Differs(f"a product in another thread sums up to 512, expected; {sums}, seen")
    return True


def broken_kernel(task: Task) -> Figures:
    """Check that an invalid kernel raises a Python exception and leaves the device usable."""
    choose_device("auto")
    if not on_gpu():
        raise NotApplicable("kernels are compiled at run time on GPUs alone")
    make: Any = mx.fast.metal_kernel if on_metal() else mx.fast.cuda_kernel
    kernel = make(name="selftest_broken", input_names=["a"], output_names=["b"], source=_BROKEN)
    raised = ""
    try:
        mx.eval(
            kernel(inputs=[mx.zeros(4)], output_shapes=[(4,)], output_dtypes=[mx.float32], grid=(4, 1, 1), threadgroup=(4, 1, 1))
        )
    except Exception as error:  # noqa: BLE001 - the class is the measurement
        raised = type(error).__name__
    if not raised:
        raise Differs("an exception for a kernel without a program, expected; nothing, seen")
    if mx.ones(4).sum().item() != 4.0:
        raise Differs("the device computes after a broken kernel, expected; wrong sums, seen")
    return {"exception": raised}
