"""Sounds that clients send: the samples of a file."""

from __future__ import annotations

import io

import torch
from torch import Tensor

from .api_errors import ApiError

MOST_SECONDS = 2 * 3600  # of a sound: a small file of silence can hold years
LEAST_RATE = 1000  # samples a second; at fewer a small file is a long sound too
FRAMES_AT_A_TIME = 2**18  # frames that are read at a time, of all channels
MOST_CHANNELS = 64


def samples_of(content: bytes, rate: int) -> Tensor:
    """Return the samples of a sound file, mono, at a rate: [n] float32. Raises ApiError (400) for what is none.

    libsndfile reads it (wav, FLAC, Ogg, MP3, ...), and libsoxr changes its rate; with the first sound they are loaded.
    """
    import soundfile
    import soxr

    try:
        file = soundfile.SoundFile(io.BytesIO(content))
    except (soundfile.LibsndfileError, RuntimeError, TypeError) as error:
        raise _refused("holds no sound that can be read; send wav, FLAC, Ogg or MP3") from error
    with file:
        given, channels = file.samplerate, file.channels
        if not 1 <= channels <= MOST_CHANNELS or given < LEAST_RATE:
            raise _refused(f"says that it has {channels} channels and {given} samples a second")
        stream, parts, frames, last = soxr.ResampleStream(given, rate, 1), [], 0, False
        while not last:
            try:
                block = file.read(FRAMES_AT_A_TIME, dtype="float32", always_2d=True)
            except (soundfile.LibsndfileError, RuntimeError) as error:
                raise _refused("holds a sound that is broken") from error
            frames, last = frames + len(block), len(block) < FRAMES_AT_A_TIME
            if frames > MOST_SECONDS * given:
                raise _refused(f"holds more than {MOST_SECONDS // 3600} hours of sound")
            mono = block.mean(axis=1)
            parts.append(torch.from_numpy(mono if given == rate else stream.resample_chunk(mono, last=last)))
    samples = torch.cat(parts)
    if not frames:
        raise _refused("holds no sound")
    if not samples.isfinite().all():
        raise _refused("holds samples that are no numbers")
    return samples


def _refused(what: str) -> ApiError:
    return ApiError(400, f"file {what}", field="file")
