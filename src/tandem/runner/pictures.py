"""Pictures on a rank of the first stage: their encoder, which is mlx-vlm's, and their features (mlx).

An encoder is the vision tower and the projector behind it. It is loaded with the first picture, from the model's own
weights.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from tandem.checkpoints.config import read_config
from tandem.checkpoints.files import ModelFiles
from tandem.errors import BatchDesync, UsageError
from tandem.loading.mlx_lm_models import FAILURES
from tandem.loading.text_tower import build_whole
from tandem.loading.weights import MLX_ERRORS, PartLoader, Weights, one_line, open_weights
from tandem.models.description import describe
from tandem.models.pictures import ENCODERS
from tandem.models.sources import require_mlx_vlm
from tandem.protocol.pictures import EncodePicture
from tandem.protocol.step import InsertOp, PrefillOp

_PIXELS = "pixel_values"


class _Blank:
    """Language model of an encoder: embeds every token as zeros, between which the features stand."""

    def __init__(self, width: int, dtype: mx.Dtype) -> None:
        self._width, self._dtype = width, dtype

    @property
    def model(self) -> _Blank:
        """The module that has the embedding."""
        return self

    def embed_tokens(self, tokens: mx.array) -> mx.array:
        """Return zeros [B, L, H]."""
        return mx.zeros((*tokens.shape, self._width), self._dtype)

    embed_scale, hidden_size_per_layer_input = 1, 0
    """Entries that gemma4 reads: its embeddings are not scaled here, and its inputs by layer are not made."""

    def get_rope_index(self, *_: object, **__: object) -> tuple[None, None]:
        """Return no positions: they are data of the step (runner/picture_inputs.py)."""
        return None, None


class Encoder:
    """Vision tower and projector of a model."""

    def __init__(self, files: ModelFiles, dtype: mx.Dtype, *, dequantize: bool = False) -> None:
        """Load the encoder's weights. Raise UnsupportedModel without mlx-vlm, BrokenModel for unusable weights."""
        require_mlx_vlm("pictures are encoded")
        description = describe(files)
        name = ENCODERS[description.family]
        # gemma3 scales features by the width of the text model, and qwen2_5_vl reads its entries beside others alone.
        config = read_config(files.path)
        self._model = build_whole({"hidden_size": description.hidden_size, **(config.get("text_config") or {}), **config}, name)
        self._scale = getattr(getattr(self._model.language_model, "model", None), "embed_scale", 1.0)
        self._model.pop("language_model")
        for name in ("audio_tower", "embed_audio"):
            setattr(self._model, name, None)
        weights = open_weights(files, _Sanitizing(self._model), description)
        loader = PartLoader(
            quantization=description.quantization,
            dequantize=dequantize,
            dtype=dtype,
            keep=lambda name: False,
            loaded=lambda nbytes: None,
        )
        own = {name: array for name, array in weights.items() if name.partition(".")[0] in self._model}
        self._model = loader.load("", self._model, own)
        self._model.language_model = _Blank(description.hidden_size, dtype)
        self._dtype = dtype
        made = self._model.config
        self._placeholder = next(
            found for key in ("image_token_index", "image_token_id") if (found := getattr(made, key, None)) is not None
        )

    def encode(self, tokens: Sequence[int], inputs: bytes) -> tuple[mx.array, mx.array]:
        """Return a picture's features [L, H], zeros between its placeholders, and where these are: bool [L].

        Features that are added behind the first layers follow in the last axis: [L, H + layers * H].
        """
        arrays: Any = mx.load(io.BytesIO(inputs), format="safetensors")
        if _PIXELS not in arrays:
            raise ValueError(f"the processor made no {_PIXELS}")
        side = int(getattr(self._model.config.vision_config, "image_size", 0))
        largest: Any = mx.max(arrays["image_sizes"]).item() if "image_sizes" in arrays else 0
        if largest > side:  # its positions would be read from beyond their table
            raise ValueError(f"a side has more than the {side} pixels of the model's vision tower")
        ids = mx.array([list(tokens)], dtype=mx.int32)
        taken = ids[0] == self._placeholder
        made = self._model.get_input_embeddings(ids, arrays.pop(_PIXELS), mask=mx.ones(ids.shape, mx.int32), **arrays)
        features = (made.inputs_embeds[0] / self._scale).astype(self._dtype)
        if made.deepstack_visual_embeds is not None:
            order = mx.maximum(mx.cumsum(taken.astype(mx.int32)) - 1, 0)
            layers = (mx.where(taken[:, None], one[order], 0) for one in made.deepstack_visual_embeds)
            features = mx.concatenate([features, *(one.astype(self._dtype) for one in layers)], axis=-1)
        mx.eval(features, taken)
        if not mx.any(taken).item():
            raise ValueError(f"its tokens have no placeholder ({self._placeholder})")
        return features, taken


class _Sanitizing:
    """Names of an encoder's weights, made as mlx-vlm's `load_model` makes them."""

    def __init__(self, model: Any) -> None:
        self._parts = [model, *model.children().values()]

    def sanitize(self, weights: Weights) -> Weights:
        """Return the weights under the names of mlx-vlm's modules."""
        for part in self._parts:
            weights = part.sanitize(weights) if hasattr(part, "sanitize") else weights
        return weights


class PictureFeatures:
    """Features of pictures on one rank. The engine decides which it holds."""

    def __init__(self, load: Callable[[], Encoder]) -> None:
        """Store how to `load` the encoder, which is done at the first picture."""
        self._load = load
        self._encoder: Encoder | None = None
        self._held: dict[str, tuple[mx.array, mx.array]] = {}
        """Features and places of placeholders by key, as `Encoder.encode` returns them."""

    def encode(self, order: EncodePicture) -> str:
        """Encode a picture and hold its features. Return why it cannot be encoded, empty if it was."""
        for key in order.evicts:
            self._held.pop(key, None)
        try:
            self._encoder = self._encoder or self._load()
            self._held[order.key] = self._encoder.encode(order.tokens, order.inputs)
        except UsageError as error:
            return str(error)
        except (*FAILURES, *MLX_ERRORS) as error:
            return f"the picture cannot be encoded: {one_line(error)}"
        return ""

    def of(self, ops: Sequence[PrefillOp], inserts: Sequence[InsertOp], width: int) -> tuple[mx.array, mx.array] | None:
        """Return features [rows, width, H] for a pass over these chunks, and where they stand: bool [rows, width]. None if
        no chunk has a position of a picture. Raise BatchDesync for a picture that is not held."""
        parts: list[tuple[int, slice, mx.array, mx.array]] = []
        for row, (op, insert) in enumerate(zip(ops, inserts, strict=True)):
            for one in insert.pictures:
                first, stop = max(one.start, op.start), min(one.stop, op.start + op.count)
                if first >= stop:
                    continue
                if one.key not in self._held:
                    why = f"{op.request_id} has picture {one.key[:12]}, which is not held here"
                    raise BatchDesync(f"BATCH DESYNC DETECTED: {why}")
                features, taken = (part[first - one.start : stop - one.start] for part in self._held[one.key])
                parts.append((row, slice(first - op.start, stop - op.start), features, taken))
        if not parts:
            return None
        features = mx.zeros((len(ops), width, parts[0][2].shape[-1]), parts[0][2].dtype)
        taken = mx.zeros((len(ops), width), mx.bool_)
        for row, places, some, where in parts:
            features[row, places], taken[row, places] = some, where
        return features, taken
