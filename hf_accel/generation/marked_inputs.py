"""Features that a model's decoder is given for marked tokens besides their embeddings, as for layers behind the first.

A decoder takes them by arguments of its own: one says which tokens are marked, and others hold a row of features for
each marked token, in their order (DeepStack, Meng et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import NotRaggedError


@dataclass(frozen=True)
class MarkedForm:
    """The arguments by which a decoder takes features of marked tokens.

    marks: the name of the argument, of bool, that says which tokens are marked. tail: its shape behind [B, T].
    features: the name of each other argument, with the keys of its tensors if it is a dict, their number if it is a
    list, and None if it is one tensor.
    """

    marks: str
    tail: tuple[int, ...]
    features: tuple[tuple[str, tuple[Any, ...] | int | None], ...]

    def arguments(self, marks: Tensor, features: Iterator[Tensor]) -> dict[str, Any]:
        """Return the arguments for tokens of one row. marks: [T] bool. features: a tensor [M, ...] for each."""
        shape = (1, len(marks), *[1] * len(self.tail))
        given: dict[str, Any] = {self.marks: marks.view(shape).expand(1, len(marks), *self.tail)}
        for name, parts in self.features:
            if parts is None:
                given[name] = next(features)
            elif isinstance(parts, int):
                given[name] = [next(features) for _ in range(parts)]
            else:
                given[name] = {key: next(features) for key in parts}
        return given


@dataclass(frozen=True)
class MarkedInputs:
    """The features of the marked ones among T tokens.

    marks: [T] bool, on the host. features: a tensor [M, ...] for each that the form names, where M tokens are marked.
    """

    form: MarkedForm
    marks: Tensor
    features: tuple[Tensor, ...]

    def part(self, start: int, stop: int) -> MarkedInputs | None:
        """Return those of the tokens start..stop-1; None if none of them is marked."""
        first, last = int(self.marks[:start].sum()), int(self.marks[:stop].sum())
        if first == last:
            return None
        return MarkedInputs(self.form, self.marks[start:stop], tuple(each[first:last] for each in self.features))

    def chosen(self, tokens: Tensor) -> MarkedInputs | None:
        """Return those of the tokens that `tokens`, [T] bool on the host, names; None if none of them is marked."""
        marks = self.marks[tokens]
        if not bool(marks.any()):
            return None
        rows = tokens[self.marks]
        return MarkedInputs(self.form, marks, tuple(each[rows.to(each.device)] for each in self.features))

    def contents(self) -> list[bytes]:
        """Return what the features of each token are as bytes; none for a token that is not marked."""
        rows = [each.detach().contiguous().cpu().view(torch.uint8).flatten(1) for each in self.features]
        given = iter(torch.cat(rows, dim=1).numpy())
        return [next(given).tobytes() if marked else b"" for marked in self.marks.tolist()]


def read_marked(given: Mapping[str, Any], shape: tuple[int, int]) -> MarkedInputs | None:
    """Read the arguments of a decoder's call that are not known otherwise, of the tokens of B rows, end to end.

    given: at least one argument by name. shape: (B, T). Returns None if they are no features of marked tokens.
    """
    names = [name for name, value in given.items() if _is_marks(value, shape)]
    if len(names) != 1:
        return None
    marks = given[names[0]]
    tail = tuple(marks.shape[2:])
    marks = marks.flatten(2)[..., 0] if tail else marks
    features: list[Any] = []
    forms: list[tuple[str, tuple[Any, ...] | int | None]] = []
    for name, value in given.items():
        if name == names[0]:
            continue
        parts = list(value.values()) if isinstance(value, dict) else value
        several = isinstance(parts, list | tuple)
        features += parts if several else [parts]
        forms.append((name, tuple(value) if isinstance(value, dict) else len(parts) if several else None))
    count = int(marks.sum())
    fit = [isinstance(each, Tensor) and each.ndim >= 2 and len(each) == count for each in features]
    if not fit or not all(fit):
        return None
    return MarkedInputs(MarkedForm(names[0], tail, tuple(forms)), marks.flatten().cpu(), tuple(features))


def _is_marks(value: Any, shape: tuple[int, int]) -> bool:
    if not isinstance(value, Tensor) or value.dtype is not torch.bool or value.shape[:2] != shape:
        return False
    return value.ndim == 2 or bool((value == value.flatten(2)[..., :1].view(*shape, *[1] * (value.ndim - 2))).all())


def marked_arguments(parts: Sequence[tuple[int, MarkedInputs]], count: int) -> dict[str, Any]:
    """Return the arguments for a pass of `count` tokens.

    parts: the features of tokens that stand end to end, with the index of the first of them in the pass; at least one.
    Raises NotRaggedError if they are of different forms.
    """
    form = parts[0][1].form
    if any(each.form != form for _, each in parts):
        raise NotRaggedError("prompts of one pass bring features of different forms")
    features = [torch.cat(each) for each in zip(*(each.features for _, each in parts), strict=True)]
    marks = torch.zeros(count, dtype=torch.bool)
    for first, each in parts:
        marks[first : first + len(each.marks)] = each.marks
    return form.arguments(marks.to(features[0].device), iter(features))
