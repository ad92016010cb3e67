"""/v1/audio/transcriptions: what was said in a sound, by Whisper's own generate() over a patched model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from torch import Tensor
from transformers import AutoProcessor
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from ...checkpoints.load import load
from ...estimate.shapes import class_of, read_config
from ..api_errors import ApiError
from ..bodies import read_body
from ..formats import Named
from ..limits import Limits
from ..rows import RowService
from ..sounds import samples_of

PART_SECONDS = 30  # of sound that the encoder reads at a time
MOST_SOUNDS = 8  # sounds of a pass
MOST_SOUND_BYTES = 25 * 2**20  # of a body, as in OpenAI's API, unless a limit was given
FORM = "multipart/form-data"
MOST_FIELDS = 64
NUMBERS = ("temperature",)


class TranscriptionBody(Named):
    """POST /v1/audio/transcriptions. file: the sound."""

    media_type: ClassVar[str] = FORM

    file: bytes
    language: Annotated[str, Field(max_length=32)] | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "verbose_json"] | None = None
    temperature: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    timestamp_granularities: list[Literal["segment"]] | None = None
    stream: Literal["false"] | None = None


@dataclass(frozen=True)
class Sound:
    """A sound with what is asked of it. language: a code as "en"; None is to be found out."""

    samples: Tensor
    rate: int
    language: str | None
    prompt: str | None
    temperature: float
    times: bool

    def __len__(self) -> int:
        """Return the tokens of the encoder for 30 seconds; a longer sound is computed part after part."""
        return 1500

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate

    @property
    def is_long(self) -> bool:
        return self.seconds > PART_SECONDS


class Transcriber:
    """Computes what was said. Sounds of one part that ask for the same are computed together."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor, self.tokenizer = model, processor, processor.tokenizer
        self.max_tokens = int(model.config.max_target_positions)
        self.takes_batches = True
        config = model.generation_config
        self.is_multilingual = bool(getattr(config, "is_multilingual", False))
        self.codes = {token[2:-2]: number for token, number in (getattr(config, "lang_to_id", None) or {}).items()}

    @torch.no_grad()
    def compute(self, sounds: Sequence[Sound]) -> list[dict[str, Any]]:
        """Return the language, the tokens and the segments of each sound."""
        features = [self._features(sound) for sound in sounds]
        languages = [sound.language or self._language(given) for sound, given in zip(sounds, features, strict=True)]
        groups: dict[Any, list[int]] = {}
        for place, (sound, language) in enumerate(zip(sounds, languages, strict=True)):
            alone = place if sound.is_long or sound.temperature else None
            groups.setdefault((language, sound.prompt, sound.times, sound.temperature, alone), []).append(place)
        found: list[dict[str, Any]] = [{} for _ in sounds]
        for places in groups.values():
            first = sounds[places[0]]
            texts = self._said([features[place] for place in places], first, languages[places[0]])
            for place, text in zip(places, texts, strict=True):
                found[place] = {**text, "language": languages[place]}
        return found

    def _features(self, sound: Sound) -> dict[str, Tensor]:
        """Return what the encoder reads: 30 seconds, or all of a longer sound with a mask of its frames."""
        more = {"truncation": False, "padding": "longest"} if sound.is_long else {}
        made = self.processor.feature_extractor(
            sound.samples.numpy(), sampling_rate=sound.rate, return_tensors="pt", return_attention_mask=sound.is_long,
            **more,
        )  # fmt: skip
        dtype, device = self.model.dtype, self.model.device
        return {name: (one.to(dtype) if one.is_floating_point() else one).to(device) for name, one in made.items()}

    def _language(self, features: Mapping[str, Tensor]) -> str | None:
        if not self.is_multilingual:
            return None
        frames = 2 * int(self.model.config.max_source_positions)
        number = int(self.model.detect_language(input_features=features["input_features"][..., :frames])[0])
        return next(code for code, one in self.codes.items() if one == number)

    def _said(self, features: list[dict[str, Tensor]], asked: Sound, language: str | None) -> list[dict[str, Any]]:
        """Return the text of sounds that ask for the same, by one call of generate()."""
        given: dict[str, Any] = {name: torch.cat([one[name] for one in features]) for name in features[0]}
        if self.is_multilingual:
            given |= {"language": language, "task": "transcribe"}
        if asked.prompt:
            given["prompt_ids"] = self.processor.get_prompt_ids(asked.prompt, return_tensors="pt").to(
                self.model.device
            )
        if asked.temperature:
            given |= {"do_sample": True, "temperature": asked.temperature}
        output = self.model.generate(
            **given, return_timestamps=asked.times or asked.is_long, return_segments=asked.times or asked.is_long
        )
        if not asked.times and not asked.is_long:
            return [self._one(row, ()) for row in output]
        return [self._one(row, parts) for row, parts in zip(output["sequences"], output["segments"], strict=True)]

    def _one(self, row: Tensor, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        segments = [
            {
                "id": index, "start": round(float(part["start"]), 2), "end": round(float(part["end"]), 2),
                "text": self._text(part["tokens"]), "tokens": part["tokens"].tolist(),
            }
            for index, part in enumerate(parts)
        ]  # fmt: skip
        return {"text": self._text(row).strip(), "segments": segments}

    def _text(self, tokens: Tensor) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def transcribes(path: str) -> bool:
    """Return whether a checkpoint says what is said in a sound, by the generate() of Whisper."""
    if path.endswith(".gguf"):
        return False
    kind = class_of(read_config(path))
    return isinstance(kind, type) and issubclass(kind, WhisperGenerationMixin)


def load_transcriber(path: str, **keywords: Any) -> Transcriber:
    """Load and patch a checkpoint of Whisper, with its processor. keywords: those of hf_accel.load()."""
    return Transcriber(load(path, **keywords).eval(), AutoProcessor.from_pretrained(path))


class Transcriptions:
    """Answers with what was said in the sound of a multipart body."""

    body_type: ClassVar[type[Named]] = TranscriptionBody

    def __init__(self, service: RowService) -> None:
        self.service = service

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        """Answer a request. Raises ApiError for what is not served."""
        ignores = self.service.limits.ignore_unknown_fields
        asked: TranscriptionBody = read_body(TranscriptionBody, body, ignore_unknown=ignores)
        self.service.require_ready(1)
        maker = self.service.encoder
        rate = int(maker.processor.feature_extractor.sampling_rate)
        samples = await asyncio.to_thread(samples_of, asked.file, rate)
        times = asked.response_format == "verbose_json"
        sound = Sound(samples, rate, self._code(asked), asked.prompt, asked.temperature or 0.0, times)
        (found,) = await self.service.compute([sound])
        return self._written(found, asked, sound)

    def _code(self, asked: TranscriptionBody) -> str | None:
        if asked.language is None:
            return None
        name = asked.language.lower()
        code = TO_LANGUAGE_CODE.get(name, name)
        maker = self.service.encoder
        known = maker.codes if maker.is_multilingual else {"en": 0}
        if code not in known:
            raise ApiError(400, f"language={asked.language!r} is none that the model knows", field="language")
        return code

    def _written(self, found: dict[str, Any], asked: TranscriptionBody, sound: Sound) -> Response:
        if asked.response_format == "text":
            return PlainTextResponse(found["text"] + "\n")
        if asked.response_format != "verbose_json":
            return JSONResponse({"text": found["text"]})
        language = LANGUAGES.get(found["language"] or "en")
        head = {"task": "transcribe", "language": language, "duration": round(sound.seconds, 2), "text": found["text"]}
        return JSONResponse({**head, "segments": found["segments"]})


async def form_body(request: Request) -> dict[str, Any]:
    """Return the fields of a multipart body, as JSON would have them. Raises ApiError (400) for other bodies."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise ApiError(400, f"send the file as {FORM}")
    parser = MultiPartParser(request.headers, request.stream(), max_files=1, max_fields=MOST_FIELDS)
    parser.spool_max_size = MOST_SOUND_BYTES * 1000  # no sound is written to the disk; bodies are bounded elsewhere
    body: dict[str, Any] = {}
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise ApiError(400, f"the body is no {FORM} that can be read: {error.message}") from error
    parts = [(name, one if isinstance(one, str) else await one.read()) for name, one in form.multi_items()]
    await form.close()
    for name, value in parts:
        if name.endswith("[]"):  # how OpenAI's client sends lists
            body.setdefault(name[:-2], []).append(value)
        elif name in body:
            raise ApiError(400, f"{name[:100]} is to be sent once", field=name[:100])
        else:
            body[name] = _number(value) if name in NUMBERS else value
    return {name: one for name, one in body.items() if one != ""}


def _number(text: Any) -> Any:
    try:
        return float(text)
    except ValueError:
        return text  # which the check of the body refuses


def sound_service(path: str, name: str, limits: Limits, **keywords: Any) -> Callable[[float], RowService]:
    """Load a checkpoint of Whisper, and return what starts its service.

    Its bodies may have 25 MiB unless a limit was given.
    """
    if limits.max_body_bytes == Limits.max_body_bytes:
        limits = Limits(**{**vars(limits), "max_body_bytes": MOST_SOUND_BYTES})
    transcriber = load_transcriber(path, **keywords)
    return lambda share: RowService(transcriber, name, limits, most_rows=MOST_SOUNDS)
