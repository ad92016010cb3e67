"""hf-accel quantize: writes a smaller checkpoint of a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_accel.config import WEIGHTS

from .models import checked_path, load_patched, tokenizer_of
from .options import Asked, Dtype, Path_, choice, common
from .output import BadInputError

FILE_FORMATS = ("transformers", "compressed-tensors", "gguf")


@common()
def quantize(
    path: Path_,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder, or a new file for --format gguf.")],
    format: Annotated[
        str,
        typer.Option(**choice("For from_pretrained here, for vLLM and SGLang, or for llama.cpp", FILE_FORMATS)),
    ] = "transformers",
    dtype: Dtype = "auto",
    *,
    asked: Asked,
) -> None:  # fmt: skip
    """Write a quantized checkpoint of a model. If it is stopped at any moment, OUT is complete or does not exist.

    \b
    Examples:
      hf-accel quantize examples/stdlib-tiny tiny-int4 --weights int4
      hf-accel quantize Qwen/Qwen3-8B qwen-awq --weights int4 --method awq --calibration texts.jsonl
      hf-accel quantize examples/stdlib-tiny tiny.gguf --weights int4 --group-size 32 --format gguf
    """
    _check_out(out, format)
    place, keywords = checked_path(path), asked.keywords()
    if "weights" in keywords and keywords["weights"] is None:
        raise BadInputError(f"--weights none leaves nothing to quantize; choose one of {', '.join(WEIGHTS)}")
    start = time.perf_counter()
    with asked.output.progress("reading the model") as now:
        _check_room(place, out, keywords)
        tokenizer = _tokenizer(path)
        now("loading and quantizing")
        model = load_patched(path, dtype=dtype, **keywords)
        now(f"writing {out}")
        size, text = _writer(format)(model, tokenizer, out)
    document = {
        "path": path, "out": str(out), "format": format, "tensor_bytes": size, "tokenizer": tokenizer is not None,
        "seconds": time.perf_counter() - start,
    }  # fmt: skip
    asked.output.write(document, text)


def _check_out(out: Path, format: str) -> None:
    """Raise BadInputError for a path that exists, or that cannot be written to."""
    if format not in FILE_FORMATS:
        raise BadInputError(f"--format {format} is not known; choose one of {', '.join(FILE_FORMATS)}")
    if out.is_dir() and format == "gguf":
        raise BadInputError(f"{out} is a folder; name a file in it, as {out / 'model.gguf'}")
    if out.is_dir() and any(out.iterdir()):
        raise BadInputError(f"{out} is not empty; name a new folder, or empty this one")
    if out.exists() and not out.is_dir():
        raise BadInputError(f"{out} is there already; name another place, or delete it")


def _check_room(place: str, out: Path, keywords: dict[str, Any]) -> None:
    """Raise HfAccelError before hours of calibration if the disk has no room for the result."""
    import hf_accel
    from hf_accel.checkpoints.writers.savable import check_room

    if place.endswith(".gguf"):
        return
    try:
        weights = keywords.get("weights", "int8")
        found = hf_accel.estimate(place, context=1, weights=weights, bandwidth=1.0, compute=1.0)
    except hf_accel.UnsupportedError:  # a kind of model that it cannot count; an error then comes from writing
        return
    check_room(out, found.weights_bytes)


def _tokenizer(path: str) -> Any:
    try:
        return tokenizer_of(path)
    except BadInputError:  # a model can be without one
        return None


Written = tuple[int, str]  # bytes of all tensors, and words about them


def _writer(format: str) -> Callable[[Any, Any, Path], Written]:
    return {"transformers": _as_ours, "compressed-tensors": _as_compressed, "gguf": _as_gguf}[format]


def _as_ours(model: Any, tokenizer: Any, out: Path) -> Written:
    from safetensors import SafetensorError

    from hf_accel.checkpoints.writers.savable import check_room
    from hf_accel.hardware.atomic import replaced_folder

    size = sum(tensor.nbytes for tensor in model.state_dict().values() if hasattr(tensor, "nbytes"))
    check_room(out, size)
    with replaced_folder(out, errors=(SafetensorError,)) as unfinished:
        model.save_pretrained(unfinished)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
    way = "import hf_accel, then AutoModelForCausalLM.from_pretrained" if _is_ours(model) else "from_pretrained"
    return size, f"hf_accel saved: {out}, {size / 1e6:,.1f} MB of tensors; load it with {way}({str(out)!r})"


def _is_ours(model: Any) -> bool:
    return getattr(getattr(model.config, "quantization_config", None), "quant_method", None) == "hf_accel"


def _as_compressed(model: Any, tokenizer: Any, out: Path) -> Written:
    import hf_accel

    saved = hf_accel.save_compressed(model, out, tokenizer=tokenizer)
    return saved.bytes, str(saved)


def _as_gguf(model: Any, tokenizer: Any, out: Path) -> Written:
    import hf_accel

    saved = hf_accel.save_gguf(model, out, tokenizer=tokenizer)
    return saved.bytes, str(saved)
