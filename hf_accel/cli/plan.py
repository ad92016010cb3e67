"""hf-accel plan: prints what patch() would do to a model, and why."""

from __future__ import annotations

from typing import Any

from .models import checked_path, explained, load_patched, named_dtype
from .options import Asked, Dtype, Fit, Path_, common, with_fit


@common()
def plan(path: Path_, dtype: Dtype = "auto", fit: Fit = None, *, asked: Asked) -> None:
    """Print what patch() will do to a model, and why. No weight is loaded.

    With --fit: the bits, the cache and the tokens that are chosen for a memory. Where 4 and 8 bits are mixed, the
    weights are read one after the other.

    \b
    Examples:
      hf-accel plan examples/stdlib-tiny
      hf-accel plan Qwen/Qwen3-0.6B --weights int4 --cache-dtype int8
      hf-accel plan examples/stdlib-tiny --json
      hf-accel plan Qwen/Qwen3-8B --fit 6GB
    """
    place, wanted, keywords = checked_path(path), named_dtype(dtype), with_fit(asked.keywords(), fit)
    with asked.output.progress("reading the model's config"), explained(path):
        found = _without_weights(place, wanted, keywords)
    if found is None:
        with asked.output.progress("loading the model"):
            found = _of_the_loaded(path, dtype, keywords)
    document, text = found
    asked.output.write({"path": path, **document}, text)


def _without_weights(place: str, dtype: Any, keywords: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return the plan as a document and as text; None if it cannot be made without the weights."""
    import hf_accel
    from hf_accel.config.fit import take_fit
    from hf_accel.config.patch_config import PatchConfig
    from hf_accel.estimate.shapes import read_config, stored_config

    rest = dict(keywords)
    take_fit(rest)
    settings = PatchConfig.build(**rest)
    if place.endswith(".gguf") or (settings.weights is not None and settings.weights.needs_data):
        return None
    if stored_config(read_config(place)) is not None:
        return None
    made = hf_accel.plan(place, dtype=dtype, **keywords)
    return made.to_dict(), str(made)


def _of_the_loaded(path: str, dtype: str, keywords: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Plan with the loaded model: for a quantized checkpoint, and where a run of the model decides."""
    import hf_accel
    from hf_accel.config import WeightConfig
    from hf_accel.patching.printed import Line, table
    from hf_accel.undo.state import state_of

    from .models import load_float

    if "fit" not in keywords and (hf_accel.PatchConfig.build(**keywords).weights or WeightConfig()).needs_data:
        made = hf_accel.plan(load_float(path, dtype=dtype), **keywords)
        return made.to_dict(), str(made)
    document = state_of(load_patched(path, dtype=dtype, **keywords)).description
    lines = table([Line(**line) for line in document["choices"]])
    return document, "\n".join([f"hf_accel plan: {document['model']}", *lines])
