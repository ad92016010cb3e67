"""/v1/audio/transcriptions over HTTP says what transformers' own generate() of the same model says."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import soundfile
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from hf_accel.serving.api_errors import ApiError
from hf_accel.serving.sounds import samples_of

from .running import Running, serving
from .whisper import RATE, save_whisper, tone, wav

SOUNDS = {"short": tone(3.0), "other": tone(2.0, 800.0), "long": tone(41.0, 300.0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whisper")
    save_whisper(path)
    return path


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    with serving(folder, deterministic=False) as running:  # its convolutions are torch's
        yield running


@pytest.fixture(scope="module")
def stock(folder: Path) -> tuple[Any, Any]:
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), WhisperProcessor.from_pretrained(folder)


@torch.no_grad()
def said(stock: tuple[Any, Any], samples: Tensor, *, prompt: str | None = None, **given: Any) -> Any:
    """What generate() says, with its segments if there are any."""
    model, processor = stock
    samples = samples.mul(32767).round().div(32768)  # as a wav file holds them
    is_long = len(samples) > 30 * RATE
    more: dict[str, Any] = {"truncation": False, "padding": "longest"} if is_long else {}
    inputs = processor.feature_extractor(
        samples.numpy(), sampling_rate=RATE, return_tensors="pt", return_attention_mask=is_long, **more
    )
    given |= {"return_timestamps": True} if is_long else {}
    given |= {} if prompt is None else {"prompt_ids": processor.get_prompt_ids(prompt, return_tensors="pt")}
    segments = bool(given.get("return_timestamps"))
    output = model.generate(**inputs, task="transcribe", return_segments=segments, **given)
    row = output["sequences"][0] if segments else output[0]
    text = processor.tokenizer.decode(row, skip_special_tokens=True).strip()
    return (text, output["segments"][0]) if segments else (text, [])


@pytest.mark.covering(1)
@pytest.mark.parametrize("sound", ["short", "long"])
@pytest.mark.parametrize("language", ["en", "german", None])
def test_text(client: openai.OpenAI, stock: tuple[Any, Any], sound: str, language: Any) -> None:
    samples = SOUNDS[sound]
    given = {} if language is None else {"language": language}
    answer = client.audio.transcriptions.create(model="tiny", file=("a.wav", wav(samples)), **given)
    known = {"german": "de"}.get(language, language)
    assert answer.text == said(stock, samples, **({} if known is None else {"language": known}))[0]
    assert len(answer.text) > 3


@pytest.mark.parametrize("sound", ["short", "long"])
def test_segments(client: openai.OpenAI, stock: tuple[Any, Any], sound: str) -> None:
    samples = SOUNDS[sound]
    answer = client.audio.transcriptions.create(
        model="tiny", file=("a.wav", wav(samples)), language="en", response_format="verbose_json",
        timestamp_granularities=["segment"],
    )  # fmt: skip
    text, segments = said(stock, samples, language="en", return_timestamps=True)
    assert answer.text == text and answer.language == "english" and answer.segments
    assert float(answer.duration) == pytest.approx(len(samples) / RATE, abs=0.01)
    found = [(one.start, one.end, one.tokens) for one in answer.segments]
    wanted = [(float(one["start"]), float(one["end"]), one["tokens"].tolist()) for one in segments]
    assert [one[2] for one in found] == [one[2] for one in wanted]
    assert [one[:2] for one in found] == [pytest.approx(one[:2], abs=0.011) for one in wanted]


def test_plain_text_and_a_prompt(running: Running, stock: tuple[Any, Any]) -> None:
    data = {"response_format": "text", "prompt": "abc", "language": "en"}
    files = {"file": ("a.wav", wav(SOUNDS["short"]), "audio/wav")}
    answer = httpx.post(f"{running.url}/audio/transcriptions", data=data, files=files, timeout=60)
    assert answer.status_code == 200, answer.text
    wanted = said(stock, SOUNDS["short"], language="en", prompt="abc")[0]
    assert answer.text == wanted + "\n" and answer.headers["content-type"].startswith("text/plain")
    assert wanted != said(stock, SOUNDS["short"], language="en")[0]


def test_sounds_at_once(running: Running, client: openai.OpenAI, stock: tuple[Any, Any]) -> None:
    """Those of one pass that ask for the same are one batch, and each is answered as if it were alone."""
    kinds = [(sound, language) for sound in SOUNDS for language in ("en", "de")]
    wanted = {(sound, language): said(stock, SOUNDS[sound], language=language)[0] for sound, language in kinds}
    before = running.stats["passes"]

    def ask(kind: tuple[str, str]) -> str:
        file = ("a.wav", wav(SOUNDS[kind[0]]))
        return client.audio.transcriptions.create(model="tiny", file=file, language=kind[1]).text

    asked = [*kinds, *[kind for kind in kinds if kind[0] != "long"]]
    with ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(ask, asked)) == [wanted[kind] for kind in asked]
    assert running.stats["passes"] - before < len(asked)


FORM = {"file": ("a.wav", wav(SOUNDS["other"]))}
BAD: dict[str, dict[str, Any]] = {
    "no file": {"data": {"language": "en"}, "files": {"other": ("a", b"x")}},
    "no multipart": {"json": {"language": "en"}},
    "a text": {"files": {"file": ("a.wav", b"no sound")}},
    "empty": {"files": {"file": ("a.wav", b"")}},
    "no samples": {"files": {"file": ("a.wav", wav(tone(0.0)))}},
    "half a head": {"files": {"file": ("a.wav", wav(tone(0.1))[:30])}},
    "another language": {"files": FORM, "data": {"language": "klingon"}},
    "a language that the model lacks": {"files": FORM, "data": {"language": "fr"}},
    "words": {"files": FORM, "data": {"timestamp_granularities[]": ["word"]}},
    "subtitles": {"files": FORM, "data": {"response_format": "srt"}},
    "too warm": {"files": FORM, "data": {"temperature": "2"}},
    "no number": {"files": FORM, "data": {"temperature": "warm"}},
    "a stream": {"files": FORM, "data": {"stream": "true"}},
    "unknown": {"files": FORM, "data": {"no_such": "1"}},
    "another model": {"files": FORM, "data": {"model": "other"}},
    "twice": {"files": FORM, "data": {"language": ["en", "de"]}},
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_what_is_refused(running: Running, body: dict[str, Any]) -> None:
    before = running.stats["requests"]
    answer = httpx.post(f"{running.url}/audio/transcriptions", **body)
    assert answer.status_code in (400, 404) and answer.json()["error"]["message"], answer.text
    assert running.stats["requests"] == before


def test_the_description(running: Running) -> None:
    paths = httpx.get(f"{running.root}/openapi.json").json()["paths"]
    content = paths["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]
    assert list(content) == ["multipart/form-data"] and "/v1/embeddings" not in paths


# -- files and forms -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [{"bits": 8}, {"bits": 16}, {"bits": 24}, {"bits": 32}, {"bits": 32, "floats": True},
     {"bits": 64, "floats": True}, {"bits": 16, "channels": 2}],
    ids=str,
)  # fmt: skip
def test_wav_files(form: dict[str, Any]) -> None:
    samples = tone(0.05)
    allowed = 2 ** (1 - form["bits"]) + 1e-6 if not form.get("floats") else 1e-6
    torch.testing.assert_close(samples_of(wav(samples, **form), RATE), samples, rtol=2**-6, atol=2 * allowed)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_rates(rate: int) -> None:
    """A tone stays what it is, but for its ends, where there is nothing before and after it."""
    seconds, pitch = 0.5, 300.0
    found = samples_of(wav(tone(seconds, pitch, rate), rate), RATE)
    wanted = tone(seconds, pitch)
    assert abs(len(found) - len(wanted)) <= 1
    inner = slice(RATE // 50, len(wanted) - RATE // 50)
    torch.testing.assert_close(found[inner], wanted[inner], atol=3e-3, rtol=0)


def test_a_rate_holds_no_higher_tone() -> None:
    """11 kHz is above what 16,000 samples a second hold, and is left out in place of turning into a lower tone."""
    times = torch.arange(24_000) / 48_000
    sound = wav(torch.sin(2 * torch.pi * 11_000 * times), 48_000)
    assert float(samples_of(sound, RATE)[800:-800].abs().max()) < 0.02


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3"])
def test_other_files(kind: str) -> None:
    file, sound = io.BytesIO(), tone(1.0)
    soundfile.write(file, sound.numpy(), RATE, format=kind)
    found, inner = samples_of(file.getvalue(), RATE), slice(RATE // 4, 3 * RATE // 4)
    assert torch.nn.functional.cosine_similarity(found[inner], sound[inner], dim=0) > 0.99


@pytest.mark.parametrize(
    ("rate", "seconds", "words"), [(8, 100, "8 samples a second"), (1000, 7201, "more than 2 hours")], ids=str
)
def test_a_small_file_is_no_long_sound(rate: int, seconds: int, words: str) -> None:
    file = io.BytesIO()
    soundfile.write(file, torch.zeros(rate * seconds).numpy(), rate, format="FLAC" if rate >= 1000 else "WAV")
    assert len(file.getvalue()) < 2**20
    with pytest.raises(ApiError, match=words):
        samples_of(file.getvalue(), RATE)


def test_forms(running: Running, client: openai.OpenAI) -> None:
    """A sound holds what stands between parts, and bodies that are no whole form are refused."""
    file = wav(SOUNDS["short"]) + b"LIST\x0c\0\0\0\r\n--b\r\n\r\n--"
    given = {"model": "tiny", "language": "en"}
    assert client.audio.transcriptions.create(file=('a"b.wav', file), **given).text == (
        client.audio.transcriptions.create(file=("a.wav", wav(SOUNDS["short"])), **given).text
    )
    form = "multipart/form-data; boundary=b"
    for body, kind in (
        (b"", form), (b"--b\r\n", form), (b"x", "multipart/form-data"), (b"x", "text/plain"),
        (b"--b\r\n\r\nx\r\n--b--", form),
    ):  # fmt: skip
        url = f"{running.url}/audio/transcriptions"
        assert httpx.post(url, content=body, headers={"content-type": kind}).status_code == 400, body
