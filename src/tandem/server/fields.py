"""Request fields outside a body's schema: accepted, ignored or refused. Pure.

null is always accepted. Fields of other servers are accepted with the values in their table. All others are refused, or
ignored with `--unknown-fields warn` or `ignore`. The names of ignored fields are returned. The tables come from the
request schemas of OpenAI, Anthropic, vLLM, SGLang, llama.cpp's server, Ollama, OpenRouter, LM Studio, mlx_lm.server, GLM
and Qwen. `scripts/generate_docs` writes docs/clients.md from these tables.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import BaseModel

from tandem.errors import RequestError, invalid


@dataclass(frozen=True)
class Known:
    """Accepted values of a field that has no effect here."""

    of: str
    """Server or company that defines the field."""
    accepted: tuple[object, ...] | None
    """Values that ask for the existing behaviour; None: any value, as none changes the text. null is always accepted."""

    def accepts(self, value: object) -> bool:
        """Return whether the field may have this value. Booleans differ from numbers; 1 and 1.0 are equal."""
        return self.accepted is None or any(
            type(value) is type(known) or float in (type(value), type(known)) for known in self.accepted if value == known
        )

    @property
    def values(self) -> str:
        """Accepted values as Markdown, for error messages and docs."""
        if self.accepted is None:
            return "any"
        return ", ".join(f"`{json.dumps(value)}`" for value in self.accepted) or "`null`"


Fields = Mapping[str, Known]


def _any(of: str, names: str) -> dict[str, Known]:
    """Return fields `names` (separated by blanks) with any value accepted."""
    return {name: Known(of, None) for name in names.split()}


def _only(of: str, names: str, *values: object) -> dict[str, Known]:
    """Return fields `names` (separated by blanks) with only `values` accepted; others need features that are missing."""
    return {name: Known(of, values) for name in names.split()}


OPENAI = _any("OpenAI", "user safety_identifier prompt_cache_options service_tier") | _only("OpenAI", "moderation")
"""OpenAI fields, accepted on most routes, that do not affect the text."""
CACHING = _any("OpenAI", "prompt_cache_key prompt_cache_retention")
"""Cache fields of OpenAI, for routes without prefix caching."""

GENERATING = {
    **OPENAI,
    **_any("OpenAI", "metadata store verbosity prediction"),
    **_only("OpenAI", "audio web_search_options"),
    **_only("OpenAI", "modalities", ["text"]),
    **_only("OpenAI", "functions", []),
    **_only("OpenAI", "function_call", "none", "auto"),
    **_any("vLLM", "priority request_id spaces_between_special_tokens guided_decoding_backend"),
    **_only("vLLM", "skip_special_tokens", True),
    **_only(
        "vLLM", "include_stop_str_in_output use_beam_search early_stopping return_token_ids return_tokens_as_token_ids", False
    ),
    **_only("vLLM", "length_penalty", 1),
    **_only("vLLM", "bad_words logits_processors", []),
    **_only("vLLM", "mm_processor_kwargs vllm_xargs kv_transfer_params", {}),
    **_only("vLLM", "truncate_prompt_tokens allowed_token_ids cache_salt guided_whitespace_pattern structural_tag"),
    **_any("SGLang", "rid data_parallel_rank return_cached_tokens_details"),
    **_only("SGLang", "separate_reasoning stream_reasoning", True),
    **_only("SGLang", "no_stop_trim return_hidden_states return_routed_experts", False),
    **_only("SGLang", "regex ebnf custom_logit_processor custom_params session_params"),
    **_any(
        "llama.cpp",
        "cache_prompt id_slot timings_per_token return_progress n_keep n_discard mirostat_tau "
        "mirostat_eta xtc_threshold dry_base dry_allowed_length dry_penalty_last_n "
        "dry_sequence_breakers dynatemp_exponent speculative.n_max speculative.n_min "
        "speculative.p_min",
    ),
    **_only("llama.cpp", "typical_p tfs_z", 1),
    **_only("llama.cpp", "xtc_probability mirostat dry_multiplier dynatemp_range n_probs n_indent min_keep", 0),
    **_only("llama.cpp", "top_n_sigma t_max_predict_ms", -1),
    **_only("llama.cpp", "penalize_nl post_sampling_probs return_tokens", False),
    **_only("llama.cpp", "repeat_last_n grammar grammar_lazy samplers json_schema response_fields"),
    **_any(
        "Ollama",
        "num_ctx keep_alive num_gpu main_gpu num_thread num_batch num_keep numa low_vram f16_kv vocab_only use_mmap use_mlock",
    ),
    **_only("Ollama", "options", {}),
    **_only("Ollama", "format", ""),
    **_only("Ollama", "raw", False),
    **_any("OpenRouter", "provider route models preset session_id trace usage"),
    **_only("OpenRouter", "transforms plugins", []),
    **_only("OpenRouter", "top_a", 0),
    **_any("LM Studio", "ttl draft_model"),
    **_any("mlx_lm.server", "num_draft_tokens"),
    **_only("mlx_lm.server", "repetition_context_size presence_context_size frequency_context_size"),
    **_any("GLM", "user_id tool_stream"),
    **_only("GLM", "do_sample", True),
    **_only("Qwen", "enable_search incremental_output", False),
}

CHAT = {
    **GENERATING,
    **_only("vLLM", "add_generation_prompt", True),
    **_only("vLLM", "add_special_tokens echo", False),
    **_only("vLLM", "documents", []),
    **_only("vLLM", "chat_template chat_template_content_format media_io_kwargs"),
    **_only("llama.cpp", "reasoning_format", "auto", "deepseek"),
    **_only("llama.cpp", "thinking_forced_open parse_tool_calls", False),
    **_only("Ollama", "think"),
}

COMPLETION = {
    **GENERATING,
    **_any("OpenAI", "parallel_tool_calls reasoning_effort reasoning"),
    **_only("OpenAI", "tools", []),
    **_only("OpenAI", "tool_choice", "none", "auto"),
    **_only("OpenAI", "suffix", ""),
    **_only("vLLM", "add_special_tokens", True),
}

EMBEDDING = {
    **OPENAI,
    **CACHING,
    **_any("OpenAI", "metadata"),
    **_any("vLLM", "priority request_id"),
    **_any("Ollama", "keep_alive"),
    **_only("Ollama", "options", {}),
    **_only("Ollama", "truncate", False),
    **_only("vLLM", "add_special_tokens normalize", True),
    **_only("vLLM", "truncate_prompt_tokens cache_salt mm_processor_kwargs"),
}

TOKENS = {
    **OPENAI,
    **CACHING,
    **_any("OpenAI", "metadata"),
    **_only("vLLM", "continue_final_message", False),
    **_only("vLLM", "mm_processor_kwargs", {}),
}

RESPONSES = {
    **OPENAI,
    **_any("OpenAI", "client_metadata max_tool_calls verbosity"),
    **_only("OpenAI", "truncation", "disabled"),
    **_only("OpenAI", "top_logprobs", 0),
    **_only("OpenAI", "conversation prompt"),
    **_only("OpenAI", "context_management", []),
    **_any("vLLM", "priority request_id"),
    **_only("vLLM", "skip_special_tokens", True),
    **_only("vLLM", "enable_response_messages include_stop_str_in_output", False),
    **_only("vLLM", "cache_salt mm_processor_kwargs"),
}

KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
"""Context edit of Anthropic's API that removes nothing; agents send it."""

MESSAGES = {
    **_any("Anthropic", "metadata service_tier cache_control inference_geo diagnostics"),
    **_only("Anthropic", "speed", "standard"),
    **_only("Anthropic", "container"),
    **_only("Anthropic", "mcp_servers", []),
    **_only("Anthropic", "context_management", {}, {"edits": []}, {"edits": [KEEP_ALL]}),
    **_any("vLLM", "request_id"),
}

BY_SCHEMA: Mapping[str, Fields] = {
    "ChatRequest": CHAT,
    "CompletionRequest": COMPLETION,
    "EmbeddingRequest": EMBEDDING,
    "ResponsesRequest": RESPONSES,
    "MessagesRequest": MESSAGES,
    "CountRequest": MESSAGES,
    "TokenizeRequest": TOKENS,
    "DetokenizeRequest": TOKENS,
    "WarmRequest": CHAT,
    "RerankRequest": EMBEDDING,
    "ScoreRequest": EMBEDDING,
    "OllamaChatRequest": CHAT,
    "OllamaGenerateRequest": CHAT,
    "OllamaEmbedRequest": EMBEDDING,
    "ModelRequest": _any("Ollama", "insecure verbose"),
}
"""Tables by the name of the body's schema."""

ROUTES = {
    "ChatRequest": "/v1/chat/completions",
    "CompletionRequest": "/v1/completions",
    "ResponsesRequest": "/v1/responses",
    "MessagesRequest": "/v1/messages",
    "EmbeddingRequest": "/v1/embeddings",
    "TokenizeRequest": "/tokenize",
}
"""Routes by the name of the body's schema, for docs/clients.md."""

RENAMED: Mapping[str, str] = {
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "random_seed": "seed",
    "max_new_tokens": "max_tokens",
    "queries": "text_1",
    "data_1": "text_1",
    "documents": "text_2",
    "data_2": "text_2",
}
"""Aliases that llama.cpp, Ollama, Mistral, TGI and vLLM use, and our names for those fields."""
UNLIMITED = {("n_predict", -1), ("num_predict", -1), ("num_predict", -2), ("n_predict", -2)}
"""(field, value) pairs with which llama.cpp and Ollama set no limit."""

ADAPTERS = frozenset({"adapter", "adapters", "adapter_path", "lora", "lora_name", "lora_path", "lora_request"})
"""Fields that select a LoRA adapter on other servers."""

Unknown = Literal["refuse", "warn", "ignore"]
"""Values of --unknown-fields."""
MOST_NAMES, LONGEST_NAME = 20, 60
"""Most field names in a header or log line, and most characters of each."""
LONGEST_PATH = 200
"""Most characters of a field's path in an error."""


def without_strangers(
    data: Mapping[str, object], model: type[BaseModel], unknown: Unknown
) -> tuple[dict[str, object], list[str], dict[str, str]]:
    """Split a body's fields. Return those of its schema, the names of ignored ones, and the aliases used (ours to theirs).

    Raises RequestError for a field that must not be ignored.
    """
    kept: dict[str, object] = {}
    left_out: list[str] = []
    names: dict[str, str] = {}
    known = BY_SCHEMA.get(model.__name__, {})
    for name, value in data.items():
        ours = RENAMED.get(name)
        if name in model.model_fields:
            kept[name] = value
        elif value is None or (name in ADAPTERS and value in ([], {})):
            continue
        elif name in ADAPTERS:
            message = (
                f"'{name}' is not supported: an adapter is asked for by its name as 'model', which the server "
                "gets with --lora-modules NAME=DIRECTORY (GET /v1/models lists them)."
            )
            raise RequestError(message, param=name, code="unsupported_parameter")
        elif ours in model.model_fields:
            names |= _take_renamed(name, ours, value, data, kept)
        elif name == "best_of" and "n" in model.model_fields:
            # Without effect unless larger than n: the n best of `best_of` candidates are returned.
            if value not in (1, data.get("n")):
                _refuse(name, unknown, left_out)
        elif name not in known:
            if unknown == "refuse":
                raise unknown_field(name, {*model.model_fields, *known, *RENAMED})
            left_out.append(name)
        elif known[name].accepted is None:
            left_out.append(name)
        elif not known[name].accepts(value):
            _refuse(name, unknown, left_out)
    return kept, left_out, names


def _take_renamed(name: str, ours: str, value: object, data: Mapping[str, object], kept: dict[str, object]) -> dict[str, str]:
    if isinstance(value, int) and (name, value) in UNLIMITED:
        return {}
    own = data.get(ours)
    if own is not None and own != value:
        raise invalid(name, f"'{name}' and '{ours}' contradict each other; give one of them.")
    kept[ours] = value
    return {ours: name}


def _refuse(name: str, unknown: Unknown, left_out: list[str]) -> None:
    if unknown == "refuse":
        raise RequestError(f"'{name}' is not supported by this server; leave it out.", param=name, code="unsupported_parameter")
    left_out.append(name)


def unknown_field(path: str, known: Iterable[str]) -> RequestError:
    """Return the error for an unknown field at `path`; suggest the most similar name of `known`."""
    path = path[:LONGEST_PATH]
    *before, name = path.rsplit(".", 1)
    near = difflib.get_close_matches(name[:LONGEST_NAME], sorted(known), 1, cutoff=0.7)
    meant = f"; did you mean '{'.'.join([*before, near[0]])}'?" if near else "."
    return RequestError(f"Unknown parameter: '{path}'{meant}", param=path, code="unknown_parameter")


def fields_beside(model: type[BaseModel], place: tuple[int | str, ...]) -> set[str]:
    """Return the field names of the schema that contains `place` (a pydantic error location) within `model`."""
    for part in place[:-1]:
        if isinstance(part, str):
            fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
            inner = _schema_in(fields.get(part))
            if inner is None:
                return set()
            model = inner
    return {field.alias or name for name, field in model.model_fields.items()}


def _schema_in(annotation: object) -> type[BaseModel] | None:
    """Return the schema X of an annotation X, X | None or list[X]; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_schema_in(part) for part in get_args(annotation))
    return next((schema for schema in inner if schema is not None), None)


def told(names: Iterable[str]) -> str:
    """Return the names joined for a header or log line: ASCII, without commas, shortened."""
    whole = list(names)
    shown = [ascii(name[:LONGEST_NAME])[1:-1].replace(",", "")[:LONGEST_NAME] for name in whole[:MOST_NAMES]]
    more = [f"and {len(whole) - MOST_NAMES} more"] if len(whole) > MOST_NAMES else []
    return ", ".join(shown + more)
