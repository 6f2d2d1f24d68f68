"""Structured output: convert the response format of a request to a checked grammar."""

from __future__ import annotations

from msgspec.structs import asdict
from pydantic_core import to_json

from tandem.errors import RequestError, invalid
from tandem.guided.grammar import grammar_of
from tandem.protocol.request import StructuredOutputs
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.chats.texts import LARGE
from tandem.server.context import get_api, get_group, unless_gone
from tandem.server.openai.schemas import SamplingFields


async def response_format_of(texts: RequestTexts, fields: SamplingFields) -> StructuredOutputs | None:
    """Return the response format of a request as a checked grammar; None for free text. Raises RequestError."""
    asked = fields.asked_form()
    return None if asked is None else await accepted(texts, asked[0], await described(texts, *asked))


async def described(texts: RequestTexts, param: str, form: StructuredOutputs) -> str:
    """Return `form` as a grammar, not yet checked. Raises RequestError naming `param` and the reason."""
    try:
        texts.grammars.require_bytes()
        if texts.body_size > LARGE:
            return await texts.ask("describe_form", {"form": to_json(asdict(form))}, str)
        return grammar_of(form)
    except (ValueError, RequestError) as error:
        if isinstance(error, RequestError) and error.code != "invalid_value":
            raise
        raise _refused(param, error) from error


async def accepted(texts: RequestTexts, param: str, grammar: str) -> StructuredOutputs:
    """Check that the grammar compiles (in a worker process, cached) and return it.

    Raises RequestError naming `param` and the reason.
    """
    http, grammars = texts.http, texts.grammars
    trouble = grammars.known(grammar)
    if trouble is None:
        reply = await unless_gone(http, get_api(http).workers.reply(get_group(http), grammars.task(grammar)))
        trouble = grammars.judge(grammar, reply)
    if trouble:
        raise _refused(param, trouble)
    return StructuredOutputs(grammar=grammar)


def _refused(param: str, reason: object) -> RequestError:
    return invalid(param, f"Invalid '{param}': {reason}.")
