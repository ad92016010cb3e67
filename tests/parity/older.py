"""Models that an older transformers writes in another way, which is not known, so that they stay on its own loop."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_accel
from hf_accel.generation.hf.refusals import ragged_refusal

IS_OLDER = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)  # than constraints-dev.txt has


def skip_older_code(
    model: Any, known: str, *, generates: bool = True, given: Mapping[str, Tensor] | None = None
) -> None:
    """Skip a test about pages where patch() keeps a model of an older transformers on stock's loop.

    known: the reason that the plan must give, as a pattern; with another one, and with the release of
    constraints-dev.txt, the test goes on, and fails. Before it is skipped the model must write stock's tokens.
    generates: whether stock can generate with the model; else it must give stock's logits. given: what it is called
    with, if not with token ids alone.
    """
    if not IS_OLDER:
        return
    patched = hf_accel.patch(copy.deepcopy(model), weights=None)
    if given is None:
        ids = torch.tensor([[7, 5, 9, 11, 6, 8, 5, 3], [8, 4, 9, 7, 12, 3, 6, 10]])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if generates:
        found, expected = (each.generate(**given, max_new_tokens=6, do_sample=False) for each in (patched, model))
        reason = hf_accel.stats(patched)["loop"]
    else:
        with torch.no_grad():
            found, expected = (each(given["input_ids"], use_cache=False).logits for each in (patched, model))
        reason = ragged_refusal(patched)
    if reason is None or re.search(known, reason) is None:
        return
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    pytest.skip(f"transformers {transformers.__version__}: {reason}")


@contextmanager
def by_stock_alone() -> Iterator[None]:
    """Skip a test where what stands within fails with an older transformers. It must hold no model of ours."""
    try:
        yield
    except Exception as error:
        if not IS_OLDER:
            raise
        pytest.skip(f"transformers {transformers.__version__} itself fails: {type(error).__name__}, {error}")


def check_loop(model: Any, *, older: str | None = None) -> None:
    """Require that a patched model's last generate() ran ragged.

    older: what may stand in its way with an older transformers, as a pattern.
    """
    loop = hf_accel.stats(model)["loop"]
    assert loop == "ragged" or (IS_OLDER and older is not None and re.search(older, loop) is not None), loop
