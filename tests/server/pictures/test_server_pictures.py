"""Pictures in requests: each API hands the engine the same prompt and arrays, and bad ones end with 400."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import threading
import zlib
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import SimpleNamespace

import anthropic
import numpy as np
import pytest
from safetensors.numpy import load
from transformers.image_utils import SizeDict
from transformers.models.llama4.processing_llama4 import Llama4Processor

from processors import PROCESSOR, encoded, mutants, noise, see
from server.conftest import MODEL, running_engine, running_server, wait_until
from tandem.checkpoints.files import ModelFiles
from tandem.errors import RequestError
from tandem.loading.text_tower import import_lazily
from tandem.models.pictures import OFF, why_no_pictures
from tandem.server.chats import picture_fetch, request_texts, texts
from tandem.server.chats.pictures import check_given
from tandem.server.chats.prompt import Marks, prompt_text
from tandem.server.openai.messages import GivenPicture
from tandem.text.pictures import Processor, decoded, processor_of, tokens_with_pictures
from tandem.text.tokenizer import load_tokenizer

if find_spec("mlx_vlm") is None:
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)
Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A server with a journal, whose model sees, with its `engine`."""
    path = tmp_path_factory.mktemp("qwen")
    kept = {"journal": str(tmp_path_factory.mktemp("journal")), "keep_conversations": 60}
    see(path, "qwen2_5_vl")
    kept["image_hosts"] = ("localhost",)
    with running_engine(path, max_context=512, no_pictures="") as fake, running_server(MODEL, fake, **kept) as live:
        yield live


def uri(raw, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def part(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def ask(live, *content, **fields):
    parts = [one if isinstance(one, dict) else {"type": "text", "text": one} for one in content]
    return live.chat(messages=[{"role": "user", "content": parts}], **fields)


def refused(sent, *words):
    assert sent.status_code == 400, sent.text
    error = sent.json()["error"]
    assert error["param"] in ("messages", "input") or error["param"].startswith("messages["), error
    assert all(word in error["message"] for word in words), error["message"]


def test_the_prompt_has_a_placeholder_for_each_patch_and_the_engine_gets_the_arrays(seeing):
    wide, tall = noise(32, 16), noise(8, 24, seed=1)
    sent = ask(seeing, "a", part(uri(encoded(wide))), "b", part(uri(encoded(tall, "WEBP", lossless=True))), "c", n=2)
    assert sent.status_code == 200, sent.text
    pads = [32 * 16 // 64, 8 * 24 // 64]
    shown = [f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in pads]
    assert seeing.engine.prompt() == f"<|im_start|>user\na{shown[0]}b{shown[1]}c<|im_end|>\n<|im_start|>assistant"
    request = seeing.engine.last
    assert sent.json()["usage"]["prompt_tokens"] == len(request.prompt)
    pad = request.prompt[request.pictures[0].start]
    assert [picture.length for picture in request.pictures] == pads
    for picture, size in zip(request.pictures, (wide.size, tall.size), strict=True):
        assert request.prompt[picture.start : picture.start + picture.length] == [pad] * picture.length
        arrays = load(picture.inputs)
        assert arrays["image_grid_thw"].tolist() == [[1, size[1] // 4, size[0] // 4]]
        assert (picture.rows, picture.columns) == (size[1] // 8, size[0] // 8)
        assert arrays["pixel_values"].shape == (picture.length * 4, 3 * 2 * 4 * 4)
    first = load(request.pictures[0].inputs)["pixel_values"]
    pixel = (np.asarray(wide)[0, 0] / 255 - [0.48145466, 0.4578275, 0.40821073]) / [0.26862954, 0.26130258, 0.27577711]
    np.testing.assert_allclose(first[0].reshape(3, 2, 4, 4)[:, 0, 0, 0], pixel, atol=1e-5)
    ask(seeing, part(uri(encoded(tall))), part(uri(encoded(noise(8, 24, seed=2)))))
    keys = [picture.key for picture in seeing.engine.last.pictures]
    assert keys[0] == request.pictures[1].key != keys[1], "the key tells pictures apart, whatever file they came in"


def test_a_picture_of_an_earlier_request_is_not_prepared_again(seeing, monkeypatch):
    tasks, real = [], request_texts.RequestTexts.ask

    async def ask_worker(self, function, arguments, *more, **options):
        tasks.append(arguments)
        return await real(self, function, arguments, *more, **options)

    monkeypatch.setattr(request_texts.RequestTexts, "ask", ask_worker)
    old, new = (part(uri(encoded(noise(16, 16, seed)))) for seed in (31, 32))
    assert ask(seeing, old, "a").status_code == 200
    before = seeing.engine.last.pictures
    assert ask(seeing, "another question", new, old).status_code == 200
    after = seeing.engine.last.pictures
    assert (after[1].key, after[1].inputs) == (before[0].key, before[0].inputs) != (after[0].key, after[0].inputs)
    assert after[1].start > after[0].start > before[0].start and load(after[0].inputs)["pixel_values"].size
    assert [url for url, _ in tasks[-1]["pictures"]] == [new["image_url"]["url"], ""] and not tasks[-1]["known"][2].picture.inputs
    monkeypatch.setattr(texts, "MAX_PICTURE_BYTES", 0)
    for _ in range(2):
        assert ask(seeing, "b", old).status_code == 200
    assert not tasks[-1]["known"] and seeing.engine.last.pictures[0].inputs == before[0].inputs
    monkeypatch.setattr(seeing.engine, "encodes", False)
    assert ask(seeing, "c", old).status_code == 200
    [bare] = seeing.engine.last.pictures
    assert (bare.key, bare.inputs, bare.size) == (before[0].key, b"", len(before[0].inputs)), "no bytes before they are asked for"


def test_all_apis_hand_over_the_same_picture(seeing):
    raw = encoded(noise())
    image = base64.b64encode(raw).decode()
    url, text = uri(raw), {"type": "text", "text": "what?"}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image}}
    calls = [{"id": "t", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    result = {"role": "tool", "tool_call_id": "t", "content": [part(url)]}
    used = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    answer = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    call = {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"}
    output = [{"type": "input_image", "image_url": url}]
    ollama = {"role": "user", "content": "what?", "images": [image]}
    user = "<|im_start|>user\n"
    go, out = {"role": "user", "content": "go"}, {"type": "function_call_output", "call_id": "t", "output": output}
    asks = [{"role": "user", "content": [block, text]}]
    acts = [go, {"role": "assistant", "content": [used]}, {"role": "user", "content": [answer]}]
    talks = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [part(url), text]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [*output, {"type": "input_text", "text": "what?"}]}]}),
        ("/v1/messages", {"max_tokens": 4, "messages": asks}),
        ("/api/chat", {"stream": False, "messages": [ollama]}),
        ("/api/generate", {"stream": False, "prompt": "what?", "images": [image]}),
        ("/v1/chat/completions", {"messages": [go, {"role": "assistant", "tool_calls": calls}, result]}),
        ("/v1/responses", {"input": [go, call, out]}),
        ("/v1/messages", {"max_tokens": 4, "messages": acts}),
    ]
    keys = set()
    for place, (route, body) in enumerate(talks):
        sent = seeing.http.post(route, json={"model": "tiny", **body})
        assert sent.status_code == 200, (route, sent.text)
        [picture] = seeing.engine.last.pictures
        keys.add(picture.key)
        prompt = seeing.engine.prompt()
        assert prompt.count("<|image_pad|>") == 8
        if place < 5:
            assert prompt.startswith(f"{user}<|vision_start|>") and "<|vision_end|>what?" in prompt
        else:
            assert "<tool_response>\n<|vision_start|>" in prompt
    assert len(keys) == 1
    counted = seeing.http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": talks[2][1]["messages"]}).json()
    assert counted["input_tokens"] == seeing.http.post("/tokenize", json={"messages": talks[0][1]["messages"]}).json()["count"]


def test_official_clients_send_pictures(seeing):
    image = base64.b64encode(encoded(noise())).decode()
    with seeing.openai() as client:
        content = [{"type": "text", "text": "What does this show?"}, part(f"data:image/png;base64,{image}")]
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": content}])
        first = seeing.engine.last.pictures
        content = [{"type": "input_image", "image_url": f"data:image/png;base64,{image}", "detail": "auto"}]
        client.responses.create(model="default", input=[{"role": "user", "content": content}])
        second = seeing.engine.last.pictures
    with anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0) as client:
        source = {"type": "base64", "media_type": "image/png", "data": image}
        asks = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        client.messages.create(model="default", max_tokens=4, messages=asks)
    assert len(first) == 1 and first[0].key == second[0].key == seeing.engine.last.pictures[0].key


def test_models_say_that_they_see(seeing, shared):
    said = {"seeing": ["text", "image"], "blind": ["text"]}
    for live, inputs in ((seeing, said["seeing"]), (shared, said["blind"])):
        assert live.http.get("/v1/models/tiny").json()["architecture"]["input_modalities"] == inputs
        able = live.http.post("/api/show", json={"model": "tiny"}).json()["capabilities"]
        assert ("vision" in able) == (len(inputs) == 2)


def test_low_detail_takes_a_smaller_picture_and_kinds_are_told_by_content(seeing):
    big = Image.new("RGB", (600, 40), "red")
    lengths = []
    for detail in ("low", "high", "auto"):
        assert ask(seeing, part(uri(encoded(big, "JPEG"), "text/plain"), detail=detail)).status_code == 200
        lengths.append(seeing.engine.last.pictures[0].length)
    assert lengths[0] < lengths[1] == lengths[2]
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert ask(seeing, part(uri(encoded(clear)))).status_code == 200
    assert (load(seeing.engine.last.pictures[0].inputs)["pixel_values"] > 1).all(), "what is transparent becomes white"


def test_grey_of_16_bits_keeps_its_levels():
    grey = Image.fromarray(np.array([[0, 0x4000, 0x8000, 0xFFFF]], np.uint16))
    assert np.asarray(decoded(1, uri(encoded(grey))))[0, :, 0].tolist() == [0, 0x40, 0x80, 0xFF]


def test_a_conversation_that_the_server_keeps_has_its_picture(seeing):
    ask(seeing, "look", part(uri(encoded(noise()))), conversation_id="c")
    assert seeing.chat(conversation_id="c").status_code == 200
    assert len(seeing.engine.last.pictures) == 1


def test_a_stored_response_and_its_background_keep_the_picture(seeing):
    asks = [{"role": "user", "content": [{"type": "input_image", "image_url": uri(encoded(noise()))}]}]
    first = seeing.http.post("/v1/responses", json={"input": asks, "background": True}).json()
    place = f"/v1/responses/{first['id']}"
    wait_until(lambda: seeing.http.get(place).json()["status"] == "completed")
    sent = seeing.engine.last
    more = seeing.http.post("/v1/responses", json={"input": "more", "previous_response_id": first["id"]})
    assert more.status_code == 200, more.text
    assert seeing.engine.last is not sent and seeing.engine.last.pictures == sent.pictures != ()


def _damaged():
    good = encoded(noise())
    frames = [noise(seed=seed) for seed in range(2)]
    bomb = bytearray(good)
    bomb[16:24] = b"\0\0\x27\x10\0\0\x27\x10"  # 10,000 x 10,000
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4)
    return {
        "elsewhere": ("http://else.where/x.png?key=secret", ["picture 1 is at else.where", "none of --image-hosts"]),
        "credentials": ("http://me:secret@localhost/x.png", ["is at localhost with a user name or password"]),
        "file": ("file:///etc/passwd", ["not allowed", "'file:'"]),
        "not base64": ("data:image/png;base64,?", ["base64"]),
        "empty": ("data:image/png;base64,", ["unknown kind"]),
        "svg": (uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), ["SVG", "send PNG"]),
        "unknown": (uri(b"II*\0junkjunk"), ["unknown kind", "send PNG"]),
        "begun": (uri(good[:8] + b"junk"), ["picture 1 is damaged or cut short", "send a whole file"]),
        "cut": (uri(good[:-100]), ["cut short", "send a whole file"]),
        "bomb": (uri(bytes(bomb)), ["more than 64 million pixels", "smaller"]),
        "gif": (uri(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])), ["animated (GIF)", "one frame"]),
        "webp": (uri(encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:])), ["animated (WEBP)"]),
        "shape": (uri(encoded(Image.new("RGB", (4000, 4)))), ["refused by the model's processor", "ratio"]),
    }


@pytest.mark.parametrize("kind", _damaged())
def test_a_bad_picture_is_refused_before_anything_is_queued(seeing, kind):
    url, words = _damaged()[kind]
    before = len(seeing.engine.submitted)
    sent = ask(seeing, "what?", part(url))
    refused(sent, *words)
    assert "secret" not in sent.text
    assert len(seeing.engine.submitted) == before


@pytest.fixture
def web():
    """A web server on this machine; the answers are by path."""
    answers = {}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            status, headers, body = answers[self.path]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value.replace("PORT", str(server.server_port)))
            self.end_headers()
            self.wfile.write(body)
            if "hang" in self.path:
                left.wait(60)

        def log_message(self, *_):
            pass

    left = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield SimpleNamespace(url=f"http://localhost:{server.server_port}", answers=answers)
        left.set()
        server.shutdown()
        thread.join()


def test_pictures_are_fetched_from_named_hosts_at_public_addresses_alone(seeing, web, monkeypatch):
    good = encoded(noise())
    to = {"content-type": "image/png"}
    web.answers |= {
        "/good.png?a=%20b": (200, to, good),
        **{f"/{left}": (302, {"location": f"/{left - 1}"}, b"") for left in range(2, 5)},
        "/1": (307, {"location": "http://LOCALHOST:PORT/good.png?a=%20b"}, b""),
        "/away": (302, {"location": "http://127.0.0.1:PORT/good.png?a=%20b"}, b""),
        "/file": (302, {"location": "file:///etc/passwd"}, b""),
        "/page": (200, {"content-type": "text/html"}, good),
        "/gone": (404, to, good),
        "/cut": (200, {**to, "content-length": "99999"}, good),
        "/large": (200, to, bytes(2000)),
        "/hang": (200, {**to, "content-length": "99999"}, good),
    }
    refused(ask(seeing, part(f"{web.url}/good.png?a= b")), "picture 1 is at localhost", "an address that is not public")
    monkeypatch.setattr(picture_fetch, "is_public", "127.0.0.1".__eq__)
    resolve, asked = asyncio.BaseEventLoop.getaddrinfo, []

    async def resolved(loop, host, *args, **kwargs):
        """`host` has the addresses of 127.0.0.1; another one once it was asked for again (DNS rebinding)."""
        asked.append(host)
        return await resolve(loop, "127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolved)
    sent = ask(seeing, part(uri(good)), part(f"{web.url}/good.png?a= b"), part(f"{web.url}/3"))
    assert sent.status_code == 200, sent.text
    assert len({picture.key for picture in seeing.engine.last.pictures}) == 1 and len(seeing.engine.last.pictures) == 3
    assert asked.count("localhost") == 5, "a name is resolved once for each connection"
    source = {"type": "image", "source": {"type": "url", "url": f"{web.url}/1"}}
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": [source]}]}
    assert seeing.http.post("/v1/messages", json=body).status_code == 200
    before = len(seeing.engine.submitted)
    for path, words in {
        "4": "redirected more than 3 times",
        "away": "is at 127.0.0.1, which is none of --image-hosts",
        "file": "not one of http or https",
        "page": "the content type 'text/html'",
        "gone": "status 404 by localhost",
        "cut": "cannot be fetched",
    }.items():
        refused(ask(seeing, part(uri(good)), part(f"{web.url}/{path}")), "picture 2", words)
    monkeypatch.setattr(picture_fetch, "TIMEOUT_S", 0.1)
    refused(ask(seeing, part(f"{web.url}/hang")), "picture 1 is not there after 0.1 seconds")
    monkeypatch.setattr(picture_fetch, "MAX_BYTES", 1999)
    monkeypatch.setattr(picture_fetch, "TIMEOUT_S", 60.0)
    refused(ask(seeing, part(f"{web.url}/large")), "picture 1 is larger than")
    assert len(seeing.engine.submitted) == before


def test_addresses_that_are_not_public():
    private = "127.0.0.1 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 240.0.0.1"
    private += " ::1 :: fe80::1%eth0 fd00::1 fec0::1 ff02::1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 64:ff9b::a00:1 2002:7f00:1:: 2001::1"
    assert [one for one in private.split() if picture_fetch.is_public(one)] == []
    assert all(map(picture_fetch.is_public, ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"]))


def test_limits_of_number_context_and_texts(seeing):
    good = part(uri(encoded(noise())))
    refused(ask(seeing, *[good] * 33), "at most 32 pictures", "33")
    refused(ask(seeing, "x<|image_pad|>", good), "'<|image_pad|>'", "leave it out")
    sent = ask(seeing, *[part(uri(encoded(noise(64, 64))))] * 9)
    assert (sent.status_code, sent.json()["error"]["code"]) == (400, "context_length_exceeded")
    refused(ask(seeing, part("x", detail="huge")), "'image_url.detail' is 'huge': expected 'auto'")
    refused(ask(seeing, {"type": "image", "image": "x"}), "type 'image' is not supported; send 'text', or 'image_url'")
    refused(seeing.chat(messages=[{"role": "assistant", "content": [good]}]), "image_url")
    sent = seeing.http.post(
        "/v1/responses", json={"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}
    )
    refused(sent, "Invalid 'input': picture 1")
    sent = seeing.http.post("/api/generate", json={"model": "tiny", "prompt": "x", "raw": True, "images": ["aGk="]})
    assert sent.status_code == 400 and "raw" in sent.json()["error"]
    sent = seeing.http.post("/v1/cache/warm", json={"messages": [{"role": "user", "content": [good]}]})
    refused(sent, "not warmed")


def test_models_without_sight_say_why(shared, seeing, tmp_path, monkeypatch):
    good = part(uri(encoded(noise())))
    refused(ask(shared, good), "takes text alone")
    with pytest.raises(
        RequestError, match=r"is at a\.b, and nothing is fetched; start the server with --image-hosts a\.b, or send"
    ):
        check_given([GivenPicture(0, "http://a.b/c", False)], ())
    see(tmp_path, "qwen2_5_vl")
    with running_engine(tmp_path, no_pictures=OFF) as fake, running_server(MODEL, fake) as live:
        refused(ask(live, good), "--vision off")
    for name, text, why in (
        ("unseen_vl", {}, "'unseen_vl'"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "both directions"),
        ("qwen3_vl", {"rope_scaling": {"rope_type": "yarn"}}, "is scaled"),
    ):
        assert why in why_no_pictures({"model_type": name, "vision_config": {"depth": 1}, "text_config": text})
    monkeypatch.setattr("tandem.server.chats.pictures.find_spec", lambda name: None)
    refused(ask(seeing, good), "mlx-tandem[vision]")


SOFT, ROW, TILE, AROUND = "<image_soft_token>", "[IMG]" * 4, "<image>" * 4, "<fake_token_around_image>"

TILES = "<|patch|><|tile_x_separator|><|patch|><|tile_y_separator|><|image|><|patch|>"


@pytest.mark.parametrize(
    ("kind", "shown", "before", "shape"),
    [
        ("gemma3", SOFT * 3, "<start_of_image>", (1, 3, 8, 8)),
        ("mistral3", f"{ROW}[IMG_BREAK]{ROW}", "user\n", (1, 3, 16, 32)),
        ("internvl", "<IMG_CONTEXT>" * 9, "<img>", (3, 3, 8, 8)),
        ("kimi_vl", "<|media_pad|>" * 8, "image:", (32, 3, 4, 4)),
        ("llama4", TILES, "<|image_start|>", (3, 3, 8, 8)),
        ("lfm2-vl", f"{TILE}<|img_row_1_col_2|>{TILE}<|img_thumbnail|><image><image>", "<|img_row_1_col_1|>", (3, 16, 48)),
        ("glm4v", "<|image|>" * 8, "<|begin_of_image|>", (32, 96)),
        ("gemma4", "<|image|>" * 55, "<|image>", (1, 630, 48)),
        ("gemma4_unified", "<|image|>" * 55, "<|image>", (1, 70, 432)),
        ("smolvlm", f"{TILE}{AROUND}<row_1_col_2>{TILE}\n\n{AROUND}<global-img>{TILE}", "<row_1_col_1>", (1, 3, 3, 16, 16)),
    ],
)
def test_a_template_of_parts_alone_and_placeholders_in_rows(tmp_path, kind, shown, before, shape):
    see(tmp_path, kind)
    tokenizer = load_tokenizer(ModelFiles(tmp_path, "tiny"))
    messages = [{"role": "system", "content": "sys"}, {"role": "user", "content": "<mark>x"}]
    processor, options = processor_of(str(tmp_path)), {"tools": [], "variables": {}, "add_generation_prompt": True}
    text = prompt_text(tokenizer, messages, **options, quick=False, marks=Marks("<mark>", processor.placeholder))
    given = [(uri(encoded(noise())), False)]
    tokens, [picture], _ = tokens_with_pictures(tokenizer, processor, 256, messages, given, text)
    assert tokenizer.decode(tokens[picture.start : picture.start + picture.length], False) == shown
    text = tokenizer.decode(tokens, False)
    assert "sys<" in text and before + shown in text
    assert load(picture.inputs)["pixel_values"].shape == shape
    assert (picture.rows, picture.columns) == ((2, 4) if kind == "glm4v" else (0, 0))


def test_a_processor_keeps_its_methods_where_the_model_is_loaded_beside_it(tmp_path):
    see(tmp_path, "lfm2-vl")
    image, before = decoded(1, uri(encoded(noise()))), Processor(str(tmp_path))
    import_lazily()
    from mlx_vlm.models.lfm2_vl import processing_lfm2_vl  # noqa: F401 - replaces methods of transformers' processor

    after = Processor(str(tmp_path))
    assert before.prepare(image).picture == after.prepare(image).picture


@pytest.mark.filterwarnings("ignore:Image.Image.getdata is deprecated")  # mlx-vlm's
@pytest.mark.parametrize("kind", ["kimi_vl", "kimi_k25", "cropped"])
def test_pictures_of_kimi_are_prepared_as_by_mlx_vlm(tmp_path, kind):
    import_lazily()
    from mlx_vlm.models.kimi_k25.processing_kimi_k25 import KimiK25ImageProcessor
    from mlx_vlm.models.kimi_vl.processing_kimi_vl import KimiVLImageProcessor

    settings = {**PROCESSOR["kimi_vl"], "pad_input": kind == "kimi_vl", "merge_kernel_size": [2, 2]}
    theirs, stored = KimiVLImageProcessor(**settings), settings
    if kind == "kimi_k25":
        stored = {name: settings[name] for name in ("patch_size", "image_mean", "image_std")} | {"patch_limit_on_one_side": 9}
        theirs = KimiK25ImageProcessor(**stored, in_token_limit=40, merge_kernel_size=[2, 2])
        stored = {"media_proc_cfg": {**stored, "in_patch_limit": 40, "merge_kernel_size": 2}}
    see(tmp_path, "kimi_vl")
    (tmp_path / "preprocessor_config.json").unlink()
    if kind == "cropped":  # as transformers 5 writes it
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": stored}))
    else:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(stored))
    ours = processor_of(str(tmp_path))
    for size in ((33, 17), (100, 37), (9, 130 if kind == "kimi_k25" else 13)):
        (text, picture), want = ours.prepare(noise(*size)), theirs([noise(*size)])
        found = load(picture.inputs)
        for name in ("pixel_values", "image_grid_hws"):
            assert np.array_equal(found[name], np.array(want[name])), (size, name)
        assert picture.length * 4 == len(found["pixel_values"]) and text == "<|media_pad|>" * picture.length


def test_pictures_of_llama4_are_cut_into_tiles_as_by_transformers(tmp_path, monkeypatch):
    """Its module needs torch, but numpy's functions of these names choose the same grid."""
    names = {"Tensor": np.ndarray, "compiler": SimpleNamespace(disable=lambda call: call)}
    names |= {name: getattr(np, name) for name in ("where", "min", "max", "argmin")}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(**names))
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(functional=None))
    place = find_spec("transformers.models.llama4").submodule_search_locations[0]
    spec = spec_from_file_location("transformers.models.llama4.tiles", f"{place}/image_processing_llama4.py")
    monkeypatch.setitem(sys.modules, spec.name, theirs := module_from_spec(spec))
    spec.loader.exec_module(theirs)
    monkeypatch.undo()
    see(tmp_path, "llama4")
    ours, resolutions = processor_of(str(tmp_path)), np.array(theirs.find_supported_resolutions(4, SizeDict(height=8, width=8)))
    for width, height in ((8, 8), (32, 16), (7, 90), (5, 3), (13, 9), (17, 16), (100, 20)):
        image = noise(width, height)
        rows, columns = (side // 8 for side in theirs.get_best_fit((height, width), resolutions))
        room = min(max(height, 8), rows * 8), min(max(width, 8), columns * 8)
        size = [max(side, 1) for side in theirs.get_max_res_without_distortion((height, width), room)[::-1]]
        canvas = Image.new("RGB", (columns * 8, rows * 8))
        canvas.paste(image.resize(size, Image.Resampling.BILINEAR))
        want = [canvas.crop((x, y, x + 8, y + 8)) for y in range(0, rows * 8, 8) for x in range(0, columns * 8, 8)]
        want += [image.resize((8, 8), Image.Resampling.BILINEAR)] if len(want) > 1 else []
        text, found = ours.prepare(image)
        assert text == Llama4Processor._prompt_split_image(None, (rows, columns), 1) and found.length == len(want)
        pixels = (np.stack([np.asarray(one) for one in want]) / 255 - [0.5, 0.4, 0.3]) / 0.5
        assert np.allclose(load(found.inputs)["pixel_values"], pixels.transpose(0, 3, 1, 2), atol=1e-6)


@pytest.mark.parametrize("count", [40])
def test_damaged_pictures_are_refused_or_read(seeing, count):
    found = Counter()
    for kind, raw in mutants(count):
        sent = ask(seeing, part(uri(raw)), max_tokens=1)
        assert sent.status_code in (200, 400), (kind, raw, sent.text)
        found[kind, sent.status_code] += 1
    assert {code for _, code in found} == {200, 400}
    wait_until(lambda: not seeing.api.live)
    print(dict(found))


def test_a_processor_that_cannot_be_loaded_is_a_400_without_the_models_path(tmp_path):
    see(tmp_path, "gemma3")
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(RequestError, match="processor of pictures cannot be loaded") as found:
        processor_of(str(tmp_path))
    assert str(tmp_path) not in str(found.value) and "its directory" in str(found.value)
