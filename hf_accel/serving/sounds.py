"""Sounds that clients send: the parts of a multipart body, and the samples of a wav file."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from email.message import Message
from email.parser import BytesHeaderParser
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .api_errors import ApiError

MOST_PARTS = 64  # of a multipart body
PCM, FLOATS, EXTENSIBLE = 1, 3, 0xFFFE  # formats of a wav file
MOST_RATE, MOST_CHANNELS = 768_000, 64
ZEROS = 16  # zero crossings on each side of the filter that changes a rate
ROLL_OFF = 0.95  # of the lower rate's highest frequency


# -- multipart bodies ----------------------------------------------------------------------------------


def form_of(body: bytes, content_type: str) -> dict[str, list[bytes]]:
    """Return the values of the fields of a multipart/form-data body. Raises ApiError (400) for any other body."""
    head = Message()
    head["content-type"] = content_type
    boundary = head.get_param("boundary")
    if head.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise ApiError(400, "send the file as multipart/form-data")
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
    if len(pieces) < 2 or not pieces[-1].startswith(b"--") or len(pieces) > MOST_PARTS:
        raise ApiError(400, f"the body is no whole multipart/form-data of up to {MOST_PARTS - 2} parts")
    found: dict[str, list[bytes]] = {}
    for piece in pieces[1:-1]:
        said, blank, value = piece.partition(b"\r\n\r\n")
        disposition = BytesHeaderParser().parsebytes(said.lstrip(b"\r\n")).get("content-disposition", "")
        part = Message()
        part["content-disposition"] = disposition
        name = part.get_param("name", header="content-disposition")
        if not blank or not isinstance(name, str):
            raise ApiError(400, "a part of the multipart body has no name")
        found.setdefault(name, []).append(value)
    return found


# -- samples -------------------------------------------------------------------------------------------


def samples_of(content: bytes, rate: int) -> Tensor:
    """Return the samples of a sound file, mono, at a rate: [n] float32. Raises ApiError (400) for what is none.

    A wav file is read here; any other file by the package soundfile, if it is installed.
    """
    if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
        samples, given = _of_wav(content)
    elif find_spec("soundfile") is not None:
        import soundfile

        try:
            read, given = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
        except Exception as error:  # of its own kinds, for a broken file and for an unknown format
            raise _refused("holds no sound that can be read") from error
        samples = torch.from_numpy(read)
    else:
        raise _refused("is no wav file, and this server reads no other: send wav, or install soundfile there")
    if not len(samples):
        raise _refused("holds no sound")
    return resampled(samples.mean(dim=1), given, rate)


def _of_wav(content: bytes) -> tuple[Tensor, int]:
    """Return the samples [n, channels] of a wav file, and its rate."""
    chunks = dict(_chunks(content))
    if b"fmt " not in chunks or len(chunks[b"fmt "]) < 16 or b"data" not in chunks:
        raise _refused("is a wav file without a format or without data")
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", chunks[b"fmt "][:16])
    if kind == EXTENSIBLE and len(chunks[b"fmt "]) >= 26:
        kind = int.from_bytes(chunks[b"fmt "][24:26], "little")
    if not 1 <= channels <= MOST_CHANNELS or not 1 <= rate <= MOST_RATE:
        raise _refused(f"says that it has {channels} channels and {rate} samples a second")
    data = chunks[b"data"]
    data = data[: len(data) // (channels * bits // 8 or 1) * (channels * bits // 8)]
    if kind == PCM and bits == 8:
        samples = torch.frombuffer(bytearray(data), dtype=torch.uint8).float() / 128 - 1 if data else torch.empty(0)
    elif kind == PCM and bits == 24:
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 3).int() if data else torch.empty(0, 3)
        samples = (whole[:, 0] * 2**8 + whole[:, 1] * 2**16 + whole[:, 2] * 2**24).float() / 2**31
    elif (kind, bits) in SAMPLE_TYPES:
        dtype, largest = SAMPLE_TYPES[kind, bits]
        samples = torch.frombuffer(bytearray(data), dtype=dtype).float() / largest if data else torch.empty(0)
    else:
        raise _refused(f"has samples of {bits} bits in format {kind}, and wav files of PCM and floats are read")
    if not samples.isfinite().all():
        raise _refused("holds samples that are no numbers")
    return samples.view(-1, channels), rate


SAMPLE_TYPES = {
    (PCM, 16): (torch.int16, 2**15),
    (PCM, 32): (torch.int32, 2**31),
    (FLOATS, 32): (torch.float32, 1),
    (FLOATS, 64): (torch.float64, 1),
}


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Iterate over the chunks of a RIFF file. The last one may say that it is longer than it is, as in a stream."""
    place = 12
    while place + 8 <= len(content):
        name, size = content[place : place + 4], int.from_bytes(content[place + 4 : place + 8], "little")
        yield name, content[place + 8 : place + 8 + size]
        place += 8 + size + size % 2


def resampled(samples: Tensor, given: int, rate: int) -> Tensor:
    """Change the rate of samples [n], by a windowed sinc filter that keeps what both rates can hold."""
    if given == rate:
        return samples
    common = math.gcd(given, rate)
    up, down = rate // common, given // common
    cutoff = ROLL_OFF * min(up, down) / down  # as a part of the given rate's highest frequency
    reach = math.ceil(ZEROS / cutoff)
    # Sample k of each `up` new ones lies at k * down / up of the old ones.
    shifts = torch.arange(up, dtype=torch.float64)[:, None] * down / up
    times = torch.arange(-reach, reach + down + 1, dtype=torch.float64)[None] - shifts
    window = torch.cos(times.clamp(-reach, reach) * math.pi / (2 * reach)) ** 2
    kernel = (torch.sinc(times * cutoff) * window * cutoff).float()
    padded = torch.nn.functional.pad(samples[None, None], (reach, reach + down))
    found = torch.nn.functional.conv1d(padded, kernel[:, None], stride=down)
    return found[0].T.reshape(-1)[: math.ceil(len(samples) * up / down)].contiguous()


def _refused(what: str) -> ApiError:
    return ApiError(400, f"file {what}", field="file")


def text_of(values: list[bytes], name: str) -> Any:
    """Return the text of a field that was sent once. Raises ApiError (400) for any other."""
    try:
        (value,) = values
        return value.decode()
    except (ValueError, UnicodeDecodeError) as error:
        raise ApiError(400, f"{name} is to be sent once, as text", field=name) from error
