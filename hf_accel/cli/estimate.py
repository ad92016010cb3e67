"""hf-accel estimate: bytes, seconds and money, from a model's config alone."""

from __future__ import annotations

from typing import Annotated

import typer

from .models import check, explained, named_dtype
from .options import Asked, Path_, common
from .plan import Dtype


@common("weights")
def estimate(
    path: Path_,
    dtype: Dtype = "auto",
    context: Annotated[int, typer.Option(help="Tokens of each sequence.")] = 4096,
    batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    kv_dtype: Annotated[
        str | None, typer.Option(help="How keys and values are stored.", metavar="auto|int8|fp8|int4")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Bytes a second; measured here if left out.")] = None,
    compute: Annotated[float | None, typer.Option(help="Operations a second; measured here if left out.")] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="Of the machine, in any currency.")] = None,
    fits: Annotated[
        str | None, typer.Option(help="Say whether it fits: into 24GB, 'RTX 4090', or cpu or cuda here.")
    ] = None,
    *,
    asked: Asked,
) -> None:
    """Print what a model needs at a context and a batch: memory, seconds, money. No weight is loaded.

    \b
    Examples:
      hf-accel estimate examples/stdlib-tiny --context 2048 --batch 8
      hf-accel estimate Qwen/Qwen3-8B --context 32768 --weights int4 --fits "RTX 4090"
      hf-accel estimate Qwen/Qwen3-8B --bandwidth 3.35e12 --compute 1e15 --price-per-hour 3
    """
    place, wanted = check(path), named_dtype(dtype)
    import hf_accel

    with asked.output.progress("measuring this machine"), explained(path):
        found = hf_accel.estimate(
            _config(place), context=context, batch=batch, weights=asked.weights, kv_dtype=kv_dtype, dtype=wanted,
            bandwidth=bandwidth, compute=compute, price_per_hour=price_per_hour,
        )  # fmt: skip
        room = None if fits is None else found.fits(fits)
    document, text = found.to_dict(), str(found)
    if room is not None:
        document["fits"] = {fits: room}
        text += f"\n{'fits ' + str(fits):<12} {'yes' if room else 'no'}"
    asked.output.write({"path": path, **document}, text)


def _config(place: str) -> object:
    """What estimate() takes."""
    if not place.endswith(".gguf"):
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(place)
    from hf_accel.interop.gguf_reader import Gguf

    return Gguf({"path": place}).config()
