"""The Python API: the engine without the server.

    from tandem import LLM, SamplingParams

    with LLM("demo", pipeline_parallel_size=2) as llm:
        print(llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0))[0].text)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from tandem.config.options import section_names
from tandem.config.settings import Settings
from tandem.config.validation import validate
from tandem.engine.engine import Engine
from tandem.engine.layout import plan_layout
from tandem.errors import ConfigError, RequestError, ServerError
from tandem.executors.base import Progress
from tandem.guided.check import GrammarCheck
from tandem.models.pooling import unit_vector
from tandem.protocol.checks import check_params
from tandem.protocol.control import Output, Refused
from tandem.protocol.request import EngineRequest, SamplingParams, TokenLogprob
from tandem.text.stream import TextStream
from tandem.text.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Sequence[int]
Message = dict[str, Any]


@dataclass
class RequestOutput:
    """What became of one prompt."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Without the token that ended the text."""
    finish_reason: str | None = None
    """`stop` or `length`."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""


@dataclass
class _Running:
    output: RequestOutput
    stream: TextStream


class LLM:
    """A model, loaded and ready. Not thread-safe; for many callers use the server. Close it, or use a `with` block."""

    def __init__(self, model: str, *, progress: Progress | None = None, **options: Any) -> None:
        """`options` are the fields of all settings sections, as on the command line (docs/configuration.md).

        `progress` is called with (rank, bytes done, bytes in all, `fetch` or `load`). Raises UsageError.
        """
        settings = _settings({"model": model, **options})
        layout = plan_layout(settings)
        self.tokenizer: Tokenizer = load_tokenizer(layout.files, chat_template_file=settings.model.chat_template,
                                                   trust_remote_code=settings.model.trust_remote_code)
        self._grammars = GrammarCheck(self.tokenizer)
        self.engine = Engine(settings, layout)
        self.engine.start(progress)
        self._ids = itertools.count()

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | None = None) -> list[RequestOutput]:
        """Complete each prompt (text, or token ids); all of them run together. Raises RequestError."""
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        batch: Sequence[Any] = [prompts] if single else prompts
        running = self._start([self._encode(prompt) for prompt in batch], params or SamplingParams())
        outputs = [one.output for one in running.values()]
        for _ in self._run(running):
            pass
        return outputs

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation in the model's chat template."""
        return self.generate(self.tokenizer.render_chat(list(messages)), params)[0]

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> Iterator[str]:
        """Pieces of the completion of a prompt, or of the answer to a conversation, as they come."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
            tokens = self.tokenizer.render_chat([message for message in prompt if isinstance(message, dict)])
        else:
            tokens = self._encode(prompt)
        running = self._start([tokens], params or SamplingParams())
        try:
            yield from self._run(running)
        finally:
            for request_id in running:
                self.engine.abort(request_id)

    def embed(self, prompts: Prompt | Sequence[Prompt], dimensions: int | None = None) -> list[list[float]]:
        """A vector of length 1 for each prompt, pooled as `--pooling` says and cut to `dimensions` numbers if given.

        Raises RequestError.
        """
        pooling, size = self.engine.layout.pooling, self.engine.layout.description.hidden_size
        if pooling is None:
            raise RequestError("this model wants its hidden states pooled in a way that is not supported; "
                               "give pooling='last' or 'mean'", param="pooling")
        if dimensions is not None and not 1 <= dimensions <= size:
            raise RequestError(f"dimensions is {dimensions}; it must be 1 to {size}", param="dimensions")
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        batch: Sequence[Any] = [prompts] if single else prompts
        params, vectors = SamplingParams(max_tokens=0), dict[str, bytes]()
        requests = [EngineRequest(request_id=f"llm-{next(self._ids)}", prompt=self._encode(prompt, closed=True),
                                  params=params, pooling=pooling) for prompt in batch]
        try:
            for request in requests:
                self.engine.submit(request)
            while len(vectors) < len(requests):
                for message in self.engine.pump(1.0):
                    if isinstance(message, Refused):
                        raise ServerError(message.message, code=message.code)
                    if isinstance(message, Output):
                        vectors[message.request_id] = message.vector
        except RequestError:
            for request in requests:
                self.engine.abort(request.request_id)
            raise
        return [unit_vector(vectors[request.request_id], dimensions).tolist() for request in requests]

    def _encode(self, prompt: Any, *, closed: bool = False) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        return self.tokenizer.encode_closed(prompt) if closed else self.tokenizer.encode(prompt)

    def _start(self, prompts: list[list[int]], params: SamplingParams) -> dict[str, _Running]:
        params = self._checked(params)
        running: dict[str, _Running] = {}
        for prompt in prompts:
            request_id = f"llm-{next(self._ids)}"
            try:
                self.engine.submit(EngineRequest(request_id=request_id, prompt=prompt, params=params))
            except RequestError:
                for earlier in running:
                    self.engine.abort(earlier)
                raise
            text = TextStream(self.tokenizer, params.stop, continues=True)
            running[request_id] = _Running(RequestOutput(prompt), text)
        return running

    def _checked(self, params: SamplingParams) -> SamplingParams:
        """`params` with a grammar that the ranks can follow. Raises RequestError."""
        check_params(params, self.engine.layout.description.vocab_size)
        if params.structured_outputs is None:
            return params
        try:
            form = self._grammars.accept(params.structured_outputs)
        except ValueError as error:
            raise RequestError(f"structured_outputs cannot be followed: {error}", param="structured_outputs") from error
        return msgspec.structs.replace(params, structured_outputs=form)

    def _run(self, running: dict[str, _Running]) -> Iterator[str]:
        """Pump the engine until all of `running` are done, yielding new text; finished ones leave `running`."""
        while running:
            for message in self.engine.pump(1.0):
                if isinstance(message, Refused) and message.request_id in running:
                    running.pop(message.request_id)
                    raise ServerError(message.message, code=message.code)
                if isinstance(message, Output) and (one := running.get(message.request_id)):
                    piece = self._take(one, message)
                    if one.output.finish_reason:
                        del running[message.request_id]
                    if piece:
                        yield piece

    def _take(self, one: _Running, message: Output) -> str:
        output = one.output
        tokens = message.tokens[:-1] if message.stop_token else message.tokens
        piece = ""
        for used, token in enumerate(tokens, 1):  # where a stop string ends must not depend on how many came at once
            piece += one.stream.push([token])
            if one.stream.stopped:
                tokens = tokens[:used]
                break
        output.token_ids += tokens
        output.logprobs += message.logprobs[:len(tokens)]
        output.cached_tokens += message.cached_tokens
        output.finish_reason = message.finish_reason
        if one.stream.stopped:
            self.engine.abort(message.request_id)
            output.finish_reason = "stop"
        elif output.finish_reason:
            piece += one.stream.finish()
        output.text += piece
        return piece

    def close(self) -> None:
        """End all ranks and free the model."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _settings(options: dict[str, Any]) -> Settings:
    """Each option in the section that has a field of its name."""
    chosen: dict[str, Any] = {}
    for section in section_names():
        default = getattr(Settings(), section)
        names = {one.name for one in dataclasses.fields(default)}
        mine = {name: options.pop(name) for name in list(options) if name in names}
        if section == "models" and mine:
            raise ConfigError(f"{min(mine)}: several models are for `tandem serve`; make an LLM for each",
                              param=min(mine))
        chosen[section] = dataclasses.replace(default, **mine)
    if options:
        raise ConfigError(f"unknown option {next(iter(options))!r}; docs/configuration.md lists all",
                          param=next(iter(options)))
    settings = Settings(**chosen)
    validate(settings, str)
    return settings
