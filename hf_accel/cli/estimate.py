"""hf-accel estimate: bytes, seconds and money, from a model's config alone."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import typer

from hf_accel.config import KVDtype

from .models import checked_path, explained, named_dtype
from .options import Asked, Dtype, Path_, choice, common
from .output import BadInputError

StoredAs = Annotated[
    str | None, typer.Option(**choice("How keys and values are stored", (*get_args(KVDtype), "none")))
]


@common("weights")
def estimate(
    path: Path_,
    dtype: Dtype = "auto",
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of each sequence; 4096, what a load takes, or an encoder's longest input."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    kv_dtype: StoredAs = None,
    machine: Annotated[
        str | None, typer.Option(help="A GPU, as L4 or 'A100 80GB', by its data sheet; this machine if left out.")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Bytes a second of another machine.")] = None,
    compute: Annotated[float | None, typer.Option(help="Operations a second of another machine.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="What it must fit into: 24GB, 'RTX 4090', or cpu or cuda.")
    ] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="The price of a machine, in any currency.")] = None,
    requests_per_second: Annotated[float | None, typer.Option(help="A load: prints replicas and latency.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the load's prompts, the mean.")] = 512,
    output_tokens: Annotated[int, typer.Option(help="Tokens of the load's answers, the mean.")] = 128,
    seconds_per_token: Annotated[float | None, typer.Option(help="Most seconds between two tokens.")] = None,
    *,
    asked: Asked,
) -> None:
    """Print what a model needs at a context and a batch, and under a load: memory, seconds, money. Loads no weight.

    \b
    Examples:
      hf-accel estimate examples/stdlib-tiny --context 2048 --batch 8
      hf-accel estimate Qwen/Qwen3-8B --context 32768 --weights int4 --memory "RTX 4090"
      hf-accel estimate Qwen/Qwen3-8B --machine "A100 80GB" --price-per-hour 2 --requests-per-second 4
    """
    place, wanted = checked_path(path), named_dtype(dtype)
    import hf_accel

    if context is None and requests_per_second is not None:
        context = prompt_tokens + output_tokens
    sizes: dict[str, Any] = {} if context is None else {"context": context}
    fp8 = None
    if machine is not None:
        bandwidth, compute, fp8, memory = _machine(machine, (bandwidth, compute, memory))
    with asked.output.progress("measuring this machine"), explained(path):
        found = hf_accel.estimate(
            _config(place), **sizes, **asked.keywords(), batch=batch, dtype=wanted,
            kv_dtype=None if kv_dtype == "none" else kv_dtype, bandwidth=bandwidth, compute=compute, compute_fp8=fp8,
            price_per_hour=price_per_hour,
        )  # fmt: skip
        document, text = found.to_dict(), str(found)
        if memory is not None:
            document["fits"] = {memory: found.fits(memory)}
            text += f"\n{'fits ' + memory:<12} {'yes' if found.fits(memory) else 'no'}"
        if requests_per_second is not None:
            served = found.serving(
                requests_per_second=requests_per_second, prompt_tokens=prompt_tokens, output_tokens=output_tokens,
                memory=memory, seconds_per_token=seconds_per_token,
            )  # fmt: skip
            document["serving"] = served.to_dict()
            load = f"{requests_per_second:g} requests/s of {prompt_tokens} + {output_tokens} tokens"
            text += f"\n\n{'load':<12} {load}\n{served}"
    asked.output.write({"path": path, **document}, text)


def _machine(
    name: str, given: tuple[float | None, float | None, str | None]
) -> tuple[float, float, float | None, str]:
    """Return bandwidth, compute, compute in FP8 and memory of a device by its name; values given as options come
    first.
    """
    from hf_accel.estimate.devices import memory_of, speed_of

    if name in ("cpu", "cuda"):
        raise BadInputError(f"--machine {name} is this machine, which is measured; leave --machine out")
    bandwidth, compute, fp8 = speed_of(name)
    return given[0] or bandwidth, given[1] or compute, fp8, given[2] or f"{memory_of(name) / 1e9:g}GB"


def _config(place: str) -> Any:
    """Return the model's config in the form that estimate() takes."""
    if not place.endswith(".gguf"):
        from hf_accel.estimate.shapes import read_config

        return read_config(place)
    from hf_accel.checkpoints.readers.gguf_reader import Gguf

    return Gguf({"path": place}).config()
