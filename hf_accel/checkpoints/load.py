"""hf_accel.load: a checkpoint of any known kind is checked, loaded and patched."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

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
from ..errors import HfAccelError, UnsupportedError
from ..estimate.shapes import class_of, on_meta, read_config, stored_config
from ..hardware.collecting import collecting_later
from ..keywords import MEANT_BY_PATCH, Default, check_keywords, one_of
from ..linear.hf import METHOD, AccelConfig
from ..patching.patch import patch
from .checkpoint import reader_of
from .contents import COPY, check_float_model, check_report
from .readers.gguf_reader import Gguf, LazyTensor, forget_files
from .readers.reader import ForeignReader

HUB_KEYWORDS = (
    "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
    "trust_remote_code",
)  # fmt: skip
OLD_BITS = {"load_in_4bit": (4, "int4"), "load_in_8bit": (8, "int8")}  # bitsandbytes' old keywords, and ours for them
KNOWN_KEYWORDS = (
    *DEFAULTS,
    *HUB_KEYWORDS,
    *OLD_BITS,
    "dtype",
    "device_map",
    "attn_implementation",
    "distributed_config",
    "fit",
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
    fit: Any = None,
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
    fit: a memory, as "6GB", a number of bytes, or a device of this machine. What weights= and cache= do not say is
    chosen for it, and the plan says why (docs/formats.md): the weights as they are if they fit with the tokens of
    cache={"max_tokens": ...}, else INT8, 4 and 8 bits mixed, INT4 with head and embedding, an INT8 cache, fewer
    tokens. weights={"calibration": texts} says what the bits are mixed by; else by the rounding error of the weights.

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
    ours |= {} if fit is None else {"fit": fit}
    if not isinstance(ours.get("config"), PatchConfig | None):
        keywords["config"] = ours.pop("config")
    _read_old_bits(ours, keywords)
    meant = {**MEANT_BY_PATCH, "tokenizer": f"{_tokenizer_call(path)} for the tokenizer"}
    if "quantization_config" in keywords:
        check_keywords("load()", ["quantization_config"], KNOWN_KEYWORDS, meant)
    try:
        return _load_checkpoint(path, ours, keywords)
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


# -- loading -------------------------------------------------------------------------------------------


def _load_checkpoint(path: str | os.PathLike[str], ours: dict[str, Any], keywords: dict[str, Any]) -> PreTrainedModel:
    """Load and patch. ours: the keywords for patch() that were given. keywords: those for from_pretrained()."""
    if str(path).endswith(".gguf"):
        return _load_gguf(str(path), ours, keywords)
    hub = {name: keywords[name] for name in HUB_KEYWORDS if name in keywords}
    config = keywords.pop("config", None) or read_config(path, **hub)
    kind = class_of(config)
    config.architectures = [kind.__name__] if issubclass(kind, PreTrainedModel) else config.architectures
    load_model = partial(_load, kind, path, config=config, **keywords)
    stored = stored_config(config)
    if stored is None and keywords.get("distributed_config") is not None:
        _leave_fit_out(ours, "a model that is split over ranks")
        return patch(_whole(load_model), **ours)  # parts of weights are packed when they are all there
    if stored is None:
        return load_model(quantization_config=_for_float_files(ours, keywords))
    method = stored.get("quant_method")
    reader = None if method == METHOD else reader_of(stored)
    if not (isinstance(reader, ForeignReader) and reader.of_experts):
        _leave_weights_out(ours, method)
    if method == METHOD:
        config.quantization_config = {**stored, **ours}
    elif reader is not None:
        config.quantization_config = {"quant_method": METHOD, "stored_as": stored, **ours}
    elif method in AUTO_QUANTIZATION_CONFIG_MAPPING:
        _leave_fit_out(ours, f"a checkpoint of {method}")
        return patch(_whole(load_model), weights=None, **ours)
    else:  # transformers passes over it, with a warning, and reads floats
        return load_model(quantization_config=_for_float_files({"weights": None, **ours}, keywords))
    return load_model()


def _load(kind: Any, path: str | os.PathLike[str], /, **keywords: Any) -> Any:
    """Call from_pretrained(). Raises HfAccelError for what it reports only once it has read the tensors."""
    try:
        with collecting_later():
            return kind.from_pretrained(path, **keywords)
    except RuntimeError as error:
        if "above report" not in str(error):
            raise
        raise HfAccelError(f"transformers cannot make {kind.__name__} of {path}: {error} {COPY}") from error


def _for_float_files(ours: Mapping[str, Any], keywords: Mapping[str, Any]) -> AccelConfig:
    """Make settings by which the files are checked before they are read. keywords: those of from_pretrained()."""
    settings = AccelConfig(**ours)
    shapes = not keywords.get("ignore_mismatched_sizes", False)
    settings.check_files = {"key_mapping": keywords.get("key_mapping"), "shapes": shapes}
    return settings


def _whole(load_model: partial[Any]) -> PreTrainedModel:
    """Load with transformers alone. Raises HfAccelError if it had to fill in random numbers."""
    model, report = load_model(output_loading_info=True)
    check_report(model, report["missing_keys"], report["unexpected_keys"])
    return model


def _load_gguf(path: str, ours: dict[str, Any], keywords: dict[str, Any]) -> PreTrainedModel:
    stored = {"quant_method": "gguf", "path": path}
    reader = reader_of(stored)
    assert isinstance(reader, Gguf)
    config = keywords.pop("config", None) or reader.config()
    empty = on_meta(config, dtype=None)
    config.architectures = [type(empty).__name__]
    keywords["dtype"] = reader.dtype if keywords.get("dtype", "auto") == "auto" else keywords["dtype"]
    if reader.is_quantized:
        _leave_weights_out(ours, "gguf")
        config.quantization_config = {"quant_method": METHOD, "stored_as": stored, **ours}
    else:
        keywords["quantization_config"] = AccelConfig(**ours)
        check_float_model(empty, reader.headers(empty))
    state_dict = {name: LazyTensor(found) for name, found in reader.headers(empty)}
    try:
        model: PreTrainedModel = type(empty).from_pretrained(None, config=config, state_dict=state_dict, **keywords)
    finally:
        forget_files()
    return model


def _leave_weights_out(ours: dict[str, Any], method: str | None) -> None:
    if ours.get("weights") is not None:
        raise UnsupportedError(
            f"weights={ours['weights']!r}: the weights of this {method} checkpoint are quantized already; leave "
            "weights= out, or load the float checkpoint"
        )
    ours.pop("weights", None)


def _leave_fit_out(ours: dict[str, Any], what: str) -> None:
    if "fit" in ours:
        raise UnsupportedError(
            f"fit={ours['fit']!r} cannot count {what}; leave fit= out, and choose weights= and cache="
        )


# -- the tokenizer -------------------------------------------------------------------------------------


def load_tokenizer(path: str | os.PathLike[str], **hub: Any) -> Any:
    """Load the tokenizer of a checkpoint; that of a .gguf file is in its metadata.

    hub: keywords of from_pretrained.
    """
    place, options = _tokenizer_place(path)
    return transformers.AutoTokenizer.from_pretrained(place, **options, **hub)


def _tokenizer_call(path: str | os.PathLike[str]) -> str:
    place, options = _tokenizer_place(path)
    given = ", ".join([repr(place), *(f"{name}={value!r}" for name, value in options.items())])
    return f"transformers.AutoTokenizer.from_pretrained({given})"


def _tokenizer_place(path: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
    file = Path(path)
    return (str(file.parent), {"gguf_file": file.name}) if file.suffix == ".gguf" else (os.fspath(path), {})
