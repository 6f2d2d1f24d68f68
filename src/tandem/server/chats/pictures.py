"""Pictures in messages: whether a model takes them, and what is refused before a worker decodes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from urllib.parse import SplitResult, urlsplit

from tandem.config.validation import is_among
from tandem.errors import RequestError
from tandem.protocol.control import EngineStatus
from tandem.server.openai.messages import GivenPicture
from tandem.text.pictures import refusal

MAX_PICTURES = 32
"""Most pictures in one request."""
MAX_BYTES = 20 * 2**20
"""Most bytes of one picture as the client sends it."""
OMITTED = "[image omitted: this model does not see]"
"""Text in place of pictures in results of tools, for models that take none."""
DATA = "data:image/png;base64,..."
"""How bytes of a picture are sent."""
WEB = ("http:", "https:")


def unseen(status: EngineStatus) -> str:
    """Return why the model of an engine takes no pictures, and the remedy; empty if it takes them."""
    if status.no_pictures:
        return f"the model takes no pictures: {status.no_pictures}; send text, or name a model that sees"
    if find_spec("PIL") is None or find_spec("mlx_vlm") is None:
        return "pictures need the extra 'vision' on the server (pip install 'mlx-tandem[vision]'); send text alone"
    return ""


def takes_pictures(status: EngineStatus, asked: bool) -> bool:
    """Return whether the model of an engine takes pictures. `asked`: users have sent some, not tools alone.

    Raises RequestError if not, but `asked`: a question about a picture has no answer then.
    """
    why = unseen(status)
    if why and asked:
        raise RequestError(f"Invalid 'messages': {why}.", param="messages", code="unsupported_value")
    return not why


def check_url(number: int, url: str, hosts: Collection[str]) -> tuple[SplitResult, str]:
    """Return the parts and the host of a picture's http(s) URL. Raise RequestError unless it is one of `hosts`.

    Messages have the host alone: the rest of a URL may be secret.
    """
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode().rstrip(".")
        readable = bool(host) and f"{parts.scheme}:" in WEB and (parts.port is None or parts.port > 0)
    except ValueError:
        readable = False
    if not readable:
        raise refusal(number, "has a URL that is not one of http or https", f"correct it, or send its bytes as {DATA}")
    if "@" in parts.netloc:
        raise refusal(number, f"is at {host} with a user name or password, which are not taken", "leave them out of its URL")
    if not hosts:
        remedy = f"start the server with --image-hosts {host}, or send its bytes as {DATA}"
        raise refusal(number, f"is at {host}, and nothing is fetched", remedy)
    if not is_among(host, hosts):
        raise refusal(number, f"is at {host}, which is none of --image-hosts", f"send its bytes as {DATA}")
    return parts, host


def check_given(pictures: Sequence[GivenPicture], hosts: Collection[str]) -> None:
    """Raise RequestError for too many or too large pictures, and for URLs that hold no bytes and are at none of `hosts`."""
    if len(pictures) > MAX_PICTURES:
        message = f"Invalid 'messages': at most {MAX_PICTURES} pictures are taken, not {len(pictures)}; leave some out."
        raise RequestError(message, param="messages", code="too_many_images")
    for number, picture in enumerate(pictures, 1):
        start = picture.url[:40]
        if start.lower().startswith(WEB):
            check_url(number, picture.url, hosts)
        elif not start.lower().startswith("data:") or ";base64," not in picture.url[:200]:
            raise refusal(number, f"has a URL that is not allowed ({start.partition('//')[0]!r})", f"send its bytes as {DATA}")
        elif len(picture.url) > MAX_BYTES * 4 // 3 + 200:
            raise refusal(number, f"is larger than {MAX_BYTES // 2**20} MiB", "send it smaller")
