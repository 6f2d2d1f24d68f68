"""Evidence of two Macs with nothing wrong, made up in the form of Apple's tools; tests of the doctor change it."""

from __future__ import annotations

from msgspec import structs

from tandem.diagnostics.doctor.evidence import Clock, Evidence, Finding, Host, Need, PlannedMemory
from tandem.diagnostics.doctor.examine import findings
from tandem.diagnostics.doctor.probe_messages import Facts, ModelFacts, Transferred
from tandem.diagnostics.tasks import RankTimes, Row

VERSIONS = {"python": "3.12.4", "tandem": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"}
DEVICES = "    device                 node GUID\n    ------              ----------------\n"


def ifconfig(*lines: str) -> str:
    text = "lo0: flags=8049<UP,LOOPBACK> mtu 16384\n\tinet 127.0.0.1 netmask 0xff000000\n"
    for line in lines:
        name, *rest = line.split()
        text += f"{name}: flags=8863<UP,BROADCAST> mtu 1500\n\t{' '.join(rest)}\n" if rest else ""
    return text


def mac(number: int, **outputs: str) -> Facts:
    own = {
        "ifconfig": ifconfig(f"en0 inet 192.168.1.{number} netmask 0xffffff00", f"en2 inet 10.254.0.{number} netmask 0xfffffffc"),
        "routes": "default 192.168.1.254 UGScg en0\n",
        "firewall": "Firewall is disabled. (State = 0)",
        "hardware_ports": "Hardware Port: Wi-Fi\nDevice: en0\n\nHardware Port: Thunderbolt 1\nDevice: en2\n",
        "rdma_ctl": "RDMA is enabled\n",
        "ibv_devices": DEVICES + "    rdma_en2            00\n",
        "ibv_devinfo": "hca_id: rdma_en2\n\tport: 1\n\t\tstate: PORT_ACTIVE (4)\n",
        "os_version": "26.3\n",
        "os_build": "25D125\n",
        "battery": "Now drawing from 'AC Power'\n",
        "power": "Currently in use:\n lowpowermode         0\n",
        **outputs,
    }
    return Facts(
        hostname=f"mac{number}",
        hostname_addresses=[f"192.168.1.{number}"],
        system="Darwin",
        root=False,
        executable="/opt/venv/bin/python3.12",
        program="/opt/python/3.12/bin/python3.12",
        build="5f1e",
        chip="Apple M4 Max",
        memory_bytes=64 << 30,
        available_bytes=50 << 30,
        mlx_bytes=48 << 30,
        versions=dict(VERSIONS),
        busy_ports=[],
        outputs=own,
        model=ModelFacts("/models/m", digests={"config.json": "1", "model.safetensors": "2"}, bytes=1 << 30),
    )


def pair(**changes) -> Evidence:
    """Two Macs with nothing wrong."""
    evidence = Evidence(
        [Host("a", "10.254.0.1", (None, "rdma_en2")), Host("b", "10.254.0.2", ("rdma_en2", None))],
        "a",
        "jaccl",
        "m",
        planned=PlannedMemory("its part of the model", {"a": Need(10 << 30, 40 << 30), "b": Need(10 << 30, 40 << 30)}),
        facts={"a": mac(1), "b": mac(2)},
        clocks={"b": Clock(0.01, 0.02)},
        links={ends: Transferred(None, 2e-5, 3e9) for ends in (("a", "b"), ("b", "a"))},
        collected=dict.fromkeys(
            "ab", RankTimes(rows=[Row(operation="all_sum", bytes=4096, median_us=30.0, p99_us=40.0, gb_per_s=0.1)])
        ),
    )
    for name, value in changes.items():
        setattr(evidence, name, value)
    return evidence


def with_b(evidence: Evidence, **changes) -> Evidence:
    evidence.facts["b"] = structs.replace(evidence.facts["b"], **changes)
    return evidence


def with_output(evidence: Evidence, **outputs: str) -> Evidence:
    return with_b(evidence, outputs={**evidence.facts["b"].outputs, **outputs})


def judged(evidence: Evidence) -> list[Finding]:
    return [one for one in findings(evidence) if one.check != "ray" or evidence.ray]


def bad(evidence: Evidence) -> list[Finding]:
    found = judged(evidence)
    assert all(one.remedy for one in found if one.verdict in ("fail", "warn"))
    return [one for one in found if one.verdict in ("fail", "warn")]
