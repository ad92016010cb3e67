"""Checks that a logits processor may be called again for one position, as rejected drafts need it."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .processors import Function, name_of


def is_stateful(processor: Function, ids: Tensor, vocabulary_size: int) -> bool:
    """Return whether the processor must be called once for each position and in their order, as far as a trial shows.

    ids: [1, T], the prompt. A copy of the processor is asked about the prompt, about one more token, which the copy
    itself prefers, and about both again: as drafts that are rejected do it. It is stateful if an answer differs, if it
    raises an error, and if it cannot be copied: the user's own object is never called. The answer False is not
    certain, because a state may show only later, or only for certain tokens.
    """
    scores = torch.linspace(-4, 4, vocabulary_size, device=ids.device)[None]
    devices = [ids.device] if ids.is_cuda else []
    try:
        called = _copied(processor, {})
        with torch.random.fork_rng(devices=devices):
            first = _result(called, ids, scores)
            longer = torch.cat([ids, first.argmax(-1, keepdim=True)], dim=1)
            second, third = (_result(called, longer, scores.flip(-1)) for _ in range(2))
            again = _result(called, ids, scores)
    except Exception:
        return True
    return not (torch.equal(first, again) and torch.equal(second, third))


def stateful_refusal(processors: Iterable[Function], ids: Tensor, vocabulary_size: int) -> str | None:
    """Return why drafts cannot be verified with these processors, as one clause; None if no state was found."""
    for processor in processors:
        if is_stateful(processor, ids, vocabulary_size):
            return (
                f"the logits processor {name_of(processor)} keeps a state, or cannot be copied to find out, and a "
                "position is processed again after a draft was rejected"
            )
    return None


def _result(processor: Function, ids: Tensor, scores: Tensor) -> Tensor:
    return processor(ids.clone(), scores.clone()).clone().nan_to_num()


# -- copies ------------------------------------------------------------------------------------------------


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy that shares no state with `value`. deepcopy does not copy functions, which hold variables too.

    Raises TypeError for a module of a network, because the copy could be as large as the model.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, FunctionType):
        return _copied_function(value, memo)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _copied(value.__self__, memo))
    if isinstance(value, partial):
        return partial(_copied(value.func, memo), *_copied(value.args, memo), **_copied(value.keywords, memo))
    attributes = getattr(value, "__dict__", {})
    if any(isinstance(each, nn.Module) for each in (value, *attributes.values())):
        raise TypeError(f"{type(value).__name__} may be too large to be copied")
    made = copy.deepcopy(value, memo)
    for name, each in attributes.items() if made is not value else ():
        if isinstance(each, FunctionType | MethodType | partial):
            vars(made)[name] = _copied(each, memo)
    return made


def _copied_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    own_cells = function.__closure__ or ()
    cells = tuple(CellType() for _ in own_cells)
    known = memo.setdefault(id(function.__globals__), dict(function.__globals__))
    made = FunctionType(function.__code__, known, function.__name__, None, cells)
    memo[id(function)] = made  # before its variables, which may hold the function itself
    for cell, own in zip(cells, own_cells, strict=True):
        cell.cell_contents = _copied(own.cell_contents, memo)
    made.__defaults__, made.__kwdefaults__ = _copied([function.__defaults__, function.__kwdefaults__], memo)
    for name in _names(function.__code__) & known.keys():
        if not isinstance(known[name], type | ModuleType | FunctionType):
            known[name] = _copied(known[name], memo)
    return made


def _names(code: CodeType) -> set[str]:
    """The global variables that a function, and the functions inside it, may use."""
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))
