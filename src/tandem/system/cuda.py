"""CUDA settings for ranks that wait for one another. Does not import mlx."""

from __future__ import annotations

from importlib.metadata import distributions

from tandem.env import set_default

MODULE_LOADING = "CUDA_MODULE_LOADING"


def uses_cuda(device: str) -> bool:
    """Return whether ranks with this `--device` may use NVIDIA GPUs.

    True unless it is `cpu`, if a CUDA build of MLX is installed (mlx-cuda-12, mlx-cuda-13). Does not check for a GPU.
    """
    return device != "cpu" and any((package.name or "").startswith("mlx-cuda") for package in distributions())


def prepare_cuda() -> None:
    """Make CUDA load all kernels when a library is opened. Call before mlx is imported; harmless without CUDA.

    By default CUDA loads a kernel at its first use, and waits for an idle GPU first ("Lazy Loading" in NVIDIA's CUDA
    programming guide). A GPU inside an all-reduce is not idle, and a kernel signals the arrival of a peer's data too. A rank
    that needed a new kernel during an all-reduce therefore deadlocked, and with it all other ranks.
    """
    set_default(MODULE_LOADING, "EAGER")
