"""Rows whose tokens are chosen together: a user's processors and criteria see what they see in transformers' loop."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

import hf_accel
from hf_accel import CacheConfig
from hf_accel.errors import NotRaggedError, OutOfBlocksError
from hf_accel.generation.hf import model_runner

from .families import PADDING, VOCABULARY, build, prompts

END = 5


class AcrossRows(LogitsProcessor):
    """Lowers the last token's score, and adds a part of the first row's scores to the others'. Keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append((input_ids.clone(), scores.clone()))
        scores = scores.clone()
        scores.scatter_add_(1, input_ids[:, -1:], torch.full((len(scores), 1), -2.0))
        scores[1:] += 0.2 * scores[:1]
        return scores


class AtTokens(StoppingCriteria):
    """Ends a row at some of the tokens."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] % 9 == 4


@functools.cache
def stock() -> Any:
    return build("llama")


def ours(**settings: Any) -> Any:
    return hf_accel.patch(build("llama"), weights=None, **settings)


def asked(layout: str, **settings: Any) -> dict[str, Any]:
    ids = prompts(3, 9)
    mask = torch.ones_like(ids)
    if layout == "left":
        ids[0, :4], mask[0, :4] = PADDING, 0
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 14, "pad_token_id": PADDING, **settings}


def answers(model: Any, settings: dict[str, Any], seed: int = 0) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(seed)
    across = AcrossRows()
    processors, criteria = LogitsProcessorList([across]), StoppingCriteriaList([AtTokens()])
    return model.generate(**settings, logits_processor=processors, stopping_criteria=criteria), across.seen


CALLS = {
    "greedy": {"do_sample": False, "eos_token_id": END},
    "without an end": {"do_sample": False, "eos_token_id": None},
    "sampled": {"do_sample": True, "temperature": 1.7, "top_k": 0, "eos_token_id": END},
    "samples of each": {"do_sample": True, "num_return_sequences": 2, "eos_token_id": END},
    "kept": {"do_sample": False, "return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["left", "none"])
@pytest.mark.parametrize("name", CALLS)
def test_rows_and_what_processors_see_are_those_of_stock(layout: str, name: str) -> None:
    model, settings = ours(), asked(layout, **CALLS[name])
    expected, seen = answers(stock(), settings)
    found, seen_by_ours = answers(model, settings)
    assert hf_accel.stats(model)["loop"] == "ragged"
    if name == "kept":
        for kept in ("scores", "logits"):
            pairs = zip(expected[kept], found[kept], strict=True)
            assert all(torch.allclose(theirs, own, atol=1e-5) for theirs, own in pairs)
        expected, found = expected.sequences, found.sequences
    assert torch.equal(found, expected)
    for (ids, scores), (own_ids, own_scores) in zip(seen, seen_by_ours, strict=True):
        assert torch.equal(ids, own_ids)
        torch.testing.assert_close(scores, own_scores, rtol=1e-4, atol=1e-4)


def test_scores_alone_are_kept_of_one_row_too() -> None:
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    model, ids = ours(), prompts(1, 7)
    expected, found = stock().generate(ids, **settings), model.generate(ids, **settings)
    assert hf_accel.stats(model)["loop"] == "ragged" and found.keys() == expected.keys()
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.scores), torch.stack(expected.scores), rtol=1e-4, atol=1e-4)
    transition = (found.sequences, found.scores)
    torch.testing.assert_close(
        model.compute_transition_scores(*transition, normalize_logits=True),
        stock().compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip


def test_pages_without_room_for_all_rows_leave_the_call_to_stock() -> None:
    model, settings = ours(cache=CacheConfig(max_tokens=48, block_size=8)), asked("none", **CALLS["greedy"])
    found: Any
    try:
        found, _ = answers(model, settings)
    except OutOfBlocksError:  # stock's loop over these pages needs as many
        found = None
    assert hf_accel.stats(model).get("loop") != "ragged"
    assert found is None or torch.equal(found, answers(stock(), settings)[0])


def test_a_prompt_in_chunks() -> None:
    """A pass that has no room for all prompts lets rows wait for each other."""
    model = ours()
    for size in (3, 5, 30):
        settings = asked("left", **CALLS["greedy"], prefill_chunk_size=size)
        expected, _ = answers(stock(), asked("left", **CALLS["greedy"]))
        assert torch.equal(answers(model, settings)[0], expected) and hf_accel.stats(model)["loop"] == "ragged"


class Heard:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


@pytest.mark.parametrize("name", ["greedy", "without an end", "sampled", "samples of each"])
def test_streams_get_the_columns_that_stock_gives(name: str) -> None:
    """Some rows end by the user's criterion, and are padded; without an end they go on."""
    model, settings, heard = ours(), asked("left", **CALLS[name]), [Heard(), Heard()]
    expected, _ = answers(stock(), {**settings, "streamer": heard[0]})
    found, _ = answers(model, {**settings, "streamer": heard[1]})
    assert torch.equal(found, expected) and hf_accel.stats(model)["loop"] == "ragged"
    assert heard[0].got == heard[1].got


def test_a_streamer_of_each_row_ends_with_its_row() -> None:
    settings, heard = asked("left", **CALLS["greedy"]), [Heard() for _ in range(3)]
    expected, _ = answers(stock(), settings)
    answers(ours(), {**settings, "streamer": heard})
    for row, each in zip(expected.tolist(), heard, strict=True):
        new = row[9:]
        stop = next((at + 1 for at, token in enumerate(new) if token == END or token % 9 == 4), len(new))
        assert each.got == [row[:9], *([token] for token in new[:stop]), "end"]


@pytest.mark.parametrize("drafts", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": build("llama", seed=1)}, {}])
def test_drafts_give_way_to_what_sees_all_rows(drafts: dict[str, Any]) -> None:
    """Transformers drafts for one row alone. Rows that accept other numbers of tokens would be no batch."""
    model, settings = ours(speculative="ngram"), asked("left", **CALLS["greedy"])
    expected, seen = answers(stock(), settings)
    with pytest.warns(hf_accel.HfAccelWarning, match="without drafts, because AcrossRows may depend on the batch"):
        found, own = answers(model, settings | drafts)
    assert torch.equal(found, expected) and len(own) == len(seen)
    assert hf_accel.stats(model)["loop"] == "ragged"
    assert hf_accel.stats(model)["drafts"] == "none: AcrossRows may depend on the batch"


# -- processors that keep a state of their own ----------------------------------------------------------------

KEEP_STATES: dict[str, dict[str, Any]] = {
    "guidance": {"guidance_scale": 1.7},
    "guidance, sampled": {"guidance_scale": 1.7, "do_sample": True, "negative_prompt_ids": prompts(3, 4)},
    "watermark": {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 1, 4, 15], ngram_len=3),
        "do_sample": True,
    },
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", KEEP_STATES)
def test_processors_that_depend_on_their_earlier_calls(name: str, rows: int) -> None:
    model, settings = ours(), {"do_sample": False, "eos_token_id": END, **KEEP_STATES[name]}
    given = {
        key: value[:rows] if isinstance(value, Tensor) else value for key, value in asked("left", **settings).items()
    }
    found = []
    for each in (stock(), model):
        torch.manual_seed(0)
        found.append(each.generate(**given))
    assert torch.equal(*found) and hf_accel.stats(model)["loop"] == "ragged"


@pytest.mark.filterwarnings("ignore:generate.. runs transformers. own loop:hf_accel.HfAccelWarning")
def test_a_loop_that_is_begun_again_finds_the_states_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third pass finds that it cannot be ragged, when the watermark has seen two."""
    model, calls = ours(), itertools.count()
    computed = model_runner.ModelRunner.compute

    def failing(runner: Any, *given: Any, **keywords: Any) -> Tensor:
        if next(calls) == 2:
            raise NotRaggedError("of the test")
        return computed(runner, *given, **keywords)

    monkeypatch.setattr(model_runner.ModelRunner, "compute", failing)
    found = []
    for each in (stock(), model):
        torch.manual_seed(0)
        found.append(each.generate(**asked("left", **KEEP_STATES["watermark"])))
    assert torch.equal(*found) and hf_accel.stats(model)["loop"] == "stock: of the test"


class Broken(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > 11:
            raise KeyError("of the user")
        return scores


def test_an_error_of_a_processor_reaches_the_user_and_leaves_no_pages() -> None:
    model, settings = ours(), asked("left", **CALLS["greedy"])
    with pytest.raises(KeyError, match="of the user"):
        model.generate(**settings, logits_processor=LogitsProcessorList([Broken()]))
    assert torch.equal(answers(model, settings)[0], answers(stock(), settings)[0])


# -- classes of the user that are made of transformers' own, and what takes the place of those ------------------


class ByLength(SuppressTokensLogitsProcessor):
    """Suppresses tokens, and raises the score of one that depends on the length."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = super().__call__(input_ids, scores).clone()
        scores[:, 6 + input_ids.shape[1] % 20] += 50
        return scores


class BySum(TemperatureLogitsWarper):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, 6 + int(input_ids.sum()) % 20] += 50
        return scores


class InDoubles(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.double() * 1.1


class EndsAtTen(EosTokenCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 10)


class EndsAtEleven(MaxLengthCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 11)


class Counted(StoppingCriteria):
    """Ends all rows at its ninth call."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.count += 1
        return torch.full((len(input_ids),), self.count == 9)


GIVEN: dict[str, tuple[list[Any], list[Any]]] = {
    "suppresses, made of stock's": ([lambda: ByLength([7, 8])], []),
    "warps, made of stock's": ([lambda: BySum(1.5)], []),
    "doubles": ([InDoubles], []),
    "an end, made of stock's": ([], [lambda: EndsAtTen(END)]),
    "a limit, made of stock's": ([], [lambda: EndsAtEleven(30)]),
    "a shorter limit": ([], [lambda: MaxLengthCriteria(max_length=9)]),
    "a longer limit": ([], [lambda: MaxLengthCriteria(max_length=26)]),
    "other ends": ([], [lambda: EosTokenCriteria(list(range(6, 30)))]),
    "calls that are counted": ([], [Counted]),
}
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 0},
    "beams": {"num_beams": 2},
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.filterwarnings("ignore:generate.. runs transformers. own loop:hf_accel.HfAccelWarning")
def test_classes_of_the_user_do_what_they_do_in_stock(name: str, search: str, rows: int) -> None:
    if (name, search) == ("a longer limit", "beams"):
        pytest.skip("transformers has no room for longer beams")
    found, counts = [], []
    for each in (stock(), ours()):
        torch.manual_seed(0)
        processors, criteria = ([make() for make in made] for made in GIVEN[name])
        settings = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": PADDING, **SEARCHES[search]}
        output = each.generate(prompts(rows, 6), **settings, logits_processor=processors, stopping_criteria=criteria)
        found.append(output)
        counts.append([getattr(criterion, "count", None) for criterion in criteria])
    assert torch.equal(*found) and counts[0] == counts[1]


@pytest.mark.parametrize("kind", [TemperatureLogitsWarper, SuppressTokensLogitsProcessor])
def test_a_class_whose_call_was_replaced_is_no_longer_stock(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "__call__", lambda self, ids, scores: scores.roll(int(ids[0, -1]), 1))
    settings = {"do_sample": True, "temperature": 1.4, "top_k": 0, "suppress_tokens": [7], "max_new_tokens": 10}
    found = []
    for each in (stock(), ours()):
        torch.manual_seed(0)
        found.append(each.generate(prompts(1, 6), **settings))
    assert torch.equal(*found)


def test_an_engine_gives_a_class_of_the_user_the_tokens() -> None:
    with hf_accel.Engine(ours()) as engine:
        answer = engine.submit(prompts(1, 6)[0].tolist(), max_new_tokens=10, processors=[ByLength([7, 8])]).result()
    processors: Any = [ByLength([7, 8])]
    expected = stock().generate(prompts(1, 6), max_new_tokens=10, do_sample=False, logits_processor=processors)
    assert list(answer.tokens) == expected[0, 6:].tolist()


@pytest.mark.long
def test_random_calls() -> None:
    numbers, model = random.Random(3), ours()
    for case in range(60):
        rows, columns = numbers.randint(2, 5), numbers.randint(2, 20)
        ids = torch.tensor([[numbers.randint(6, VOCABULARY - 1) for _ in range(columns)] for _ in range(rows)])
        mask = torch.ones_like(ids)
        for row in range(rows):
            hidden = numbers.randint(0, columns - 1) if numbers.random() < 0.5 else 0
            ids[row, :hidden], mask[row, :hidden] = PADDING, 0
        settings = {
            "input_ids": ids, "attention_mask": mask, "pad_token_id": PADDING,
            "max_new_tokens": numbers.randint(1, 20),
            "do_sample": numbers.random() < 0.5, "eos_token_id": numbers.choice([END, [END, 9, 17], None]),
            "num_return_sequences": 1,
        }  # fmt: skip
        if settings["do_sample"]:
            settings["num_return_sequences"] = numbers.randint(1, 3)
        expected, seen = answers(stock(), settings, seed=case)
        found, own = answers(model, settings, seed=case)
        assert torch.equal(found, expected) and len(seen) == len(own), case
