"""A model as a GGUF file, and quantized by llama.cpp itself: a Llama as save_gguf writes it, or one of gguf_kinds."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_accel.checkpoints.writers.gguf_model import gguf_refusal
from hf_accel.checkpoints.writers.save_gguf import write_gguf

from .gguf_kinds import KINDS, write_kind
from .model_folder import model_file

FILE_TYPES = {"Q8_0": 7, "Q4_0": 2}  # llama_ftype in llama.h


def gguf_refuses(config: PreTrainedConfig) -> str | None:
    """None, or why a model of this config is not measured as GGUF."""
    if config.model_type in KINDS:
        return None
    if config.model_type != "llama":
        return f"only llama, {' and '.join(KINDS)} models are measured as GGUF, this is {config.model_type}"
    return gguf_refusal(config)


def gguf_file(model: PreTrainedModel, kind: str, *, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    """The model as "bf16", "Q8_0" or "Q4_0", in a folder that is removed when the process ends.

    Quantized as llama-quantize does by default: the head of a Q4_0 model gets 6 bits. tokenizer: without one the file
    takes token ids alone; there is one file for all tokenizers.
    """
    name = "{}.gguf" if tokenizer is None else "{}-with-tokenizer.gguf"
    return model_file(
        model,
        name.format(kind),
        plain=name.format("bf16"),
        write=partial(write, tokenizer=tokenizer),
        quantize=partial(quantize, kind=kind),
    )


def quantize(source: Path, target: Path, kind: str) -> None:
    import llama_cpp

    from .llama_cpp_model import start

    start()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = FILE_TYPES[kind], torch.get_num_threads()
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), parameters):
        raise RuntimeError(f"llama.cpp could not quantize {source} to {kind}")


def write(model: PreTrainedModel, path: Path, *, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Matrices in bfloat16, norms in float32."""
    if model.config.model_type in KINDS:
        return write_kind(model, path)
    write_gguf(model, path, tokenizer=tokenizer, dtype=torch.bfloat16)
