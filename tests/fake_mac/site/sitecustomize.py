"""Makes Tandem's modules take this machine for a Mac: the `sys` and `platform` that they see say so.

The libraries beside it see the real system, since on a Mac they would load parts that only macOS has.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class Disguised(ModuleType):
    """A module of which some names have other values; all the rest is the module's own."""

    def __init__(self, module: ModuleType, **values: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(values, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


DISGUISED = {
    "sys": Disguised(sys, platform="darwin"),
    "platform": Disguised(
        platform, system=lambda: "Darwin", machine=lambda: "arm64", mac_ver=lambda *_: ("26.3", ("", "", ""), "arm64")
    ),
}


class Finder:
    """Finds Tandem's modules as usual, and changes what they have imported."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "tandem":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for one, disguised in DISGUISED.items():
                    if module.__dict__.get(one) is disguised._module:
                        module.__dict__[one] = disguised

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
