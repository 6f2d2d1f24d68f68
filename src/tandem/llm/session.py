"""A loaded model: builds requests from prompts, a batch from the requests of a call, and answers from engine events."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import operator
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from tandem.config.options import by_name, renamed, section_names
from tandem.config.settings import Settings
from tandem.config.validation import validate
from tandem.engine.build_layout import plan_layout, say_what_is_idle
from tandem.engine.engine import Engine
from tandem.engine.thread import EngineThread, Event, Sink
from tandem.errors import ConfigError, RequestError
from tandem.guided.accept import GrammarCheck
from tandem.json_types import JsonObject
from tandem.llm.pictures import check_kinds, is_picture, picture_of, shown
from tandem.models.pooling import unit_vector
from tandem.protocol.control import Output
from tandem.protocol.logprobs import PromptLogprobs, TokenLogprob
from tandem.protocol.ranges import check_params
from tandem.protocol.request import EngineRequest, Pooling, SamplingDefaults, SamplingParams
from tandem.text.pictures import processor_of, tokens_with_pictures
from tandem.text.stream import TextStream
from tandem.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)
Prompt = str | Sequence[int]
Message = JsonObject


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token at one position of a prompt. The names are vLLM's."""

    logprob: float
    """Natural logarithm of the model's own probability, before sampling parameters apply."""
    rank: int
    """Rank of the token among all candidates at its position; 1 is the most likely."""
    decoded_token: str


@dataclasses.dataclass
class RequestOutput:
    """Output of one prompt."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    """Generated tokens, without the stop token."""
    finish_reason: str | None = None
    """Either `stop` or `length`; None while unfinished."""
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Log probabilities by token id for each prompt position, if `SamplingParams.prompt_logprobs` is set.

    Each holds the prompt's token and the most likely ones. None at the first position.
    """


class Answer:
    """Output of one request so far."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer) -> None:
        self.output = RequestOutput(request.prompt)
        self._text = TextStream(tokenizer, request.params.stop, continues=True)
        self._name = tokenizer.token_text

    @property
    def over(self) -> bool:
        """True once the request has a finish reason: the engine's, or a matched stop string."""
        return self.output.finish_reason is not None

    def take(self, event: Output) -> str:
        """Add the tokens of an event and return the new text."""
        output = self.output
        tokens = event.tokens[:-1] if event.stop_token else event.tokens
        piece = ""
        for used, token in enumerate(tokens, 1):  # one by one: the cut must not depend on the event's size
            piece += self._text.push([token])
            if self._text.stopped:
                tokens = tokens[:used]
                break
        output.token_ids += tokens
        output.logprobs += event.logprobs[: len(tokens)]
        output.cached_tokens += event.cached_tokens
        if event.prompt_logprobs is not None:
            output.prompt_logprobs = self._places(event.prompt_logprobs)
        output.finish_reason = event.finish_reason
        if self._text.stopped:
            output.finish_reason = "stop"
        elif output.finish_reason:
            piece += self._text.finish()
        output.text += piece
        return piece

    def _places(self, scored: PromptLogprobs) -> list[dict[int, Logprob] | None]:
        places: list[dict[int, Logprob] | None] = [None]
        for token, entry in zip(self.output.prompt_token_ids[1:], scored, strict=True):
            place = {token: Logprob(entry.logprob, entry.rank, self._name(token))}
            for rank, (other, logprob) in enumerate(entry.top, 1):
                place.setdefault(other, Logprob(logprob, rank, self._name(other)))
            places.append(place)
        return places


class Batch:
    """Requests of one call. Used by one thread or task."""

    def __init__(self, engine: EngineThread, tokenizer: Tokenizer, requests: Sequence[EngineRequest]) -> None:
        """Prepare the answers; `submit` queues the requests."""
        self._engine = engine
        self._requests = requests
        self._answers = {request.request_id: Answer(request, tokenizer) for request in requests}
        self._vectors: dict[str, bytes] = {}
        self._open = set(self._answers)

    def submit(self, sink: Sink) -> Future[None]:
        """Queue the requests; their events are passed to `sink`."""
        return self._engine.submit(self._requests, sink)

    @property
    def open(self) -> bool:
        """True while a request is unfinished."""
        return bool(self._open)

    def take(self, event: Event) -> str:
        """Process an event and return its new text. Raises a failed request's error; call `end` then."""
        if isinstance(event, Exception):
            raise event
        if event.request_id not in self._open:  # tokens after a stop string
            return ""
        answer = self._answers[event.request_id]
        piece = answer.take(event)
        if answer.over:
            self._vectors[event.request_id] = event.vector
            self._open.discard(event.request_id)
            if event.finish_reason is None:
                self._engine.abort([event.request_id])
        return piece

    def end(self) -> None:
        """Abort unfinished requests without blocking. Safe before `submit` and after the engine has ended."""
        self._engine.abort(self._open)

    @property
    def outputs(self) -> list[RequestOutput]:
        """Outputs in the order of the prompts."""
        return [answer.output for answer in self._answers.values()]

    def vectors(self, dimensions: int | None) -> list[list[float]]:
        """Return unit-length vectors in the order of the prompts, of `dimensions` numbers (None: all)."""
        return [unit_vector(self._vectors[request_id], dimensions).tolist() for request_id in self._answers]


class LoadedModel:
    """Properties of a loaded model, for `LLM` and `AsyncLLM`."""

    _session: Session

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""
        return self._session.tokenizer

    @property
    def default_sampling(self) -> SamplingDefaults:
        """Sampling defaults of the model's generation_config.json, for calls without `params`."""
        return self._session.layout.defaults

    @property
    def engine(self) -> Engine:
        """Engine, for inspection only: another thread operates it."""
        return self._session.engine.engine


class Session:
    """Tokenizer, input checks and engine of one model. Thread-safe."""

    def __init__(self, model: str, options: dict[str, object]) -> None:
        """Check the options and the layout and load the tokenizer, but not the weights. Raises UsageError."""
        settings = _settings({"model": model, "log_level": "WARNING", **options})  # no logs of ranks
        self.layout = plan_layout(settings)
        say_what_is_idle(settings, self.layout)
        self.tokenizer: Tokenizer = load_tokenizer(
            self.layout.files, chat_template_file=settings.model.chat_template, trust_remote_code=settings.model.trust_remote_code
        )
        self._default = SamplingParams(**self.layout.defaults.given())
        self._grammars = GrammarCheck(self.tokenizer)
        self.engine = EngineThread(settings, self.layout)
        self._ids = itertools.count()

    def texts(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None) -> Batch:
        """Return a batch that completes one prompt or several. Raises RequestError."""
        checked = self._checked(params)
        return self._batch(map(self._encode, _several(prompts)), checked)

    def answer(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None) -> Batch:
        """Return a batch that completes a prompt or answers a conversation. Raises RequestError."""
        if not isinstance(prompt, str) and isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], dict):
            return self.reply(prompt, params)
        return self._batch([self._encode(prompt)], self._checked(params))

    def reply(self, messages: object, params: SamplingParams | None) -> Batch:
        """Return a batch that answers a conversation. Raises RequestError."""
        if (
            isinstance(messages, str)
            or not isinstance(messages, Sequence)
            or not messages
            or not all(isinstance(message, dict) for message in messages)
        ):
            raise RequestError(
                "messages must be a list of one message or more, such as {'role': 'user', 'content': 'Hello'}", param="messages"
            )
        _require_unicode(messages, "messages")
        check_kinds(messages, self.tokenizer.template_words)
        contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
        if not (pictures := [part for parts in contents for part in parts if is_picture(part)]):
            return self._batch([self.tokenizer.render_chat(messages)], self._checked(params))
        if why := self.layout.description.no_pictures:
            raise RequestError(f"messages: this model takes no pictures: {why}; send text alone", param="messages")
        processor = processor_of(str(self.layout.files.path))
        given = [picture_of(number, part) for number, part in enumerate(pictures, 1)]
        placeholder = "" if "image" in self.tokenizer.template_words else processor.placeholder
        text = self.tokenizer.template.render([shown(message, placeholder) for message in messages])
        found = tokens_with_pictures(self.tokenizer, processor, self.layout.max_context, messages, given, text)
        return self._batch([found[0]], self._checked(params), pictures=tuple(found[1]))

    def pooled(self, prompts: Prompt | Sequence[Prompt], dimensions: int | None) -> Batch:
        """Return a batch that embeds one prompt or several. Raises RequestError."""
        pooling = self._pooling(dimensions)
        tokens = (self._encode(prompt, closed=True) for prompt in _several(prompts))
        return self._batch(tokens, SamplingParams(max_tokens=0), pooling=pooling)

    def _batch(self, prompts: Iterable[list[int]], params: SamplingParams, **more: Any) -> Batch:
        """Return a batch of requests, each with the fields of `more`."""
        requests = [EngineRequest(request_id=f"llm-{next(self._ids)}", prompt=one, params=params, **more) for one in prompts]
        return Batch(self.engine, self.tokenizer, requests)

    def _pooling(self, dimensions: int | None) -> Pooling:
        pooling, size = self.layout.pooling, self.layout.description.hidden_size
        if pooling is None:
            raise RequestError(
                "this model wants its hidden states pooled in a way that is not supported; give pooling='last' or 'mean'",
                param="pooling",
            )
        if dimensions is not None and not 1 <= dimensions <= size:
            raise RequestError(f"dimensions is {dimensions}; it must be 1 to {size}", param="dimensions")
        return pooling

    def _encode(self, prompt: object, *, closed: bool = False) -> list[int]:
        if not isinstance(prompt, str):
            return _token_ids(prompt)
        _require_unicode(prompt, "prompt")
        return self.tokenizer.encode_closed(prompt) if closed else self.tokenizer.encode(prompt)

    def _checked(self, given: SamplingParams | None) -> SamplingParams:
        """Return checked parameters (None: the model's defaults) with a compiled grammar. Raises RequestError."""
        params = _typed(given or self._default)
        check_params(params, self.layout.description.vocab_size)
        if params.structured_outputs is None:
            return params
        try:
            form = self._grammars.accept(params.structured_outputs)
        except ValueError as error:
            raise RequestError(f"structured_outputs cannot be followed: {error}", param="structured_outputs") from error
        return msgspec.structs.replace(params, structured_outputs=form)


def _several(prompts: object) -> Sequence[object]:
    """Return a list of prompts, wrapping a single text or list of token ids. Raises RequestError."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise _no_prompt(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def _token_ids(prompt: object) -> list[int]:
    try:
        if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise _no_prompt(prompt) from None


def _require_unicode(value: object, name: str) -> None:
    """Raise RequestError if a string in `value` has a lone surrogate; JSON forbids these to a server's clients too."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{name}: {value[error.start]!r} at character {error.start} is half a character (a lone "
                "surrogate); decode the text with errors='replace'",
                param=name,
            ) from None
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            _require_unicode(part, name)


def _no_prompt(value: object) -> RequestError:
    kind = type(value).__name__
    return RequestError(
        f"a prompt must be a text or a list of token ids, not {kind}; a list of messages is for chat() and stream()",
        param="prompt",
    )


def _typed(params: object) -> SamplingParams:
    """Return the parameters converted to their types; a string as `stop` becomes one stop string. Raises RequestError."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, not {type(params).__name__}", param="params")
    if isinstance(params.stop, str):
        params = msgspec.structs.replace(params, stop=(params.stop,))
    try:
        fields = msgspec.to_builtins(params)
        _require_unicode(fields, "params")
        return msgspec.convert(fields, SamplingParams)
    except (TypeError, ValueError) as error:
        raise RequestError(f"params are not of the right types: {error}", param="params") from None


def _converted(name: str, value: object) -> object:
    """Return an option's value converted to the type of its settings field. Raises ConfigError."""
    option = by_name()[name]
    if value is None and option.optional:
        return None
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return option.convert(list(value) if isinstance(value, tuple) else value, label=name)


def _settings(options: dict[str, object]) -> Settings:
    """Return settings with each option in the section that has a field of its name. Raises ConfigError."""
    chosen: JsonObject = {}
    warnings: list[str] = []
    options = {renamed(name, name, warnings): value for name, value in options.items()}
    for warning in warnings:
        log.warning("former name of an option: %s", warning)
    for section in section_names():
        default = getattr(Settings(), section)
        names = {field.name for field in dataclasses.fields(default)}
        mine = {name: _converted(name, options.pop(name)) for name in list(options) if name in names}
        if section == "models" and mine:
            raise ConfigError(f"{min(mine)}: several models are for `tandem serve`; make an LLM for each", param=min(mine))
        chosen[section] = dataclasses.replace(default, **mine)
    if options:
        raise ConfigError(f"unknown option {next(iter(options))!r}; docs/configuration.md lists all", param=next(iter(options)))
    settings = Settings(**chosen)
    validate(settings, str)
    return settings
