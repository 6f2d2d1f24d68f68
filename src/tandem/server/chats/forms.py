"""Structured output: from the fields of a request to a grammar that the ranks can follow."""

from __future__ import annotations

import asyncio

from tandem.errors import RequestError
from tandem.guided.check import GrammarCheck
from tandem.protocol.request import StructuredOutputs
from tandem.server.chats.texts import Texts
from tandem.server.openai.schemas import ResponseFormat, SamplingFields
from tandem.text.tokenizer import Tokenizer

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


async def form_of(texts: Texts, tokenizer: Tokenizer, fields: SamplingFields) -> StructuredOutputs | None:
    """What the output of a request must look like, as a checked grammar. Raises RequestError."""
    asked = asked_form(fields)
    return None if asked is None else await accepted(texts.grammars(tokenizer), *asked)


async def accepted(grammars: GrammarCheck, param: str, form: StructuredOutputs) -> StructuredOutputs:
    """`form` as a grammar that is known to be good. Raises RequestError naming `param` and the reason."""
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(grammars.threads, grammars.accept, form)
    except ValueError as error:
        raise RequestError(f"Invalid '{param}': {error}.", param=param, code="invalid_value") from error
