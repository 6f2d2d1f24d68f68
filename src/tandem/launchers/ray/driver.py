"""Parent side of the Ray driver (driver_process.py) and of other processes that use Ray."""

from __future__ import annotations

import importlib.util
import logging
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from tandem.env import child_environment, runtime_dir, variable
from tandem.errors import RankFailure, UsageError
from tandem.launchers.ray.nodes import NodeList, RayNode
from tandem.launchers.ssh import HostProcess
from tandem.processes.interpreter import module_command
from tandem.protocol import payloads
from tandem.protocol.codec import UNREADABLE
from tandem.protocol.payloads import LAUNCHERS

T = TypeVar("T")
OnHost = Callable[[payloads.HostOutput | payloads.HostEnded], None]
log = logging.getLogger(__name__)

CONNECT_S = 30.0
"""Timeout in seconds for the driver to connect; its own timeout is shorter unless the cluster never answers."""
NEW_S = 120.0
"""Timeout in seconds for a new cluster to start."""
END_S = 5.0
TOKEN = {"RAY_AUTH_MODE": "token"}
"""Environment variables of processes that use the user's Ray token."""
LAST_WORDS = 20
"""Number of lines of the driver's output kept for its error message."""


def ray_variables(token: bool = False) -> dict[str, str | None]:
    """Return environment variables for the driver and a cluster that it starts. The user's own values take precedence. With
    `token` Ray authenticates with the user's token."""
    wanted = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Seconds until Ray stops trying to connect to an address that is no head, or whose cluster lacks this machine.
        "RAY_NUM_REDIS_GET_RETRIES": "5",
        "RAY_gcs_server_request_timeout_seconds": "10",
        # Ray carries only bytes and strings here, so another patch release of Python is harmless.
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    }
    if sys.platform == "darwin":
        wanted["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"  # otherwise Ray uses loopback only
    return {**{name: variable(name) or value for name, value in wanted.items()}, **(TOKEN if token else {})}


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM after `ray.init`.

    Ray installs its own handler, which exits with code 15. Before it runs absl's, whose alarm aborts the process (SIGABRT) if it
    has not exited 3 s after the signal. If SIGTERM had no handler, Ray's stays, without the alarm.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            now = signal.getsignal(signal.SIGTERM)
            # Set even if unchanged: this removes absl's handler.
            signal.signal(signal.SIGTERM, now if before in (signal.SIG_DFL, None) else before)


def _check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            "Ray is needed on every machine: pip install 'mlx-tandem[ray]', or '.[ray]' in a checkout", param="launcher"
        )


class RayDriver(HostProcess):
    """Client of the driver process, over JSON lines on its standard input and output."""

    def __init__(self, address: str | None, start_units: int, on_host: OnHost, *, token: bool = False) -> None:
        """Start the driver. `address` is host:port, `auto` for this machine's cluster, or `new` for a new one with room for
        `start_units` ranks; None uses RAY_ADDRESS, else `auto`. `on_host` is called in another thread with each `HostOutput`
        and `HostEnded`. With `token` Ray authenticates with the user's token.

        Raises UsageError when Ray is not installed.
        """
        _check_installed()
        self._address = cluster_address(address)
        self._on_host = on_host
        self._news: queue.Queue[payloads.DriverMessage | None] = queue.Queue()
        lock = str((runtime_dir() / "ray-placement.lock").absolute())
        super().__init__(
            module_command(LAUNCHERS, "ray", "place", self._address, str(start_units), lock),
            ray_variables(token),
            stderr=subprocess.PIPE,
        )
        self._last_words: deque[str] = deque(maxlen=LAST_WORDS)
        self._follow(self._process.stdout, self._take, "ray-driver", lambda: self._news.put(None))
        self._follow(self._process.stderr, self._keep, "ray-words")

    def _keep(self, line: bytes) -> None:
        """Keep Ray's own output, which matters only if the driver fails."""
        self._last_words.append(line.decode(errors="replace").rstrip())
        log.debug("ray: %s", self._last_words[-1])

    def _take(self, line: bytes) -> None:
        message = msgspec.json.decode(line, type=payloads.DriverMessage)
        if isinstance(message, payloads.HostOutput | payloads.HostEnded):
            self._on_host(message)
        else:
            self._news.put(message)

    def connect(self) -> payloads.Connected:
        """Wait for the connection. Raises UsageError after a timeout or refusal, RankFailure when the driver exits."""
        timeout_s = NEW_S if self._address == "new" else CONNECT_S
        message = self.next(timeout_s)
        if not isinstance(message, payloads.Connected):
            raise UsageError(
                f"no Ray head has answered at {self._address} within {timeout_s:.0f} s; is it one, and "
                "does a firewall let Ray's ports through?"
            )
        return message

    def place(self, request: payloads.PlaceRanks) -> None:
        """Request places; the answer is the `next` message. Ignored if the driver has exited."""
        self.tell(msgspec.json.encode(request))

    def next(self, timeout_s: float) -> payloads.DriverMessage | None:
        """Return the driver's next message; None after `timeout_s` seconds.

        Raises UsageError for errors that the user must fix, RankFailure when the driver has exited.
        """
        try:
            message = self._news.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None
        if isinstance(message, payloads.ClusterRefused):
            raise UsageError(message.message)
        if message is None:
            self._news.put(None)
            raise RankFailure(
                "the connection to the Ray cluster is lost; has its head ended, or Ray on this machine?",
                details="\n".join(self._last_words),
            )
        return message

    def close(self) -> None:
        """Stop the driver; Ray then stops everything that it placed."""
        self.end(END_S)


def cluster_address(address: str | None) -> str:
    """Return the cluster's address: `address`, else RAY_ADDRESS, else `auto`."""
    return address or variable("RAY_ADDRESS") or "auto"


def ray_nodes(address: str | None) -> tuple[list[RayNode], bool]:
    """Return the nodes of the cluster at `address` (as for `RayDriver`), and whether the user's token was needed.

    Raises UsageError.
    """
    _check_installed()
    return _with_token(
        address, lambda token: (list_nodes(cluster_address(address), ray_variables(token), CONNECT_S).nodes, token)
    )


def list_nodes(address: str, variables: Mapping[str, str | None], timeout_s: float) -> NodeList:
    """Return the nodes of a cluster, listed by a subprocess with `variables` in its environment. Raises UsageError, also after
    `timeout_s` seconds."""
    try:
        done = subprocess.run(
            module_command(LAUNCHERS, "ray", "nodes", address),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            env=child_environment(variables),
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"no Ray head has answered at {address} within {timeout_s:.0f} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise UsageError(lines[-1].removeprefix("tandem: ") if lines else "the Ray cluster does not tell its nodes")
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=NodeList)
    except (*UNREADABLE, IndexError) as error:
        raise UsageError(f"what the Ray cluster says of its nodes cannot be read: {error}") from None


def ray_command(address: str | None, node_id: str, module: str, *, token: bool) -> list[str]:
    """Return the command that runs a module on a node, in place of ssh. Its environment needs `ray_variables`."""
    shown = ["env", *(f"{name}={value}" for name, value in TOKEN.items())] if token else []
    return [*shown, *module_command(LAUNCHERS, "ray", "run", cluster_address(address), node_id, module)]


def connected_driver(address: str | None, start_units: int, on_host: OnHost) -> tuple[RayDriver, payloads.Connected]:
    """Return a connected driver, authenticated with the user's Ray token if the cluster requires it.

    The token is tried second: a driver with a token gets no answer from a cluster without authentication. Raises UsageError and
    RankFailure.
    """

    def connected(token: bool) -> tuple[RayDriver, payloads.Connected]:
        driver = RayDriver(address, start_units, on_host, token=token)
        try:
            return driver, driver.connect()
        except BaseException:
            driver.close()
            raise

    return _with_token(address, connected)


def _with_token(address: str | None, attempt: Callable[[bool], T]) -> T:
    """Call `attempt` with False and, after a UsageError and if the user has a token, with True."""
    has_token = variable("RAY_AUTH_TOKEN") or variable("RAY_AUTH_TOKEN_PATH") or (Path.home() / ".ray" / "auth_token").exists()
    try:
        return attempt(False)
    except UsageError:
        if not has_token or address == "new" or variable("RAY_AUTH_MODE"):
            raise
    return attempt(True)


@contextmanager
def new_cluster(units: int) -> Iterator[str]:
    """Run a Ray cluster on this machine with room for `units` ranks while the context lasts; yield its address.

    Raises UsageError and RankFailure.
    """
    driver, connected = connected_driver("new", units, lambda news: None)
    try:
        yield connected.cluster
    finally:
        driver.close()
