"""Pictures on a rank of the first stage: their encoder, which is mlx-vlm's, its process, and their features (mlx).

An encoder is the vision tower and the projector behind it. It is loaded with the first picture, from the model's own
weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError
from safetensors.numpy import load

from tandem.checkpoints.config import nested_text, read_config
from tandem.checkpoints.files import ModelFiles
from tandem.crash_guard import start_thread
from tandem.errors import BatchDesync, BrokenModel, UsageError
from tandem.loading.mlx_lm_models import FAILURES
from tandem.loading.stage_payload import dtype_name
from tandem.loading.text_tower import build_whole
from tandem.loading.weights import MLX_ERRORS, PartLoader, one_line, open_weights
from tandem.models.description import describe
from tandem.models.families.table import family_of
from tandem.models.sources import require_mlx_vlm
from tandem.processes.leftovers import temporary_prefix
from tandem.processes.sandbox import Sandbox, SandboxEnded, SandboxTask, TaskDone
from tandem.protocol.layout import StageSpec
from tandem.protocol.pictures import EncodePicture, PictureEncoded
from tandem.protocol.quarantine import ENCODER_DEATHS
from tandem.protocol.step import InsertOp, PrefillOp

log = logging.getLogger(__name__)


def _blank(width: int, dtype: mx.Dtype) -> SimpleNamespace:
    """Return the language model of an encoder: it embeds every token as zeros, between which the features stand. It makes no
    positions, which are data of the step, and has what gemma4 reads: a scale of embeddings, and no inputs by layer."""
    blank = SimpleNamespace(embed_scale=1, hidden_size_per_layer_input=0, get_rope_index=lambda *_, **__: (None, None))
    blank.embed_tokens = lambda tokens: mx.zeros((*tokens.shape, width), dtype)
    blank.model = blank
    return blank


class Encoder:
    """Vision tower and projector of a model."""

    def __init__(self, files: ModelFiles, dtype: mx.Dtype, *, dequantize: bool = False) -> None:
        """Load the encoder's weights. Raise UnsupportedModel without mlx-vlm, BrokenModel for unusable weights."""
        require_mlx_vlm("pictures are encoded")
        description = describe(files)
        name = description.family.replace("-", "_")
        # gemma3 scales features by the width of the text model, and qwen2_5_vl reads its entries beside others alone.
        config, family = read_config(files.path), family_of(description.family)
        text = {**(family.defaults if family.nested else {}), **nested_text(config)}
        config |= {"text_config": text} if nested_text(config) else {}
        self._model = build_whole({"hidden_size": description.hidden_size, **text, **config}, name)
        self._scale = getattr(getattr(self._model.language_model, "model", None), "embed_scale", 1.0)
        self._model.pop("language_model")
        self._model.audio_tower = self._model.embed_audio = None
        parts = [part for part in (self._model, *self._model.children().values()) if hasattr(part, "sanitize")]
        # Its weights get the names of mlx-vlm's modules as by mlx-vlm's `load_model`.
        named = SimpleNamespace(sanitize=lambda weights: reduce(lambda found, part: part.sanitize(found), parts, weights))
        loader = PartLoader(quantization=description.quantization, dequantize=dequantize, dtype=dtype)
        weights = open_weights(files, named, description).items()
        self._model = loader.load("", self._model, {name: one for name, one in weights if name.partition(".")[0] in self._model})
        self._model.language_model = _blank(description.hidden_size, dtype)
        self._dtype = dtype
        made = self._model.config
        self._placeholder = config.get("image_token_id") or getattr(made, "image_token_index", None) or made.image_token_id

    def encode(self, tokens: Sequence[int], inputs: bytes) -> dict[str, mx.array]:
        """Return a picture's `features` [L, H], zeros between its placeholders, and where these are, `taken`: bool [L].

        Features that are added behind the first layers follow in the last axis: [L, H + layers * H].
        """
        arrays: Any = {name: mx.array(value) for name, value in load(bytes(inputs)).items()}
        if (pixels := arrays.pop("pixel_values", None)) is None:
            raise ValueError("the processor made no pixel_values")
        side = getattr(self._model.config.vision_config, "image_size", 0)
        if "image_sizes" in arrays and mx.any(arrays["image_sizes"] > side).item():  # positions would be read beyond their table
            raise ValueError(f"a side has more than the {side} pixels of the model's vision tower")
        ids = mx.array([list(tokens)], dtype=mx.int32)
        taken = ids[0] == self._placeholder
        made = self._model.get_input_embeddings(ids, pixels, mask=mx.ones(ids.shape, mx.int32), **arrays)
        features = (made.inputs_embeds[0] / self._scale).astype(self._dtype)
        if made.deepstack_visual_embeds is not None:
            order = mx.maximum(mx.cumsum(taken.astype(mx.int32)) - 1, 0)
            layers = (mx.where(taken[:, None], one[order], 0) for one in made.deepstack_visual_embeds)
            features = mx.concatenate([features, *(one.astype(self._dtype) for one in layers)], axis=-1)
        mx.eval(features, taken)
        if not mx.any(taken).item():
            raise ValueError(f"its tokens have no placeholder ({self._placeholder})")
        return {"features": features, "taken": taken}


class EncoderProcess:
    """Encoder in a process of its own, which the first picture starts, and which is started again when it has ended."""

    def __init__(self, spec: StageSpec, files: ModelFiles, dtype: mx.Dtype) -> None:
        """Store the arguments of `encode_picture` (executors/worker.py). Raises UnsupportedModel without mlx-vlm, BrokenModel
        without weights of a vision tower."""
        require_mlx_vlm("pictures are encoded")
        if not describe(files).vision_bytes:
            raise BrokenModel(f"{files.name}: has no weights of a vision tower; get the whole model, or give --vision off")
        self._spec, self.sandbox = spec, Sandbox(None, "encoder")
        self._arguments = {"spec": spec, "files": files, "dtype": dtype_name(dtype)}
        self._stream = mx.new_thread_unsafe_stream(mx.cpu)
        """Stream on which features are read, by one thread at a time."""

    def encode(self, order: EncodePicture, held: dict[str, Any], report: Callable[[PictureEncoded], None]) -> None:
        """Encode a picture, add its features to `held`, and report. A picture during which the process ends is tried again, at
        most `ENCODER_DEATHS` times in all."""
        answer = partial(PictureEncoded, self._spec.rank, order.key)
        for _ in range(ENCODER_DEATHS):
            try:  # through a file, as bytes in messages are copied while the thread that computes waits for the interpreter
                with NamedTemporaryFile(prefix=temporary_prefix("picture"), suffix=".safetensors") as file:
                    Path(file.name).write_bytes(order.inputs)
                    arguments = {**self._arguments, "key": order.key, "tokens": order.tokens, "path": file.name}
                    task = SandboxTask("tandem.executors.worker", "encode_picture", arguments).encoded()
                    reply = self.sandbox.ask(task, self._spec.encoder_seconds)
                    if isinstance(reply, TaskDone):
                        features = mx.load(file.name, stream=self._stream)
                        mx.eval(features)  # here, as running streams wait for the thread that computes
                        held[order.key] = features
                        return report(reply.decoded(PictureEncoded))
            except (OSError, RuntimeError) as failed:  # MLX raises the latter for a file that it cannot read
                return report(answer(f"the picture cannot be handed to its encoder: {failed}", died=True))
            if isinstance(reply, SandboxEnded) and not reply.how:  # by `PictureFeatures.close`
                return None
            log.warning("Encoder of pictures failed (%s); starting it again", reply.why)
            self.sandbox.end()
            self.sandbox = Sandbox(None, "encoder")
        why = f"the encoder of pictures died {ENCODER_DEATHS} times in a row while it worked on a picture of this request"
        return report(answer(f"{why}; it is not tried again", died=True))


class PictureFeatures:
    """Features of pictures on one rank. The engine decides which it holds."""

    def __init__(self, load: Callable[[], Encoder], process: EncoderProcess | None = None) -> None:
        """Store how to `load` the encoder, which is done at the first picture; or the `process` that encodes instead."""
        self._encoder, self._process = cache(load), process
        self._held: dict[str, Any] = {}
        """Arrays by key, as `Encoder.encode` returns them."""

    def encode(self, order: EncodePicture, report: Callable[[PictureEncoded], None] = lambda _: None) -> str | None:
        """Encode a picture and hold its features. Return why it cannot be encoded, empty if it was; None if a process has
        begun to, after which `report` is called in another thread."""
        for key in order.evicts:
            self._held.pop(key, None)
        if self._process is not None:
            start_thread(partial(self._process.encode, order, self._held, report), name="encoder")
            return None
        try:
            self._held[order.key] = self._encoder().encode(order.tokens, order.inputs)
        except UsageError as error:
            return str(error)
        except (*FAILURES, *MLX_ERRORS, SafetensorError) as error:
            return f"the picture cannot be encoded: {one_line(error)}"
        return ""

    def pack(self, key: str, path: str) -> None:
        """Write a picture's features as safetensors, and hold them no longer; none if it could not be encoded."""
        mx.save_safetensors(path, self._held.pop(key, {}))
        mx.clear_cache()

    def close(self) -> None:
        """End the encoder's process, if there is one."""
        if self._process is not None:
            self._process.sandbox.end()

    def of(self, ops: Sequence[PrefillOp], inserts: Sequence[InsertOp], width: int) -> tuple[mx.array, mx.array] | None:
        """Return features [rows, width, H] for a pass over these chunks, and where they stand: bool [rows, width]. None if
        no chunk has a position of a picture. Raise BatchDesync for a picture that is not held."""
        found: dict[str, mx.array] = {}
        for row, (op, insert) in enumerate(zip(ops, inserts, strict=True)):
            for one in insert.pictures:
                first, stop = max(one.start, op.start), min(one.stop, op.start + op.count)
                if first >= stop:
                    continue
                if one.key not in self._held:
                    raise BatchDesync(f"BATCH DESYNC DETECTED: {op.request_id} has picture {one.key[:12]}, not held here")
                for name, array in self._held[one.key].items():
                    found.setdefault(name, mx.zeros((len(ops), width, *array.shape[1:]), array.dtype))
                    found[name][row, first - op.start : stop - op.start] = array[first - one.start : stop - one.start]
        return (found["features"], found["taken"]) if found else None
