"""Images in chats: a model with a tower answers as generate() does, and what is no image is refused."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoTokenizer, LlavaProcessor

from hf_accel.serving.api_errors import ApiError
from hf_accel.serving.images import read_images
from hf_accel.serving.limits import Limits
from hf_accel.serving.service import ModelService

from ..families.models import enliven
from .running import CHAT_TEMPLATE, SHIPPED, WAIT, Running, serving

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "CLIPImageProcessorPil"), reason="images need torchvision before transformers 5.20"
)

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}"
)
SIDE = 16
NEW_TOKENS = 6


def save_seer(path: Path) -> None:
    """A tiny LLaVA with random weights, and its processor."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": 8, "projection_dim": 32, "model_type": "clip_vision_model",
    }  # fmt: skip
    text = {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config)
    enliven(model, 2.0)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SIDE)
    LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(path)  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("seer")
    save_seer(path)
    limits = Limits(max_images=2, max_image_pixels=900)
    with serving(path, chat_template=None, deterministic=False, limits=limits) as running:
        yield running


def picture(color: str, size: tuple[int, int] = (20, 18)) -> Image.Image:
    return Image.new("RGB", size, color)


def url(image: Image.Image, kind: str = "png") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def question(*images: str, words: str = "import ") -> list[Any]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": one}} for one in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": words}]}]


def expected(running: Running, images: list[Image.Image], words: str = "import ") -> str:
    """What generate() makes of what transformers' processor makes of the chat."""
    service = running.service
    parts = [{"type": "image"}] * len(images) + [{"type": "text", "text": words}]
    text = service.processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    given = service.processor(text=[text], images=[images] if images else None, return_tensors="pt")
    out = service.engine.model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)
    found: str = service.tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def asked(client: openai.OpenAI, messages: list[Any]) -> Any:
    return client.chat.completions.create(model="tiny", messages=messages, max_tokens=NEW_TOKENS, temperature=0)


def test_answers_are_those_of_generate(running: Running, client: openai.OpenAI) -> None:
    red, blue = picture("red"), picture("blue")
    one, other, both = (asked(client, question(*map(url, some))) for some in ([red], [blue], [red, blue]))
    text = asked(client, question())
    found = [answer.choices[0].message.content for answer in (one, other, both, text)]
    assert found == [expected(running, some) for some in ([red], [blue], [red, blue], [])]
    assert found[0] != found[1]
    assert both.usage.prompt_tokens == one.usage.prompt_tokens + 4  # tokens of an image


def test_words_that_stand_for_an_image_too_many(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"refuses the messages: .*image"):
        asked(client, question(url(picture("red")), words="<image> import "))
    assert asked(client, question()).choices[0].message.content  # it ends no other request


def test_a_processor_that_stops_in_the_middle_ends_its_request() -> None:
    """No future holds a StopIteration: its request would wait for ever."""
    service: Any = SimpleNamespace(_tokenizing=ThreadPoolExecutor(1))
    with pytest.raises(ValueError, match="an image, or for another value, that was not sent"):
        asyncio.run(asyncio.wait_for(ModelService.in_thread(service, lambda: next(iter(()))), WAIT))


def test_other_forms(running: Running, client: openai.OpenAI) -> None:
    """A stream, several choices, and /v1/responses."""
    red = url(picture("red"), "bmp")
    wanted = expected(running, [picture("red")])
    create: Any = client.chat.completions.create
    settings = {"model": "tiny", "messages": question(red), "max_tokens": NEW_TOKENS, "temperature": 0}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in create(**settings, stream=True)) == wanted
    assert [choice.message.content for choice in create(**settings, n=2).choices] == [wanted] * 2
    parts: list[Any] = [{"type": "input_image", "image_url": red}, {"type": "input_text", "text": "import "}]
    answer = client.responses.create(
        model="tiny", input=[{"role": "user", "content": parts}], max_output_tokens=NEW_TOKENS, temperature=0
    )
    assert answer.output_text == wanted


BROKEN = [
    ([url(picture("red"))[:60] + "!"], "no base64"),
    (["data:image/png;base64,AAAA"], "no image that can be read"),
    (["data:image/png,AAAA"], "not in base64"),
    (["file:///etc/passwd"], "no data URL"),
    (["/etc/passwd"], "no data URL"),
    (["http://127.0.0.1:1/x.png"], "does not fetch images from '127.0.0.1'"),
    ([url(picture("red", (40, 40)))], "40 x 40 pixels"),
    ([url(picture("red"))] * 3, "takes 2 a request"),
]


@pytest.mark.parametrize(("urls", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_what_is_no_image_is_refused(client: openai.OpenAI, urls: list[str], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as error:
        asked(client, question(*urls))
    assert error.value.param == "messages"


def test_a_model_without_a_tower_takes_no_images() -> None:
    with serving(chat_template=CHAT_TEMPLATE) as running:
        body = {"messages": question(url(picture("red"))), "max_tokens": 2}
        answer = httpx.post(f"{running.url}/chat/completions", json=body, timeout=WAIT)
    assert answer.status_code == 400 and "takes no images" in answer.json()["error"]["message"]


class Pictures(BaseHTTPRequestHandler):
    """Answers /ok with an image, /far with a redirect to it, and /long with more bytes than are taken."""

    def do_GET(self) -> None:
        file = io.BytesIO()
        picture("red").save(file, "png")
        self.send_response(302 if self.path == "/far" else 200)
        if self.path == "/far":
            self.send_header("Location", "/ok")
        self.end_headers()
        self.wfile.write(b"x" * 5000 if self.path == "/long" else file.getvalue())

    def log_message(self, *_: Any) -> None:
        pass


def test_addresses_of_hosts_that_were_allowed() -> None:
    server = HTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        root = f"http://127.0.0.1:{server.server_port}"
        for hosts in (("127.0.0.1",), ("*",)):
            limits = Limits(image_hosts=hosts, max_body_bytes=1000)
            (image,) = read_images([f"{root}/ok"], limits)
            assert image.getpixel((0, 0)) == (255, 0, 0)
            for path, reason in (("far", "could not be fetched"), ("long", "more than 1000 bytes")):
                with pytest.raises(ApiError, match=reason):
                    read_images([f"{root}/{path}"], limits)
        with pytest.raises(ApiError, match="does not fetch"):
            read_images([f"{root}/ok"], Limits(image_hosts=("localhost",)))
    finally:
        server.shutdown()
        server.server_close()
