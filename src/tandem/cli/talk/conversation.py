"""A conversation in the terminal: its messages, its settings, and the slash commands."""

from __future__ import annotations

import base64
import json
import mimetypes
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_type_hints

from tandem.cli.options.sampling import EFFORTS, KINDS, LEFT_OUT
from tandem.cli.talk.backends import Model, RemoteModel
from tandem.config.options import nearest
from tandem.errors import UsageError
from tandem.json_types import JsonObject
from tandem.protocol.ranges import RANGES
from tandem.protocol.request import SamplingParams
from tandem.system.files import file_errors, read_regular, read_text

COMMANDS = {
    "/help": "this list",
    "/system [TEXT]": "show or set the system message",
    "/clear": "forget what was said",
    "/save FILE": "write the conversation to a file",
    "/load FILE": "go on with one that was saved",
    "/model [NAME]": "show the model, or talk to another one",
    "/set [NAME VALUE]": "show or set sampling parameters, such as temperature 0.2, and think",
    "/image FILE": "send a picture with the next message",
    "/exit": "end (also /bye, Ctrl-D, or Ctrl-C twice)",
}
KEYS = 'Enter sends; Alt-Enter, or """ around several lines, makes a new line; Ctrl-C stops an answer.'
_ALSO = {"/bye": "/exit", "/quit": "/exit", "/?": "/help"}
MOST_IMAGE = 20 * 2**20
MOST_SAVED = 256 * 2**20
"""Most bytes of a saved conversation, images included."""


class Quit(Exception):
    """The user ends the conversation."""


def _path(name: str) -> Path:
    """Return the path that a person typed. One with `~` of no user or a NUL is that of no file, as opening it then says."""
    return Path(os.path.expanduser(name.replace("\0", "\\0")))


@dataclass
class Conversation:
    """Messages and settings of a conversation."""

    model: Model
    params: JsonObject
    """Sampling parameters set by the user."""
    other: Callable[[str], Model]
    """Function that returns the model of a given name. Raises UsageError."""
    system: str | None = None
    said: list[JsonObject] = field(default_factory=list)
    """Messages of user and assistant."""
    images: list[JsonObject] = field(default_factory=list)
    """Image parts for the user's next message."""

    @property
    def messages(self) -> list[JsonObject]:
        """All messages in the API's format, with the system message first."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.said]

    def ask(self, text: str) -> None:
        """Append a user message, with the collected images."""
        content: object = [{"type": "text", "text": text}, *self.images] if self.images else text
        self.said.append({"role": "user", "content": content})
        self.images = []

    def add_image(self, name: str) -> str:
        """Collect a picture's file for the next message, and return the text to show. Raises UsageError."""
        if not self.model.can_see:
            remote = isinstance(self.model, RemoteModel)
            why = "sees no pictures" if remote else "is loaded here, and pictures go to servers alone"
            raise UsageError(
                f"{self.model.name} {why}; talk to a server whose model sees (`tandem serve`, `tandem chat --url URL`)"
            )
        kind = mimetypes.guess_type(name)[0] or ""
        if not kind.startswith("image/"):
            raise UsageError(f"{name}: its name does not end like that of a picture (.png, .jpg, ...)")
        with file_errors(f"{name} cannot be read"):
            content = read_regular(_path(name), MOST_IMAGE)
        data = base64.b64encode(content).decode()
        self.images.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}})
        return f"{name} goes with the next message"

    def command(self, line: str) -> str:
        """Run a slash command and return the text to show. Raises UsageError, and Quit for `/exit`."""
        name, _, rest = line.replace("/set system", "/system", 1).replace("/set parameter", "/set", 1).partition(" ")
        name, rest = _ALSO.get(name, name), rest.strip()
        known = {usage.split()[0]: usage for usage in COMMANDS}
        if name not in known:
            raise UsageError(f"there is no command {name}{nearest(name, [*known, *_ALSO])} (/help lists all)")
        if not rest and known[name].split()[-1] == "FILE":
            raise UsageError(f"{name} needs a file: {known[name]}")
        done: str = self.add_image(rest) if name == "/image" else getattr(self, f"_{name[1:]}")(rest)
        return done

    def _help(self, _: str) -> str:
        return "\n".join(f"  {usage:20}{what}" for usage, what in COMMANDS.items()) + f"\n{KEYS}"

    def _exit(self, _: str) -> str:
        raise Quit

    def _clear(self, _: str) -> str:
        self.said.clear()
        self.images.clear()
        return "forgotten"

    def _system(self, text: str) -> str:
        if text:
            self.system = text
            return "set; it holds from the next answer on"
        return self.system or "there is no system message"

    def _save(self, name: str) -> str:
        content = json.dumps({"model": self.model.name, "messages": self.messages}, indent=1, ensure_ascii=False)
        with file_errors(f"{name} cannot be written"):
            _path(name).write_text(content, encoding="utf-8", errors="replace")
        return f"{len(self.said)} messages are in {name}"

    def _load(self, name: str) -> str:
        with file_errors(f"{name} cannot be read"):
            text = read_text(_path(name), MOST_SAVED)
        try:
            messages = json.loads(text)["messages"]
            good = isinstance(messages, list) and all(
                message["role"] in ("system", "user", "assistant") and message["content"] is not None for message in messages
            )
        except (ValueError, LookupError, TypeError, RecursionError):
            good = False
        if not good:
            raise UsageError(f"{name} is no saved conversation")
        begins = bool(messages) and messages[0]["role"] == "system"
        self.system, self.said = (messages[0]["content"], messages[1:]) if begins else (None, messages)
        return f"{len(self.said)} messages"

    def _model(self, name: str) -> str:
        if name:
            self.model = self.other(name)
        elif isinstance(self.model, RemoteModel):
            return "\n".join(f"{'*' if name == self.model.name else ' '} {name}" for name in self.model.names())
        return f"{self.model.name} ({self.model.where})"

    def _set(self, text: str) -> str:
        hints = get_type_hints(SamplingParams)
        names = [name for name in SamplingParams.__struct_fields__ if hints[name] in KINDS and name not in LEFT_OUT] + ["think"]
        text = {"think": "think true", "nothink": "think false"}.get(text, text)
        if not text:
            shown = "\n".join(f"  {name} {value}" for name, value in self.params.items())
            return shown or f"nothing is set; there is {', '.join(names)}"
        name, _, value = text.replace("=", " ", 1).partition(" ")
        if name == "think":
            if value.strip() not in EFFORTS:
                raise UsageError(f"think {value.strip()}: must be one of {', '.join(EFFORTS)}")
            self.params["reasoning_effort"] = EFFORTS[value.strip()]
            return f"think is {value.strip()}"
        if name not in names:
            meant = nearest(name, names) or f"; there is {', '.join(names)}"
            raise UsageError(f"there is no parameter {name}{meant}")
        if value.strip() in ("", "default"):
            self.params.pop(name, None)
            return f"{name} is as the model has it"
        try:
            number = KINDS[hints[name]](value.strip())
        except ValueError:
            raise UsageError(f"{name} {value.strip()}: is not a number") from None
        if name in RANGES and number not in RANGES[name]:
            raise UsageError(f"{name} {value.strip()}: must be {RANGES[name]}")
        self.params[name] = number
        return f"{name} is {number}"
