"""hf_accel.load: the keywords of patch() and of from_pretrained(), sorted."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..config import parse_weights
from ..config.patch_config import (
    DEFAULTS,
    Attention,
    Cache,
    KeepOriginal,
    PatchConfig,
    ProcessGroup,
    Speculative,
    Weights,
    takes_patch_keywords,
)
from ..errors import UnsupportedError
from ..keywords import MEANT_BY_PATCH, Default, check_keywords, one_of
from .loading import HUB_KEYWORDS, load_checkpoint

OLD_BITS = {"load_in_4bit": (4, "int4"), "load_in_8bit": (8, "int8")}  # bitsandbytes' old keywords, and ours for them
KNOWN_KEYWORDS = (
    *DEFAULTS,
    *HUB_KEYWORDS,
    *OLD_BITS,
    "dtype",
    "device_map",
    "attn_implementation",
    "distributed_config",
)


@takes_patch_keywords
def load(
    path: str | os.PathLike[str],
    *,
    weights: Weights = "int8",
    attention: Attention = "auto",
    cache: Cache = "paged",
    fuse: bool = True,
    speculative: Speculative = None,
    keep_original: KeepOriginal = "auto",
    deterministic: bool = False,
    context_parallel: ProcessGroup | None = None,
    config: PatchConfig | PreTrainedConfig | None = None,
    **keywords: Any,
) -> PreTrainedModel:
    """Load a checkpoint and patch it: a float one, one of ours, or one that another program quantized.

    path: a folder, a name on the Hub or a .gguf file. keywords: those of hf_accel.patch() and of
    from_pretrained(); load_in_4bit=True is weights="int4", load_in_8bit=True is weights="int8". compressed-tensors
    (INT4, INT8, FP8, NVFP4A16), GPTQ (4 and 8 bits, also with act-order), AWQ, FP8 in blocks (DeepSeek, Qwen),
    MXFP4 (gpt-oss) and GGUF (Llama and Qwen; all types of blocks from Q2_K to Q8_0) are run in the bits that they
    have: nothing is rounded again, and nothing but the embedding of a GGUF file is held in floating point. Leave
    weights= out for them, except for MXFP4: there it says how the rest is held, which the file has in bfloat16. A
    checkpoint of another quantizer, such as bitsandbytes, is loaded as transformers does, and everything but its
    Linears is patched.
    With distributed_config= a float model is loaded split, and then patched.

    The class is the one that config.json names under architectures. Raises UnsupportedError for an unknown keyword and
    for a layout that is not read, HfAccelError, before anything is loaded, for files that do not hold the weights that
    config.json describes.
    """
    written = {
        "weights": weights, "attention": attention, "cache": cache, "fuse": fuse, "speculative": speculative,
        "keep_original": keep_original, "deterministic": deterministic, "context_parallel": context_parallel,
        "config": config,
    }  # fmt: skip
    ours = {name: value for name, value in written.items() if not isinstance(value, Default)}
    if not isinstance(ours.get("config"), PatchConfig | None):
        keywords["config"] = ours.pop("config")
    _read_old_bits(ours, keywords)
    meant = {**MEANT_BY_PATCH, "tokenizer": f"{_tokenizer_call(path)} for the tokenizer"}
    if "quantization_config" in keywords:
        check_keywords("load()", ["quantization_config"], KNOWN_KEYWORDS, meant)
    try:
        return load_checkpoint(path, ours, keywords)
    except TypeError as error:  # the model's class is the last to be asked, before any weight is read
        unknown = re.search(r"__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
        if unknown is not None and unknown[1] in keywords:
            check_keywords("load()", [unknown[1]], KNOWN_KEYWORDS, meant)
        raise


def _read_old_bits(ours: dict[str, Any], keywords: dict[str, Any]) -> None:
    """Replace load_in_4bit= and load_in_8bit= by weights=; UnsupportedError if weights= is given and differs."""
    for name, (bits, word) in OLD_BITS.items():
        asked = keywords.pop(name, False)
        one_of(name, asked, (True, False))
        config = ours.get("config")
        if not asked:
            continue
        named = {"weights": config.weights} if config is not None and "weights" in config.explicit else {}
        weights = {**named, **ours}.get("weights", word)
        parsed = parse_weights(weights)
        if parsed is None or parsed.bits != bits:
            raise UnsupportedError(f"{name}=True is weights={word!r}, and weights={weights!r} is not; leave one out")
        ours["weights"] = weights


def _tokenizer_call(path: str | os.PathLike[str]) -> str:
    file = Path(path)
    given = f"{str(file.parent)!r}, gguf_file={file.name!r}" if file.suffix == ".gguf" else repr(os.fspath(path))
    return f"transformers.AutoTokenizer.from_pretrained({given})"
