"""Every setting of Tandem, as frozen dataclasses. The command line, the environment and the TOML file are generated
from these fields: their names, types, defaults and the docstring under each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from tandem.config.api_keys import MOST
from tandem.json_types import JsonObject


class Within(NamedTuple):
    """Range of a number, or of the length of a text, ends included."""

    low: float
    high: float = math.inf


ABOVE_0 = math.ulp(0.0)
Filled = Annotated[str, Within(1)]
Count = Annotated[int, Within(1)]
Limit = Annotated[int, Within(1, MOST)]
Positive = Annotated[float, Within(ABOVE_0)]
NotNegative = Annotated[float, Within(0.0)]
Drafts = Annotated[int, Within(1, 32)]
"""Draft tokens per step: longer drafts rarely pay off, and sliding windows reserve room for all."""
Lookup = Annotated[int, Within(1, 64)]
"""Tokens that are compared to find the best earlier place to copy from."""

Role = Literal["prefill", "decode", "both"]
"""Part of a request that a replica takes."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model, and how it is held in memory."""

    model: str = ""
    """Directory, GGUF file, name (`llama3.2`, docs/models.md), hub id (org/name), or `demo`."""
    served_name: tuple[Filled, ...] = ()
    """Names for clients (A B, after MODEL), the first in answers; by default that of the directory or the hub. `default`
    always works."""
    revision: Filled | None = None
    """Branch, tag or commit of a hub model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of computation. auto: the model's own on a GPU, float32 on a CPU (half precision is slow there)."""
    dequantize: Literal["auto", "yes", "no"] = "auto"
    """Expand quantised weights while loading. auto: on a CPU, where quantised products are slow."""
    attention: Literal["auto", "masked"] = "auto"
    """Attention of decode steps. masked: MLX's own, over all positions up to the longest; auto: on CUDA and on
    a CPU one that reads each sequence's own length, elsewhere masked."""
    fuse_projections: Literal["auto", "on", "off"] = "auto"
    """Compute projections of the same input (q, k and v; gate and up) as one product each, so that a step has fewer
    operations. auto: on a GPU, where a step waits for them; sums are rounded otherwise than with off."""
    max_context: Count | None = None
    """Most tokens of prompt and output together; by default the model's own limit."""
    chat_template: Filled | None = None
    """File with a Jinja chat template to use instead of the model's."""
    generation_config: Filled = "auto"
    """Where defaults of sampling come from, for requests that do not say otherwise. auto: the model's
    generation_config.json (temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens); none: from nowhere;
    or a directory with such a file."""
    override_generation_config: Filled | None = None
    """Defaults as JSON, which replace those of the file, such as '{"temperature": 0.2, "max_new_tokens": 512}'."""
    pooling: Literal["auto", "last", "mean"] = "auto"
    """How /v1/embeddings makes one vector of a text: last: the final hidden state of its last token; mean: the mean of
    all. auto: as the model's 1_Pooling/config.json says, else last."""
    reranker: Literal["auto", "on", "off"] = "auto"
    """Whether /v1/rerank and /v1/score ask the model, with Qwen3-Reranker's prompt, if a document answers a query. auto: if
    its name or path contains "rerank"."""
    weights_from: Literal["local", "head"] = "local"
    """Where ranks get their weights. local: from their own machine's copy, or each downloads its part from the hub;
    head: from the engine's machine, each its part, into its cache directory."""
    adapter_path: Filled | None = None
    """Directory of a LoRA adapter to apply to all requests (mlx-lm's or PEFT's format). Ranks on other machines need a copy
    at the same path, also below the home directory, or --weights-from head."""
    lora_modules: tuple[str, ...] = ()
    """LoRA adapters for MODEL, each as NAME=DIRECTORY, where NAME is what clients ask for. They share batches, and one copy
    of MODEL."""
    enable_lora: bool = False
    """Load and unload LoRA adapters while serving (POST /v1/load_lora_adapter). Whoever has an API key can then have any
    directory of the server read as an adapter."""
    max_loras: Count = 8
    """Most LoRA adapters at once with --enable-lora; memory is set aside for so many."""
    max_lora_rank: Count = 16
    """Largest rank of a LoRA adapter that is loaded while serving."""
    trust_remote_code: bool = False
    """Let the tokenizer run Python code that comes with the model."""
    vision: Literal["auto", "off"] = "auto"
    """Pictures of a model that sees. off: it is served for text alone: no vision tower is loaded, no memory is kept for
    pictures, and they are refused."""
    vision_rank: Literal["first", "own"] = "first"
    """Where pictures are encoded. first: on the ranks of the first stage, between two steps; own: in a process of its own
    beside each of them, so that running requests do not wait for it."""


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """How the model is spread over processes."""

    pipeline_parallel_size: Count = 1
    """Number of pipeline stages; each holds a contiguous range of layers."""
    tensor_parallel_size: Count = 1
    """Ranks of each stage; they share the heads and widths of every layer."""
    data_parallel_size: Annotated[int, Within(1, 128)] = 1
    """Copies of the model (replicas) behind one address, each laid out as the other options say; they share this
    machine's cores and memory. Only `tandem serve` has several."""
    roles: tuple[Role, ...] | None = None
    """Role of each replica, such as prefill,decode: long prompts are computed by those that prefill and go on, over
    `kv_disk`, at those that decode; both: either (docs/kv.md). By default all do both."""
    parallel: tuple[Count, ...] | None = None
    """Ranks of each stage, where they differ: 2,1 is a stage of two ranks and a stage of one."""
    tensor_split: tuple[Positive, ...] | None = None
    """Shares by which the ranks of a stage divide heads and widths, such as 2,1; by default equal ones."""
    expert_parallel: bool = False
    """Ranks of a stage each hold some of a mixture's experts whole, in place of a part of each; the rest of a layer is
    divided as ever."""
    backend: Literal["auto", "ring", "jaccl", "jaccl-ring", "nccl", "mpi", "any"] = "auto"
    """MLX backend between the ranks of a stage. auto: that of the hostfile; on one machine NCCL if each rank
    has an NVIDIA GPU of its own; else ring."""
    layer_split: tuple[Count, ...] | None = None
    """Layers per stage, such as 20,16; by default in proportion to each machine's memory."""
    micro_batches: Count | None = None
    """Independent batches in flight, so that all stages work at once; by default one per stage."""
    channel: Literal["auto", "tcp", "mlx"] = "auto"
    """How stages pass activations on. auto: tcp, which is `mlx` only over RDMA."""
    executor: Literal["auto", "inline", "cluster"] = "auto"
    """inline: the whole model in the engine's process; cluster: ranks in processes of their own. auto: inline for one
    stage."""
    launcher: Literal["auto", "local", "ssh", "ray", "manual"] = "auto"
    """How ranks are started. local: on this machine; ssh: on the hosts of `hostfile`; ray: on the nodes of a Ray
    cluster; manual: by `tandem rank` on each machine. auto: ssh with a hostfile, else local."""
    hostfile: Filled | None = field(default=None, metadata={"launcher": "ssh", "needed": "which names the hosts"})
    """MLX's hostfile: machines for the ranks, one rank for each entry, in order. Without a layout of your own they
    form a pipeline."""
    host_entries: tuple[Annotated[int, Within(0)], ...] | None = field(default=None, metadata={"launcher": "ssh"})
    """Entries of the hostfile to use, counted from 0; by default all in order, shared out among replicas."""
    hardware_profile: Filled | None = None
    """File of `tandem bench comm --write-profile`: when machines are lost, the layout over those that remain is chosen
    by the speeds that were measured, in place of assumed ones."""
    remote_python: Filled | None = field(default=None, metadata={"launcher": "ssh"})
    """Python interpreter on the hosts. By default that of the same path as here, else what a login shell there finds as
    `tandem` or `python3`."""
    head_address: Filled | None = None
    """Address of this machine at which the ranks' machines reach it. By default worked out for each host."""
    join_port: Annotated[int, Within(1, 65535)] = 29650
    """Port at which `tandem rank` joins with the manual launcher; further replicas take the ports behind it."""
    token_file: Filled | None = field(
        default=None,
        metadata={"launcher": "manual", "needed": "it is made if it is missing, and each machine needs a copy for `tandem rank`"},
    )
    """File with the keys that `tandem rank` needs to join; made if it is missing."""
    ray_address: Filled | None = field(default=None, metadata={"launcher": "ray"})
    """Ray cluster of the ray launcher: host:port of its head, auto (the one that runs on this machine), or new (one
    that Tandem starts here, and ends). By default what RAY_ADDRESS says, else auto."""
    heartbeat_timeout: Annotated[float, Within(2.0)] = 8.0
    """Seconds of silence after which a rank's machine and the engine's give each other up; the rank then ends."""
    threads_per_rank: Count | None = None
    """CPU threads of each rank; by default the cores are shared out among the ranks of a machine."""
    standby_ranks: Annotated[int, Within(0, 1)] = 0
    """1: beside each rank a process waits that has imported everything (it takes some 100 MB), so that ranks which have
    to be replaced start sooner."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """What ranks compute on. auto: what TANDEM_DEVICE says on a rank's machine, else a GPU where MLX has one."""
    fast_sync: Literal["auto", "on", "off"] = "off"
    """MLX's fast fences (MLX_METAL_FAST_SYNCH) on ranks of Macs: a sum over ranks waits about 4 us for the GPU and not
    180. MLX warns of them: they have locked GPUs up until a restart (docs/two-machines.md). auto: where ranks
    share layers; on: everywhere, and refused where no Mac's GPU computes; off: never, whatever the environment says."""
    blas: Filled = "auto"
    """Linear algebra library for CPU ranks: auto, none, or the path of a shared library."""

    @property
    def chosen_launcher(self) -> str:
        """The launcher that `auto` stands for."""
        if self.launcher != "auto":
            return self.launcher
        return "ssh" if self.hostfile is not None else "local"


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """What runs together in a step, and how much may wait."""

    max_batch_size: Count = 32
    """Most sequences that decode together, over all micro-batches."""
    prefill_chunk: Count | None = None
    """Most prompt tokens computed in one step, so that a long prompt does not hold up running streams for longer. By
    default what the warm-up measures as fastest; without a warm-up 512 on a GPU and 192 on a CPU."""
    prefill_time_ms: NotNegative | None = None
    """Most milliseconds that prompts may add to a step in which others decode: their chunks are halved, down to 32
    tokens, until they keep to it. By default ten times what a step of decoding takes; 0: as long as it takes."""
    max_queued_requests: Count = 256
    """Most requests that wait; the next is refused with 429."""
    max_queue_tokens: Count = 1_000_000
    """Most prompt tokens that wait; a request beyond it is refused with 429."""
    kv_tokens: Count | None = None
    """Tokens that the KV cache may hold; by default what fits into memory."""
    kv_dtype: Literal["auto", "8bit", "4bit"] = "auto"
    """Type in which keys and values are kept. auto: that of computation; 8bit and 4bit: quantised, so that the same
    memory holds about two or three times as many tokens (docs/kv.md)."""
    prefix_cache: Annotated[float, Within(0.0, 1.0)] = 0.3
    """Share of the KV cache that may hold prefixes of past prompts, so that they need not be computed again; 0 turns
    prefix caching off."""
    prefix_checkpoint_tokens: Count | None = None
    """Tokens between the checkpoints of a long prompt, for a model with recurrent states or sliding windows: its prefixes
    can be used again only up to one. By default at least 2048, and so many that they take at most a quarter of the KV."""
    kv_disk: Filled | None = None
    """Directory, on each machine with ranks (at the same path, also below the home directory), in which prefixes of prompts
    are kept: they outlive ranks and servers, and are read where that takes less time than computing them (docs/kv.md). By
    default none is kept."""
    kv_disk_gb: Positive | None = None
    """Most GB in that directory, by default 20; what was used least recently goes first."""
    memory_fraction: Annotated[float, Within(ABOVE_0, 1.0)] = 0.85
    """Share of a machine's memory that its ranks may use together, weights included."""
    max_memory: str | None = None
    """Most memory of a machine that its ranks may use together, such as 32GB; of each GPU where ranks have their own. By
    default the share (`memory_fraction`) alone decides."""
    wired: str = "auto"
    """Weights that macOS must leave in a Mac's GPU memory, so that the next answer is not late: auto (all, as long as
    enough is left for the rest of the Mac), off, or most of them as a size such as 40GB. Nothing elsewhere."""
    step_timeout: Positive = 300.0
    """Most seconds without progress in a step before its ranks count as stuck. What steps have taken lately makes the
    deadline shorter, down to 5 seconds on a CPU and 20 on a GPU."""
    start_timeout: Positive = 600.0
    """Seconds within which all ranks must be up and loaded; they count anew whenever weights have arrived."""
    rejoin_timeout: Positive = 60.0
    """Seconds that requests wait for a machine that was lost. Then the model is laid out over those that remain, if it
    fits there, until the machine is back."""
    self_check: bool = True
    """Self-check: before serving, compute a prompt of two chunks twice in different ways over all ranks and links, and
    refuse to serve if anything disagrees; then compare each step of the ranks. Layouts of one rank skip it."""
    warm_up_seconds: NotNegative | None = None
    """Most seconds for the warm-up before the server says that it is ready: batches of 1, 2, 4 ... sequences, a chunk of a
    prompt, sampling and grammars run once on every rank, and the prefill chunk is measured. By default 40 on a GPU, which
    compiles what it meets first, and 0 on a CPU, which does not; 0: no warm-up."""
    max_restarts: Annotated[int, Within(0)] = 5
    """Rank group restarts in a row, without a request served in between, before the engine gives up. Also most times that
    `tandem serve` starts an engine again within 5 minutes, or its api within one."""


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings:
    """Speculative decoding: several tokens of a sequence in one step, where they could be guessed."""

    speculative_method: Literal["auto", "none", "ngram", "draft_model", "mtp", "eagle3", "dflash"] = "auto"
    """How tokens are guessed. ngram: what followed earlier in the same prompt and answer; draft_model: by a small
    model; mtp: by the draft head that the checkpoint carries, or by Gemma 4's assistant; eagle3, dflash: by a head of that
    kind. Answers stay what they are without it, and where it does not pay it stops by itself (docs/speculation.md). auto:
    draft_model if one is named, else mtp if there is a head, else none."""
    draft_model: Filled | None = None
    """Path or hub id of a small model, or of a separate draft head; the rank that samples loads all of it."""
    num_speculative_tokens: Drafts = 5
    """Most tokens that are guessed for a sequence at once."""
    prompt_lookup_max: Lookup = 5
    """Most tokens that are compared to find the best earlier place to copy from."""
    prompt_lookup_min: Lookup = 2
    """Fewest last tokens that must stand before a place to copy from."""
    speculative_config: str | None = None
    """Speculative decoding in vLLM's JSON, such as '{"method": "ngram", "num_speculative_tokens": 5}'. Its entries
    replace the options above."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The HTTP address and who may use it."""

    host: Filled = "127.0.0.1"
    """Address to listen on. Anything but loopback should come with an API key."""
    port: Annotated[int, Within(0, 65535)] = 8000
    """Port to listen on."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Keys that clients may use. Better given as a file or as TANDEM_API_KEY, which do not show in process lists."""
    api_key_file: Filled | None = None
    """File with one API key a line. After a key may stand what it may use, such as `requests_per_minute=60 weight=2`
    (docs/operate.md)."""
    max_concurrent_requests: Limit | None = None
    """Most requests of one client at once, the next is refused with 429; a client is an API key, or an address where
    there are no keys."""
    requests_per_minute: Limit | None = None
    """Most requests of one client in a minute."""
    tokens_per_minute: Limit | None = None
    """Most tokens of one client in a minute, prompts and answers together."""
    cors_origin: tuple[str, ...] = ()
    """Web origins that may call the server from a browser; * for any."""
    allowed_origin: tuple[str, ...] = ()
    """Web origins whose pages may use a server without keys, such as https://chat.example.com; * for any. Those of
    `cors_origin`, the server's own and those of this machine (http://localhost:3000) may."""
    allowed_host: tuple[str, ...] = ()
    """Names by which clients reach a server without keys, such as gpu.example.com, or *.example.com; * for any.
    Addresses, names without a dot, and names in .localhost, .local, .internal, .home.arpa, .lan and .home need not be
    listed."""
    image_hosts: tuple[str, ...] = ()
    """Hosts from which pictures at http(s) URLs are fetched, such as images.example.com, or *.example.com; never from
    addresses that are not public. By default from none: clients send the bytes of pictures (docs/apis.md)."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies in front of the server, such as 10.0.0.2 or 10.0.0.0/24, whose X-Forwarded-For
    names the client; anybody else's is ignored."""
    tls_cert: Filled | None = None
    """PEM file with the certificate, and those between it and its authority, to serve HTTPS; read anew when it changes
    (docs/operate.md)."""
    tls_key: Filled | None = None
    """PEM file with its private key, if that is not in `tls_cert`."""
    max_connections: Count | None = None
    """Most connections at once, the next are told 503; by default as many as the limit of open files allows."""
    max_connections_per_address: Count | None = None
    """Most of them from one address, the next are told 429; by default half of all."""
    max_body_mb: Positive = 32.0
    """Largest request body, in MiB."""
    default_max_tokens: Count | None = None
    """Output limit of requests that set none; by default the model's own (`generation_config`), else what is left of
    the context."""
    thinking_budget: Annotated[int, Within(0, 2**31 - 1)] | None = None
    """Most tokens of reasoning in an answer to a chat whose request sets no budget; words for an effort are shares of
    it (docs/apis.md). By default `max_tokens` alone limits it."""
    thinking_message: str | None = None
    """A sentence that the model is made to say before a budget ends its reasoning. By default there is none."""
    request_timeout: Positive | None = None
    """Seconds after which a request is ended with 504; by default never."""
    warmup_prompts: tuple[Filled, ...] = ()
    """Files with prompts that are computed before the server says that it is ready, and again when ranks were replaced,
    so that prompts that begin like them are answered sooner: as `tandem cache warm` takes them (docs/kv.md)."""
    keep_conversations: NotNegative = 0.0
    """Seconds for which a conversation is kept in memory after an answer: a chat request with its `conversation_id`
    goes on from what was said (docs/clients.md). 0: none is kept."""
    tool_parser: Literal[
        "auto",
        "none",
        "hermes",
        "llama3",
        "mistral",
        "harmony",
        "cohere",
        "deepseek",
        "deepseek-dsml",
        "kimi",
        "kimi-k3",
        "minimax",
        "minimax-m3",
        "minicpm",
        "muse",
        "longcat",
        "pythonic",
        "glm",
        "solar",
        "qwen-coder",
        "seed",
        "gemma",
        "generic",
    ] = "auto"
    """How the model writes tool calls. auto: told from its chat template; none: requests with tools are refused."""
    reasoning_parser: Literal[
        "auto", "none", "think", "brackets", "longcat", "minimax-m3", "seed", "gemma", "cohere", "solar", "kimi-k3", "harmony"
    ] = "auto"
    """How the model marks its reasoning, which answers then carry as `reasoning_content`: between <think> tags, between
    [THINK] brackets, between the tags of a family, or on harmony's channels. auto: told from the chat template; none:
    it stays content."""
    unknown_fields: Literal["refuse", "warn", "ignore"] = "warn"
    """Treatment of request fields that are unknown, or that ask for what is not here. warn and ignore: they
    have no effect, and a header of the answer names them; warn also has the log name them; refuse: a 400 names them
    (docs/clients.md)."""
    max_choices: Count = 16
    """Largest `n`, and most prompts in one completion request."""
    enable_metrics: bool = True
    """Serve Prometheus metrics at /metrics."""
    otlp_traces_endpoint: str | None = None
    """Address to which OpenTelemetry traces of requests are sent (OTLP over HTTP), such as
    http://localhost:4318/v1/traces. Needs the extra `otel`."""
    enable_tokenizer_info_endpoint: bool = False
    """Serve what the model's tokenizer_config.json says, chat template included, at /tokenizer_info."""
    journal: Filled | None = None
    """Directory of a journal of requests that carry an Idempotency-Key or `Prefer: respond-async`: they are answered
    even after a crash of the whole server, and each once (docs/background-work.md). By default there is none."""
    journal_sync: Literal["always", "everysec", "no"] = "always"
    """When the journal is forced to disk. always: before a request is accepted and before its answer is shown;
    everysec: once a second; no: when the operating system likes."""
    journal_keep_hours: Positive = 24.0
    """Hours for which answers can be had from the journal."""
    journal_max_gb: Positive = 4.0
    """GiB from which on the journal drops its oldest answers before that time, but for those with an
    Idempotency-Key."""
    max_file_mb: Positive = 200.0
    """Largest file for a batch, in MiB."""
    files_max_gb: Positive = 4.0
    """GiB that files and results of batches may take together; the next file is refused."""
    log_requests: bool = True
    """Log one line per request: its id, client, path, status, model, times and numbers of tokens, never prompts or
    answers. Health checks, and /metrics, /v1/status and /v1/events unless refused, have none."""


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Sockets and logs of the processes on this machine."""

    engine_socket: Filled | None = None
    """Unix socket between api and engine; by default one per port in the user's runtime directory."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe messages to log."""
    log_format: Literal["auto", "text", "json"] = "auto"
    """Format of all processes' logs. json: one JSON object a line; text: lines with time, level and process; auto:
    short coloured lines on a terminal, else text."""
    drain_timeout: NotNegative = 30.0
    """Seconds that running requests get to finish after SIGTERM or Ctrl-C; 5 by default where `tandem serve` runs on a
    terminal."""


@dataclass(frozen=True, kw_only=True)
class ModelsSettings:
    """Several models behind one address, each loaded when it is asked for (docs/models.md). A table [models.NAME] of
    the TOML file adds one with settings of its own: any of [model], [parallel], [scheduler] and [speculation], the
    parsers and default_max_tokens of [server], `keep` (true) and `unload_after`.
    """

    extra_models: tuple[str, ...] = ()
    """Further models, each as NAME=MODEL, where NAME is what clients ask for."""
    pinned_models: tuple[str, ...] = ()
    """Names of models that are loaded at the start and never unloaded."""
    unload_after: Positive | None = None
    """Seconds without a request after which a model, also an only one, is unloaded; the next request loads it. By default
    only to make room for another."""
    max_loaded: Count | None = None
    """Most models in memory at once; by default as many as fit. With 1, each has all the memory for itself."""


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """One further model, as `also` or a table [models.NAME] describes it."""

    name: str
    """Name that clients ask for."""
    values: JsonObject
    """Values that differ from the other settings: by field name, `keep` and `unload_after` among them, typed as in
    TOML."""
    source: str
    """Place of the entry, as messages name it."""

    def label(self, field: str) -> str:
        """A field as messages name it."""
        return f"{self.source} {field}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings together, as `tandem serve` takes them."""

    model: ModelSettings = field(default_factory=ModelSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    process: ProcessSettings = field(default_factory=ProcessSettings)
    models: ModelsSettings = field(default_factory=ModelsSettings)
    named: tuple[NamedModel, ...] = ()
    """The tables [models.NAME]; no section."""
