"""Functions that torch rounds by the place of a number, in modules that torch computes.

On a CPU torch cuts a tensor into shares, one for each thread. It computes what fills vectors of a share in one way,
and the rest of it in another. So a token's bits depend on what else is in its tensor, unless rows fill vectors in each
share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..fused.composed_activation import rounds_by_place
from ..kernels.cpu.library import FLOATS
from ..models import answer_once
from ..recognition.source import without_renaming
from ..recognition.trial import KNOWN_MODULES, settings_of_activation
from ..tensors import model_device
from ..undo.journal import original_class

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mish": F.mish, "sigmoid": torch.sigmoid, "silu": F.silu, "softplus": F.softplus,
}  # fmt: skip
STEP = 32  # numbers that a loop of torch's takes at a time, at most


def placed_functions(model: PreTrainedModel, computed: Set[nn.Module]) -> Iterator[str]:
    """Yield what torch rounds by its place, as clauses. computed: modules whose functions our kernels compute."""
    if model_device(model).type not in ("cpu", "meta") or model.dtype not in FLOATS:
        return
    for module in model.modules():
        if module in computed or _fills_shares(module):
            continue
        named = [f"the {name} of {original_class(module).__name__}" for name in _called(module, model.dtype)]
        for child in module.children():
            if child not in computed and _is_placed_activation(child, model.dtype):
                named.append(original_class(child).__name__)
        yield from (f"{name} is torch's, which rounds by a number's place in a pass" for name in named)


def _fills_shares(module: nn.Module) -> bool:
    """Return whether the rows that the linear layers of a module make fill vectors, however many threads share them.

    A share is a number of rows divided by a number of threads, of which there may be fewer than torch has.
    """
    made = (
        getattr(child, "out_features", getattr(child, "nf", None)) for child in module.children()
    )  # nf: a Conv1D's
    widths = [width for width in made if isinstance(width, int)]
    unit = STEP * math.lcm(*range(1, torch.get_num_threads() + 1))
    return bool(widths) and all(width % unit == 0 for width in widths)


def _called(module: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    """Yield the names of functions that a module's code calls and that torch rounds by place."""
    kind = original_class(module)
    code: Any = getattr(without_renaming(kind.forward), "__code__", None)
    if code is None or kind.__module__ in KNOWN_MODULES:
        return
    dtypes = {dtype, torch.float32} if {"float", "float32"} & set(code.co_names) else {dtype}
    for name in sorted(FUNCTIONS.keys() & set(code.co_names)):
        if any(answer_once(rounds_by_place, FUNCTIONS[name], each) for each in dtypes):
            yield name


def _is_placed_activation(module: nn.Module, dtype: torch.dtype) -> bool:
    if original_class(module).__module__ not in KNOWN_MODULES or next(module.parameters(), None) is not None:
        return False
    try:
        return answer_once(rounds_by_place, module, dtype, equal=settings_of_activation(module))
    except (TypeError, RuntimeError):  # it takes more than one tensor: an attention of torch's
        return False
