"""Passes on the meta device, whose tensors hold no numbers: none is read, and few are mixed with those of the host.

So the host waits for no pass on a GPU, also for those that are never captured, such as prefill.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_accel
from hf_accel.cache.hf import page_groups
from hf_accel.cache.pages import Pages
from hf_accel.cache.step import PassInputs, TokenRange
from hf_accel.generation.hf.model_runner import ModelRunner
from hf_accel.generation.sampling.choice import likeliest
from hf_accel.tensors import integers

from ..unit.generation.tape import install
from .families import FAMILIES, VOCABULARY, build

META = torch.device("meta")


@pytest.fixture(autouse=True)
def _torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def pass_of(pages: Pages, counts: list[int], past: list[int], *, everything: bool) -> PassInputs:
    ranges = []
    for count, start in zip(counts, past, strict=True):
        sequence = pages.begin()
        pages.append(sequence, start + count)
        ranges.append(TokenRange(sequence, start, count))
    total = sum(counts)
    ends = torch.tensor(counts).cumsum(0).sub(1).tolist()
    ids, positions = integers([1] * total), integers([p for r in ranges for p in range(r.start, r.start + r.count)])
    return PassInputs(ids, positions, integers(list(range(total)) if everything else ends), pages.step(ranges))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["auto", "int8"])
# GPT-2's own code looks for padding in the ids of each pass, but not in one that is captured.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_a_pass_stays_on_the_device(family: str, dtype: Any) -> None:
    """A prefill of several prompts, decode beside it, and verification."""
    settings = hf_accel.CacheConfig(block_size=4, dtype=dtype)
    model: Any = hf_accel.patch(build(family), weights=None, fuse=False, attention="tape", cache=settings).to(META)
    groups, groups_of_layer = page_groups(model.config, settings)
    runner, pages = ModelRunner(model, groups, groups_of_layer), Pages(groups)
    assert runner.device == META
    for counts, past, everything in (([7, 3, 1], [0, 0, 0], False), ([1, 9], [7, 3], False), ([4, 4], [8, 12], True)):
        inputs = pass_of(pages, counts, past, everything=everything).to(META)
        with torch.no_grad():
            logits = runner.compute(inputs, everything=everything)
        assert logits.device == META and logits.shape == (len(inputs.keep), VOCABULARY)
        best = likeliest(logits)
        assert best.device == META
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            best.tolist()
