"""What a chat request comes to: its prompt, the form of its answer, and how to read the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request

from tandem.errors import RequestError
from tandem.protocol.request import StructuredOutputs
from tandem.server.chats.forms import accepted, asked_form, described
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.chats.variables import template_variables
from tandem.server.engines.served_model import Served
from tandem.server.openai.messages import ToolChoice
from tandem.server.openai.schemas import ChatRequest
from tandem.server.tools.choose import Dialect, Writing, dialect, told_formats
from tandem.server.tools.forced import answer_grammar, forced_format, literal_of
from tandem.server.tools.scan import Tools

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_AUTO = ToolChoice(mode="auto")


@dataclass(frozen=True)
class ChatPlan:
    """One chat request, ready for the engine."""

    prompt: list[int]
    form: StructuredOutputs | None
    """The grammar of the answer, already checked; None when it is free."""
    dialect: Dialect | None
    """How to read the answer; None when all of it is content."""
    shown: frozenset[int]
    """Special tokens that belong to the text, because its reader needs them."""
    calls_finish: str
    """`finish_reason` of an answer with calls that ended by itself. OpenAI says `stop` when the call was named."""
    short_ids: bool
    """Ids of calls have nine characters, as Mistral's templates demand."""


async def plan_chat(http: Request, served: Served, fields: ChatRequest) -> tuple[ChatPlan, RequestTexts]:
    """Render the prompt and settle the rest; also with what it was rendered. Raises RequestError."""
    texts = await RequestTexts.of(http, served)
    tokenizer, settings = texts.tokenizer, served.settings.server
    variables = template_variables(http, fields, tokenizer)
    choice = fields.tool_choice or _AUTO
    tools = callable_tools(fields, choice)
    if tools is not None and settings.tool_parser == "none":
        message = "'tools' are not supported: the server runs with --tool-parser none."
        raise RequestError(message, param="tools", code="unsupported_parameter")
    asked, forced = asked_form(fields), choice.mode in ("required", "named")
    if asked is not None and forced:
        message = f"'{asked[0]}' contradicts 'tool_choice', which forces a call; leave one of them out."
        raise RequestError(message, param=asked[0], code="invalid_value")
    told = [] if tools is None else [tool.model_dump(exclude_none=True) for tool in fields.tools or ()]
    prompt = await texts.render(fields.messages, variables, tools=told)
    own = told_formats(settings.tool_parser, settings.reasoning_parser, tokenizer.chat_template, prompt.end, tools,
                       tokenizer.has_special)
    writing = replace(
        own,
        format=forced_format(own.format) if forced or asked is not None else own.format,
        several=choice.mode != "named" and fields.parallel_tool_calls is not False,
    )
    how = dialect(writing, tokenizer.has_special)
    plan = ChatPlan(
        prompt=prompt.tokens,
        form=await _form(texts, writing, asked) if forced or asked is not None else None,
        dialect=how,
        shown=frozenset(tokenizer.special_ids_of(how.markers)) if how is not None else frozenset(),
        calls_finish="stop" if choice.mode == "named" else "tool_calls",
        short_ids=own.format == "mistral",
    )
    return plan, texts


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
    texts: RequestTexts, writing: Writing, asked: tuple[str, StructuredOutputs] | None
) -> StructuredOutputs:
    """The checked grammar of the whole answer. Raises RequestError naming the field at fault and the reason."""
    param = "tools" if asked is None else asked[0]
    answer = None if asked is None else await described(texts, *asked)
    literal = literal_of(texts.grammars.special)
    try:
        grammar = await off_loop(texts.body_size > LARGE, answer_grammar, writing, literal, answer)
        return await accepted(texts, param, await described(texts, param, StructuredOutputs(grammar=grammar)))
    except ValueError as error:
        raise RequestError(f"Invalid '{param}': {error}.", param=param, code="invalid_value") from error
