"""Breaks Tandem in the processes that find this on PYTHONPATH: the fault that PLANTED names, when its module is loaded.

The check itself is made in the test's process, which is whole.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def unlikely_tokens(module: ModuleType) -> None:
    import mlx.core as mx

    module._most_likely = lambda logits: mx.argmin(logits, axis=-1).astype(mx.int32)


def few_files(module: ModuleType) -> None:
    module.raise_limit = lambda wanted=0: 256


def later_stages(module: ModuleType) -> None:
    forward = module.StageModel.forward
    module.StageModel.forward = lambda self, h, caches: forward(self, h if self.is_first else h + 0.5, caches)


def no_sums(module: ModuleType) -> None:
    module.StageGroup.sum = lambda self, x: x


def torn_sums(module: ModuleType) -> None:
    """As when a cable is pulled: while the file TORN is there, ranks keep their own parts, and MLX says nothing."""
    import mlx.core as mx

    whole = module.StageGroup.sum

    def sum_(self: Any, x: mx.array) -> mx.array:
        found = whole(self, x)
        return mx.depends([x], [found])[0] if os.path.exists(os.environ["TORN"]) else found

    module.StageGroup.sum = sum_


def no_lifeline(module: ModuleType) -> None:
    if not {"engine", "tandem.executors.worker"} & set(sys.orig_argv):  # the others are to end with the test
        return
    module.watch_lifeline = lambda on_loss=None: None


def wrong_sums(module: ModuleType) -> None:
    import mlx.core as mx

    mx.distributed.all_sum = lambda x, group=None, stream=None: x + 0


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "unlikely tokens": ("tandem.runner.sampler", unlikely_tokens),
    "few files": ("tandem.descriptors", few_files),
    "later stages": ("tandem.loading.stage", later_stages),
    "no sums": ("tandem.comm.group", no_sums),
    "torn sums": ("tandem.comm.group", torn_sums),
    "no lifeline": ("tandem.processes.child", no_lifeline),
    "wrong sums": ("tandem.processes.child", wrong_sums),
}


class Finder:
    """Finds one module as usual, and breaks it when it has been loaded."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        module, fault = FAULTS[os.environ["PLANTED"]]
        if name != module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(loaded: ModuleType) -> None:
            execute(loaded)
            fault(loaded)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "PLANTED" in os.environ:
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
