"""Record the requests that a client sends to Tandem, for tests/recorded/.

usage: PYTHONPATH=src:tests .venv/bin/python -m clients.record --client 'NAME VERSION' --out FILE -- COMMAND...

COMMAND runs against Tandem's own HTTP server; `{url}` in its arguments is the address. Behind the server stands the
tests' scripted engine, which calls a tool once where it is offered (--call) and otherwise answers in words. Texts are
cut but for pictures, tools beyond a few left out, and neither keys nor paths of the machine are kept.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from processors import see
from server.conftest import FakeEngine, wait_until
from tandem.config.settings import ModelSettings, ProcessSettings, Settings
from tandem.protocol.control import Submit
from tandem.server.api_process import make_server
from tandem.server.app import create_app
from tandem.server.engines.replicas import Replicas
from tandem.server.engines.router import Router
from tandem.server.listener import listen

HEADERS = ("content-type", "accept", "user-agent", "anthropic-version", "anthropic-beta", "openai-beta")
TEXT_LIMIT, TOOL_LIMIT = 80, 3
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
FORM = '{"name": "Paris", "inhabitants": 2100000}'


class ScriptedEngine(FakeEngine):
    """Calls `call` where it is offered and has no result yet; otherwise it says something."""

    def __init__(self, model_dir: Path, call: str, form: str) -> None:
        super().__init__(model_dir)
        self.call, self.form, self.tool = f"<tool_call>\n{call}\n</tool_call>", form, json.loads(call)["name"]
        self.set_status(max_context=1_000_000)

    def _handle(self, identity: bytes, message: Any) -> None:
        if isinstance(message, Submit):
            prompt = self.tokenizer.decode(message.request.prompt, skip_special_tokens=False)
            offered = re.search(rf'"name":\s*"{re.escape(self.tool)}"', prompt) is not None
            form = self.form if message.request.params.structured_outputs else "Hello, this is the answer."
            reply = self.call if offered and "<tool_response>" not in prompt else form
            self.reply = self.tokenizer.encode(reply, False)
        super()._handle(identity, message)


class Recording:
    """ASGI middleware that keeps what was asked, and tells of what was refused."""

    def __init__(self, app: Any, requests: list[dict[str, Any]]) -> None:
        self.app, self.requests = app, requests

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request, and keep it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        raw, path = bytearray(), scope["path"]
        query = scope["query_string"].decode()
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        entry = {
            "method": scope["method"],
            "path": path + (f"?{query}" if query else ""),
            "headers": {name: headers[name] for name in HEADERS if name in headers},
        }
        self.requests.append(entry)

        async def watched_receive() -> Any:
            message = await receive()
            raw.extend(message.get("body", b""))
            if not message.get("more_body") and raw:
                entry["body"] = trimmed(json.loads(raw))
            return message

        async def watched_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                entry["status"] = message["status"]
                print(entry["method"], entry["path"], message["status"])
            elif entry["status"] >= 400:
                print("  ", message.get("body", b"")[:500].decode())
            await send(message)

        await self.app(scope, watched_receive, watched_send)


def trimmed(value: Any) -> Any:
    """A body without long texts, without most tools, and without what tells of a machine or a person."""
    if isinstance(value, str):
        value = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32,}", "0" * 8, value)
        value = re.sub(r"(?:/[\w.@-]+){2,}", "/path", value)
        return value if len(value) <= TEXT_LIMIT else value[:TEXT_LIMIT] + "..."
    if isinstance(value, list):
        return [trimmed(item) for item in value]
    if not isinstance(value, dict) or value.get("type") == "base64":
        return value
    value = dict(value)
    if isinstance(tools := value.get("tools"), list):
        kinds = {tool.get("type") if isinstance(tool, dict) else None: tool for tool in reversed(tools)}
        value["tools"] = tools[:TOOL_LIMIT] + [tool for tool in kinds.values() if tool not in tools[:TOOL_LIMIT]]
    return {name: trimmed(item) for name, item in value.items()}


def record(command: list[str], call: str, form: str) -> list[dict[str, Any]]:
    """Run `command` against a server; the requests that it sent."""
    requests: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        see(Path(directory), "mistral3")
        engine = ScriptedEngine(Path(directory), call, form)
        engine.start()
        settings = Settings(
            model=ModelSettings(model=directory, served_name=("demo",)), process=ProcessSettings(engine_socket=engine.endpoint)
        )
        app = create_app(settings, Replicas(Router(), {0: engine.endpoint}, heartbeat_s=0.1))
        app.add_middleware(Recording, requests=requests)
        listener = listen("127.0.0.1", 0)
        server = make_server(app, drain_timeout=2.0)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_until(lambda: server.started and app.state.api.ready())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            done = subprocess.run(
                [part.replace("{url}", url) for part in command], stdin=subprocess.DEVNULL, timeout=300, check=False
            )
            print("exit code", done.returncode, file=sys.stderr)
        finally:
            server.should_exit = True
            thread.join(240)
            engine.stop()
    return requests


def main() -> None:
    """Record one client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", required=True, metavar="'NAME VERSION'")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE")
    parser.add_argument("--call", default=CALL, metavar="JSON", help="the call that the model makes")
    parser.add_argument("--form", default=FORM, metavar="JSON", help="the structured answer that it gives")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    found = record(options.command, options.call, options.form)
    distinct = []
    for request in found:
        if request not in distinct:
            distinct.append(request)
    options.out.write_text(json.dumps({"client": options.client, "requests": distinct}, indent=1) + "\n")


if __name__ == "__main__":
    main()
