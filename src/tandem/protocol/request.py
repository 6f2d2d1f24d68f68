"""Contents of a request on its way from the api to the engine and the ranks."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from tandem.json_types import JsonObject
from tandem.protocol.pictures import Picture
from tandem.protocol.quarantine import QuarantineRecord
from tandem.protocol.thinking import ThinkingBudget

MAX_PICTURE_BYTES = 512 * 2**20
"""Most bytes of the `inputs` of all pictures of a request."""
Pooling = Literal["last", "mean"]
"""Pooling of a prompt's final hidden states into one vector: the last position's, or the mean of all."""


class StructuredOutputs(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Constraint on the output: exactly one of the fields is set. The names are vLLM's."""

    json: str | JsonObject | None = None
    """A JSON schema, as text or as an object."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression (Rust's syntax) that the whole output matches."""
    choice: tuple[str, ...] | None = None
    """Allowed outputs."""
    grammar: str | None = None
    """A context-free grammar: Lark as llguidance reads it, GBNF, or llguidance's own JSON."""


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens. Plain data; the api validates it, the sampler trusts it."""

    max_tokens: int = 16
    """Most tokens to produce; 0 for a request with `pooling` or `prompt_logprobs` alone."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are ignored until so many tokens are out."""
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it. >= 0."""
    top_p: float = 1.0
    """Nucleus: keep the smallest set of tokens whose probability reaches it. (0, 1]; 1 is off."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one. [0, 1]; 0 is off."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in prompt or output are divided by it, negative multiplied (CTRL). > 0; 1 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from a logit once for each time the token stands in the output so far."""
    presence_penalty: float = 0.0
    """Subtracted from a logit once if the token stands in the output so far."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids."""
    seed: int | None = None
    """Same seed, same text, whatever else is in the batch; without one the engine draws it."""
    stop: tuple[str, ...] = ()
    """Strings that end the output (and do not appear in it)."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, beside the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids."""
    logprobs: int | None = None
    """None: no log probabilities; k >= 0: the chosen token's and those of the k most likely ones."""
    structured_outputs: StructuredOutputs | None = None
    """Constraint on the output; tokens that violate it get no probability."""
    prompt_logprobs: int | None = None
    """None: nothing of the prompt; k >= 0: log probabilities of its tokens, and of the k most likely ones in their
    places."""
    thinking: ThinkingBudget | None = None
    """Most tokens of reasoning; None for no limit but `max_tokens`."""

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken, so no random number is drawn."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """True when the tokens so far change the logits."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


class SamplingDefaults(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling defaults of the model or the server; None where neither sets one."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    """Most tokens to produce; None for the rest of the context."""

    def given(self) -> JsonObject:
        """Return the fields that are set, as a dict."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


class EngineRequest(Struct, frozen=True, kw_only=True):
    """Request for one sequence. `n` choices or several prompts become several requests."""

    request_id: str
    """Request id, unique among live requests."""
    prompt: list[int]
    """Token ids, at least one."""
    params: SamplingParams
    group: str = ""
    """Client for fair queueing: a digest of the API key, or the address."""
    weight: float = 1.0
    """Weight of the group in fair queueing; > 0."""
    produced: list[int] = []
    """Output tokens already sent to the client, fewer than `max_tokens`, if another engine began this request. They count as
    output (limits, penalties, random-number position); only later tokens are sent."""
    adapter: str = ""
    """Name of the LoRA adapter to use; empty for the base."""
    quarantine_record: QuarantineRecord | None = None
    """Quarantine record of crashes with this request; None without any."""
    pooling: Pooling | None = None
    """Pooling of an embedding request: it ends with its prompt and yields a vector in place of tokens."""
    label_token_ids: tuple[int, ...] = ()
    """With `pooling` "last": the vector holds the log probabilities of these tokens after the prompt, in this order."""
    cache_key: str = ""
    """Routing key: requests with equal keys prefer the same replica."""
    on_disk: bool = True
    """True if the KV of the prompt may be written to disk."""
    kept: int = 0
    """Leading tokens whose KV another replica wrote to a disk that this one can read."""
    leaves: bool = False
    """True if the request migrates (`HandedOver`) once its prompt's KV is on disk."""
    warms: bool = False
    """True for a warm-up: the request ends with its prompt, whose KV is cached for later requests."""
    pictures: tuple[Picture, ...] = ()
    """Pictures of the prompt in the order of their positions, which do not overlap."""
