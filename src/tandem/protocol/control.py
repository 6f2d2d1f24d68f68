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
from tandem.protocol.cached_prefixes import CacheReport, QueryCache
from tandem.protocol.events import Event
from tandem.protocol.kv_blocks import Fetch, Fetched, Survey, Surveyed, UseRemoteStores, Written
from tandem.protocol.logprobs import PromptLogprobs, TokenLogprob
from tandem.protocol.request import EngineRequest, Pooling, SamplingDefaults
from tandem.protocol.step import GrammarReady, RankStep, StepPlan, StepResult

# --- api -> engine ---------------------------------------------------------------------------------------------


class Submit(Struct, frozen=True, tag=True):
    """Start a request; the answer is a stream of `Output`, or one `Refused`."""

    request: EngineRequest


class Abort(Struct, frozen=True, tag=True):
    """Stop a request; no `Output` follows. Unknown and finished ids are ignored. For a request that was `HandedOver`
    it releases what is kept for the other replica."""

    request_id: str
    answered: bool = False
    """True when the client has its whole answer, as a stop string was found in the text."""


class QueryStatus(Struct, frozen=True, tag=True):
    """Ask for `EngineStatus`. Also the api's heartbeat."""

    query_id: int


class QueryMetrics(Struct, frozen=True, tag=True):
    """Ask for the engine's metrics as `MetricsText`."""

    query_id: int


class Detach(Struct, frozen=True, tag=True):
    """Abort all requests of this api, which exits."""


class HandOver(Struct, frozen=True, tag=True):
    """Migrate the api's requests: answer each with `HandedOver` once its KV is on disk.

    Requests that cannot migrate are finished here.
    """


# --- engine -> api ---------------------------------------------------------------------------------------------


class Output(Struct, frozen=True, tag=True):
    """New tokens of a request. The last one carries `finish_reason`."""

    request_id: str
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    """One entry per token if the request asked for log probabilities, else empty."""
    finish_reason: str | None = None
    """`stop` (end-of-sequence or stop token), `length`, or None while it goes on."""
    stop_token: bool = False
    """The last of `tokens` is the end-of-sequence or stop token, which does not belong to the text."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache; with the first tokens, or the vector, only."""
    disk_tokens: int = 0
    """Part of `cached_tokens` that was read from disk for this request."""
    vector: bytes = b""
    """The pooled hidden state that a request with `pooling` asked for: float32, little-endian."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of all prompt tokens but the first, if asked for; sent with the first token, or at the end."""


class Refused(Struct, frozen=True, tag=True):
    """The request ends without (further) output. `status` is an HTTP status."""

    request_id: str
    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None

    def as_error(self) -> RequestError:
        """Return the exception to raise in the api."""
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


class RankInfo(Struct, frozen=True):
    """One rank as `/health` shows it."""

    rank: int
    stage: int
    layers: tuple[int, int]
    """First layer and one past the last."""
    pid: int
    host: str
    weight_bytes: int
    peak_bytes: int
    """Highest resident or device memory so far, in bytes."""
    step_s: float
    """Mean seconds of work per step lately."""
    kv_bytes: int = 0
    """Bytes of KV held."""
    memory_bytes: int = 0
    """Bytes of the memory that weights and KV live in."""
    replica: int = 0
    """Number of the engine that it belongs to; filled in by the api."""
    slowdown: float = 1.0
    """Seconds for a unit of work lately, as a multiple of what is usual for this rank."""
    wired_bytes: int = 0
    """Weights that the system may not take from a Mac's GPU while it is idle."""
    wiring: str = ""
    """Reason why not all weights are wired; empty if they are, or need not be."""
    used_bytes: int = 0
    """Bytes of live MLX arrays, without buffers that are cached for reuse."""
    state: str = "ready"
    """`ready`; while ranks are replaced `lost` for the one that failed, and `waiting` for the others."""
    stage_latency_s: float = field(name="handoff_s", default=0.0)
    """Median seconds, lately, from the output of the stage before it until its input is there; 0: not known."""


class EngineStatus(Struct, frozen=True, tag=True):
    """State of the engine, as far as an api needs it."""

    query_id: int
    state: str
    """`starting`, `ready`, `recovering`, `draining` or `failed`."""
    detail: str
    model: str
    """Served name."""
    source: str
    """Directory of the model, from which the api reads tokenizer and chat template."""
    max_context: int
    """Most tokens of prompt and output together."""
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
    """KV positions kept for prompts to come."""
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_cache: str = ""
    """Granularity of prefix hits: `any length`, `blocks` (whole ones), or `off` with the reason."""
    kv_disk: str = ""
    """Whether prefixes are kept on disk: `on`, or `off`, and why."""
    kv_store: str = ""
    """Which directories its ranks keep KV in, and for which model and type: alike for engines that read what one
    another has written. Empty where nothing is kept on disk."""
    disk_saves: float = 0.0
    """Fraction of prefill time that a read from disk saves, 0 to 1; an estimate until both were measured."""
    kv_reach: list[str] = []
    """All directories whose KV its ranks can have, for this model and type: their own, and what other replicas lend."""
    lent_saves: float = 0.0
    """Fraction of prefill time that a fetch from another replica saves, 0 to 1."""
    lends: list[tuple[str, str]] = []
    """Directories that its ranks lend from (`Ready.store`), and the endpoint of one rank for each."""
    prefix_room: int = 0
    """Longest prefix, in tokens, that can be kept in memory, as one that is read from disk has to be."""
    prompt_tokens_s: float = 0.0
    """Tokens near the beginnings of prompts computed a second, lately, while nobody decoded; 0 until many were."""
    kv_dtype: str = ""
    """Type of keys and values, and the layers that it applies to."""
    kv_bytes_per_token: int = 0
    """Bytes of a position in the caches of all ranks together, of one replica."""
    speculation: str = ""
    """`ngram`, `draft_model`, or `off`, and why where the model cannot do it."""
    load_s: float = 0.0
    """Seconds from the start of the ranks that are there now until they were ready."""
    degraded: str = ""
    """Why fewer machines serve than the layout names; empty when all do."""
    age_s: float = 0.0
    """Seconds since the engine's main loop wrote this; the thread that answers fills it in."""
    generated_tokens: int = 0
    """Tokens produced since the engine started."""
    ttft_s: float = 0.0
    """Seconds from arrival to the first token, averaged over the last requests; 0 before there was one."""
    hidden_size: int = 0
    """Length of a pooled hidden state."""
    pooling: Pooling | None = None
    """How prompts are pooled; None where the model asks for something else."""
    generates: bool = True
    """The model has an output projection; without one it only embeds."""
    draft_tokens: int = 0
    """Tokens that speculative decoding has tried."""
    accepted_tokens: int = 0
    """Part of `draft_tokens` that became output."""
    defaults: SamplingDefaults = SamplingDefaults()
    """Sampling parameters for requests that leave them out."""
    loading: list[LoadProgress] = []
    """Loading progress of each rank during the first start."""
    num_layers: int = 0
    events: list[Event] = []
    """Recent events, oldest first."""


class MetricsText(Struct, frozen=True, tag=True):
    """Prometheus text exposition of the engine's registry."""

    query_id: int
    text: bytes


class QuarantineNotice(Struct, frozen=True, tag=True):
    """Announce that a quarantined request is about to run alone.

    The engine waits for the api to send it back as `QuarantineAck`, so that a request that kills the engine at once is known.
    """

    request_id: str
    resting: bool
    """True while the engine idles to find out whether it dies without the request; else the request runs next."""


class QuarantineAck(QuarantineNotice, frozen=True, tag=True):
    """Acknowledge a `QuarantineNotice`."""


class Neighbours(UseRemoteStores, frozen=True, tag=True):
    """Endpoints of other replicas that serve KV, as the supervisor knows them."""


ApiMessage = Submit | Abort | QuarantineAck | QueryStatus | QueryMetrics | QueryCache | HandOver | Neighbours | Detach
EngineMessage = Output | Refused | HandedOver | QuarantineNotice | EngineStatus | MetricsText | CacheReport

# --- engine -> rank --------------------------------------------------------------------------------------------


class Stop(Struct, frozen=True, tag=True):
    """End the rank process in good order."""


class Plan(Struct, frozen=True, tag=True):
    """Execute one step."""

    plan: StepPlan


class Connect(Struct, frozen=True, tag=True):
    """Connect the channels, after every rank has sent `Hello`. `endpoints[i]` is the inbound address of stage i."""

    endpoints: list[str]


class Begin(Struct, frozen=True, tag=True):
    """Announce that all ranks have loaded, so plans follow."""


class Ping(Struct, frozen=True, tag=True):
    """Ask for a `Pong`, which a rank sends at once even while it computes."""

    number: int


RankCommand = Plan | Fetch | UseRemoteStores | Survey | Stop | Connect | Begin | Ping

# --- rank -> engine --------------------------------------------------------------------------------------------


class Hello(Struct, frozen=True, tag=True):
    """First message of a rank. Versions must be alike on all ranks."""

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
    """Bytes."""
    total: int
    phase: str = "load"
    """`fetch`: onto the rank's machine; then `load`: into memory; then, all ranks together, `check`."""


class Ready(Struct, frozen=True, tag=True):
    """The slice is loaded and the channels are up."""

    rank: int
    weight_bytes: int
    kv_bytes_per_token: int
    memory_bytes: int
    """Bytes of memory of its device or machine."""
    peak_bytes: int
    gpu: bool
    """True if the rank computes on a GPU."""
    host: str
    pid: int
    trimmable: bool
    """True if its KV caches can be cut to any length."""
    state_bytes: int = 0
    """Bytes per sequence that do not depend on its length: states of recurrent layers."""
    own_memory: bool = False
    """True if no other rank shares that memory, as each has a GPU of its own."""
    machine: str = ""
    """Identity of the machine, independent of its host name."""
    cache_bytes: int = 0
    """Upper bound, in bytes, of MLX's buffer cache."""
    wired_bytes: int = 0
    """Weights that the system may not take from the GPU."""
    wiring: str = ""
    """Reason why not all weights are wired; empty if they are, or need not be."""
    metal: bool = False
    """True if the GPU is driven by Metal."""
    quantized_layers: list[int] = []
    """Layers whose keys and values it keeps quantised."""
    disk_blocks: list[bytes] | None = None
    """Names of the disk blocks of prefixes on its disk (tandem.protocol.kv_blocks); None where it keeps none there."""
    store: str = ""
    """Identity of that directory, model and KV type; equal on ranks that share one."""
    lends: str = ""
    """Endpoint at which other ranks fetch from that directory; empty if none needs to."""
    disk_trouble: str = ""
    """Reason why a configured disk store is not usable."""


class Stepped(Struct, frozen=True, tag=True):
    """Report a finished step; the sampling rank adds the `result`."""

    step: RankStep
    peak_bytes: int = 0
    """Most memory that the rank has used so far."""
    result: StepResult | None = None
    used_bytes: int = 0
    """Bytes of live MLX arrays after the step, without buffers that are cached for reuse."""


class Failure(Struct, frozen=True, tag=True):
    """The rank cannot go on. Crosses the bus as data, never as a pickled exception."""

    rank: int
    kind: str
    """Name of the error's class; those of `tandem.errors` are raised again as themselves."""
    message: str
    traceback: str = ""


class Pong(Struct, frozen=True, tag=True):
    """Answer a `Ping`. Sent by a thread that does not compute, so it shows that the process runs."""

    rank: int
    number: int
    step_id: int
    """The last step that the computing thread has begun; -1 before the first."""
    waiting: bool
    """True while blocked on input from the previous stage."""


RankMessage = Hello | LoadProgress | Ready | Stepped | GrammarReady | Fetched | Written | Surveyed | Failure | Pong
