"""Messages between processes: api <-> engine over a Unix socket, engine <-> ranks over the bus.

All are msgspec structs in tagged unions, so that one decoder turns bytes into exactly one known type or an error.
"""

from __future__ import annotations

from msgspec import Struct, field

from tandem.errors import (
    NotFoundError,
    OverloadedError,
    RequestError,
    ServerError,
    TimeoutExceeded,
    TooLargeError,
    UnavailableError,
)
from tandem.protocol.adapters import AdapterChanged, AdapterLoaded, AdapterSpec, ChangeAdapter, LoadAdapter
from tandem.protocol.cached_prefixes import CacheReport, QueryCache
from tandem.protocol.events import Event
from tandem.protocol.kv_blocks import Fetch, Fetched, Survey, Surveyed, UseRemoteStores, Written
from tandem.protocol.logprobs import PromptLogprobs, TokenLogprob
from tandem.protocol.pictures import EncodePicture, PictureEncoded
from tandem.protocol.request import EngineRequest, Pooling, SamplingDefaults
from tandem.protocol.step import GrammarReady, RankStep, StepPlan, StepResult

# --- api -> engine ---------------------------------------------------------------------------------------------


class Submit(Struct, frozen=True, tag=True):
    """Start a request; the answer is a stream of `Output`, or one `Refused`."""

    request: EngineRequest


class Abort(Struct, frozen=True, tag=True):
    """Abort a request; no `Output` follows. Unknown and finished ids are ignored. For a migrated request (`HandedOver`)
    release the KV kept for the other replica."""

    request_id: str
    answered: bool = False
    """True if the answer is complete, as the api found a stop string in the text."""


class QueryStatus(Struct, frozen=True, tag=True):
    """Ask for `EngineStatus`. Also the api's heartbeat."""

    query_id: int


class QueryMetrics(Struct, frozen=True, tag=True):
    """Ask for the engine's metrics as `MetricsText`."""

    query_id: int


class Detach(Struct, frozen=True, tag=True):
    """Abort all requests of this api process, which exits."""


class PictureContent(Struct, frozen=True, tag=True):
    """Answer `NeedPicture`."""

    key: str
    inputs: bytes


class HandOver(Struct, frozen=True, tag=True):
    """Migrate this api's requests: answer each with `HandedOver` once its KV is on disk.

    Requests that cannot migrate finish on this engine.
    """


# --- engine -> api ---------------------------------------------------------------------------------------------


class Timing(Struct, frozen=True, array_like=True):
    """Seconds that a request took until its next token."""

    queue_s: float
    """Seconds from its arrival, or its last token before it was interrupted, until it joined a batch."""
    prefill_s: float
    """Seconds from there to the token, or to the end of a prompt without one."""


class Output(Struct, frozen=True, tag=True, gc=False):
    """New tokens of a request. The last message has a `finish_reason`."""

    request_id: str
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    """One entry per token if the request asked for log probabilities, else empty."""
    finish_reason: str | None = None
    """`stop` (end-of-sequence or stop token) or `length`; None while the request runs."""
    stop_token: bool = False
    """True if the last of `tokens` is an end-of-sequence or stop token, which is not part of the text."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache. Set only in the first message with tokens or the vector."""
    disk_tokens: int = 0
    """Part of `cached_tokens` that was read from disk for this request."""
    vector: bytes = b""
    """Pooled hidden state, or log probabilities of its labels, for a request with `pooling`: float32, little-endian; else
    empty."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of all prompt tokens but the first, if requested. Sent with the first token or at the end."""
    timing: Timing | None = None
    """Set in the first message after each admission to a batch: the first, and those after a preemption or replay."""


class Refused(Struct, frozen=True, tag=True):
    """The request ends without further output. `status` is an HTTP status."""

    request_id: str
    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None

    def as_error(self) -> RequestError:
        """Return the exception for the api to raise."""
        if self.status == 429:
            return OverloadedError(self.message, retry_after=self.retry_after or 1.0, code=self.code or "overloaded")
        if self.status == 503:
            return UnavailableError(self.message, retry_after=self.retry_after or 2.0, code=self.code or "engine_unavailable")
        classes: dict[int, type[RequestError]] = {404: NotFoundError, 413: TooLargeError, 504: TimeoutExceeded}
        fallback = RequestError if 400 <= self.status < 500 else ServerError
        error = classes.get(self.status, fallback)(self.message, param=self.param, code=self.code)
        error.status = self.status if 400 <= self.status < 600 else 500
        return error


class HandedOver(Struct, frozen=True, tag=True):
    """Report that a request has migrated: the KV of its first `positions` tokens is on disk, and no output follows."""

    request_id: str
    positions: int


class NeedPicture(Struct, frozen=True, tag=True):
    """Ask for the inputs of a request's picture, which is encoded next. Those of a cached prefix are not needed."""

    request_id: str
    key: str


class RankInfo(Struct, frozen=True):
    """State of one rank, as in `/health`."""

    rank: int
    stage: int
    layers: tuple[int, int]
    """First layer, and one past the last."""
    pid: int
    host: str
    weight_bytes: int
    peak_bytes: int
    """Highest resident or device memory since the start, in bytes."""
    step_s: float
    """Recent mean of compute seconds per step."""
    kv_bytes: int = 0
    """Bytes of KV that the rank holds."""
    memory_bytes: int = 0
    """Total bytes of the memory (RAM or GPU) that holds weights and KV."""
    replica: int = 0
    """Number of the rank's engine; filled in by the api."""
    slowdown: float = 1.0
    """Recent time per unit of work, as a multiple of this rank's usual time."""
    wired_bytes: int = 0
    """Bytes of weights wired for a Mac's GPU: the system cannot page them out while idle."""
    wiring: str = ""
    """Reason why some weights are not wired; empty if all are, or wiring is not needed."""
    used_bytes: int = 0
    """Bytes of live MLX arrays, without buffers that are cached for reuse."""
    state: str = "ready"
    """`ready`. While ranks are replaced: `lost` for the failed rank, `waiting` for the other ranks."""
    build: str = ""
    """Version and digest of the rank's code."""
    stage_latency_s: float = field(name="handoff_s", default=0.0)
    """Recent median seconds from the previous stage's output to its arrival here; 0 while unmeasured."""
    encoder_pid: int = 0
    """Id of the process beside the rank that encodes pictures; 0 without one, and before the first picture."""


class EngineStatus(Struct, frozen=True, tag=True, rename={"no_pictures": "blind"}):
    """State of the engine for the api: routing, health and metrics."""

    query_id: int
    state: str
    """`starting`, `ready`, `recovering`, `draining` or `failed`."""
    detail: str
    model: str
    """Served name of the model."""
    source: str
    """Model directory, from which the api reads tokenizer and chat template."""
    max_context: int
    """Maximum tokens of prompt and output together."""
    vocab_size: int
    queued: int
    running: int
    kv_tokens_used: int
    kv_tokens_total: int
    restarts: int
    stages: int
    micro_batches: int
    ranks: list[RankInfo]
    prefix_tokens: int = 0
    """KV positions in the prefix cache."""
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_cache: str = ""
    """Granularity of prefix hits: `any length`, `blocks` (whole ones), or `off` with the reason."""
    kv_disk: str = ""
    """`on` if prefixes are cached on disk, else `off` and the reason."""
    kv_store: str = ""
    """Key of the ranks' KV directories, model and KV type. Engines with equal keys read each other's files. Empty without a
    disk cache."""
    disk_saves: float = 0.0
    """Fraction of prefill time saved by reading KV from disk, 0 to 1. An estimate until both are measured."""
    kv_reach: list[str] = []
    """Ids (`Ready.store`) of all KV directories that its ranks can read: their own, and remote ones of other replicas."""
    lent_saves: float = 0.0
    """Fraction of prefill time saved by fetching KV from another replica, 0 to 1."""
    lends: list[tuple[str, str]] = []
    """KV directories that its ranks serve to other replicas: (`Ready.store`, endpoint of one rank)."""
    prefix_room: int = 0
    """Longest prefix, in tokens, that fits in memory. A prefix restored from disk must fit too."""
    prompt_tokens_s: float = 0.0
    """Recent prefill speed in tokens per second, near the start of prompts and without decoding. 0 until enough are measured."""
    kv_dtype: str = ""
    """KV cache type, and the layers that it applies to."""
    kv_bytes_per_token: int = 0
    """KV bytes per token over all ranks of one replica."""
    speculation: str = ""
    """`ngram`, `draft_model`, `mtp`, `eagle3`, `dflash`, or `off` (with the reason if the model does not support it)."""
    load_s: float = 0.0
    """Seconds that the current ranks took from start to ready."""
    degraded: str = ""
    """Reason why fewer machines serve than the layout names; empty if all serve."""
    age_s: float = 0.0
    """Seconds since the engine's main loop wrote this status; set by the answering thread."""
    generated_tokens: int = 0
    """Tokens produced since the engine started."""
    ttft_s: float = 0.0
    """Mean seconds from arrival to first token over recent requests; 0 before the first."""
    hidden_size: int = 0
    """Length of a pooled hidden state."""
    pooling: Pooling | None = None
    """Pooling of embeddings; None if the model needs an unsupported pooling."""
    generates: bool = True
    """True if the model has an output projection; without one it only embeds."""
    no_pictures: str = "its engine is of an older version, which reads none"
    """Reason why the model takes no pictures; empty if it takes them."""
    draft_tokens: int = 0
    """Draft tokens proposed by speculative decoding."""
    accepted_tokens: int = 0
    """Draft tokens that became output."""
    defaults: SamplingDefaults = SamplingDefaults()
    """Sampling parameters for requests that omit them."""
    build: str = ""
    """Version and digest of the engine's code."""
    loading: list[LoadProgress] = []
    """Loading progress of each rank during the first start."""
    num_layers: int = 0
    adapters: list[AdapterSpec] = []
    """LoRA adapters that requests can use."""
    events: list[Event] = []
    """Recent events, oldest first."""


class MetricsText(Struct, frozen=True, tag=True):
    """Prometheus text exposition of the engine's registry."""

    query_id: int
    text: bytes


class QuarantineNotice(Struct, frozen=True, tag=True):
    """Announce that a quarantined request is about to run alone.

    The engine waits until the api returns it as `QuarantineAck`. So the api can name the request even if it kills the engine
    at once.
    """

    request_id: str
    resting: bool
    """True while the engine idles, to see if it dies without the request. False if the request runs next."""


class QuarantineAck(QuarantineNotice, frozen=True, tag=True):
    """Acknowledge a `QuarantineNotice`."""


class Neighbours(UseRemoteStores, frozen=True, tag=True):
    """Endpoints of other replicas that serve KV, from the supervisor."""


Order = Submit | Abort | QuarantineAck | PictureContent | QueryCache | ChangeAdapter | HandOver | Neighbours | Detach
"""Messages for the engine's thread."""
ApiMessage = Order | QueryStatus | QueryMetrics
OfRequest = Output | Refused | HandedOver | QuarantineNotice | NeedPicture
"""Messages to the api that has the request."""
Answered = EngineStatus | MetricsText | CacheReport | AdapterChanged
"""Answers to questions."""
EngineMessage = OfRequest | Answered

# --- engine -> rank --------------------------------------------------------------------------------------------


class Stop(Struct, frozen=True, tag=True):
    """End the rank process cleanly."""


class Plan(Struct, frozen=True, tag=True):
    """Execute one step."""

    plan: StepPlan


class Connect(Struct, frozen=True, tag=True):
    """Connect the channels, after every rank has sent `Hello`. `endpoints[i]` is the inbound address of rank i."""

    endpoints: list[str]


class Begin(Struct, frozen=True, tag=True):
    """Announce that all ranks have loaded and that plans follow."""


class Ping(Struct, frozen=True, tag=True):
    """Ask for a `Pong`, which a rank sends at once even while computing."""

    number: int


RankCommand = Plan | LoadAdapter | EncodePicture | Fetch | UseRemoteStores | Survey | Stop | Connect | Begin | Ping

# --- rank -> engine --------------------------------------------------------------------------------------------


class Hello(Struct, frozen=True, tag=True):
    """First message of a rank. Versions must be equal on all ranks."""

    rank: int
    pid: int
    host: str
    versions: dict[str, str]
    endpoint: str
    """Address of this rank's inbound channel; empty if the channel needs none."""


class LoadProgress(Struct, frozen=True, tag=True):
    """Progress of a rank that loads its weights."""

    rank: int
    done: int
    """Bytes loaded so far."""
    total: int
    phase: str = "load"
    """`fetch` to the rank's machine, then `load` into memory, then `check` and `warm` on all ranks together."""


class Ready(Struct, frozen=True, tag=True):
    """The rank has loaded its weights and connected its channels."""

    rank: int
    weight_bytes: int
    kv_bytes_per_token: int
    memory_bytes: int
    """Total bytes of its GPU's or machine's memory."""
    peak_bytes: int
    gpu: bool
    """True if the rank computes on a GPU."""
    host: str
    pid: int
    trimmable: bool
    """True if its KV caches can be trimmed to any length."""
    state_bytes: int = 0
    """Bytes per sequence independent of its length: states of recurrent layers."""
    picture_bytes: int = 0
    """Bytes to keep free for pictures: vision tower, its process, features, and the inputs of one."""
    window: int = 0
    """Positions of the largest sliding window or chunk."""
    own_memory: bool = False
    """True if no other rank shares that memory, as each has its own GPU."""
    machine: str = ""
    """Identity of the machine, independent of its host name."""
    cache_bytes: int = 0
    """Upper bound, in bytes, of MLX's buffer cache."""
    wired_bytes: int = 0
    """Bytes of weights wired for a Mac's GPU."""
    wiring: str = ""
    """Reason why some weights are not wired; empty if all are, or wiring is not needed."""
    metal: bool = False
    """True if the rank uses Metal."""
    quantized_layers: list[int] = []
    """Layers whose KV is quantised."""
    disk_blocks: list[bytes] | None = None
    """Names of the disk blocks on its disk (tandem.protocol.kv_blocks); None without a disk cache."""
    store: str = ""
    """Identity of the KV directory, model and KV type; equal on ranks that share one."""
    lends: str = ""
    """Endpoint that serves this directory to other ranks; empty if no rank needs it."""
    disk_trouble: str = ""
    """Reason why a configured disk store is not usable."""
    build: str = ""
    """Version and digest of the rank's code."""


class Stepped(Struct, frozen=True, tag=True):
    """Report a finished step; the sampling rank adds its `result`."""

    step: RankStep
    peak_bytes: int = 0
    """Highest memory use of the rank since its start, in bytes."""
    result: StepResult | None = None
    used_bytes: int = 0
    """Bytes of live MLX arrays after the step, without buffers that are cached for reuse."""


class Failure(Struct, frozen=True, tag=True):
    """The rank fails. Crosses the bus as data, never as a pickled exception."""

    rank: int
    kind: str
    """Name of the error's class; classes of `tandem.errors` are raised again as themselves."""
    message: str
    traceback: str = ""


class Pong(Struct, frozen=True, tag=True):
    """Answer a `Ping`. Sent by a thread that does not compute, so it shows that the process runs."""

    rank: int
    number: int
    step_id: int
    """Last step that the compute thread began; -1 before the first."""
    waiting: bool
    """True while blocked on input from the previous stage."""


Answer = AdapterLoaded | PictureEncoded | GrammarReady | Fetched | Written | Surveyed
"""Reports of a rank about other orders than plans."""
RankMessage = Hello | LoadProgress | Ready | Stepped | Answer | Failure | Pong
