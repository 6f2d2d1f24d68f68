"""Position of a rank in its group: the part of the model that it holds, and the ranks that it sends to."""

from __future__ import annotations

from msgspec import Struct


class RankPosition(Struct, frozen=True, kw_only=True):
    """Position of a rank among the stages of its group; ranks of a stage have consecutive numbers."""

    rank: int
    """Number in the rank group."""
    stage_sizes: tuple[int, ...]
    """Ranks of each stage."""

    @property
    def stage(self) -> int:
        """Number of its stage."""
        return next(stage for stage in range(len(self.stage_sizes)) if self.rank < sum(self.stage_sizes[: stage + 1]))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_sizes)

    @property
    def tp_size(self) -> int:
        """Ranks of this stage."""
        return self.stage_sizes[self.stage]

    @property
    def tp_rank(self) -> int:
        """Number within the stage; 0 leads it."""
        return self.rank - sum(self.stage_sizes[: self.stage])

    @property
    def samples(self) -> bool:
        """True for the one rank of the rank group that chooses tokens: the leader of the last stage."""
        return self.stage == self.stages - 1 and self.tp_rank == 0

    @property
    def downstream(self) -> list[int]:
        """Ranks that this one sends to: activations to the next stage, tokens from the sampler to the first.

        Every rank of a stage holds the same activations, so the ranks of the next one are shared out among them.
        """
        if self.stages == 1 or (self.stage == self.stages - 1 and not self.samples):
            return []
        target = (self.stage + 1) % self.stages
        first = sum(self.stage_sizes[:target])
        peers = range(self.stage_sizes[target])
        if target == 0:
            return [first + peer for peer in peers]
        return [first + peer for peer in peers if peer % self.tp_size == self.tp_rank]


class StageSpec(RankPosition, frozen=True, kw_only=True):
    """Specification from which a rank builds its part of the model; sent to rank processes as JSON."""

    model_path: str
    model_name: str
    layers: tuple[int, int]
    """First layer and one past the last."""
    tensor_split: tuple[float, ...] | None
    """Weights by which the stage's ranks share heads and widths; None for equal shares."""
    micro_batches: int
    dtype: str
    dequantize: str
    vocab_size: int
    memory_share: float
    """Share of its machine's memory, or of the GPU there, that this rank may use."""
    eos_token_ids: tuple[int, ...]
    channel: str
    backend: str
    blas: str
    log_level: str
    attention: str = "auto"
    """Attention of decode steps: `auto` or `masked`."""
    fuse_projections: str = "auto"
    """`on`, `off`, or `auto`: on a GPU."""
    device: str = "auto"
    """`cpu`, `gpu`, or `auto`: what MLX takes by itself."""
    fast_sync: str = "off"
    """MLX's fast fences on a Mac: `on`, `off`, or `auto`, where the stage has several ranks."""
    wired: int | None = None
    """Most bytes of weights to keep in a GPU's memory for good, 0 for none; None: as many as is safe."""
    machine: str = ""
    """Identity of the rank's machine, from its launcher."""
    sharing: int = 1
    """Ranks of the rank group on that machine that share its memory."""
    gpu_share: float | None = None
    """Share of the GPU's memory when this rank has one of several GPUs to itself; else None."""
    weights_from: str = "local"
    """`head`: from the engine's machine; `model_path` is a directory there."""
    hub: str = ""
    """Repository and commit (org/name@commit) from which the weights that are not here can be downloaded."""
    drafts: int = 0
    """Most drafts of a sequence in one step; 0 without speculative decoding."""
    draft_path: str = ""
    """Directory of the draft model, for the rank that samples."""
    trust_remote_code: bool = False
    """Let the tokenizer, which grammars need, run Python code that comes with the model."""
    adapter_path: str = ""
    """Directory, on the rank's machine, of a LoRA adapter to apply."""
    expert_parallel: bool = False
    """The stage's ranks share out experts whole."""
    kv_dtype: str = "auto"
    """Type in which keys and values are kept: `auto`, `8bit` or `4bit`."""
    kv_disk: str = ""
    """Directory, on the rank's machine, in which it keeps prefixes of prompts; empty for none."""
    kv_disk_bytes: int = 0
    """Upper bound, in bytes, of that directory."""
    kv_space: str = ""
    """Key of this model, adapter and KV type in that directory."""

    @property
    def share(self) -> float:
        """Fraction of the stage's heads and widths that this rank holds."""
        weights = self.tensor_split or (1.0,) * self.tp_size
        return weights[self.tp_rank] / sum(weights)

    @property
    def fast_fences(self) -> bool:
        """True if MLX's fast fences are requested for this rank."""
        return self.fast_sync == "on" or (self.fast_sync == "auto" and self.tp_size > 1)

    @property
    def label(self) -> str:
        """Name of the rank in log lines."""
        part = f" part {self.tp_rank + 1}/{self.tp_size}" if self.tp_size > 1 else ""
        return f"stage {self.stage + 1}/{self.stages} layers {self.layers[0]}-{self.layers[1] - 1}{part}"
