"""The Ray driver: the process that uses Ray, and the only launcher module that imports it.

Ray exits a process that has lost the cluster's head for 60 seconds, and replaces its signal handlers. An engine must keep its
requests, so the driver is a separate process (docs/adr/0013-ray-has-a-process-of-its-own.md). The driver reserves a device per
rank with a placement group. On each it keeps an actor, which starts and watches the node agent. When the driver exits for any
reason, Ray ends the actors, and they end node agents and ranks.

Ray pickles arguments and results of calls; Tandem passes only bytes and strings.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import BinaryIO

import msgspec
import ray
from msgspec.structs import replace
from ray._private.state import available_resources_per_node
from ray.util import get_node_ip_address, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from tandem.crash_guard import start_thread
from tandem.env import child_environment
from tandem.errors import UsageError
from tandem.json_types import JsonObject
from tandem.launchers.host_facts import is_own
from tandem.launchers.ray.driver import sigterm_kept
from tandem.launchers.ray.nodes import UNIT, NodeList, RayNode, check_addresses, choose, shortage
from tandem.processes.child import die_with_parent, lines_of_parent
from tandem.processes.interpreter import module_command
from tandem.protocol.payloads import (
    RANK_HOST,
    ClusterRefused,
    Connected,
    DriverMessage,
    HostEnded,
    HostOutput,
    Placed,
    PlaceRanks,
)

NEW = "new"
POLL_S = 0.3
"""Seconds between attempts to reserve devices."""
RESERVE_S = 5.0
"""Timeout in seconds of a Ray reservation; after it nodes are chosen again."""
REACH_S = 2.0
"""Timeout in seconds for a test connection to a node's advertised address."""
REACH_AT_ONCE = 16
END_S = 4.0
"""Seconds for the driver to release its actors after standard input closes."""
OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Object store of a cluster that Tandem starts: Ray's minimum, since nothing large is stored."""


class Driver:
    """A connection to a cluster that places the node agents of one rank group after the other."""

    def __init__(self, address: str, start_units: int, lock: str, link: BinaryIO) -> None:
        """Connect, and send `Connected` on `link`. `address` and `start_units` as in `RayDriver`. Drivers on this machine lock
        the file `lock` while they choose nodes. Raises UsageError."""
        self._lock_path = lock
        self._link = link
        self._sending = threading.Lock()
        self._cluster = _connect(address, start_units)
        self._here = get_node_ip_address()
        self._group: PlacementGroup | None = None
        self._actors: list[object] = []
        self._closing = False
        self._send(Connected(self._cluster, self._here))

    def serve(self, requests: Iterable[bytes]) -> None:
        """Handle requests, JSON lines of `PlaceRanks`, until they end."""
        for line in requests:
            request = msgspec.json.decode(line, type=PlaceRanks)
            try:
                self._release()
                self._place(request)
            except UsageError as error:
                self._send(ClusterRefused(error.message))
            except ray.exceptions.RayError as error:
                sys.exit(f"tandem: the Ray cluster does not go on: {_reason(error)}")  # the engine starts a new driver

    def close(self) -> None:
        """Stop what was placed, and the cluster if this driver started it."""
        self._closing = True
        self._release()
        ray.shutdown()

    def _send(self, message: DriverMessage) -> None:
        with self._sending:
            _write(self._link, message)

    # --- placement ---

    def _place(self, request: PlaceRanks) -> None:
        deadline = time.monotonic() + request.patience_s
        while (nodes := self._reserve(len(request.payloads), request.avoid)) is None:
            if time.monotonic() > deadline:
                raise UsageError(shortage(nodes_of_cluster(), len(request.payloads), self._cluster))
            time.sleep(POLL_S)
        self._send(Placed([node.node_id for node in nodes], [node.where for node in nodes]))
        for rank, node in enumerate(nodes):
            self._start(request, rank, node)

    def _reserve(self, count: int, avoid: list[str]) -> list[RayNode] | None:
        """Choose nodes and reserve a device for each rank. Return None if there is no room. Raises UsageError.

        Holds a lock, so that replicas that start together see each other's reservations.
        """
        with _locked(self._lock_path):
            nodes = choose(nodes_of_cluster(), count, self._here, avoid)
            if nodes is None:
                return None
            check_addresses(nodes, self._here)
            self._group = placement_group(
                [node.bundle for node in nodes],
                strategy="PACK",
                bundle_label_selector=[{"ray.io/node-id": node.node_id} for node in nodes],
            )
            if self._group.wait(RESERVE_S):
                return nodes
        self._release()
        return None

    # --- actors ---

    def _start(self, request: PlaceRanks, rank: int, node: RayNode) -> None:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        resources = {name: amount for name, amount in node.bundle.items() if name != "GPU"}
        actor = (
            ray.remote(Program)
            .options(
                num_cpus=0, num_gpus=node.bundle.get("GPU", 0), resources=resources, scheduling_strategy=strategy, max_restarts=0
            )
            .remote(RANK_HOST)
        )
        self._actors.append(actor)
        payload = replace(request.payloads[rank], address=node.address)
        actor.write.remote(msgspec.json.encode(payload) + b"\n")
        lines = actor.read.options(num_returns="streaming").remote(node.address)
        start_thread(lambda: self._watch(request.number, rank, node.where, lines), name=f"rank {rank}")

    def _watch(self, placement: int, rank: int, place: str, lines: Iterator[object]) -> None:
        """Forward a node agent's output, and report its end."""
        try:
            for line in lines:
                text = ray.get(line).decode(errors="replace").rstrip("\n")
                self._send(HostOutput(placement, rank, place, text))
            reason = "has ended"
        except ray.exceptions.RayError as error:
            reason = _reason(error)
        if not self._closing:
            self._send(HostEnded(placement, rank, reason))

    def _release(self) -> None:
        """Kill the actors and return their devices."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def nodes_of_cluster() -> list[RayNode]:
    """Return the cluster's nodes. Ray's free amounts lag behind and its reservations do not, so the smaller amount counts."""
    available = available_resources_per_node()
    reserved: dict[str, dict[str, float]] = {}
    for group in placement_group_table().values():
        if group["state"] == "REMOVED":
            continue
        for index, node_id in group["bundles_to_node_id"].items():
            taken = reserved.setdefault(node_id, {})
            for name, amount in group["bundles"][index].items():
                taken[name] = taken.get(name, 0.0) + amount
    with ThreadPoolExecutor(REACH_AT_ONCE) as pool:
        troubles = pool.map(_trouble, listed := ray.nodes())
    nodes = []
    for node, trouble in zip(listed, troubles, strict=True):
        node_id, total = node["NodeID"], node["Resources"]
        unused, taken = available.get(node_id, {}), reserved.get(node_id, {})
        free = {name: min(unused.get(name, 0.0), amount - taken.get(name, 0.0)) for name, amount in total.items()}
        nodes.append(RayNode(node_id, node["NodeManagerAddress"], node["NodeManagerHostname"], total, free, trouble))
    return nodes


class Program:
    """Actor on a node that runs a Python module and carries its input and output."""

    def __init__(self, module: str) -> None:
        """Start `python -m module`, which may include arguments."""
        # Ray sets OMP_NUM_THREADS for its workers; Tandem chooses a rank's threads itself.
        self._process = subprocess.Popen(
            module_command(*module.split()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=child_environment({"OMP_NUM_THREADS": None}),
            start_new_session=True,
        )

    def write(self, data: bytes) -> None:
        """Write to the program's standard input; b"" closes it. Ignored if the program has exited."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(data)
            self._process.stdin.flush()
            if not data:
                self._process.stdin.close()

    def read(self, address: str = "") -> Iterator[bytes]:
        """Yield the program's output by lines until it exits. Raises UsageError if this machine lacks the node's advertised
        `address`."""
        if address and not is_own(address):
            raise UsageError(
                f"the Ray node on {socket.gethostname()} advertises {address}, an address that this "
                "machine does not have; start Ray there with --node-ip-address=ADDRESS, one of its own"
            )
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            yield line
        self._process.wait()


def _run_there(address: str, node_id: str, module: str) -> None:
    """Run a module on a node with this process's standard input and output, like ssh. Raises UsageError."""
    _connect(address)
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor = ray.remote(Program).options(num_cpus=0, max_concurrency=2, scheduling_strategy=strategy).remote(module)

    def pass_on() -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # the main thread reports the same error
            while data := os.read(0, 65536):
                ray.get(actor.write.remote(data))
            actor.write.remote(b"")

    start_thread(pass_on, name="input")
    try:
        for line in actor.read.options(num_returns="streaming").remote():
            sys.stdout.buffer.write(ray.get(line))
            sys.stdout.buffer.flush()
    except ray.exceptions.RayError as error:
        raise UsageError(f"the Ray node cannot run it: {_reason(error)}") from None
    finally:
        ray.kill(actor)


def _list(address: str) -> None:
    """Print a `NodeList` as JSON: all nodes, with the reason if one is unreachable."""
    _connect(address)
    sys.stdout.buffer.write(msgspec.json.encode(NodeList(nodes_of_cluster(), get_node_ip_address())))


def _connect(address: str, start_units: int = 0) -> str:
    """Connect to the cluster, or start one with room for `start_units` ranks; return its address. Raises UsageError."""
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "namespace": "tandem"}
    if address == NEW:
        address, size = "local", {"num_cpus": start_units, "resources": {UNIT: start_units}}
        quiet |= {**size, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    elif address != "auto":
        _check_answers(address)
    try:
        with sigterm_kept():
            return str(ray.init(address=address, **quiet).address_info["gcs_address"])
    except ConnectionError as error:
        raise UsageError(
            f"this machine is no node of a Ray cluster, or not of that at {address} ({_line(error)}). Run "
            f"`ray start --head --node-ip-address=ADDRESS --resources='{{\"{UNIT}\": 1}}'` here or, to "
            f"join a cluster, with --address=HEAD:6379 instead of --head; or give --ray-address {NEW}"
        ) from None
    except (RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise UsageError(f"cannot use the Ray cluster at {address}: {_line(error)}") from None


def _trouble(node: JsonObject) -> str:
    """Return why ranks cannot be placed on a node, from this machine's view; empty if they can."""
    if not node["Alive"]:
        return (
            "is lost; if it is up, it advertises an address that the head does not reach: start Ray there with "
            "--node-ip-address=ADDRESS, one that other machines reach"
        )
    address, port = node["NodeManagerAddress"], node["NodeManagerPort"]
    try:
        socket.create_connection((address, port), timeout=REACH_S).close()
    except OSError as error:
        return (
            f"cannot be reached from here at the address that it advertises ({error.strerror or error}); if it is "
            "up, start Ray there with --node-ip-address=ADDRESS, one that other machines reach"
        )
    return ""


def _line(error: Exception) -> str:
    try:
        return " ".join(str(error).split()) or type(error).__name__
    except Exception:  # noqa: BLE001 - some of Ray's errors fail to print when a part of them is missing
        return type(error).__name__


def _reason(error: ray.exceptions.RayError) -> str:
    """Return why a node agent ended, in one line."""
    if isinstance(error, ray.exceptions.RayTaskError) and (cause := getattr(error, "cause", None)) is not None:
        return _line(cause)
    if isinstance(error, ray.exceptions.ActorUnavailableError | ray.exceptions.NodeDiedError):
        return "was lost with its node, or with the Ray processes there"
    return _line(error)


def _check_answers(address: str) -> None:
    """Raise UsageError if nothing listens at the head's `address`; Ray itself would retry for much longer."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise UsageError(
            f"--ray-address {address}: must be HOST:PORT of the cluster's head, auto or new; ray:// "
            "addresses are not supported, since ranks must be able to connect to this machine"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise UsageError(
            f"--ray-address {address}: nothing answers there ({error.strerror or error}); is Ray running on the head?"
        ) from None


@contextmanager
def _locked(path: str) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(link: BinaryIO, message: DriverMessage) -> None:
    link.write(msgspec.json.encode(message) + b"\n")
    link.flush()


def _place_ranks(address: str, start_units: str, lock: str) -> None:
    """Run a driver until standard input ends."""
    die_with_parent()
    link = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Ray's own output goes to standard error
    requests = lines_of_parent(END_S)
    try:
        driver = Driver(address, int(start_units), lock, link)
    except UsageError as error:
        _write(link, ClusterRefused(error.message))
        return
    driver.serve(requests)
    driver.close()


def main(action: str, *words: str) -> int:
    """Place ranks for an engine (`place`), list nodes (`nodes`) or run a module on a node (`run`). Return 0."""
    os.chdir("/")  # Ray's workers would import from the driver's working directory first
    actions: dict[str, Callable[..., None]] = {"place": _place_ranks, "nodes": _list, "run": _run_there}
    try:
        actions[action](*words)
    except UsageError as error:
        sys.exit(f"tandem: {error.message}")
    return 0
