"""A plan with what only a run of the model can tell: the layers that need more bits, and where scales go."""

from __future__ import annotations

from dataclasses import replace

from ...config import PatchConfig
from ..explain import explain
from ..plan import FindOriginals, Plan
from ..planning import make_plan
from ..twin import twin
from .bit_budget import eight_bit_names
from .feeding import check_takes_ids
from .folds import find_folds


def planned(model: object, config: PatchConfig, *, find_originals: FindOriginals | None = None) -> Plan:
    """`make_plan`; with average_bits and with AWQ a copy of the model is run on a few tokens."""
    todo = make_plan(model, config, find_originals=find_originals)
    if config.weights is not None and config.weights.average_bits is not None:
        todo = make_plan(model, config, find_originals=find_originals, eight_bits=eight_bit_names(todo))
    names = [p.site.name for p in todo.quantized if p.config.method == "awq"]
    if not names:
        return todo
    check_takes_ids(todo.model)
    todo = replace(todo, folds=tuple(find_folds(twin(todo.model), names)))
    return replace(todo, lines=tuple(explain(todo)))
