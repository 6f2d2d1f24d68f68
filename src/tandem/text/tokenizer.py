"""Tokenizer of a model, and its chat template. No mlx, and no transformers for models with tokenizer.json.

Importing transformers takes more than a second. It is used only if a model has no tokenizer.json, or a tokenizer in
Python code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tandem.checkpoints.config import eos_token_ids, read_json
from tandem.checkpoints.files import ModelFiles
from tandem.errors import BrokenModel, RequestError
from tandem.json_types import JsonMapping, JsonObject
from tandem.system.files import file_errors, read_text
from tandem.text.template import ChatTemplate

if TYPE_CHECKING:
    from tandem.text.fast import Scheme

_CONTROL = re.compile(r"<[|｜][^<>\s]+[|｜]>")
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
CHARS_PER_TOKEN = 8
"""Characters per token of context above which a text is tokenized in growing prefixes, as few such texts fit."""
SLACK = 256
"""Most tokens by which a prefix, whose last word is cut, may exceed the whole text."""


class Backend(Protocol):
    """Interface of the library that `Tokenizer` uses."""

    vocab_size: int
    """Largest id plus 1."""
    special_ids: frozenset[int]
    scheme: Scheme
    longest_token: int | None
    """Most bytes of text per token; None if unbounded."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""

    def piece(self, token: int) -> str | None:
        """Return the vocabulary entry of an id; None for an unused id."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids, for schemes in which tokens have no fixed bytes."""


class Tokenizer:
    """A model's tokenizer. Thread-safe."""

    def __init__(
        self,
        backend: Backend,
        *,
        template: ChatTemplate | None,
        eos: tuple[int, ...],
        bos: int | None,
        add_bos: bool | None,
        closing: int | None = None,
        config: JsonMapping | None = None,
    ) -> None:
        """Store the parts. `closing`: token to append to a text for embedding, if the tokenizer does not add it; else
        None. `config`: content of tokenizer_config.json."""
        self._backend = backend
        self._template = template
        self.chat_template = template.source if template is not None else ""
        """Source of the chat template; empty if there is none."""
        self.eos_token_ids = eos
        """Ids of tokens that end an answer."""
        self.vocab_size = backend.vocab_size
        """Largest id plus 1."""
        self.special_ids = backend.special_ids
        """Ids that `skip_special_tokens` omits."""
        self.scheme = backend.scheme
        self.longest_token = backend.longest_token
        """Most bytes of text per token; None if unbounded."""
        self._bos, self._add_bos, self._closing = bos, add_bos, closing
        self._config = dict(config or {})
        # Called for each token at every step of every stream.
        self.token_bytes = lru_cache(maxsize=65536)(self._token_bytes)
        self.special_ids_of = lru_cache(maxsize=64)(self._special_ids_of)

    @property
    def has_chat_template(self) -> bool:
        """True if there is a chat template, the model's or the user's."""
        return self._template is not None

    @property
    def info(self) -> JsonObject:
        """Content of tokenizer_config.json, with special tokens as plain texts (None if missing) and the chat template
        in use."""
        names = {name: _token_string(self._config.get(name)) for name in _NAMES}
        return {**self._config, **names, "chat_template": self.chat_template or None}

    @property
    def template_reads(self) -> frozenset[str]:
        """Names of variables that the chat template reads."""
        return self._template.reads if self._template is not None else frozenset()

    @property
    def template_words(self) -> frozenset[str]:
        """String constants in the chat template's expressions."""
        return self._template.words if self._template is not None else frozenset()

    def has_special(self, text: str) -> bool:
        """Return True if `text` contains a special token, or is a single token of the form <|...|>."""
        if self.special_ids_of((text,)):
            return True
        return _CONTROL.fullmatch(text) is not None and len(self.encode(text, False)) == 1

    def _special_ids_of(self, texts: tuple[str, ...]) -> list[int]:
        """Return the ids of special tokens that occur in any of `texts`."""
        known = ((token, self.token_text(token)) for token in sorted(self.special_ids))
        return [token for token, name in known if name and any(name in text for text in texts)]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; with `add_special_tokens` including the model's prefix (BOS)."""
        ids = self._backend.encode(text, add_special_tokens)
        if add_special_tokens and self._bos is not None and self._add_bos is not None:
            # `add_bos_token` of tokenizer_config.json takes precedence over tokenizer.json's post-processor.
            starts = ids[:1] == [self._bos]
            if self._add_bos and not starts:
                return [self._bos, *ids]
            if not self._add_bos and starts:
                return ids[1:]
        return ids

    def encode_closed(self, text: str) -> list[int]:
        """Return the token ids of a text for embedding: as `encode`, plus EOS if tokenizer_config.json has
        `add_eos_token`."""
        ids = self.encode(text)
        return [*ids, self._closing] if self._closing is not None and ids[-1:] != [self._closing] else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Invalid UTF-8 becomes U+FFFD; unused ids yield no text."""
        if not self.scheme.has_bytes:
            return self._backend.decode(ids, skip_special_tokens)
        special = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in special).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.scheme.strips_first_space else text

    def render_chat(self, messages: Sequence[JsonMapping], variables: JsonMapping | None = None) -> list[int]:
        """Return the token ids of a conversation; `variables` are extra ones for the template. Raise `RequestError`
        without a template, or if it rejects the messages."""
        return self._backend.encode(self.template.render(messages, variables=variables), False)

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises RequestError if there is none."""
        if self._template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE",
                param="messages",
            )
        return self._template

    def token_text(self, token: int) -> str:
        """Return the text of one token, special or not; U+FFFD for part of a character."""
        if self.scheme.has_bytes:
            return self.token_bytes(token).decode("utf-8", errors="replace")
        return self._backend.decode([token], False)

    def _token_bytes(self, token: int) -> bytes:
        piece = self._backend.piece(token) if token >= 0 else None
        if piece is None:
            return b""
        if not self.scheme.has_bytes:
            return self._backend.decode([token], False).encode()
        return self.scheme.piece_bytes(piece, added=self.scheme.is_added(token))


def load_tokenizer(
    files: ModelFiles, *, chat_template_file: str | Path | None = None, trust_remote_code: bool = False
) -> Tokenizer:
    """Load the tokenizer of a model directory.

    `chat_template_file` replaces the model's chat template. Raise `BrokenModel` for missing or damaged tokenizer files,
    `UsageError` for an unreadable template file.
    """
    config = _config(files.path)
    backend: Backend
    if (files.path / "tokenizer.json").exists() and not (trust_remote_code and "auto_map" in config):
        from tandem.text.fast import FastBackend

        backend = FastBackend(files.path / "tokenizer.json")
    else:
        from tandem.text.hf import HFBackend

        backend = HFBackend(files.path, trust_remote_code=trust_remote_code)
    tokens = {name: text for name in _NAMES if (text := _token_string(config.get(name))) is not None}
    source: str | None
    if chat_template_file is not None:
        source, origin = _read_template(chat_template_file), _flag(chat_template_file)
    else:
        source, origin = _template_source(files.path, config), str(files.path)
    ids = {name: _only_id(backend, text) for name, text in tokens.items() if name in ("bos_token", "eos_token")}
    eos = eos_token_ids(files.path)
    own_eos = ids.get("eos_token")
    add_bos = config.get("add_bos_token")
    return Tokenizer(
        backend,
        template=ChatTemplate(source, tokens, origin=origin) if source else None,
        eos=tuple(sorted({*eos, own_eos})) if own_eos is not None else eos,
        bos=ids.get("bos_token"),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        closing=own_eos if config.get("add_eos_token") is True else None,
        config=config,
    )


def _config(path: Path) -> JsonObject:
    """Return tokenizer_config.json, with missing entries from the special_tokens_map.json of older models."""
    merged: JsonObject = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path / name).exists():
            merged |= read_json(path / name)
    return merged


def _token_string(value: object) -> str | None:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _only_id(backend: Backend, text: str) -> int | None:
    ids = backend.encode(text, False)
    return ids[0] if len(ids) == 1 else None


def check_template_file(file: str | Path) -> None:
    """Raise UsageError for an unreadable file of `--chat-template`, BrokenModel for an invalid template."""
    ChatTemplate(_read_template(file), {}, origin=_flag(file))


def _flag(file: str | Path) -> str:
    return f"--chat-template {file}"


def _read_template(file: str | Path) -> str:
    with file_errors(f"{_flag(file)}: cannot be read", param="chat_template"):
        return read_text(Path(file).expanduser())


def _template_source(path: Path, config: JsonObject) -> str | None:
    jinja = path / "chat_template.jinja"
    if jinja.exists():
        with file_errors(f"{jinja}: cannot be read", param="chat_template", kind=BrokenModel):
            return read_text(jinja)
    source = config.get("chat_template")
    if isinstance(source, list):  # named templates: [{"name": "default", "template": "..."}, ...]
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default") or next(iter(named.values()), None)
    if source is None and (path / "chat_template.json").exists():
        source = read_json(path / "chat_template.json").get("chat_template")
    return source if isinstance(source, str) else None


def too_long(context: int, param: str, tokens: int | None, *, least: bool = False) -> RequestError:
    """Return OpenAI's context length error. `tokens`: the text's length, None if not counted; `least`: a lower bound."""
    many = f"more than {context}" if tokens is None else f"{'at least ' if least else ''}{tokens}"
    return RequestError(
        f"This model's maximum context length is {context} tokens. However, your {param} resulted in "
        f"{many} tokens. Please reduce the length of the {param}.",
        param=param,
        code="context_length_exceeded",
    )


def check_bytes(tokenizer: Tokenizer, text: str, context: int, param: str) -> None:
    """Raise RequestError for a text with more bytes than `context` tokens can encode."""
    if tokenizer.longest_token is None:
        return
    most = context * tokenizer.longest_token
    if 4 * len(text) > most and len(text.encode("utf-8", "replace")) > most:
        raise too_long(context, param, None)


def encode_fitting(
    tokenizer: Tokenizer, text: str, context: int, param: str, *, special: bool = True, closed: bool = False
) -> list[int]:
    """Return the token ids of a text. `special`: add the special tokens; `closed`: end as embedding models expect.

    The result may exceed `context` a little. Raises RequestError, without tokenizing all, if it exceeds it by far.
    """
    check_bytes(tokenizer, text, context, param)
    size = CHARS_PER_TOKEN * context
    while len(text) > size:
        least = len(tokenizer.encode(text[:size], special)) - SLACK
        if least > context:
            raise too_long(context, param, least, least=True)
        size *= 2
    return tokenizer.encode_closed(text) if closed else tokenizer.encode(text, special)
