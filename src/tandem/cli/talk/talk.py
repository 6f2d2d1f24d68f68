"""`tandem generate` and `tandem chat`, with a running server or a model loaded in this process."""

from __future__ import annotations

import argparse
import sys
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from tandem.checkpoints.catalogue import copies_of
from tandem.checkpoints.resolve import known, name_of, resolve
from tandem.cli.address import api_key, named_url, record_url, started
from tandem.cli.arguments import DEFAULT_URL, fail, load_settings
from tandem.cli.options.sampling import CHAT_DEFAULTS, DEFAULTS, asked_of
from tandem.cli.screen import screen
from tandem.cli.talk.backends import LocalModel, Model, RemoteModel, Speed
from tandem.cli.talk.conversation import KEYS, Conversation, Quit
from tandem.cli.talk.line_editor import Interrupts, make_prompt
from tandem.config.loading import LoadedSettings
from tandem.config.options import by_name
from tandem.errors import RequestError, UsageError
from tandem.json_types import JsonMapping, JsonObject
from tandem.loading.mlx_lm_models import import_models_only
from tandem.log import set_up
from tandem.printable import printable
from tandem.system.http_client import ServerClient

FRAMES = 12
"""Maximum redraws per second."""


class AnswerView:
    """Incremental display of an answer: finished blocks (between blank lines) are printed, the last one is redrawn.

    An answer can therefore exceed the screen, and its beginning stays in the scrollback.
    """

    def __init__(self, console: Console) -> None:
        """Start with an empty answer on `console`."""
        self._console = console
        self._block, self._fenced, self._reasoning = "", False, False
        self._live: Live | None = None

    def add(self, text: str, *, reasoning: bool = False) -> None:
        """Append text to the answer and redraw."""
        if reasoning != self._reasoning:
            self.close()
            self._reasoning = reasoning
        for line in text.splitlines(keepends=True):
            self._block += line
            if line.endswith("\n"):
                last = self._block.splitlines()[-1].strip()
                if last.startswith(("```", "~~~")):
                    self._fenced = not self._fenced
                if not last and not self._fenced:
                    self._print()
        self._draw()

    def close(self) -> None:
        """Print the last block."""
        self._print()
        self._fenced = False

    def _print(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._block.strip():
            self._console.print(self._drawn())
        self._block = ""

    def _draw(self) -> None:
        if not self._block.strip():
            return
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=FRAMES, transient=True, vertical_overflow="crop")
            self._live.start()
        self._live.update(self._drawn())

    def _drawn(self) -> RenderableType:
        if self._reasoning:
            return Text(self._block.strip("\n"), style="dim italic")
        return Markdown(self._block)


@contextmanager
def unechoed() -> Iterator[None]:
    """Context manager that hides typed characters; Ctrl-C still works."""
    with ExitStack() as stack:
        with suppress(termios.error, ValueError, OSError):  # not a terminal
            stream = sys.stdin.fileno()
            before = termios.tcgetattr(stream)
            stack.enter_context(suppress(termios.error))  # the terminal may be gone on exit
            stack.callback(termios.tcsetattr, stream, termios.TCSANOW, before)
            termios.tcsetattr(stream, termios.TCSANOW, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
        yield


Other = Callable[[str], Model]
NAME_ONE = "name a directory, a GGUF file, a hub id or demo, or a running server with --url"


def run_generate(arguments: argparse.Namespace) -> int:
    """Complete one prompt and print the text as it arrives. Return the exit code."""
    params = asked_of(arguments)
    prompt = arguments.prompt
    if prompt is None:
        if sys.stdin.isatty():
            print("reading the prompt from standard input; Ctrl-D ends it", file=sys.stderr)
        prompt = sys.stdin.read()
    if not prompt:
        raise UsageError("the prompt is empty; give --prompt TEXT, or text on standard input", param="prompt")
    with _opened(arguments, DEFAULTS) as (model, _):
        speed = Speed()
        for piece in model.answer(prompt, params, speed):
            print(_shown(piece.text), end="", flush=True)
        print()
        if sys.stderr.isatty():
            print(f"({speed})", file=sys.stderr)
    return 0


def run_chat(arguments: argparse.Namespace) -> int:
    """Run a conversation (commands: cli/talk/conversation.py). Return the exit code.

    With a prompt, answer it alone, behind what is piped.
    """
    if arguments.prompt == "":
        raise UsageError("the prompt is empty; leave it out to talk", param="prompt")
    params, console = asked_of(arguments), screen()
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with _opened(arguments, CHAT_DEFAULTS) as (model, other), ExitStack() as stack:
        if not model.can_chat:
            raise UsageError("the model has no chat template; use `tandem generate`, or give --chat-template")
        talk, interrupts, interrupted = Conversation(model, params, other, system=arguments.system), Interrupts(), False
        for name in arguments.image:
            talk.add_image(name)
        if arguments.prompt is not None:
            piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
            _answer(talk, f"{piped}\n\n{arguments.prompt}" if piped else arguments.prompt, None, interrupts)
            return 0
        prompt = make_prompt(interrupts)
        if terminal:
            stack.enter_context(interrupts.deferred())
            greeting = f"{model.name} ({model.where}). /help lists commands, /exit ends.\n{KEYS}"
            console.print(greeting, style="dim", highlight=False, markup=False)
        while True:
            try:
                said = prompt()
                interrupted = False
                if said.startswith("/"):
                    with interrupts.heard():
                        told = talk.command(said)
                    print(printable(told))
                elif said:
                    _answer(talk, said, console if terminal else None, interrupts)
            except (EOFError, Quit):
                return 0
            except KeyboardInterrupt:
                if interrupted or not terminal:
                    return 0 if terminal else 130
                interrupted = True
                print("(Ctrl-C once more ends, as does /exit)")
            except (UsageError, RequestError) as error:
                fail(error.message)


def _shown(text: str) -> str:
    """Return the text unchanged for a file or a pipe, without control characters for a terminal."""
    return printable(text) if sys.stdout.isatty() else text


def _answer(talk: Conversation, said: str, screen: Console | None, interrupts: Interrupts) -> None:
    """Send the message and show the answer. Ctrl-C stops it and keeps the partial answer. Raises UsageError, RequestError."""
    talk.ask(said)
    text, speed, stopped = "", Speed(), False
    view = AnswerView(screen) if screen is not None else None
    with ExitStack() as stack:
        if view is not None:
            stack.enter_context(unechoed())
            stack.callback(view.close)
        pieces = talk.model.answer(talk.messages, talk.params, speed)
        try:
            for piece in interrupts.each(pieces):
                text += "" if piece.reasoning else piece.text
                if view is not None:
                    view.add(piece.text, reasoning=piece.reasoning)
                elif not piece.reasoning:
                    print(_shown(piece.text), end="", flush=True)
        except KeyboardInterrupt:
            stopped = True
            pieces.close()
            if view is None:
                raise
        except (UsageError, RequestError):
            pictures = isinstance(talk.said.pop()["content"], list)  # the user may send it again
            if pictures and screen is not None:
                screen.print("The message and its pictures are not kept: add them again with /image FILE.", style="dim")
            raise
    talk.said.append({"role": "assistant", "content": text})
    if screen is None:
        print()
    else:
        screen.print(f"({'stopped' if stopped else speed})", style="dim", highlight=False)


@contextmanager
def _opened(arguments: argparse.Namespace, defaults: Mapping[str, float]) -> Iterator[tuple[Model, Other]]:
    """Yield the model, and a function that opens another one by name. Raises UsageError.

    Uses a server that is named, or that `tandem up` started with this model; otherwise loads the model in this process.
    """
    loaded = load_settings(arguments)
    options = loaded.given("model", "parallel", "scheduler", "speculation")
    if (server := _server(arguments, loaded, options)) is not None:
        url, name = server
        client = ServerClient(url, api_key(arguments, url))
        try:
            model = RemoteModel(client, name, defaults)
        except UsageError as error:
            if url != DEFAULT_URL or named_url(arguments) is not None:
                raise
            why = error.message.partition(";")[0]
            raise UsageError(f"no model is given, and {why}; {NAME_ONE}", param="model") from None
        if sys.stderr.isatty():
            print(f"talking to the server at {url} (--local loads the model here)", file=sys.stderr)
        yield model, lambda other: RemoteModel(client, other, defaults)
        return
    if "model" not in options:
        raise UsageError(f"no model is given: {NAME_ONE}", param="model")
    with ExitStack() as stack:

        def load(name: str) -> Model:
            if (chosen := known(name)) is not None:
                print(f"tandem: {chosen.line}", file=sys.stderr)
                name = chosen.id
            resolve(name, weights=False)  # raises for an unknown model, before the current one is unloaded
            stack.close()
            model = _load({**options, "model": name}, defaults)
            stack.push(model.llm)
            return model

        yield load(options["model"]), load


def _server(arguments: argparse.Namespace, loaded: LoadedSettings, options: JsonMapping) -> tuple[str, str | None] | None:
    """Return the server's address and the model's name there (None: its first); None to load the model in this process.

    Layout options on the command line require loading, unlike variables and files, which `tandem up` reads too. Raises
    UsageError.
    """
    named, record, model = named_url(arguments), started(), options.get("model")
    asked = None if record is not None and record.model == model else model
    typed = {name: flag for name in options if loaded.sources[name] == (flag := by_name()[name].flag)}
    layout = [name for name in typed if name != "model"]
    if arguments.local:
        if arguments.url or arguments.server_port or arguments.server_name:
            raise UsageError("--local and the name of a server contradict one another; give one", param="local")
        return None
    if named is not None:
        if layout:
            raise UsageError(
                f"{typed[layout[0]]} is for a model that is loaded here, and {named} is a server; leave it out, or give --local",
                param=layout[0],
            )
        return named, asked if "model" in typed else None
    if layout:
        return None
    if model is None:
        return (DEFAULT_URL if record is None else record_url(record)), None
    copies = {model, *copies_of(model)}
    same = next((name for name in (record.model.split(", ") if record else ()) if name in copies), None)
    return None if record is None or same is None else (record_url(record), asked and same)


def _load(options: JsonObject, defaults: Mapping[str, float]) -> LocalModel:
    """Load and return the model, with live progress lines."""
    from tandem.cli.startup import progress_lines
    from tandem.llm import LLM
    from tandem.protocol.control import LoadProgress

    set_up("WARNING")
    import_models_only()
    name = options["model"]
    with progress_lines() as show:
        ranks: dict[int, LoadProgress] = {}

        def report(rank: int, done: int, total: int, phase: str) -> None:
            ranks[rank] = LoadProgress(rank, done, total, phase)
            show({0: argparse.Namespace(loading=list(ranks.values()), detail="")})

        llm = LLM(progress=report, **options)
    return LocalModel(llm, name_of(name), defaults)
