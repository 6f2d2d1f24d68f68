"""Environment variables of the plugin: Tandem's own, and equivalent ones of vllm-metal."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.env import variable
from tandem.errors import ConfigError

DEVICES = "VLLM_METAL_VISIBLE_DEVICES"
"""vllm-metal's variable for the devices that a server may use."""
WITHOUT_EFFECT = {"VLLM_METAL_USE_PAGED_ATTENTION": "the KV cache is Tandem's own, in rows; leave it out"}
"""Variables of vllm-metal without effect here -> explanation for the warning."""
FROM_VLLM_METAL = ("VLLM_METAL_MEMORY_FRACTION", "VLLM_METAL_RING_BASE_PORT", DEVICES, *WITHOUT_EFFECT)
"""Variables of vllm-metal that vLLM itself would report as unknown."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a worker in addition to vLLM's configuration."""

    memory_fraction: float | None = None
    """Share of the machine's memory for all of its workers; None for vLLM's --gpu-memory-utilization."""
    base_port: int | None = None
    """Rank r listens on base_port + r. None for `BASE_PORT` among several machines where it is free, else any free port."""
    blas: str = "auto"
    dtype: str | None = None
    """Computation dtype; None for float32 on a CPU, vLLM's --dtype on a GPU."""
    layer_split: tuple[int, ...] | None = None
    threads: int | None = None


def read_options() -> Options:
    """Return the options from the environment; of equivalent variables, the first that is set counts. Raises ConfigError for an
    invalid value."""
    fraction = _number("TANDEM_MEMORY_FRACTION", "VLLM_METAL_MEMORY_FRACTION")
    if fraction is not None and not 0 < fraction <= 1:
        raise ConfigError(
            f"the memory fraction is {fraction}; it must lie above 0 and be at most 1 (or auto)", param="memory_fraction"
        )
    port = _number("TANDEM_BASE_PORT", "VLLM_METAL_RING_BASE_PORT")
    if port is not None and not (port.is_integer() and 1024 <= port <= 65535):
        raise ConfigError(f"the base port is {port:g}; it must be a port from 1024 to 65535", param="base_port")
    threads = _number("TANDEM_THREADS_PER_RANK")
    split = variable("TANDEM_LAYER_SPLIT") or variable("VLLM_PP_LAYER_PARTITION")
    return Options(
        memory_fraction=fraction,
        base_port=None if port is None else int(port),
        blas=variable("TANDEM_BLAS") or "auto",
        dtype=variable("TANDEM_DTYPE"),
        layer_split=None if split is None else _numbers(split),
        threads=None if threads is None else int(threads),
    )


def check_devices() -> None:
    """Raise ConfigError if VLLM_METAL_VISIBLE_DEVICES names a device other than 0.

    A list of zeros is valid: vLLM needs one entry per worker of the machine's replicas.
    """
    listed = variable(DEVICES)
    if listed is not None and {part.strip() for part in listed.split(",")} != {"0"}:
        raise ConfigError(
            f"{DEVICES}={listed}: MLX has one device, number 0, which all workers of a machine share; "
            "set it to 0 or leave it out (NVIDIA GPUs: CUDA_VISIBLE_DEVICES)",
            param=DEVICES,
        )


def _number(*names: str) -> float | None:
    for name in names:
        text = variable(name)
        if text is not None and text != "auto":
            try:
                return float(text)
            except ValueError:
                raise ConfigError(f"{name}={text} is not a number", param=name) from None
    return None


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"layers per stage must be numbers such as 20,16, not {text}", param="layer_split") from None
