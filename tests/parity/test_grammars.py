"""Processors that keep a state, such as grammars, under speculation: the text is stock's without drafts.

Stock's own assisted decoding cannot serve them; where speculation is a setting of the model, nothing else would do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

import hf_accel
from hf_accel import Engine, HfAccelWarning

from .families import VOCABULARY, build, inputs, prompts
from .speculating import near, speculative, stock, target

pytestmark = pytest.mark.filterwarnings("ignore:.* without drafts:hf_accel.HfAccelWarning")
NEW_TOKENS = 12


class Grammar(LogitsProcessor):
    """Allows a third of the vocabulary, chosen by all tokens since the first call, which it counts. It knows no way
    back, and cannot be copied, as grammars that are written in C++."""

    def __init__(self) -> None:
        self.state, self.length, self.calls = 0, 0, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        count = input_ids.shape[1]
        if self.calls and count != self.length + 1:
            raise ValueError("No next state found")
        if self.calls:
            self.state = (self.state * 5 + int(input_ids[0, -1])) % 3
        self.length, self.calls = count, self.calls + 1
        banned = torch.arange(scores.shape[1]) % 3 != self.state
        return scores.masked_fill(banned, -torch.inf)

    def __deepcopy__(self, memo: object) -> Grammar:
        raise TypeError("no native creator")


class Copied(Grammar):
    """A grammar that can be copied, and is then found out."""

    def __deepcopy__(self, memo: object) -> Copied:
        made = Copied()
        vars(made).update(vars(self))
        return made


def closure() -> Callable[[Tensor, Tensor], Tensor]:
    """A function that holds a grammar. deepcopy does not copy it."""
    grammar = Copied()

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        return grammar(input_ids, scores)

    return process


def bound() -> Callable[[Tensor, Tensor], Tensor]:
    return Grammar().__call__


def xgrammar() -> Any:
    made = pytest.importorskip("xgrammar")
    signs = [chr(33 + i) for i in range(VOCABULARY)]
    info = made.TokenizerInfo(signs, vocab_size=VOCABULARY, stop_token_ids=[0])
    return made.contrib.hf.LogitsProcessor(made.GrammarCompiler(info).compile_regex("(12|3)+45(6|78)+"))


KINDS = {"uncopyable": Grammar, "copied": Copied, "closure": closure, "bound method": bound, "xgrammar": xgrammar}
WAYS: dict[str, dict[str, Any]] = {
    "lookup": {"prompt_lookup_num_tokens": 3},
    "assistant": {"assistant_model": "near model"},
    "suffix": {"speculative": "suffix"},
    "draft model": {"speculative": "near model"},
    "of the model": {},
}


def drafting(name: str) -> dict[str, Any]:
    given = dict(WAYS[name])
    if "assistant_model" in given:
        return {"assistant_model": near("llama")}
    return {"speculative": speculative(given["speculative"], "llama", 3)} if "speculative" in given else given


def generate(model: PreTrainedModel, processor: Any, **more: Any) -> Tensor:
    torch.manual_seed(3)
    given = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **more}
    return model.generate(**inputs("single"), logits_processor=[processor], **given)  # type: ignore[operator]


@pytest.fixture(scope="module")
def drafts() -> PreTrainedModel:
    return hf_accel.patch(build("llama"), weights=None, speculative="ngram")


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_the_text_is_stocks_without_drafts(way: str, kind: str, drafts: PreTrainedModel) -> None:
    model = drafts if way == "of the model" else target("llama")
    for sample in ({}, {"do_sample": True, "top_k": 20}):
        expected = generate(stock("llama"), KINDS[kind](), **sample)
        assert torch.equal(generate(model, KINDS[kind](), **sample, **drafting(way)), expected)
        stats = hf_accel.stats(model)
        assert stats["loop"] == "ragged" and stats["drafts"].startswith("none: the logits processor ")


def test_the_users_object_is_called_once_for_each_token(drafts: PreTrainedModel) -> None:
    grammar = Grammar()
    length = generate(drafts, grammar, eos_token_id=None).shape[1]
    assert grammar.calls == NEW_TOKENS and grammar.length == length - 1


def test_a_constraint_that_keeps_a_state() -> None:
    """The function is the user's, the processor that calls it transformers'."""

    def constraint() -> Callable[[int, Tensor], list[int]]:
        calls: list[int] = []

        def allowed(batch_id: int, ids: Tensor) -> list[int]:
            calls.append(len(ids))
            return [token for token in range(VOCABULARY) if token % 3 == len(calls) % 3]

        return allowed

    expected, actual = (
        model.generate(  # type: ignore[operator]
            **inputs("single"), do_sample=False, max_new_tokens=8, prefix_allowed_tokens_fn=constraint(), **more
        )
        for model, more in ((stock("llama"), {}), (target("llama"), drafting("draft model")))
    )
    assert torch.equal(actual, expected)


def test_rows_stay_on_stocks_loop_with_every_way() -> None:
    class OfRows(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores + input_ids.sum() % 7 * torch.linspace(0, 2, scores.shape[1])

    given: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "logits_processor": [OfRows()]}
    expected = stock("llama").generate(**inputs("left"), **given)  # type: ignore[operator]
    for way in ("lookup", "assistant"):
        actual = target("llama").generate(**inputs("left"), **given, **drafting(way))  # type: ignore[operator]
        assert torch.equal(actual, expected)


def test_it_is_said_once() -> None:
    model = hf_accel.patch(build("llama"), weights=None, speculative="ngram")
    with pytest.warns(HfAccelWarning, match="decodes without drafts, because the logits processor Grammar") as found:
        generate(model, Grammar())
        generate(model, Grammar())
    assert len(found) == 1 and found[0].filename == __file__
    generate(model, lambda input_ids, scores: scores)
    assert "drafts" not in hf_accel.stats(model)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_an_engine(kind: str) -> None:
    """The request is decoded without drafts, and those beside it with them."""
    ids = prompts(1, 9)
    expected = stock("llama").generate(  # type: ignore[operator]
        ids, do_sample=False, max_new_tokens=NEW_TOKENS, logits_processor=[KINDS[kind]()]
    )
    plain = stock("llama").generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)  # type: ignore[operator]
    with Engine(target("llama"), speculative=speculative("near model", "llama", 3)) as engine:
        asked = [engine.submit(ids[0].tolist(), max_new_tokens=NEW_TOKENS, processors=given, temperature=0)
                 for given in ([KINDS[kind]()], [])]  # fmt: skip
        found = [list(request.result().tokens) for request in asked]
        assert engine.stats["speculation"]["drafted"] > 0
    assert found == [expected[0, 9:].tolist(), plain[0, 9:].tolist()]
