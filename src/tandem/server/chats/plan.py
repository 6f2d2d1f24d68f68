"""From a chat request to sequences under way, for every dialect: its prompt, the form of its answer, how to read it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
from fastapi import Request

from tandem.errors import RequestError
from tandem.protocol.request import StructuredOutputs
from tandem.protocol.thinking import ThinkingTokens
from tandem.server.chats.budgets import budget_of
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.chats.response_formats import accepted, described
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.context import note_ignored
from tandem.server.engines.served_model import Served
from tandem.server.generation import Generation
from tandem.server.openai.messages import Message, ToolChoice
from tandem.server.openai.sampling import check_prompt_logprobs, check_sizes, sequences_of
from tandem.server.openai.schemas import BUDGETS, ChatRequest
from tandem.server.tools.choose import THINKING, OutputFormat, OutputParser, output_parser, thinking_tokens, told_formats
from tandem.server.tools.forced import answer_grammar, forced_format, literal_of
from tandem.server.tools.scan import Tools
from tandem.text.tokenizer import Tokenizer

T = TypeVar("T")

NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
_AUTO = ToolChoice(mode="auto")
LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Efforts from the least to the most; `none` is not to think at all."""
_USUAL = frozenset({"low", "medium", "high"})
"""Levels of a template that does not spell out which it knows."""
NO_THINKING = ThinkingTokens((-1,), (-1,))
"""Tags for a model that does not think: its tokens are none of these."""
_SWITCHES = ("enable_thinking", "thinking")
_RESERVED = frozenset(
    {"self", "messages", "conversation", "tools", "tokenize", "add_generation_prompt", "return_dict", "chat_template"}
)


@dataclass(frozen=True)
class ChatPlan:
    """One chat request, ready for the engine."""

    prompt: list[int]
    form: StructuredOutputs | None
    """The grammar of the answer, already checked; None when it is free."""
    output_parser: OutputParser | None
    """How to read the answer; None when all of it is content."""
    shown: frozenset[int]
    """Special tokens that belong to the text, because its reader needs them."""
    calls_finish: str
    """`finish_reason` of an answer with calls that ended by itself. OpenAI says `stop` when the call was named."""
    hides_reasoning: bool
    """The answer comes without what the model thinks."""
    short_ids: bool
    """Ids of calls have nine characters, as Mistral's templates demand."""
    thinking: ThinkingTokens | None
    """Tokens around reasoning; None without it, or where they are not the model's own."""
    marked: bool
    """The model marks its reasoning."""


async def plan_chat(http: Request, served: Served, fields: ChatRequest) -> tuple[ChatPlan, RequestTexts]:
    """Render the prompt and settle the rest; also return with what it was rendered. Raises RequestError."""
    check_sizes(fields, most_choices=served.settings.server.max_choices)
    texts = await RequestTexts.of(http, served)
    tokenizer, settings = texts.tokenizer, served.settings.server
    variables, vain = template_variables(fields, tokenizer)
    choice = fields.tool_choice or _AUTO
    tools = callable_tools(fields, choice)
    if tools is not None and settings.tool_parser == "none":
        message = "'tools' are not supported: the server runs with --tool-parser none."
        raise RequestError(message, param="tools", code="unsupported_parameter")
    asked, hides, forced = fields.asked_form(), fields.hides_reasoning, choice.mode in ("required", "named")
    if asked is not None and forced:
        message = f"'{asked[0]}' contradicts 'tool_choice', which forces a call; leave one of them out."
        raise RequestError(message, param=asked[0], code="invalid_value")
    told = [] if tools is None else [tool.model_dump(exclude_none=True) for tool in fields.tools or ()]
    messages, unfinished = fields.messages, ""
    if fields.continue_final_message:
        messages, unfinished = _unfinished(fields, formed=forced or asked is not None)
    prompt = await texts.render(messages, variables, tools=told)
    own = told_formats(
        settings.tool_parser, settings.reasoning_parser, tokenizer.chat_template, prompt.end, tools, tokenizer.has_special
    )
    if unfinished:
        if own.begun:
            unfinished, own = f"{THINKING[own.reasoning][1]}\n\n{unfinished}", replace(own, begun=False)
        prompt.tokens.extend((await texts.encode([unfinished], "messages", special=False))[0])
    output_format = replace(
        own,
        format=forced_format(own.format) if forced or asked is not None else own.format,
        several=choice.mode != "named" and fields.parallel_tool_calls is not False,
    )
    how = output_parser(output_format, tokenizer.has_special)
    thinking = thinking_tokens(how.thinking if how is not None else None, tokenizer)
    if vain and thinking is None:  # an effort is a share of a budget, too
        note_ignored(http, *vain)
    plan = ChatPlan(
        prompt=prompt.tokens,
        form=await _form(texts, output_format, asked) if forced or asked is not None else None,
        output_parser=how,
        shown=frozenset(tokenizer.special_ids_of(how.markers)) if how is not None else frozenset(),
        calls_finish="stop" if choice.mode == "named" else "tool_calls",
        hides_reasoning=hides,
        short_ids=own.format == "mistral",
        thinking=thinking,
        marked=how is not None and how.thinking is not None,
    )
    return plan, texts


async def start_chat(http: Request, served: Served, fields: ChatRequest, request_id: str) -> tuple[ChatPlan, Generation]:
    """Check the request and submit it; the generation is the caller's to close. Raises RequestError."""
    asked = _asked_tokens(fields)
    plan, texts = await plan_chat(http, served, fields)
    check_prompt_logprobs("prompt_logprobs", fields.prompt_logprobs, len(plan.prompt), 1)
    work = sequences_of(
        plan.prompt,
        fields,
        served,
        texts.status,
        param="messages",
        asked=asked,
        form=plan.form,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs,
    )
    effort, server = effort_of(fields), served.settings.server
    if effort.budget is not None or effort.effort is not None or server.thinking_budget is not None:
        budget = budget_of(
            http,
            fields,
            (effort.budget_field, effort.budget, effort.effort),
            plan.thinking,
            texts,
            server,
            most=asked,
            left=texts.status.max_context - len(plan.prompt),
        )
        work = [(prompt, msgspec.structs.replace(params, thinking=budget)) for prompt, params in work]
    generation = Generation(
        http,
        served,
        fields,
        work,
        texts.tokenizer,
        request_id=request_id,
        prompt_tokens=len(plan.prompt),
        continues=plan.form is not None,
        shown=plan.shown,
        thinking=plan.thinking or (None if plan.marked else NO_THINKING),
    )
    return plan, generation


def _unfinished(fields: ChatRequest, *, formed: bool) -> tuple[list[Message], str]:
    """Return the messages before the last, and the text of that, which the answer goes on with. Raises RequestError."""
    *before, last = fields.messages
    if last.role != "assistant" or last.tool_calls or not last.content or not before or formed:
        message = (
            "The answer can go on with a last message by the assistant that holds text alone, after other "
            "messages, and without a form or a forced call."
        )
        raise RequestError(message, param="messages", code="invalid_value")
    return before, last.content


def _asked_tokens(fields: ChatRequest) -> int | None:
    """Return the output limit, which OpenAI has renamed. Raises RequestError when its two names have two values."""
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) contradict each other; give one of them."
        raise RequestError(message, param="max_tokens", code="invalid_value")
    return new if new is not None else old


def callable_tools(fields: ChatRequest, choice: ToolChoice) -> Tools | None:
    """Schemas of the tools that may be called; None for no tools. Raises RequestError when the choice needs others."""
    tools = {tool.function.name: tool.function.parameters or NO_ARGUMENTS for tool in fields.tools or ()}
    if choice.mode in ("required", "named") and not tools:
        raise RequestError("'tool_choice' needs 'tools'.", param="tool_choice", code="invalid_value")
    if choice.mode == "named":
        if choice.name not in tools:
            message = f"Invalid 'tool_choice': there is no tool '{str(choice.name)[:64]}' in 'tools'."
            raise RequestError(message, param="tool_choice", code="invalid_value")
        return {choice.name: tools[choice.name]}
    return tools if tools and choice.mode != "none" else None


async def _form(
    texts: RequestTexts, output_format: OutputFormat, asked: tuple[str, StructuredOutputs] | None
) -> StructuredOutputs:
    """The checked grammar of the whole answer. Raises RequestError naming the field at fault and the reason."""
    param = "tools" if asked is None else asked[0]
    answer = None if asked is None else await described(texts, *asked)
    literal = literal_of(texts.grammars.special)
    try:
        grammar = await off_loop(texts.body_size > LARGE, answer_grammar, output_format, literal, answer)
        return await accepted(texts, param, await described(texts, param, StructuredOutputs(grammar=grammar)))
    except ValueError as error:
        raise RequestError(f"Invalid '{param}': {error}.", param=param, code="invalid_value") from error


# What the chat template is told beside messages and tools. Templates differ in what they read: `reasoning_effort`
# (gpt-oss, Mistral, DeepSeek V4), a switch called `enable_thinking` (Qwen3, GLM, Gemma 4, SmolLM3) or `thinking`
# (DeepSeek V3.1, Kimi, Granite), or several of these.


def template_variables(fields: ChatRequest, tokenizer: Tokenizer) -> tuple[dict[str, object], list[str]]:
    """Return what a chat's template is told, and the fields of which it makes nothing. Raises RequestError."""
    variables = _template_kwargs(fields)
    return variables, add_thinking(effort_of(fields), tokenizer, variables)


def _template_kwargs(fields: ChatRequest) -> dict[str, object]:
    """Variables for the chat template. Also checks that log probabilities are asked for consistently."""
    if fields.top_logprobs is not None and not fields.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs", code="invalid_value")
    variables = checked_template_kwargs(fields.chat_template_kwargs)
    thinking = fields.enable_thinking
    if thinking is not None and variables.setdefault("enable_thinking", thinking) != thinking:
        message = "'enable_thinking' contradicts the one in 'chat_template_kwargs'."
        raise RequestError(message, param="enable_thinking", code="invalid_value")
    return variables


def checked_template_kwargs(given: dict[str, object] | None) -> dict[str, object]:
    """A copy. Raises RequestError when it would replace what the server itself hands to the template."""
    for name in given or {}:
        if name in _RESERVED:
            raise RequestError(f"'{name}' cannot be set in 'chat_template_kwargs'.", param="chat_template_kwargs")
    return dict(given or {})


@dataclass(frozen=True)
class ReasoningEffort:
    """Effort and thinking that a request asks for; None for what it leaves to the model."""

    effort: str | None
    effort_field: str
    """The field that names the effort."""
    think: bool | None
    """The value of a switch of the request; false also for a budget of nothing."""
    budget: int | None = None
    """Most tokens of reasoning."""
    budget_field: str = ""


def effort_of(fields: ChatRequest) -> ReasoningEffort:
    """Read effort and thinking of a request. Raises RequestError when its fields contradict each other."""
    reasoning = fields.reasoning
    efforts: dict[str, str | None] = {
        "reasoning_effort": fields.reasoning_effort,
        "reasoning.effort": reasoning.effort if reasoning else None,
    }
    thinking = fields.thinking and fields.thinking.type
    switches: dict[str, bool | None] = {
        "enable_thinking": fields.enable_thinking,
        "thinking.type": None if thinking in (None, "auto") else thinking != "disabled",
        "reasoning.enabled": reasoning.enabled if reasoning else None,
    }
    budgets = {name: getattr(fields, name) for name in BUDGETS}
    budgets |= {
        "reasoning.max_tokens": reasoning and reasoning.max_tokens,
        "thinking.budget_tokens": fields.thinking and fields.thinking.budget_tokens,
    }
    effort_field, effort = _only("reasoning_effort", efforts)
    budget_field, budget = _only("thinking_token_budget", budgets)
    think = _only("enable_thinking", switches)[1]
    return ReasoningEffort(
        effort, effort_field, False if think is None and budget == 0 else think, None if budget == -1 else budget, budget_field
    )


def _only(default: str, said: Mapping[str, T | None]) -> tuple[str, T | None]:
    """Return the field of `said` that has a value, and the value. Raises RequestError when two differ."""
    fields = [(name, value) for name, value in said.items() if value is not None]
    for name, value in fields[1:]:
        if value != fields[0][1]:
            raise RequestError(f"'{name}' contradicts '{fields[0][0]}'; give one of them.", param=name, code="invalid_value")
    return fields[0] if fields else (default, None)


def add_thinking(effort: ReasoningEffort, tokenizer: Tokenizer, variables: dict[str, object]) -> list[str]:
    """Add the template's variables for thinking to `variables`; existing entries win.

    Returns the fields that have no effect with this template.
    """
    if effort.budget is None and effort.think is None and effort.effort is None:
        return []
    reads = tokenizer.template_reads
    if effort.budget is not None and "thinking_budget" in reads:  # Seed
        variables.setdefault("thinking_budget", effort.budget)
    if effort.think is None and effort.effort is None:
        return []
    think = effort.think if effort.think is not None or effort.effort is None else effort.effort != "none"
    switches = [name for name in _SWITCHES if name in reads]
    if think is not None:
        for name in switches:
            variables.setdefault(name, think)
    if effort.effort is None:
        return []
    if "reasoning_effort" in reads:
        if level := nearest(effort.effort, tokenizer.template_words, switched=bool(switches)):
            variables.setdefault("reasoning_effort", level)
    elif not switches:
        return [effort.effort_field]
    return []


def nearest(effort: str, words: Collection[str], *, switched: bool) -> str | None:
    """The level closest to `effort` of those that a template spells out; of two as close the higher.

    None for no thinking where a switch says so and the template has no word for it.
    """
    told = {level for level in LEVELS if level in words}
    levels = told if len(told) > 1 else _USUAL
    if effort == "none":
        if "none" in levels:
            return "none"
        if switched:
            return None
    place = LEVELS.index(effort)
    return min(
        (level for level in LEVELS if level in levels - {"none"}),
        key=lambda level: (abs(LEVELS.index(level) - place), -LEVELS.index(level)),
    )
