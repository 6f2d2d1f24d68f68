"""CUDA set up for ranks that wait for one another. Without mlx."""

from __future__ import annotations

from importlib.metadata import distributions

from tandem.env import set_default

MODULE_LOADING = "CUDA_MODULE_LOADING"


def uses_cuda(device: str) -> bool:
    """Whether ranks with this `--device` compute on NVIDIA GPUs, if this machine has any: they are not told to leave
    them, and the MLX that is installed is one of those for CUDA (mlx-cuda-12, mlx-cuda-13)."""
    return device != "cpu" and any((package.name or "").startswith("mlx-cuda") for package in distributions())


def prepare_cuda() -> None:
    """Have CUDA load all kernels when a library is opened. Call before mlx is imported; no use without CUDA, no harm.

    As it comes, CUDA loads a kernel when it is first used, and for that waits until the GPU is idle ("Lazy Loading" in
    NVIDIA's CUDA programming guide). A GPU that waits for another rank's part of a sum is not idle; and the part's
    arrival is told by a kernel, too. So a rank that needed a new kernel with a sum under way stood still for ever, and
    with it all others.
    """
    set_default(MODULE_LOADING, "EAGER")
