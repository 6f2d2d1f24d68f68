"""Plan and start a chat request, for all chat APIs: prompt, response format, output parser, thinking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
from fastapi import Request

from tandem.config.settings import ServerSettings
from tandem.errors import RequestError, invalid
from tandem.protocol.pictures import Picture
from tandem.protocol.request import StructuredOutputs
from tandem.protocol.thinking import ThinkingBudget, ThinkingTokens, begin, follow
from tandem.server.chats.budgets import budget_of
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.chats.response_formats import accepted, described
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.context import note_ignored
from tandem.server.engines.served_model import Served
from tandem.server.generation import Generation
from tandem.server.openai.messages import Message, ToolChoice
from tandem.server.openai.sampling import check_prompt_logprobs, check_sizes, sequences_of
from tandem.server.openai.schemas import BUDGETS, ChatRequest, CompletionRequest
from tandem.server.tools.choose import ANSWERS, THINKING, OutputFormat, OutputParser, output_parser, thinking_tokens, told_formats
from tandem.server.tools.forced import answer_grammar, forced_format, literal_of
from tandem.server.tools.scan import Tools
from tandem.text.thinking import THINKING_VARIABLES, thinking_variables
from tandem.text.tokenizer import Tokenizer

T = TypeVar("T")

NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
_AUTO = ToolChoice(mode="auto")
NO_THINKING = ThinkingTokens((-1,), (-1,))
"""Placeholder tags for a model that does not think; they match no token, so 0 reasoning tokens are counted."""
_RESERVED = frozenset(
    {"self", "messages", "conversation", "tools", "tokenize", "add_generation_prompt", "return_dict", "chat_template"}
)


@dataclass(frozen=True)
class ChatPlan:
    """Everything about one chat request that the engine and the output parser need."""

    prompt: list[int]
    effort: ThinkingSettings
    """Thinking settings of the request."""
    form: StructuredOutputs | None = None
    """Checked grammar of the answer; None for free text."""
    output_parser: OutputParser | None = None
    """Parser of reasoning and tool calls; None when the whole answer is content."""
    shown: frozenset[int] = frozenset()
    """Ids of special tokens to keep in the text, as the output parser needs them."""
    calls_finish: str = "stop"
    """`finish_reason` of a complete answer with calls: `tool_calls`, or OpenAI's `stop` if `tool_choice` named one."""
    hides_reasoning: bool = False
    """Leave reasoning out of the answer."""
    short_ids: bool = False
    """Use call ids of nine characters, as Mistral's templates require."""
    thinking: ThinkingTokens | None = None
    """Token ids around reasoning; None if the model does not think or its tags are not special tokens."""
    marked: bool = False
    """True if the model puts tags around its reasoning."""
    pictures: tuple[Picture, ...] = ()


async def plan_chat(http: Request, served: Served, fields: ChatRequest) -> tuple[ChatPlan, RequestTexts]:
    """Render the prompt and plan the answer; return the plan and the texts used for it. Raises RequestError."""
    check_sizes(fields, most_choices=served.settings.server.max_choices)
    texts = await RequestTexts.of(http, served)
    tokenizer, settings = texts.tokenizer, served.settings.server
    effort = effort_of(fields)
    variables, vain = template_variables(fields, effort, tokenizer)
    choice = fields.tool_choice or _AUTO
    tools = callable_tools(fields, choice)
    if tools is not None and settings.tool_parser == "none":
        message = "'tools' are not supported: the server runs with --tool-parser none."
        raise RequestError(message, param="tools", code="unsupported_parameter")
    asked, hides, forced = fields.asked_form(), fields.hides_reasoning, choice.mode in ("required", "named")
    if asked is not None and forced:
        raise invalid(asked[0], f"'{asked[0]}' contradicts 'tool_choice', which forces a call; leave one of them out.")
    told = [] if tools is None else [tool.model_dump(exclude_none=True) for tool in fields.tools or ()]
    messages, unfinished = fields.messages, ""
    if fields.continue_final_message:
        messages, unfinished = _unfinished(fields, formed=forced or asked is not None)
    prompt = await texts.render(messages, variables, tools=told)
    own = told_formats(
        settings.tool_parser, settings.reasoning_parser, tokenizer.chat_template, prompt.end, tools, tokenizer.has_special
    )
    if unfinished:
        if {own.format, own.reasoning} & {"harmony", *ANSWERS}:
            message = "The assistant's last message cannot be continued with this model, whose answers begin with a mark."
            raise RequestError(f"{message} End with a message of the user.", param="messages", code="unsupported_value")
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
    if vain and thinking is None:  # with a budget, an effort has an effect as a share of it
        note_ignored(http, *vain)
    plan = ChatPlan(
        prompt=prompt.tokens,
        pictures=prompt.pictures,
        form=await _form(texts, output_format, asked) if forced or asked is not None else None,
        output_parser=how,
        shown=frozenset(tokenizer.special_ids_of(how.markers)) if how is not None else frozenset(),
        calls_finish="stop" if choice.mode == "named" else "tool_calls",
        hides_reasoning=hides,
        short_ids=own.format == "mistral",
        thinking=thinking,
        marked=how is not None and how.thinking is not None,
        effort=effort,
    )
    return plan, texts


async def start_chat(http: Request, served: Served, fields: ChatRequest, request_id: str) -> tuple[ChatPlan, Generation]:
    """Check the request and submit it to the engine; the caller must close the generation. Raises RequestError."""
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
    effort, server = plan.effort, served.settings.server
    off = effort.think is False or effort.effort == "none"  # also where the template has no switch
    if off or effort.budget is not None or effort.effort is not None or server.thinking_budget is not None:
        budget = budget_of(
            http,
            fields.reasoning_budget_message,
            (effort.budget_field, 0 if off else effort.budget, effort.effort),
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
        pictures=plan.pictures,
        continues=plan.form is not None or bool(fields.continue_final_message),
        shown=plan.shown,
        thinking=plan.thinking or (None if plan.marked else NO_THINKING),
    )
    return plan, generation


def prompt_budget(
    http: Request, fields: CompletionRequest, texts: RequestTexts, server: ServerSettings, prompt: list[int]
) -> ThinkingBudget | None:
    """Return the thinking budget of the answer to a prompt without a chat template; None for no limit.

    Reasoning has begun if the prompt has an opening tag that is not closed. Raises RequestError naming the field.
    """
    field, limit = _only("", {name: getattr(fields, name) for name in BUDGETS})
    if limit is None or limit < 0:
        return None
    tokenizer = texts.tokenizer
    own = told_formats("none", server.reasoning_parser, tokenizer.chat_template, "", None, tokenizer.has_special)
    parser = output_parser(own, tokenizer.has_special)
    tags = thinking_tokens(parser.thinking if parser is not None else None, tokenizer)
    if tags is not None:
        tags = msgspec.structs.replace(
            tags, begun=follow(msgspec.structs.replace(tags, again=True), begin(tags), prompt).thinking
        )
    left = texts.status.max_context - len(prompt)
    said = fields.reasoning_budget_message
    return budget_of(http, said, (field, limit, None), tags, texts, server, most=fields.max_tokens, left=left)


def _unfinished(fields: ChatRequest, *, formed: bool) -> tuple[list[Message], str]:
    """Return the messages before the last, and the last message's text, which the answer continues.

    `formed`: the request also asks for a response format or a forced call. Raises RequestError.
    """
    *before, last = fields.messages
    if last.role != "assistant" or last.tool_calls or not last.content or not before or formed:
        message = (
            "The answer can go on with a last message by the assistant that holds text alone, after other "
            "messages, and without a form or a forced call."
        )
        raise invalid("messages", message)
    return before, last.content


def _asked_tokens(fields: ChatRequest) -> int | None:
    """Return the output limit in tokens (None: not set) from OpenAI's old or new field. Raises RequestError if they differ."""
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) contradict each other; give one of them."
        raise invalid("max_tokens", message)
    return new if new is not None else old


def callable_tools(fields: ChatRequest, choice: ToolChoice) -> Tools | None:
    """Return the parameter schemas of callable tools by name; None for none. Raises RequestError if `choice` needs others."""
    tools = {tool.function.name: tool.function.parameters or NO_ARGUMENTS for tool in fields.tools or ()}
    if choice.mode in ("required", "named") and not tools:
        raise invalid("tool_choice", "'tool_choice' needs 'tools'.")
    if choice.mode == "named":
        if choice.name not in tools:
            raise invalid("tool_choice", f"Invalid 'tool_choice': there is no tool '{str(choice.name)[:64]}' in 'tools'.")
        return {choice.name: tools[choice.name]}
    return tools if tools and choice.mode != "none" else None


async def _form(
    texts: RequestTexts, output_format: OutputFormat, asked: tuple[str, StructuredOutputs] | None
) -> StructuredOutputs:
    """Return the checked grammar of the whole answer, including tool calls. Raises RequestError naming the field.

    `asked`: name and value of the field with the response format; None for a forced call.
    """
    param = "tools" if asked is None else asked[0]
    answer = None if asked is None else await described(texts, *asked)
    literal = literal_of(texts.grammars.special)
    try:
        grammar = await off_loop(texts.body_size > LARGE, answer_grammar, output_format, literal, answer)
        return await accepted(texts, param, await described(texts, param, StructuredOutputs(grammar=grammar)))
    except ValueError as error:
        raise invalid(param, f"Invalid '{param}': {error}.") from error


def template_variables(
    fields: ChatRequest, effort: ThinkingSettings, tokenizer: Tokenizer
) -> tuple[dict[str, object], list[str]]:
    """Return the chat template's variables, and the request fields that have no effect on it. Raises RequestError, also for
    inconsistent logprobs fields."""
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
    variables = checked_template_kwargs(fields.chat_template_kwargs)
    thinking = fields.enable_thinking
    if thinking is not None and variables.setdefault("enable_thinking", thinking) != thinking:
        raise invalid("enable_thinking", "'enable_thinking' contradicts the one in 'chat_template_kwargs'.")
    return variables, add_thinking(effort, tokenizer, variables)


def checked_template_kwargs(given: dict[str, object] | None) -> dict[str, object]:
    """Return a copy of `chat_template_kwargs`. Raises RequestError for names that the server sets itself."""
    for name in given or {}:
        if name in _RESERVED:
            raise RequestError(f"'{name}' cannot be set in 'chat_template_kwargs'.", param="chat_template_kwargs")
    return dict(given or {})


@dataclass(frozen=True)
class ThinkingSettings:
    """Thinking settings of a request; None leaves a setting to the model."""

    effort: str | None
    effort_field: str
    """Name of the request field with the effort."""
    think: bool | None
    """Whether thinking is on; also false for a budget of 0."""
    budget: int | None = None
    """Most reasoning tokens."""
    budget_field: str = ""


def effort_of(fields: ChatRequest) -> ThinkingSettings:
    """Return the thinking settings of a request from all its fields. Raises RequestError if they contradict each other."""
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
    budget_field, budget = _only("", budgets)
    think = _only("enable_thinking", switches)[1]
    return ThinkingSettings(
        effort, effort_field, False if think is None and budget == 0 else think, None if budget == -1 else budget, budget_field
    )


def _only(default: str, said: Mapping[str, T | None]) -> tuple[str, T | None]:
    """Return name and value of the first field with a value, or (`default`, None). Raises RequestError if values differ."""
    fields = [(name, value) for name, value in said.items() if value is not None]
    for name, value in fields[1:]:
        if value != fields[0][1]:
            raise invalid(name, f"'{name}' contradicts '{fields[0][0]}'; give one of them.")
    return fields[0] if fields else (default, None)


def add_thinking(effort: ThinkingSettings, tokenizer: Tokenizer, variables: dict[str, object]) -> list[str]:
    """Add the template's thinking variables to `variables`; existing entries win.

    Return the request fields that have no effect with this template.
    """
    if effort.budget is None and effort.think is None and effort.effort is None:
        return []
    reads = tokenizer.template_reads
    if effort.budget is not None and "thinking_budget" in reads:  # Seed
        variables.setdefault("thinking_budget", effort.budget)
    thinking = thinking_variables(reads, tokenizer.template_words, effort.effort, effort.think)
    for name, value in thinking.items():
        variables.setdefault(name, value)
    return [effort.effort_field] if effort.effort is not None and not reads.intersection(THINKING_VARIABLES) else []
