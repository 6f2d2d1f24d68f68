"""Decode pictures and prepare them as a model's processor does. The server runs it in sandboxed worker processes."""

from __future__ import annotations

import base64
import inspect
import io
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.metadata import distribution
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from tandem.checkpoints.config import read_json
from tandem.errors import RequestError
from tandem.json_types import JsonMapping
from tandem.models.pictures import KIMI
from tandem.protocol.pictures import Picture
from tandem.protocol.request import MAX_PICTURE_BYTES
from tandem.text.picture_processors import KimiProcessor, PictureProcessor, Prepared
from tandem.text.tokenizer import Tokenizer, encode_fitting, too_long

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF")
MAX_PIXELS = 64_000_000
LOW = (512, 512)
"""Largest size, in pixels, of pictures with `detail` "low"."""
_KINDS = "send PNG, JPEG, WebP, GIF or AVIF"
_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"})
_TORCHVISION = {"PixtralProcessor": "pixtral", "Gemma4Processor": "gemma4"}
_NUMPY = {"Lfm2VlProcessor": ("lfm2_vl", "Lfm2VlNumpyImageProcessor")}
"""Module of mlx-vlm and its class for the pictures of processors whose own, of transformers, needs torchvision."""
_OTHERS = frozenset({"feature_extractor", "video_processor"})
"""Processors of sound and videos, which are not loaded."""
_OWN = frozenset({"image_processor", "tokenizer", "chat_template", "self"})


def _of_mlx_vlm(source: str, base: Any, package: str, name: str) -> Any:
    """Return mlx-vlm's class `name` for pictures, with the settings of `source`, without mlx-vlm's packages, which import MLX.
    What its module replaces in transformers' processor `base` is put back."""
    functions, before = ModuleType("_mlx_vlm.base"), (base.__init__, base.__call__)
    vars(functions).update(dict.fromkeys(("load_chat_template", "install_auto_processor_patch"), lambda *_: None))
    sys.modules |= {"_mlx_vlm": ModuleType("_mlx_vlm"), "_mlx_vlm.base": functions, f"_mlx_vlm.{package}": ModuleType(package)}
    file = distribution("mlx-vlm").locate_file(f"mlx_vlm/models/{package}/processing_{package}.py")
    module = ModuleType(f"_mlx_vlm.{package}.processing")
    module.__package__ = f"_mlx_vlm.{package}"
    SourceFileLoader(module.__name__, str(file)).exec_module(module)
    base.__init__, base.__call__ = before
    made = getattr(module, name)
    return made(**made.get_image_processor_dict(source, local_files_only=True)[0])


class Processor(PictureProcessor):
    """A checkpoint's processor, of transformers, on Pillow and numpy alone."""

    def __init__(self, source: str) -> None:
        """Load from the directory `source`; code in it is never run."""
        import transformers
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

        kind = str(read_json(Path(source) / "config.json").get("model_type"))
        name = PROCESSOR_MAPPING_NAMES[kind.replace("-", "_")]
        if own := _TORCHVISION.get(name):  # its module takes a function from torchvision's backend that Pillow's has too
            package = f"transformers.models.{own}"
            sys.modules[f"{package}.image_processing_{own}"] = import_module(f"{package}.image_processing_pil_{own}")
        base = getattr(import_module(f"transformers.models.{own}.processing_{own}") if own else transformers, name)
        vars(sys.modules[base.__module__]).update(num2words=str)  # SmolVLM's asks for this package, and calls it for videos alone
        # Without the check, processors of types that take videos too would need torchvision for their video processor.
        made = type(base.__name__, (base,), {"check_argument_for_proper_class": lambda *_: None})
        only = {"local_files_only": True, "trust_remote_code": False}
        if name in _NUMPY:
            images = _of_mlx_vlm(source, base, *_NUMPY[name])
        else:
            images = transformers.AutoImageProcessor.from_pretrained(source, backend="pil", **only)
        file = Path(source) / "processor_config.json"
        stored = read_json(file) if file.exists() else {}
        taken = inspect.signature(base.__init__).parameters
        options = {name: stored[name] for name in taken.keys() - _OWN if name in stored}
        options |= dict.fromkeys(_OTHERS & taken.keys())
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **only)
        self._processor: Any = made(image_processor=images, tokenizer=tokenizer, **options)
        self.settings = f"{base.__name__} {images.to_json_string()}"
        self.placeholder = self._processor.image_token
        ids: list[int] = self._processor.image_token_ids
        self.token = ids[0]
        self.words = frozenset({self.placeholder, *tokenizer.convert_ids_to_tokens(ids)})

    def arrays(self, image: Any) -> tuple[str, int, dict[str, Any]]:
        """Return text and number of a picture's tokens, and its arrays for the encoder."""
        import numpy as np

        found = self._processor(
            text=[self.placeholder], images=[image], return_tensors="np", return_text_replacement_offsets=True
        )
        tokens = int(np.count_nonzero(np.asarray(found["input_ids"]) == self.token))
        arrays = {name: array for name, array in found.items() if name not in _OF_TEXT}
        return found["text_replacement_offsets"][0][0]["replacement"], tokens, arrays


@lru_cache(maxsize=2)
def processor_of(source: str) -> PictureProcessor:
    """Return the processor of the model in the directory `source`. Raises RequestError."""
    try:
        kind = read_json(Path(source) / "config.json").get("model_type")
        return KimiProcessor(source) if kind in KIMI else Processor(source)
    except Exception as error:  # of others' files and packages
        why = " ".join(f"{type(error).__name__}: {error}".replace(source, "its directory").split())[:300]
        message = f"The model's processor of pictures cannot be loaded ({why}); send text alone."
        raise RequestError(message, param="messages", code="unsupported_value") from error


def refusal(number: int, why: str, remedy: str) -> RequestError:
    """Return the error about the picture `number` of a request, counted from 1."""
    return RequestError(f"Invalid 'messages': picture {number} {why}; {remedy}.", param="messages", code="invalid_image")


def tokens_with_pictures(
    tokenizer: Tokenizer,
    processor: PictureProcessor,
    context: int,
    messages: Sequence[JsonMapping],
    pictures: Sequence[tuple[str, bool]],
    text: str,
    known: Mapping[int, Prepared] = MappingProxyType({}),
) -> tuple[list[int], list[Picture], list[Prepared]]:
    """Return the prompt's tokens with those of the pictures, the pictures, and how they were prepared.

    `pictures`: URL, and whether a small one is enough. `text`: that of the messages, with the processor's placeholder for each
    picture. `known`: pictures that were prepared before, by number from 1.

    Raises RequestError.
    """
    prepared, tokens, size = [], 0, 0
    for number, (url, low) in enumerate(pictures, 1):
        try:
            prepared.append(known.get(number) or processor.prepare(decoded(number, url, low=low)))
        except (RequestError, MemoryError):
            raise
        except Exception as error:  # a library's, about this picture
            why = " ".join(str(error).split())[:200]
            raise refusal(number, f"is refused by the model's processor ({why})", "send it in another size") from error
        tokens, size = tokens + prepared[-1].tokens, size + prepared[-1].size
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
    return ids, found, prepared


def decoded(number: int, url: str, *, low: bool = False) -> Any:
    """Return the picture of a data URI as Pillow's, in RGB and upright, and with `low` a small one.

    Raises RequestError about picture `number`.
    """
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
        image = image.convert("RGB")
        if low:
            image.thumbnail(LOW)
        return image
    except (RequestError, MemoryError):
        raise
    except Image.DecompressionBombError:  # also Pillow's own
        raise refusal(number, f"has more than {MAX_PIXELS // 10**6} million pixels", "send it smaller") from None
    except UnidentifiedImageError:
        raise refusal(number, f"is of an unknown kind (its first bytes are {raw[:8]!r})", _KINDS) from None
    except Exception as error:  # noqa: BLE001 - Pillow raises many kinds for damaged files
        why = " ".join(str(error).split())[:100] or type(error).__name__
        raise refusal(number, f"is damaged or cut short ({why})", "send a whole file") from None
