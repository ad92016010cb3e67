"""Features of marked tokens: how a decoder takes them, which of them a pass takes, and which decoders are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from hf_accel import UnsupportedError
from hf_accel.errors import NotRaggedError
from hf_accel.generation.hf.decoder_trial import refuse_mixed_tokens
from hf_accel.generation.marked_inputs import MarkedInputs, marked_arguments, read_marked
from hf_accel.generation.prompt_inputs import PromptInputs, contents_of

MARKS = torch.tensor([[False, True, True, False], [True, False, True, False]])
FIRST, SECOND = torch.arange(8.0).view(4, 2), torch.arange(8.0).view(4, 2) + 100
FORMS = {
    "list": {"marks": MARKS, "features": [FIRST, SECOND]},
    "dict": {"features": {0: FIRST, 3: SECOND}, "marks": MARKS[..., None].expand(2, 4, 5)},
    "tensors": {"marks": MARKS[..., None], "one": FIRST, "other": SECOND},
}


def read(name: str) -> MarkedInputs:
    found = read_marked(FORMS[name], (2, 4))
    assert found is not None
    return found


@pytest.mark.parametrize("name", FORMS)
def test_parts_put_together_are_the_arguments_that_were_read(name: str) -> None:
    """The tokens of a pass are those of the second row, one without features, and the rest of the first row."""
    marked = read(name)
    second, first = marked.part(4, 8), marked.part(2, 4)
    assert first is not None and second is not None
    given = marked_arguments([(5, first), (0, second)][::-1], 7)
    assert given.keys() == FORMS[name].keys()
    again = read_marked(given, (1, 7))
    assert again is not None and again.form == marked.form
    assert again.marks.tolist() == [True, False, True, False, False, True, False]
    assert [each[:, 0].tolist() for each in again.features] == [[4, 6, 2], [104, 106, 102]]


def test_no_part_without_a_marked_token() -> None:
    marked = read("list")
    assert marked.part(3, 4) is None and marked.part(7, 8) is None
    chosen = marked.chosen(torch.tensor([True, True, False, True, False, True, True, True]))
    assert chosen is not None and chosen.marks.tolist() == [False, True, False, False, True, False]
    assert chosen.features[0][:, 0].tolist() == [0, 6]
    assert marked.chosen(torch.arange(8) % 4 == 3) is None


@pytest.mark.parametrize(
    "given",
    [
        {"features": [FIRST]},
        {"marks": MARKS},
        {"marks": MARKS, "features": [FIRST[:3]]},
        {"marks": MARKS, "others": MARKS, "features": [FIRST]},
        {"marks": MARKS[:, :3], "features": [FIRST]},
        {"marks": torch.stack([MARKS, ~MARKS], dim=-1), "features": [FIRST]},
        {"marks": MARKS, "features": [FIRST], "more": "text"},
    ],
    ids=["no marks", "no features", "too few", "two marks", "columns", "not by token", "text"],
)
def test_arguments_of_other_forms_are_not_known(given: dict[str, Any]) -> None:
    assert read_marked(given, (2, 4)) is None


def test_forms_are_not_mixed() -> None:
    with pytest.raises(UnsupportedError, match="different forms"):
        marked_arguments([(0, read("list")), (8, read("dict"))], 16)


def test_contents_tell_other_features_apart() -> None:
    """Two prompts with the same embeddings and other features never share pages."""
    embeddings, plain = torch.zeros(8, 2), [True] * 8
    marked = read("list")
    contents = contents_of([5] * 8, plain, embeddings, None, marked=marked)
    assert [number < 0 for number in contents] == MARKS.flatten().tolist()
    other = MarkedInputs(marked.form, marked.marks, (FIRST, SECOND + torch.eye(4, 2) * 1e-3))
    changed = contents_of([5] * 8, plain, embeddings, None, marked=other)
    assert [a != b for a, b in zip(contents, changed, strict=True)] == [i in (1, 2) for i in range(8)]


def test_rows_of_a_prompt_bring_their_features() -> None:
    inputs = PromptInputs(torch.zeros(8, 2), None, (0,), [1] * 8, None, read("list"))
    (rows,) = inputs.rows(3, 2, 3)
    assert rows.marked is not None and rows.marked.marks.tolist() == [True, False, True]
    assert rows.marked.features[1][:, 0].tolist() == [102, 104]
    assert [each.marked for each in inputs.rows(0, 7, 4)] == [None]


class Decoder(nn.Module):
    """Adds features behind each of its two layers, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layers = way, nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.config = LlamaConfig(num_hidden_layers=2)

    def forward(self, inputs_embeds: Tensor, marks: Any = None, features: Any = None, **kwargs: Any) -> Any:
        hidden = inputs_embeds
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, **({"features": features} if self.way == "layers" else {}))
            if features is not None:
                hidden = hidden.clone()
                added = features[index].flip(0) if self.way == "backwards" else features[index]
                hidden[marks] += added.mean() if self.way == "mean" else added
                if self.way == "all":
                    hidden += 1
        return SimpleNamespace(last_hidden_state=hidden)


@pytest.mark.parametrize("way", ["right", "mean", "all", "backwards", "layers"])
def test_decoders_that_mix_tokens_are_refused(way: str) -> None:
    marked = read_marked({"marks": MARKS, "features": [torch.zeros(4, 4)] * 2}, (2, 4))
    assert marked is not None
    if way == "right":
        refuse_mixed_tokens(Decoder(way), marked, None, torch.zeros(4))
        return
    with pytest.raises(UnsupportedError, match="gives its layers more" if way == "layers" else "mixes tokens"):
        refuse_mixed_tokens(Decoder(way), marked, 3, torch.zeros(4))


class Stopping(Decoder):
    """Raises an error of its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__("right")
        self.error = error

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError, TimeoutError, InterruptedError])
def test_what_stops_a_trial_says_nothing_of_a_decoder(kind: type[Exception]) -> None:
    """It is raised, and no slower path is taken for it."""
    decoder = Stopping(kind("can't allocate memory"))
    with pytest.raises(kind, match="allocate memory"):
        refuse_mixed_tokens(decoder, read("list"), None, torch.zeros(1, 8))


def test_code_that_takes_no_stand_ins_is_not_known() -> None:
    decoder = Stopping(RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(NotRaggedError, match="cannot be tried without its layers: shapes"):
        refuse_mixed_tokens(decoder, read("list"), None, torch.zeros(1, 8))
