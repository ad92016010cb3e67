"""What the tokens of a pass carry, against a loop over these tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_accel.cache.step import TokenRange
from hf_accel.generation.carried import Carried, may_carry
from hf_accel.generation.prompt_inputs import PromptInputs, RequestInputs
from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.sequence import Sequence
from hf_accel.linear.adapters import Adapter, LowRankPart

LAYER = nn.Linear(1, 1, bias=False).requires_grad_(False)
LAYER.weight.zero_()
ADAPTERS = [
    Adapter(str(size), {LAYER: LowRankPart(torch.ones(1, 1), torch.full((1, 1), size), 1.0)}, frozenset(), b"")
    for size in (3.0, 5.0)
]


def embeddings(first: float, count: int) -> Tensor:
    return (first + torch.arange(count)).float()[:, None]


def sequence(*, given: Tensor | None = None, adapter: Adapter | None = None) -> Sequence:
    inputs = None
    if given is not None:
        inputs = RequestInputs(prompt=PromptInputs(given, None, (0,), [-1 - i for i in range(len(given))]))
    return Sequence([1] * 9, RequestSettings(4, Sampling(), adapter=adapter), inputs)


PLAIN, ADAPTED = sequence(), sequence(adapter=ADAPTERS[0])
SEEN, BOTH = sequence(given=embeddings(100, 9)), sequence(given=embeddings(200, 4), adapter=ADAPTERS[1])
# A sequence has two ranges where a draft has branches.
RANGES = [(PLAIN, 0, 3), (BOTH, 2, 5), (ADAPTED, 8, 1), (SEEN, 4, 2), (BOTH, 7, 2), (PLAIN, 8, 1), (ADAPTED, 3, 4)]


def carried(given: list[tuple[Sequence, int, int]]) -> Carried | None:
    nowhere: Any = None
    ranges = [TokenRange(nowhere, start, count) for _, start, count in given]
    return Carried.of([sequence for sequence, _, _ in given], ranges)


def test_each_token_carries_what_its_request_brings() -> None:
    found = carried(RANGES)
    assert found is not None and found.adapters is not None
    expected: list[tuple[float, float]] = []  # of each token, its own embedding and what is added; 0 for none
    for one, start, count in RANGES:
        prompt, adapter = one.prompt_inputs, one.settings.adapter
        for place in range(start, start + count):
            rows = None if prompt is None else prompt.embeddings
            own = float(rows[place]) if rows is not None and place < len(rows) else 0.0
            expected.append((own, 0.0 if adapter is None else float(adapter.name)))
    own = torch.zeros(len(expected))
    for each in found.rows:
        assert each.embeddings is not None and not own[each.first : each.first + each.count].any()
        own[each.first : each.first + each.count] = each.embeddings[:, 0]
    with found.adapters.hooked([LAYER]):
        added = LAYER(torch.ones(len(expected), 1))[:, 0]
    found.adapters.check_added()
    assert list(zip(own.tolist(), added.tolist(), strict=True)) == expected


def test_passes_that_carry_nothing() -> None:
    assert carried([(PLAIN, 0, 3), (PLAIN, 8, 1)]) is None and not may_carry(PLAIN)
    assert carried([(PLAIN, 0, 3), (BOTH, 7, 2)]) is not None
    late = sequence(given=embeddings(300, 4))
    assert may_carry(late) and carried([(late, 4, 1)]) is None  # behind its prompt


def test_why_a_pass_is_no_graph() -> None:
    seen, adapted = carried([(SEEN, 0, 1)]), carried([(ADAPTED, 0, 1)])
    assert seen is not None and "do not follow from their ids" in seen.graph_refusal
    assert adapted is not None and adapted.graph_refusal == "some of its rows have adapters"
