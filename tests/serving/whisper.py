"""A small Whisper with random weights as a folder, and wav files."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

RATE = 16_000
LETTERS = [chr(code) for code in range(33, 127)] + ["\u0120", "\u00e9"]
SPECIAL = [
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
    "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
]  # fmt: skip
TIMES = [f"<|{step / 50:.2f}|>" for step in range(1501)]
LONGEST = 24  # tokens of an answer


def save_whisper(path: Path) -> None:
    vocabulary = {word: index for index, word in enumerate([*LETTERS, *SPECIAL])}
    tokenizer: Any = WhisperTokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    tokenizer.add_tokens(TIMES)
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in SPECIAL}
    end = ids["<|endoftext|>"]
    torch.manual_seed(3)
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_target_positions=64, init_std=0.3,
            decoder_start_token_id=ids["<|startoftranscript|>"], pad_token_id=end, eos_token_id=end, bos_token_id=end,
        )
    )  # fmt: skip
    with torch.no_grad():  # words are likelier than times
        model.model.decoder.embed_tokens.weight[len(tokenizer) - len(TIMES) :] *= 0.3
    settings = {
        "lang_to_id": {word: ids[word] for word in ("<|en|>", "<|de|>")},
        "task_to_id": {word[2:-2]: ids[word] for word in ("<|translate|>", "<|transcribe|>")},
        "no_timestamps_token_id": ids["<|notimestamps|>"], "is_multilingual": True, "max_initial_timestamp_index": 50,
        "prev_sot_token_id": ids["<|startofprev|>"], "max_length": LONGEST, "begin_suppress_tokens": [end],
        "decoder_start_token_id": ids["<|startoftranscript|>"], "_from_model_config": False,
    }  # fmt: skip
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(path)
    WhisperProcessor(WhisperFeatureExtractor(feature_size=80), tokenizer).save_pretrained(path)


def tone(seconds: float, pitch: float = 440.0, rate: int = RATE) -> Tensor:
    times = torch.arange(int(seconds * rate)) / rate
    return 0.5 * torch.sin(2 * math.pi * pitch * times * (1 + 0.1 * times))


def wav(samples: Tensor, rate: int = RATE, *, bits: int = 16, channels: int = 1, floats: bool = False) -> bytes:
    """The bytes of a wav file, each channel with the same samples."""
    samples = samples[:, None].expand(-1, channels).reshape(-1)
    if floats:
        data = samples.double().numpy().astype("<f8" if bits == 64 else "<f4").tobytes()
    else:
        whole = (samples.double() * (2 ** (bits - 1) - 1)).round().long().tolist()
        shift = 128 if bits == 8 else 0
        data = b"".join((one + shift).to_bytes(bits // 8, "little", signed=bits != 8) for one in whole)
    size = channels * bits // 8
    form = struct.pack("<HHIIHH", 3 if floats else 1, channels, rate, rate * size, size, bits)
    body = b"fmt " + struct.pack("<I", len(form)) + form + b"LIST\x02\x00\x00\x00ab"
    body += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body
