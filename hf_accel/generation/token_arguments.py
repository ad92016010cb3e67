"""Arguments of a decoder that hold something for each token besides its embedding, as Gemma 4's per-layer inputs.

For token ids alone the model's own code makes them, or leaves them out, which then means zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# By the name of the argument, what it holds for T tokens: [T, ...].
TokenArguments = Mapping[str, Tensor]


def read_arguments(given: Mapping[str, Any], shape: tuple[int, int]) -> dict[str, Tensor] | None:
    """Return the arguments of a decoder's call that hold something for each token of B rows; None if some do not.

    given: the arguments that are not known otherwise, by name. shape: (B, T).
    """
    fits = (isinstance(value, Tensor) and value.shape[:2] == shape for value in given.values())
    return dict(given) if all(fits) else None


def as_bytes(arguments: TokenArguments | None, count: int) -> list[bytes]:
    """Return what the arguments of each of `count` tokens are as bytes."""
    found = [b""] * count
    for value in (arguments or {}).values():
        rows = value.detach().reshape(count, -1).contiguous().cpu().view(torch.uint8).numpy()
        found = [before + row.tobytes() for before, row in zip(found, rows, strict=True)]
    return found


def placed_arguments(
    call: Mapping[str, Any], parts: Sequence[tuple[int, TokenArguments]], count: int
) -> dict[str, Any]:
    """Return the arguments for a pass of `count` tokens.

    call: those that the model's own code gives its decoder for the ids of these tokens. parts: those of tokens that
    stand end to end, with the index of the first of them in the pass.
    """
    placed: dict[str, Tensor] = {}
    for first, arguments in parts:
        for name, value in arguments.items():
            if name not in placed:
                own = call.get(name)
                placed[name] = value.new_zeros(1, count, *value.shape[1:]) if own is None else own.clone()
            placed[name][0, first : first + len(value)] = value
    return placed
