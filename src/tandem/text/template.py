"""Rendering of chat templates: sandboxed Jinja with transformers' extensions. No transformers, no mlx.

Follows `transformers.utils.chat_template_utils` (version 5): same environment, filters and functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property

import jinja2
from jinja2 import nodes
from jinja2.meta import find_undeclared_variables

from tandem.errors import BrokenModel, RequestError
from tandem.json_types import JsonMapping, JsonObject
from tandem.text.template_sandbox import Budget, LimitedEnvironment, TooExpensive

_MAX_TIME_FORMAT = 200  # characters
_PROBE = "a text that is shown"
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template. `variables` are the model's special tokens (bos_token ...). Raises `BrokenModel` if
    invalid."""

    def __init__(self, source: str, variables: Mapping[str, str], *, origin: str) -> None:
        self.source = source
        """Jinja source of the template."""
        self._environment = environment = LimitedEnvironment()
        environment.add_filter("tojson", _tojson)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form[:_MAX_TIME_FORMAT])
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
        # Besides TemplateError: errors of Python's compiler for the code that Jinja generates.
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BrokenModel(f"{origin}: not a valid chat template: {error}", param="chat_template") from error

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names of variables that the template reads without setting them."""
        return frozenset(find_undeclared_variables(self._environment.parse(self.source)))

    @cached_property
    def words(self) -> frozenset[str]:
        """String constants in the template's expressions."""
        constants = self._environment.parse(self.source).find_all(nodes.Const)
        return frozenset(node.value for node in constants if isinstance(node.value, str))

    @cached_property
    def _parts_alone(self) -> bool:
        """Whether the template shows texts in content parts and leaves out those that are strings, as Idefics3's does."""
        if "image" not in self.source or "is string" in self.source:
            return False
        return not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])

    def _shows(self, content: object) -> bool:
        context = {**self._variables, "messages": [{"role": "user", "content": content}]}
        try:
            with Budget(context, quick=True):
                return _PROBE in self._template.render(context)
        except Exception:  # noqa: BLE001 - whatever a template raises
            return False

    def render(
        self,
        messages: Sequence[JsonMapping],
        *,
        tools: Sequence[JsonMapping] | None = None,
        add_generation_prompt: bool = True,
        variables: JsonMapping | None = None,
        quick: bool = False,
    ) -> str:
        """Return the prompt's text; `variables` are extra variables for the template.

        Raise `RequestError` with the template's message if it rejects the messages, or if it exceeds the limits of
        `template_sandbox`. With `quick`, on the event loop, raise TooExpensive above the small limits `QUICK_*`.
        """
        if self._parts_alone:
            messages = [_in_parts(message) for message in messages]
        context = {
            **self._variables,
            "documents": None,
            **(variables or {}),
            "messages": [_with_reasoning(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with Budget(context, quick=quick):
                return self._template.render(context)
        except Exception as error:
            if quick and isinstance(error, TooExpensive):
                raise
            text = " ".join(str(error).split())[:300]
            raise RequestError(f"the chat template refuses these messages: {text}", param="messages") from error


def _in_parts(message: JsonMapping) -> JsonMapping:
    """Return a message with its text as a content part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}] if content else []} if isinstance(content, str) else message


def _with_reasoning(message: JsonMapping) -> JsonObject:
    """Return a message with its reasoning under both names that templates read."""
    copy = dict(message)
    reasoning = next((copy[name] for name in _REASONING if copy.get(name)), None)
    if reasoning is not None:
        copy.setdefault("reasoning_content", reasoning)
        copy.setdefault("thinking", reasoning)
    return copy


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
