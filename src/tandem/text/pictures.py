"""Decode pictures and prepare them as a model's processor does. The server runs it in sandboxed worker processes."""

from __future__ import annotations

import base64
import hashlib
import inspect
import io
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tandem.checkpoints.config import read_json
from tandem.errors import RequestError
from tandem.json_types import JsonMapping
from tandem.protocol.pictures import Picture
from tandem.protocol.request import MAX_PICTURE_BYTES
from tandem.text.tokenizer import Tokenizer, encode_fitting, too_long

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF")
MAX_PIXELS = 64_000_000
LOW = (512, 512)
"""Largest size, in pixels, of pictures with `detail` "low"."""
_KINDS = "send PNG, JPEG, WebP, GIF or AVIF"
_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"})
_TORCHVISION = {"PixtralProcessor": "pixtral", "Gemma4Processor": "gemma4"}
_NUMPY = {"lfm2_vl": "Lfm2VlNumpyImageProcessor", "gemma4_unified": "Gemma4UnifiedImageProcessor"}
"""mlx-vlm's class for the pictures of types for which transformers' needs torchvision."""
_OTHERS = frozenset({"feature_extractor", "video_processor"})
"""Processors of sound and videos, which are not loaded."""
_OWN = frozenset({"image_processor", "tokenizer", "chat_template", "self"})


class Prepared(NamedTuple):
    """One picture after the processor."""

    text: str
    """Text that replaces the placeholder in the prompt."""
    tokens: int
    """Number of its placeholder tokens."""
    key: str
    inputs: bytes


def _of_mlx_vlm(source: str, base: Any, package: str) -> Any:
    """Return mlx-vlm's class of `_NUMPY`, with the settings of `source`, without mlx-vlm's packages, which import MLX.
    What its module replaces in transformers' processor `base` is put back."""
    before, empty = (base.__init__, base.__call__), {name: ModuleType(name) for name in ("base", "gemma4", package)}
    vars(empty["base"]).update(dict.fromkeys(("load_chat_template", "install_auto_processor_patch", "to_mlx"), lambda *_: None))
    sys.modules |= {"_mlx_vlm": ModuleType("_mlx_vlm")} | {f"_mlx_vlm.{name}": module for name, module in empty.items()}
    for name, module in empty.items():
        module.__path__ = [str(distribution("mlx-vlm").locate_file(f"mlx_vlm/models/{name}"))]
    theirs = getattr(import_module(f"_mlx_vlm.{package}.processing_{package}"), _NUMPY[package])
    base.__init__, base.__call__ = before

    def prepared(*args: Any, **options: Any) -> Any:  # Gemma's also returns the number of tokens
        found = theirs.__call__(*args, **options)
        return found[0] if isinstance(found, tuple) else found

    made: Any = type(theirs.__name__, (theirs,), {"__call__": prepared})
    return made(**made.get_image_processor_dict(source, local_files_only=True)[0])


class Processor:
    """A checkpoint's processor, of transformers, on Pillow and numpy alone."""

    def __init__(self, source: str) -> None:
        """Load from the directory `source`; code in it is never run."""
        import transformers
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

        kind = str(read_json(Path(source) / "config.json").get("model_type")).replace("-", "_")
        name = PROCESSOR_MAPPING_NAMES[kind].replace("Unified", "")  # Gemma's two write the same text for a picture
        if own := _TORCHVISION.get(name):  # its module takes a function from torchvision's backend that Pillow's has too
            package = f"transformers.models.{own}"
            sys.modules[f"{package}.image_processing_{own}"] = import_module(f"{package}.image_processing_pil_{own}")
        base = getattr(import_module(f"transformers.models.{own}.processing_{own}") if own else transformers, name)
        vars(sys.modules[base.__module__]).update(num2words=str)  # SmolVLM's asks for this package, and calls it for videos alone
        # Without the check, processors of types that take videos too would need torchvision for their video processor.
        made = type(base.__name__, (base,), {"check_argument_for_proper_class": lambda *_: None})
        only = {"local_files_only": True, "trust_remote_code": False}
        if kind in _NUMPY:
            images = _of_mlx_vlm(source, base, kind)
        else:
            images = transformers.AutoImageProcessor.from_pretrained(source, backend="pil", **only)
        file = Path(source) / "processor_config.json"
        stored = read_json(file) if file.exists() else {}
        taken = inspect.signature(base.__init__).parameters
        options = {name: stored[name] for name in taken.keys() - _OWN if name in stored}
        options |= dict.fromkeys(_OTHERS & taken.keys())
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **only)
        self._processor: Any = made(image_processor=images, tokenizer=tokenizer, **options)
        self._settings: str = f"{base.__name__} {images.to_json_string()}"
        self.placeholder: str = self._processor.image_token
        ids: list[int] = self._processor.image_token_ids
        self.token = ids[0]
        """Id of the token that a feature replaces; others are marks of rows."""
        self.words = frozenset({self.placeholder, *tokenizer.convert_ids_to_tokens(ids)})
        """Texts that mean pictures, which messages may not contain."""

    def prepare(self, image: Any) -> Prepared:
        """Return the picture for the model. Raises what the processor raises."""
        import numpy as np
        from safetensors.numpy import save

        found = self._processor(
            text=[self.placeholder], images=[image], return_tensors="np", return_text_replacement_offsets=True
        )
        arrays = {name: np.ascontiguousarray(value) for name, value in found.items() if name not in _OF_TEXT}
        inputs = save(arrays)
        key = hashlib.sha256(self._settings.encode() + inputs).hexdigest()
        tokens = int(np.count_nonzero(np.asarray(found["input_ids"]) == self.token))
        return Prepared(found["text_replacement_offsets"][0][0]["replacement"], tokens, key, inputs)


@lru_cache(maxsize=2)
def processor_of(source: str) -> Processor:
    """Return the processor of the model in the directory `source`. Raises RequestError."""
    try:
        return Processor(source)
    except Exception as error:  # of others' files and packages
        why = " ".join(f"{type(error).__name__}: {error}".replace(source, "its directory").split())[:300]
        message = f"The model's processor of pictures cannot be loaded ({why}); send text alone."
        raise RequestError(message, param="messages", code="unsupported_value") from error


def refusal(number: int, why: str, remedy: str) -> RequestError:
    """Return the error about the picture `number` of a request, counted from 1."""
    return RequestError(f"Invalid 'messages': picture {number} {why}; {remedy}.", param="messages", code="invalid_image")


def tokens_with_pictures(
    tokenizer: Tokenizer,
    processor: Processor,
    context: int,
    messages: Sequence[JsonMapping],
    pictures: Sequence[tuple[str, bool]],
    text: str,
) -> tuple[list[int], list[Picture]]:
    """Return the prompt's tokens with those of the pictures, and the pictures. `pictures`: URL, and whether a small one is
    enough. `text`: that of the messages, with the processor's placeholder for each picture.

    Raises RequestError.
    """
    prepared, tokens, size = [], 0, 0
    for number, (url, low) in enumerate(pictures, 1):
        image = decoded(number, url)
        if low:
            image.thumbnail(LOW)
        try:
            prepared.append(processor.prepare(image))
        except MemoryError:
            raise
        except Exception as error:  # a library's, about this picture
            why = " ".join(str(error).split())[:200]
            raise refusal(number, f"is refused by the model's processor ({why})", "send it in another size") from error
        tokens, size = tokens + prepared[-1].tokens, size + len(prepared[-1].inputs)
        if tokens > context:
            raise too_long(context, "messages", tokens, least=True)
        if size > MAX_PICTURE_BYTES:
            raise refusal(
                number, f"makes more than {MAX_PICTURE_BYTES // 2**20} MiB of numbers with those before it", "send fewer"
            )
    for message in messages:
        for word in processor.words:
            if word in (message.get("content") or ""):
                why = f"Invalid 'messages': a text contains {word!r}, which stands for a picture in this model's prompts"
                raise RequestError(f"{why}; leave it out.", param="messages", code="invalid_value")
    text, *rest = text.split(processor.placeholder)
    if len(rest) != len(prepared):
        why = f"the chat template shows {len(rest)} of {len(prepared)} pictures"
        raise RequestError(f"Invalid 'messages': {why}; send them in messages of the user.", param="messages")
    text += "".join(picture.text + after for picture, after in zip(prepared, rest, strict=True))
    ids = encode_fitting(tokenizer, text, context, "messages", special=False)
    places = [place for place, token in enumerate(ids) if token == processor.token]
    if len(places) != tokens:
        why = f"{len(places)} placeholder tokens where its pictures need {tokens}"
        raise RequestError(f"Invalid 'messages': the prompt has {why}; send other text.", param="messages")
    found, first = [], 0
    for picture in prepared:
        start, end = places[first], places[first + picture.tokens - 1]
        found.append(Picture(key=picture.key, start=start, length=end - start + 1, inputs=picture.inputs))
        first += picture.tokens
    return ids, found


def decoded(number: int, url: str) -> Any:
    """Return the picture of a data URI as Pillow's, in RGB and upright. Raises RequestError about picture `number`."""
    import numpy as np
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        raw = base64.b64decode("".join(url.partition(",")[2].split()), validate=True)
    except ValueError:
        raise refusal(number, "is not valid base64", "send its bytes in base64") from None
    if raw[:512].lstrip().lower().startswith((b"<svg", b"<?xml", b"<!doctype svg")):
        raise refusal(number, "is an SVG", _KINDS)
    try:
        image: Image.Image = Image.open(io.BytesIO(raw), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise Image.DecompressionBombError
        if getattr(image, "is_animated", False) and image.format != "MPO":
            raise refusal(number, f"is animated ({image.format})", "send one frame")
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # Pillow would clip 16 bits to 8
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        return image.convert("RGB")
    except (RequestError, MemoryError):
        raise
    except Image.DecompressionBombError:  # also Pillow's own
        raise refusal(number, f"has more than {MAX_PIXELS // 10**6} million pixels", "send it smaller") from None
    except UnidentifiedImageError:
        raise refusal(number, f"is of an unknown kind (its first bytes are {raw[:8]!r})", _KINDS) from None
    except Exception as error:  # noqa: BLE001 - Pillow raises many kinds for damaged files
        why = " ".join(str(error).split())[:100] or type(error).__name__
        raise refusal(number, f"is damaged or cut short ({why})", "send a whole file") from None
