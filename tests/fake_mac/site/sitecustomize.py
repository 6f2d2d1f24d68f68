"""Makes Python take this machine for a Mac. What looks at the platform while it is imported comes first, as Linux's."""

from __future__ import annotations

import asyncio  # noqa: F401
import ctypes.util  # noqa: F401
import multiprocessing.util  # noqa: F401
import platform
import selectors  # noqa: F401
import shutil  # noqa: F401
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
import urllib.request  # noqa: F401
import uuid  # noqa: F401
import webbrowser  # noqa: F401

sys.platform = "darwin"
platform.system = lambda: "Darwin"
platform.machine = lambda: "arm64"
platform.mac_ver = lambda *_: ("26.3", ("", "", ""), "arm64")
