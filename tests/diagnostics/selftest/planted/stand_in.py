"""Stands in for a check's process (`Director(module=...)`): does what the entry says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

task = json.loads(sys.stdin.buffer.readline())
if task["entry"] == "hang":
    print("still waiting", flush=True)
    time.sleep(600)
elif task["entry"] == "abort":
    print("libc++abi: terminating", flush=True)
    os.kill(os.getpid(), signal.SIGABRT)
else:
    Path(task["result"]).write_text(json.dumps({"verdict": "ok", "figures": {"seen": task["entry"]}}))
