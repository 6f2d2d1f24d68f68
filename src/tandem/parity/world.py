"""Has `mlx.launch` started this process, as one rank of several? No mlx."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.config.settings import Settings
from tandem.engine.layout import stage_sizes
from tandem.env import variable
from tandem.errors import ConfigError, LayoutError
from tandem.launchers import facts


@dataclass(frozen=True)
class World:
    """This process's place."""

    rank: int
    size: int
    ring: bool
    """MLX's ring backend can start."""


def launched_world() -> World | None:
    """This process's place among those that `mlx.launch` started; None when it stands alone. Raises ConfigError."""
    if variable("MLX_RANK") is None:
        return None
    told, size = facts.launched_world(), variable("MLX_WORLD_SIZE")
    if size is not None and not size.isdecimal():
        raise ConfigError(f"MLX_WORLD_SIZE is {size!r}, not a number; start with mlx.launch, or unset MLX_RANK")
    count = int(size) if size is not None else max(len(told.hostfile), len(told.devices))
    return World(told.rank or 0, count, bool(told.hostfile)) if count > 1 else None


def member_settings(settings: Settings, world: World) -> Settings:
    """Settings of the layout that the world's ranks form: a pipeline, unless they say tensor parallelism.

    Raises LayoutError when the layout has another number of ranks, or MLX's groups cannot join it.
    """
    parallel = settings.parallel
    if parallel.parallel is None and parallel.pipeline_parallel_size == parallel.tensor_parallel_size == 1:
        parallel = replace(parallel, pipeline_parallel_size=world.size)
    sizes = stage_sizes(parallel)
    if sum(sizes) != world.size:
        raise LayoutError(f"mlx.launch started {world.size} ranks, the layout has {sum(sizes)}; start as many, or "
                          "change --pipeline-parallel-size or --tensor-parallel-size", param="pipeline_parallel_size")
    if len(sizes) > 1 and max(sizes) > 1:
        raise LayoutError("mlx.launch makes one MLX group, and tensor with pipeline parallelism needs one for each "
                          "stage; run `tandem parity` without mlx.launch", param="tensor_parallel_size")
    if len(sizes) > 1 and (not world.ring or parallel.channel == "tcp"):
        raise LayoutError("under mlx.launch MLX's ring joins the stages; start with --backend ring, and leave out "
                          "--channel", param="channel")
    if len(sizes) > 1:
        parallel = replace(parallel, channel="mlx")
    elif parallel.backend == "auto":
        parallel = replace(parallel, backend="ring" if world.ring else "any")
    return replace(settings, parallel=parallel)
