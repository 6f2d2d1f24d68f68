"""Position of a rank in its group: its part of the model, and the ranks it sends to."""

from __future__ import annotations

from msgspec import Struct


class RankPosition(Struct, frozen=True, kw_only=True):
    """Position of a rank among its group's stages. Ranks of a stage have consecutive numbers."""

    rank: int
    """Number in the rank group."""
    stage_sizes: tuple[int, ...]
    """Number of ranks in each stage."""

    @property
    def stage(self) -> int:
        """Number of the rank's stage, from 0."""
        return next(stage for stage in range(len(self.stage_sizes)) if self.rank < sum(self.stage_sizes[: stage + 1]))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_sizes)

    @property
    def tp_size(self) -> int:
        """Number of ranks in this stage."""
        return self.stage_sizes[self.stage]

    @property
    def tp_rank(self) -> int:
        """Number within the stage; 0 is the leader."""
        return self.rank - sum(self.stage_sizes[: self.stage])

    @property
    def samples(self) -> bool:
        """True for the one sampling rank of the group: the leader of the last stage."""
        return self.stage == self.stages - 1 and self.tp_rank == 0

    @property
    def downstream(self) -> list[int]:
        """Ranks that this rank sends to: activations to the next stage, sampled tokens to the first.

        All ranks of a stage hold the same activations, so the next stage's ranks are divided among them as receivers.
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
    """Specification from which a rank builds its part of the model. Sent to rank processes as JSON."""

    model_path: str
    model_name: str
    home: str = ""
    """Home directory on the engine's machine: a path below it that is missing here is looked for below this user's."""
    layers: tuple[int, int]
    """First layer, and one past the last."""
    tensor_split: tuple[float, ...] | None
    """Relative shares of heads and widths of the stage's ranks; None for equal shares."""
    micro_batches: int
    dtype: str
    dequantize: str
    vocab_size: int
    memory_share: float
    """Fraction of its machine's memory, or of its GPU's, that this rank may use."""
    eos_token_ids: tuple[int, ...]
    channel: str
    backend: str
    blas: str
    log_level: str
    log_format: str = "auto"
    attention: str = "auto"
    """Attention of decode steps: `auto` or `masked`."""
    fuse_projections: str = "auto"
    """Fused projections: `on`, `off`, or `auto` (only on a GPU)."""
    device: str = "auto"
    """`cpu`, `gpu`, or `auto` (MLX's default device)."""
    fast_sync: str = "off"
    """MLX's fast fences on a Mac: `on`, `off`, or `auto` (on if the stage has several ranks)."""
    wired: int | None = None
    """Maximum bytes of weights to wire for the GPU, 0 for none; None for as many as is safe."""
    machine: str = ""
    """Identity of the rank's machine, from its launcher."""
    sharing: int = 1
    """Ranks of the group that share that machine's memory."""
    max_memory: str | None = None
    """Most memory of the machine, or of its GPU, that all ranks there may use together, such as 32GB; None for the share."""
    gpu_share: float | None = None
    """Fraction of the GPU's memory if the rank has one of several GPUs to itself; else None."""
    weights_from: str = "local"
    """Source of weights: `local`, or `head` for the engine's machine, where `model_path` then is."""
    hub: str = ""
    """Repository and commit (org/name@commit) to download weights from if missing here."""
    drafts: int = 0
    """Maximum draft tokens per sequence and step; 0 without speculative decoding."""
    draft_path: str = ""
    """Directory of the draft model or head, used by the sampling rank; empty for none."""
    captured_layers: tuple[int, ...] = ()
    """Layers whose outputs travel to the sampling rank, for a head at `draft_path`; empty for another or none."""
    head: str = ""
    """Kind of head at `draft_path`: `eagle3`, `dflash`, or `mtp` for an assistant; empty for a draft model or none."""
    mtp: bool = False
    """True if the sampling rank loads the draft head that the model carries."""
    trust_remote_code: bool = False
    """True if the tokenizer, needed for grammars, may run Python code from the model directory."""
    max_loras: int = 0
    """Most LoRA adapters to hold."""
    lora_elements: int = 0
    """Numbers in A and B of that many adapters of the largest rank, and of the stacks' zeros; memory is set aside for them."""
    expert_parallel: bool = False
    """True if the stage's ranks divide whole experts among themselves."""
    kv_dtype: str = "auto"
    """KV cache type: `auto`, `8bit` or `4bit`."""
    kv_disk: str = ""
    """Directory of the disk cache on the rank's machine; empty for none."""
    kv_disk_bytes: int = 0
    """Maximum bytes of that directory."""
    kv_space: str = ""
    """Key of this model, adapter and KV type within that directory."""
    vision: bool = True
    """False if pictures are refused, and no vision tower is loaded."""
    encoder_seconds: float = 0.0
    """Most seconds for a picture in an encoder process beside the rank; 0 if ranks encode themselves."""

    @property
    def has_head(self) -> bool:
        """True if the sampling rank drafts with a head."""
        return self.mtp or bool(self.head)

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
