"""Conversion of a GGUF file's tokenizer to tokenizer.json and tokenizer_config.json (tokenizers library, no mlx)."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tandem.errors import BrokenModel, UnsupportedModel
from tandem.json_types import JsonObject

_UNKNOWN, _CONTROL, _USER = 2, 3, 4  # tokenizer.ggml.token_type
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2")
_TEKKEN = ("tekken", "pixtral")
_PATTERNS = {
    **dict.fromkeys((*_LLAMA3, "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _WORDS % "{1,3}"),
    **dict.fromkeys(_TEKKEN, _O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")),
    "qwen2": _WORDS % "",
    "qwen35": (_WORDS % "").replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),
    "gpt-4o": _O200K,
}
"""Regular expressions that split text into words, by llama.cpp's pre-tokeniser names."""
_DIGITS = ("smollm", "refact", "starcoder")
_PLAIN = ("gpt-2", "default")
_MAX_TOKEN = 1024  # characters; deriving merges takes time that grows with the square of a token's length


def write_tokenizer(metadata: JsonObject, directory: Path, source: str) -> None:
    """Write both files. Raise `UnsupportedModel` for an unknown tokenizer model or pre-tokeniser, `BrokenModel` without
    tokens."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise BrokenModel(f"{source}: has no tokenizer (tokenizer.ggml.tokens)")
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens, source)
    elif kind in ("llama", "gemma4"):
        tokenizer = _sentencepiece(metadata, tokens)
    else:
        raise UnsupportedModel(f"{source}: tokenizer model {kind!r} is not supported (gpt2, llama and gemma4 are)")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    control = [t for t, k in zip(tokens, types, strict=True) if k in (_CONTROL, _UNKNOWN)]
    user = [t for t, k in zip(tokens, types, strict=True) if k == _USER]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in user])
    _add_bos(tokenizer, metadata, tokens)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = _config(metadata, tokens)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def _byte_level(metadata: JsonObject, tokens: list[str], source: str) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps: list[object]
    if pre in _DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif pre in _PATTERNS:
        steps = [pre_tokenizers.Split(Regex(_PATTERNS[pre]), "isolated"), bytes_only]
    elif pre in _PLAIN:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        known = ", ".join((*_DIGITS, *_PATTERNS, *_PLAIN))
        raise UnsupportedModel(f"{source}: pre-tokeniser {pre!r} is not supported; supported are {known}")
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in (*_LLAMA3, *_TEKKEN)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(metadata: JsonObject, tokens: list[str]) -> Tokenizer:
    """Build a SentencePiece BPE tokenizer; missing merges are derived from the scores, as in transformers' converter."""
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", [])] or _merges(metadata, tokens, vocab)
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(vocab=vocab, merges=pairs, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    tokenizer = Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(metadata: JsonObject, tokens: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    scores = metadata.get("tokenizer.ggml.scores") or [-float(i) for i in range(len(tokens))]
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        if len(token) > _MAX_TOKEN:
            raise ValueError(f"a token of {len(token)} characters")
        local = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
        local.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(score, pair) for pair in local]
    merges.sort(key=lambda entry: entry[0], reverse=True)
    return [pair for _, pair in merges]


def _adds_bos(metadata: JsonObject) -> bool:
    default = metadata.get("tokenizer.ggml.model") in ("llama", "gemma4") or metadata.get("tokenizer.ggml.pre") in (
        *_LLAMA3,
        *_TEKKEN,
    )
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default)) and "tokenizer.ggml.bos_token_id" in metadata


def _add_bos(tokenizer: Tokenizer, metadata: JsonObject, tokens: list[str]) -> None:
    if _adds_bos(metadata):
        bos = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )


def _config(metadata: JsonObject, tokens: list[str]) -> JsonObject:
    config: JsonObject = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(metadata),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(index, int) and index < len(tokens):
            config[f"{name}_token"] = tokens[index]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
