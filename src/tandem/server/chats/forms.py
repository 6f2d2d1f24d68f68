"""Structured output: from the fields of a request to a grammar that the ranks can follow."""

from __future__ import annotations

from msgspec.structs import asdict
from pydantic_core import to_json

from tandem.errors import RequestError
from tandem.guided.grammar import grammar_of
from tandem.protocol.request import StructuredOutputs
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.chats.texts import LARGE
from tandem.server.context import get_api, get_group, unless_gone
from tandem.server.openai.schemas import ResponseFormat, SamplingFields

_GUIDED = ("json", "regex", "choice", "grammar")


def asked_form(fields: SamplingFields) -> tuple[str, StructuredOutputs] | None:
    """The form that a request asks for, and the field that says so; None when it asks for none.

    Raises RequestError when several fields ask.
    """
    forms = {f"guided_{name}": _form(name, value) for name in _GUIDED
             if (value := getattr(fields, f"guided_{name}")) is not None}
    if fields.response_format is not None and fields.response_format.type != "text":
        forms.update([_response_format(fields.response_format)])
    if fields.structured_outputs is not None:
        for name, value in fields.structured_outputs.model_dump(by_alias=True, exclude_none=True).items():
            if value is not False:
                forms[f"structured_outputs.{name}"] = _form(name, value)
    if len(forms) > 1:
        first, second, *_ = forms
        raise RequestError(f"'{first}' and '{second}' both ask for a form; give one of them.", param=second,
                           code="invalid_value")
    return next(iter(forms.items()), None)


def _form(name: str, value: object) -> StructuredOutputs:
    return StructuredOutputs(**{name: tuple(value) if isinstance(value, list) else value})  # type: ignore[arg-type]


def _response_format(asked: ResponseFormat) -> tuple[str, StructuredOutputs]:
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        return "response_format", StructuredOutputs(json_object=True)
    return "response_format.json_schema.schema", StructuredOutputs(json=asked.json_schema.schema_)


async def form_of(texts: RequestTexts, fields: SamplingFields) -> StructuredOutputs | None:
    """What the output of a request must look like, as a checked grammar. Raises RequestError."""
    asked = asked_form(fields)
    return None if asked is None else await accepted(texts, asked[0], await described(texts, *asked))


async def described(texts: RequestTexts, param: str, form: StructuredOutputs) -> str:
    """`form` as a grammar, not yet tried. Raises RequestError naming `param` and the reason."""
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
    """A grammar that is known to be good. Raises RequestError naming `param` and the reason."""
    http, grammars = texts.http, texts.grammars
    trouble = grammars.known(grammar)
    if trouble is None:
        reply = await unless_gone(http, get_api(http).workers.reply(get_group(http), grammars.task(grammar)))
        trouble = grammars.judge(grammar, reply)
    if trouble:
        raise _refused(param, trouble)
    return StructuredOutputs(grammar=grammar)


def _refused(param: str, reason: object) -> RequestError:
    return RequestError(f"Invalid '{param}': {reason}.", param=param, code="invalid_value")
