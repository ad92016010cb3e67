"""fit=: the bits of the weights, and the dtype and the tokens of the cache, chosen for a memory, with the reasons.

The first of these that fits is taken: weights as they are, INT8, INT8 with its embedding, 4 and 8 bits mixed, INT4
with head and embedding; then the same with a cache of INT8; then fewer tokens. All is counted by estimate().
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..config import PatchConfig, WeightConfig
from ..config.fit import Fit
from ..errors import UnsupportedError
from ..estimate.result import in_units, room_in
from ..keywords import positive_number
from ..patching.calibration.bit_budget import best_within, budget_of, rounding_errors
from ..patching.plan import Plan
from ..patching.planning import plan_linears
from ..patching.printed import Line
from ..patching.weight_plan import WeightPlan
from .contents import own_names
from .ladder import LEAST_TOKENS, Counter, Rung, Sized
from .readers.reader import are_safe, headers_of

MARGIN = 1.01  # of the memory that an error names: the process grows a little from one call to the next
SPARE_SHARE = 0.02  # of the memory, for what is not counted: fragments, buffers of calls, scales in float32
TOPIC = "fit"
Read = Callable[[str], Tensor | None]  # a parameter of the model by its name, if a file holds it as it is


@dataclass(frozen=True)
class Fitted:
    """The settings that fit, and the lines of the plan that say why."""

    settings: PatchConfig
    lines: tuple[Line, ...]

    def explained(self, todo: Plan) -> Plan:
        """Return the plan with these lines before its own."""
        stays = todo.stock_cache or ("cache=None" if todo.config.cache is None else None)
        stock = Line(TOPIC, "tokens", "not held", f"the cache is transformers' own and grows: {stays}")
        lines = (*self.lines, stock) if stays and todo.model.can_generate() else self.lines
        return replace(todo, lines=(*lines, *todo.lines))


def fit_into(
    model: PreTrainedModel, settings: PatchConfig, fit: Fit, *, device_type: str, read: Read | None = None
) -> Fitted:
    """Return the settings by which a model fits into a memory. What was asked for by name stays as asked.

    model: on the meta device, or without numbers; its quantized layers are counted as they are. read: the parameters
    whose rounding error can be measured. Raises UnsupportedError where nothing fits, with the least that would do, for
    a model that estimate() does not know, and for settings whose bytes are known too late.
    """
    _check_counted(settings)
    counter = Counter(model, settings)
    room, taken, first = _room(fit.memory, device_type)
    lines = [first]
    for chosen in counter.sizes(fit):
        if chosen.size <= room:
            break
        lines.append(Line(TOPIC, chosen.label, "too large", chosen.parts))
    if chosen.size > room and counter.tokens is not None and counter.asked is None:
        chosen = chosen.at(min(counter.tokens, LEAST_TOKENS))
    if chosen.size > room:
        raise _too_small(model, fit, chosen, taken=taken, asked=counter.asked)
    label, weights, mixed = chosen.label, chosen.rung.weights, None
    if chosen.rung.mixes:
        weights, mixed = _mixed(counter.shapes, chosen, fit, room=room, device_type=device_type, read=read)
        chosen = counter.count(Rung(weights), chosen.cache)
    cache, is_counted = settings.cache, weights is None or weights.average_bits is None
    if counter.tokens is not None and counter.asked is None and is_counted:
        chosen = chosen.longest(room, block=1 if cache is None else cache.block_size)
    lines.append(Line(TOPIC, label, "chosen", chosen.parts))
    lines += [*([] if mixed is None else [mixed]), *_token_lines(chosen, counter)]
    if cache is not None and counter.tokens is not None:
        dtype: Any = chosen.cache or cache.dtype
        cache = replace(cache, dtype=dtype, max_tokens=chosen.workload.context)
    return Fitted(replace(settings, weights=settings.weights if counter.held else weights, cache=cache), tuple(lines))


def parameters_in(model: PreTrainedModel, files: Sequence[str]) -> Read | None:
    """Return how to read those parameters of a model that its files hold as they are; None without safetensors."""
    if not are_safe(files):
        return None
    expected = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    found = dict(own_names(model, expected, headers_of([Path(file) for file in files])))

    def read(name: str) -> Tensor | None:
        stored = found.get(name)
        return None if stored is None or stored.shape is None else stored.read()

    return read


# -- what there is room for ------------------------------------------------------------------------------


def _room(memory: Any, device_type: str) -> tuple[float, int, Line]:
    """Return the bytes for the model, those that the process has taken before, and the line about both."""
    if isinstance(memory, bool):
        raise UnsupportedError(f"fit={memory!r} must be a size, as '6GB', a number of bytes, or a device, as 'cpu'")
    if isinstance(memory, int | float):
        positive_number("fit", memory)
    whole = room_in(memory)
    is_device = not isinstance(memory, int | float) and not str(memory)[:1].isdigit()
    taken = 0 if is_device or device_type != "cpu" else process_bytes()
    room = (1 - SPARE_SHARE) * (whole - taken)
    before = f" less {in_units(taken)} that this process has taken before," if taken else ""
    why = f"{in_units(whole)}{before} less {SPARE_SHARE:.0%} to spare"
    return room, taken, Line(TOPIC, "memory", in_units(max(0, room)), why)


def process_bytes() -> int:
    """Return the bytes of this process that are in memory; 0 where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
    return 1024 * int(next(found, 0))


# -- mixed bits -------------------------------------------------------------------------------------------


def _check_counted(settings: PatchConfig) -> None:
    """Raise UnsupportedError for settings whose bytes are known only when the model is there, or are not counted."""
    weights = settings.weights
    if settings.keep_original is True:
        raise UnsupportedError("fit= counts the weights without their originals; leave keep_original=True out")
    if weights is not None and (weights.only_if_faster or weights.average_bits is not None):
        asked = "weights='auto'" if weights.only_if_faster else f"average_bits={weights.average_bits}"
        raise UnsupportedError(
            f"fit= chooses the bits, and {asked} would choose them again; leave weights= out, or say 'int8', 'int4' "
            "or None"
        )


def _mixed(
    shapes: Any, size: Sized, fit: Fit, *, room: float, device_type: str, read: Read | None
) -> tuple[WeightConfig, Line | None]:
    """Spend what is left on 8 bits for the linears that 4 bits would change most."""
    base, left = size.rung.weights, room - size.size
    assert base is not None
    planned = plan_linears(shapes, base, device_type=device_type)
    linears, numbers, stored = budget_of(planned)
    calibration = fit.kept.get("calibration")
    if calibration is not None:
        average = math.floor(1000 * min(7.99, 8 * (stored + left) / max(1, numbers))) / 1000
        if average <= 8 * stored / max(1, numbers):
            return base, None
        why = f"8 bits where 4 would hurt most, as measured on calibration=, until {in_units(room)} are taken"
        mixed = replace(base, average_bits=average, calibration=calibration)
        return mixed, Line(TOPIC, "mixed bits", f"{average} on average", why)
    if read is None:
        return base, Line(TOPIC, "mixed bits", "all 4", "no safetensors file holds the weights, to measure them in")
    names = best_within(rounding_errors(shapes, linears, lambda linear: _weight(linear, read)), left)
    why = (
        "those whose numbers 4 bits change most for each byte: the rounding error of the weights was measured, since "
        "no calibration= was given"
    )
    line = Line(TOPIC, "mixed bits", f"{len(names)} of {len(linears)} linears in 8 bits", why)
    return replace(base, eight_bits=tuple(sorted(names))), line


def _weight(linear: WeightPlan, read: Read) -> Tensor | None:
    found = read(linear.site.tensor_name)
    return None if found is None else linear.site.matrices(found)[0]


def _token_lines(size: Sized, counter: Counter) -> Iterator[Line]:
    if counter.tokens is None:
        return
    tokens = size.workload.context
    if counter.asked is not None:
        why = "as max_tokens= says"
    elif tokens == counter.most:
        why = "all that the model has positions for"
    else:
        fewer = tokens < counter.tokens
        why = f"{counter.tokens:,} do not fit" if fewer else "as many as the rest of the memory holds"
    yield Line(TOPIC, "tokens", f"{tokens:,}", why)


def _too_small(model: PreTrainedModel, fit: Fit, least: Sized, *, taken: int, asked: int | None) -> UnsupportedError:
    needed = math.ceil(MARGIN * (least.size / (1 - SPARE_SHARE) + taken) / 1e6)
    of_process = f", and this process {in_units(taken)} besides" if taken else ""
    fewer = "" if asked is None else ", or lower max_tokens= of the cache"
    return UnsupportedError(
        f"fit={fit.memory!r} is too small for {type(model).__name__}: {least.label} is the smallest form that it can "
        f"have here, which needs {least.parts}{of_process}; give fit='{needed}MB' or more{fewer}"
    )
