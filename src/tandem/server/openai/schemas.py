"""Schemas of OpenAI's request bodies. Types are strict ("5" is not a number) and unknown fields are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from tandem.errors import invalid
from tandem.json_types import JsonObject
from tandem.protocol.ranges import BIAS, MAX_BIASES, MAX_LOGPROBS, MAX_STOPS, RANGES
from tandem.protocol.request import StructuredOutputs
from tandem.server.openai.messages import NAMED_FORM, TOOL_CHOICE, Conversation, Strict, Tool, ToolChoice, Tools, at_most, wrong

MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 256
MAX_CHOICES = 8192
MAX_TOKENS = 2**20
"""Most token ids in a body of /detokenize."""
SEED_LIMIT = 2**63


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Put the usage so far into every chunk (vLLM)."""
    include_obfuscation: bool | None = None
    """Accepted but ignored: chunks are never padded."""


MOST_BUDGET = 2**31 - 1
"""Largest thinking budget, in tokens."""
BUDGETS = ("thinking_token_budget", "thinking_budget", "reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens")
"""Thinking budget fields of vLLM, Qwen and llama.cpp (-1: no limit)."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningEffort(Strict):
    """OpenAI's `reasoning` object."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Accepted but ignored: reasoning is returned in full, without a summary."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MOST_BUDGET)] | None = None
    """OpenRouter's thinking budget in tokens, included in the output limit."""


class Reasoning(ReasoningEffort):
    """OpenRouter's `reasoning` object."""

    enabled: bool | None = None
    exclude: bool | None = None
    """Leave reasoning out of the answer."""


class ThinkingSwitch(Strict):
    """`thinking` object of GLM, DeepSeek and Kimi."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    clear_thinking: bool | None = None
    """Accepted but ignored: the chat template decides which earlier reasoning to keep."""


class JsonSchema(Strict):
    """OpenAI's `json_schema` object in `response_format`."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    schema_: JsonObject | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Accepted but ignored: the schema is always enforced."""


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _belongs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong("one_of", "'json_schema' belongs to the type 'json_schema', and only to it")
        return self

    @property
    def form(self) -> tuple[str, StructuredOutputs]:
        """Name of the field with the response format, and the format; undefined for the type `text`."""
        if self.json_schema is None or self.json_schema.schema_ is None:
            return "response_format", StructuredOutputs(json_object=True)
        return "response_format.json_schema.schema", StructuredOutputs(json=self.json_schema.schema_)


def _form(name: str, value: object) -> StructuredOutputs:
    return StructuredOutputs(**{name: tuple(value) if isinstance(value, list) else value})  # type: ignore[arg-type]


Text = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class StructuredFields(Strict):
    """vLLM's `structured_outputs`."""

    json_: str | JsonObject | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


Bias = Annotated[float, Field(**BIAS.bounds)]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]], Field(fail_fast=True)]
StopTokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)]


CacheKey = Annotated[str, Field(max_length=1024)]
"""Cache key: requests with the same key go to the same replica."""
Retention = Literal["in_memory", "in-memory", "24h"]
"""Where a prompt's prefix may be cached: only in memory (OpenAI has both spellings), or also on disk (`24h`)."""


class SamplingFields(Strict):
    """Fields shared by chat and completions: sampling, structured output, streaming and caching."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Output limit in tokens. 0: only the prompt (see `check_sizes`); -1: no limit, as for llama.cpp and LM Studio."""
    min_tokens: Annotated[int, Field(**RANGES["min_tokens"].bounds)] | None = None
    temperature: Annotated[float, Field(**RANGES["temperature"].bounds)] | None = None
    top_p: Annotated[float, Field(**RANGES["top_p"].bounds)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=RANGES["top_k"].high)] | None = None
    """0 or -1 (vLLM) disables it."""
    min_p: Annotated[float, Field(**RANGES["min_p"].bounds)] | None = None
    repetition_penalty: Annotated[float, Field(**RANGES["repetition_penalty"].bounds)] | None = None
    frequency_penalty: Annotated[float, Field(**RANGES["frequency_penalty"].bounds)] | None = None
    presence_penalty: Annotated[float, Field(**RANGES["presence_penalty"].bounds)] | None = None
    logit_bias: Annotated[dict[str, Bias] | None, at_most(MAX_BIASES)] = None
    seed: Annotated[int, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)] | None = None
    stop: Stops | None = None
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    prompt_cache_key: CacheKey | None = None
    prompt_cache_retention: Retention | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: str | JsonObject | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MOST_BUDGET)] | None = None
    thinking_budget: Annotated[int, Field(ge=0, le=MOST_BUDGET)] | None = None
    reasoning_budget: Annotated[int, Field(ge=-1, le=MOST_BUDGET)] | None = None
    reasoning_budget_tokens: Annotated[int, Field(ge=-1, le=MOST_BUDGET)] | None = None
    thinking_budget_tokens: Annotated[int, Field(ge=-1, le=MOST_BUDGET)] | None = None
    reasoning_budget_message: Annotated[str, Field(max_length=1000)] | None = None
    """Text inserted before reasoning is ended by the budget."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        stops = [value] if isinstance(value, str) else value
        if isinstance(stops, list) and len(stops) > MAX_STOPS:
            raise wrong("too_many_stops", f"at most {MAX_STOPS} stop strings, not {len(stops)}")
        return stops

    @field_validator("max_tokens", "max_completion_tokens", check_fields=False)
    @classmethod
    def _unlimited(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value == 0 and info.field_name == "max_completion_tokens":
            raise wrong("no_tokens", "must be at least 1, or -1 for no limit")
        return None if value == -1 else value

    def asked_form(self) -> tuple[str, StructuredOutputs] | None:
        """Return the name of the field with a response format, and the format; None for free text.

        Raises RequestError if several fields have one.
        """
        response_formats = {
            f"guided_{name}": _form(name, value)
            for name, value in (
                ("json", self.guided_json),
                ("regex", self.guided_regex),
                ("choice", self.guided_choice),
                ("grammar", self.guided_grammar),
            )
            if value is not None
        }
        if self.response_format is not None and self.response_format.type != "text":
            response_formats.update([self.response_format.form])
        if self.structured_outputs is not None:
            for name, value in self.structured_outputs.model_dump(by_alias=True, exclude_none=True).items():
                if value is not False:
                    response_formats[f"structured_outputs.{name}"] = _form(name, value)
        if len(response_formats) > 1:
            first, second, *_ = response_formats
            raise invalid(second, f"'{first}' and '{second}' both ask for a form; give one of them.")
        return next(iter(response_formats.items()), None)

    @property
    def caching(self) -> JsonObject:
        """Prefix cache fields of an EngineRequest."""
        return {
            "cache_key": self.prompt_cache_key or "",
            "on_disk": self.prompt_cache_retention not in ("in_memory", "in-memory"),
        }

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if every chunk has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: Conversation
    max_completion_tokens: Annotated[int, Field(ge=-1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: JsonObject | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    thinking: ThinkingSwitch | None = None
    include_reasoning: bool | None = None
    conversation_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    continue_final_message: bool | None = None
    """Continue the last message, which is the assistant's (vLLM)."""
    tools: Tools | None = None
    tool_choice: Annotated[ToolChoice, WithJsonSchema(TOOL_CHOICE)] | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("reasoning", mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        return {"enabled": value} if isinstance(value, bool) else value

    @property
    def hides_reasoning(self) -> bool:
        """True if the answer must leave out reasoning."""
        return self.include_reasoning is False or bool(self.reasoning and self.reasoning.exclude)

    @field_validator("tools")
    @classmethod
    def _distinct(cls, value: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in value or ()]
        for name in names:
            if names.count(name) > 1:
                raise wrong("twice", f"there are two tools '{name}'")
        return value

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _one_form(cls, value: object) -> object:
        if value is None or value in ("auto", "none", "required"):
            return value and {"mode": value}
        function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return {"mode": "named", "name": function["name"]}
        raise wrong("tool_choice", f"expected 'auto', 'none', 'required' or {NAMED_FORM}")


def normalise_prompt(value: object) -> list[Any]:
    """Return OpenAI's four forms of a prompt as a list of strings or of token id lists. Raises PydanticCustomError."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            value, kinds = [value], {list}
        if kinds == {str}:
            return value
        if kinds == {list} and all(set(map(type, item)) == {int} for item in value):
            return value
    raise wrong("prompt_form", "expected a string, a list of strings, a list of token ids, or a list of such lists, none empty")


Prompts = Annotated[list[Any], BeforeValidator(normalise_prompt)]
"""List of strings or of token id lists, normalized from OpenAI's four forms."""


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


MAX_INPUTS = 2048
"""Most inputs of one request, as at OpenAI."""
_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXT = {"type": "string", "minLength": 1}
_INPUT = {
    "anyOf": [
        _TEXT,
        _TOKENS,
        *({"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": item} for item in (_TEXT, _TOKENS)),
    ]
}


class EmbeddingRequest(Strict):
    """Body of POST /v1/embeddings."""

    input: Annotated[Prompts, WithJsonSchema(_INPUT)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None


def _document_text(value: object) -> object:
    return value["text"] if isinstance(value, dict) and "text" in value else value


Judged = Annotated[
    list[Annotated[str, BeforeValidator(_document_text)]], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
]
"""Texts to judge in one request; a text may also be an object with a `text`, whose other fields are the client's own."""


class JudgingFields(Strict):
    """Fields shared by /v1/rerank and /v1/score."""

    model: str | None = None
    instruction: str | None = None
    """The task, in words; None for a web search."""
    timeout: Annotated[float, Field(gt=0)] | None = None


class RerankRequest(JudgingFields):
    """Body of POST /v1/rerank."""

    query: str
    documents: Judged
    top_n: Annotated[int, Field(ge=0)] | None = None
    """Most results; 0 (vLLM) for all."""
    return_documents: bool | None = None
    """False leaves the documents' texts out of the results."""


class ScoreRequest(JudgingFields):
    """Body of POST /v1/score."""

    text_1: Judged
    text_2: Judged

    @field_validator("text_1", "text_2", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return value if isinstance(value, list) else [value]


class TokenizeRequest(Strict):
    """Body of POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Conversation | None = None
    add_special_tokens: bool | None = None
    """Default true for a prompt; without effect on messages, as the chat template adds special tokens."""
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("one_of", "give either 'prompt' or 'messages'")
        return self


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_TOKENS, fail_fast=True)]


class UnloadLoRAAdapterRequest(Strict):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_int_id: int | None = None
    """Accepted but ignored: the name says which."""


class LoadLoRAAdapterRequest(Strict):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1)]
    base_model_name: str | None = None
    """Model that the adapter is for; the default one if absent."""
