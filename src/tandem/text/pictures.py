"""Decode pictures and prepare them as a model's processor does. The server runs it in sandboxed worker processes."""

from __future__ import annotations

import base64
import hashlib
import inspect
import io
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.metadata import distribution
from itertools import product
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from msgspec.structs import replace

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
_WHOLE = "send a whole file"
_BEGINNINGS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8")
"""First bytes of kinds that are read."""
_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"})
_TORCHVISION = {"PixtralProcessor": "pixtral", "Gemma4Processor": "gemma4"}
_NUMPY = {"lfm2_vl": "Lfm2VlNumpyImageProcessor", "gemma4_unified": "Gemma4UnifiedImageProcessor"}
"""mlx-vlm's class for the pictures of types for which transformers' needs torchvision."""
_OTHERS = frozenset({"feature_extractor", "video_processor"})
"""Processors of sound and videos, which are not loaded."""
_OWN = frozenset({"image_processor", "tokenizer", "chat_template", "self"})


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


class Prepared(NamedTuple):
    """A picture after the processor."""

    text: str
    """Text that replaces its placeholder in the prompt."""
    picture: Picture
    """The picture, with the number of its tokens as its length. Inputs are left out (`b""`) where the api has them."""


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
        # mlx-vlm's module replaces the methods of transformers' class where the model is in this process too.
        theirs = sys.modules.get(f"mlx_vlm.models.{kind}.processing_{kind}")
        own_methods = {
            name: getattr(theirs, f"_original_{name.strip('_')}", getattr(base, name)) for name in ("__init__", "__call__")
        }
        # Without the check, processors of types that take videos too would need torchvision for their video processor.
        made = type(base.__name__, (base,), {"check_argument_for_proper_class": lambda *_: None, **own_methods})
        only = {"local_files_only": True, "trust_remote_code": False}
        if kind in _NUMPY:
            images = _of_mlx_vlm(source, base, kind)
        else:
            images = transformers.AutoImageProcessor.from_pretrained(source, backend="pil", **only)
        file = Path(source) / "processor_config.json"
        stored = read_json(file) if file.exists() else {}
        taken = inspect.signature(own_methods["__init__"]).parameters
        options = {name: stored[name] for name in taken.keys() - _OWN if name in stored}
        options |= dict.fromkeys(_OTHERS & taken.keys())
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **only)
        self._processor: Any = made(image_processor=images, tokenizer=tokenizer, **options)
        self.placeholder: str = self._processor.image_token
        ids: list[int] = self._processor.image_token_ids
        self.token = ids[0]
        """Id of the token that a feature replaces; others are marks of rows."""
        self._place, *marks = tokenizer.convert_ids_to_tokens(ids)
        self.words = frozenset({self.placeholder, self._place, *marks})
        """Texts that mean pictures, which messages may not contain."""

    def prepare(self, image: Any) -> Prepared:
        """Return a picture for the model. Raises what the processor raises."""
        import numpy as np
        from safetensors.numpy import save

        text, arrays = self._arrays(image)
        inputs = save({name: np.ascontiguousarray(value) for name, value in arrays.items() if name not in _OF_TEXT})
        key, length = hashlib.sha256(text.encode() + inputs).hexdigest(), text.count(self._place)
        _, height, width = map(int, arrays["image_grid_thw"][0] if "image_grid_thw" in arrays else (1, 0, 0))
        side = round((height * width / length) ** 0.5) or 1  # patches that become one feature, in a row
        picture = Picture(key, 0, length, height // side, width // side, inputs=inputs, size=len(inputs))
        return Prepared(text, picture)

    def _arrays(self, image: Any) -> tuple[str, dict[str, Any]]:
        """Return a picture's text, and its arrays for the encoder."""
        given = {"text": [self.placeholder], "images": [image]}
        found = self._processor(**given, return_tensors="np", return_text_replacement_offsets=True)
        return found["text_replacement_offsets"][0][0]["replacement"], found


class _OwnProcessor(Processor):
    """Processor of a type for which mlx-vlm's computes with MLX or otherwise, and transformers' needs torchvision."""

    def __init__(self, source: str) -> None:
        from PIL import Image

        file = Path(source) / "preprocessor_config.json"  # transformers 5 writes the other one alone, with these nested
        stored = read_json(file if file.exists() else file.with_name("processor_config.json"))
        config, stored = read_json(file.with_name("config.json")), stored.get("image_processor", stored)
        self._given: Any = {**config["vision_config"], **stored.get("media_proc_cfg", stored)}
        self.token = config.get("media_placeholder_token_id") or config["image_token_index"]
        self.words = frozenset({self.placeholder, self._place})
        self._arrays(Image.new("RGB", (1, 1)))  # raises for settings that are missing

    def _squares(self, image: Any, side: int) -> Any:
        """Return normalised numbers [N, 3, side, side] of the squares of an image, row by row."""
        import numpy as np

        pixels = np.asarray(image, np.float32) / np.float32(255) - np.float32(self._given["image_mean"])
        cut = (pixels / np.float32(self._given["image_std"])).reshape(image.height // side, side, image.width // side, side, 3)
        return cut.transpose(0, 2, 4, 1, 3).reshape(-1, 3, side, side)


class _Kimi(_OwnProcessor):
    """Processor of `kimi_vl` and `kimi_k25`: pictures are shrunk to a number of patches, and padded or cropped to whole ones."""

    placeholder = _place = "<|media_pad|>"

    def _arrays(self, image: Any) -> tuple[str, dict[str, Any]]:
        import numpy as np

        given, size = self._given, np.array(image.size)
        patch, merge = given["patch_size"], np.max(given.get("merge_kernel_size", 2))
        most, side = given.get("in_patch_limit") or given["in_token_limit"], given.get("patch_limit_on_one_side", 512) * patch
        scale = min(1.0, np.sqrt(most / np.maximum(1, size // patch).prod()), *(side / size))
        size, block = np.maximum(1, (size * scale).astype(int)), merge * patch
        counts = -(-size // block) if given.get("pad_input", "in_patch_limit" in given) else np.maximum(1, size // block)
        start = np.maximum(0, (size - counts * block) // 2)
        image = image.resize(tuple(size), 3).crop((*start, *(start + counts * block)))  # 3: bicubic
        grid = (counts * merge)[None, ::-1]
        return self._place * counts.prod(), {"pixel_values": self._squares(image, patch), "image_grid_hws": grid}


class _Llama4(_OwnProcessor):
    """Processor of `llama4`, as in transformers: tiles of a picture in the grid that fits it best, and an overview."""

    placeholder, _place = "<|image|>", "<|patch|>"

    def _arrays(self, image: Any) -> tuple[str, dict[str, Any]]:
        import numpy as np

        given, size, side = self._given, np.array(image.size), self._given["size"]["height"]
        counts = range(1, given["max_patches"] + 1)
        grids = [np.array([count // rows, rows]) for count in counts for rows in range(1, count + 1) if count % rows == 0]
        fits = [min(grid * side / size) for grid in grids]
        grid = grids[fits.index(min((fit for fit in fits if fit >= 1), default=max(fits)))]  # of these, one of fewest tiles
        room = np.minimum(np.maximum(size, side), grid * side)
        scaled = np.clip((size * min(room / size) + 1e-6).astype(int), 1, room)
        tiles = self._squares(image.resize(tuple(scaled), 2).crop((0, 0, *(grid * side))), side)  # 2: bilinear
        places, text = self._place * round((side // given["patch_size"] * given["pixel_shuffle_ratio"]) ** 2), ""
        if len(tiles) > 1:
            tiles = np.concatenate([tiles, self._squares(image.resize((side, side), 2), side)])
            text = ("<|tile_x_separator|>".join([places] * grid[0]) + "<|tile_y_separator|>") * grid[1]
        return f"<|image_start|>{text}<|image|>{places}<|image_end|>", {"pixel_values": tiles}


_PROCESSORS = {"kimi_k25": _Kimi, "kimi_vl": _Kimi, "llama4": _Llama4}


@lru_cache(maxsize=2)
def processor_of(source: str) -> Processor:
    """Return the processor of the model in the directory `source`. Raises RequestError."""
    try:
        return _PROCESSORS.get(str(read_json(Path(source) / "config.json").get("model_type")), Processor)(source)
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
        tokens, size = tokens + prepared[-1].picture.length, size + prepared[-1].picture.size
        if tokens > context:
            raise too_long(context, "messages", tokens, least=True)
        if size > MAX_PICTURE_BYTES:
            why = f"makes more than {MAX_PICTURE_BYTES // 2**20} MiB of numbers with those before it"
            raise refusal(number, why, "send fewer")
    for message, word in product(messages, processor.words):
        if word in (message.get("content") or ""):
            why = f"Invalid 'messages': a text contains {word!r}, which stands for a picture in this model's prompts"
            raise RequestError(f"{why}; leave it out.", param="messages", code="invalid_value")
    text, *rest = text.split(processor.placeholder)
    if len(rest) != len(prepared):
        why = f"the chat template shows {len(rest)} of {len(prepared)} pictures"
        raise RequestError(f"Invalid 'messages': {why}; send them in messages of the user.", param="messages")
    text += "".join(own + after for (own, _), after in zip(prepared, rest, strict=True))
    ids = encode_fitting(tokenizer, text, context, "messages", special=False)
    places = [place for place, token in enumerate(ids) if token == processor.token]
    if len(places) != tokens:
        why = f"{len(places)} placeholder tokens where its pictures need {tokens}"
        raise RequestError(f"Invalid 'messages': the prompt has {why}; send other text.", param="messages")
    found = []
    for one in (one.picture for one in prepared):
        span, places = places[: one.length], places[one.length :]
        found.append(replace(one, start=span[0], length=span[-1] + 1 - span[0]))
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
        if raw.startswith(_BEGINNINGS):
            raise refusal(number, "is damaged or cut short (what follows its first bytes cannot be read)", _WHOLE) from None
        raise refusal(number, f"is of an unknown kind (its first bytes are {raw[:8]!r})", _KINDS) from None
    except Exception as error:  # noqa: BLE001 - Pillow raises many kinds for damaged files
        why = " ".join(str(error).split())[:100] or type(error).__name__
        raise refusal(number, f"is damaged or cut short ({why})", _WHOLE) from None
