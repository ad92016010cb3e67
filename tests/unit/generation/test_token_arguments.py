"""What a decoder is given for each token: how it is read, put into a pass, and which decoders are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_accel import UnsupportedError
from hf_accel.generation.hf.decoder_trial import refuse_mixed_arguments
from hf_accel.generation.prompt_inputs import PromptInputs, contents_of
from hf_accel.generation.token_arguments import placed_arguments, read_arguments

VALUES = torch.arange(12.0).view(2, 3, 2)


def test_what_is_not_for_each_token_is_not_known() -> None:
    assert read_arguments({"values": VALUES, "kinds": VALUES[..., 0].long()}, (2, 3)) is not None
    assert read_arguments({"values": VALUES, "text": "text"}, (2, 3)) is None
    assert read_arguments({"values": VALUES[:, :2]}, (2, 3)) is None


def test_a_pass_keeps_what_the_model_makes_of_other_tokens() -> None:
    own = torch.full((1, 4, 2), 9.0)
    parts = [(1, {"values": VALUES[0, :2], "kinds": torch.tensor([1, 2])})]
    placed = placed_arguments({"values": own}, parts, 4)
    assert placed["values"][0].tolist() == [[9, 9], [0, 1], [2, 3], [9, 9]]
    assert placed["kinds"].tolist() == [[0, 1, 2, 0]]
    assert bool((own == 9).all())


def test_a_chunk_brings_its_own_tokens() -> None:
    inputs = PromptInputs(None, None, (0,), [1, 2, 3], arguments={"values": VALUES[0]})
    (rows,) = inputs.rows(5, 1, 2)
    assert rows.arguments is not None and torch.equal(rows.arguments["values"], VALUES[0, 1:])


def test_contents_tell_other_arguments_apart() -> None:
    embeddings, ids = torch.zeros(3, 2), [7, 7, 8]
    found = contents_of(ids, [False, False, True], embeddings, None, arguments={"values": VALUES[0]})
    other = contents_of(ids, [False, False, True], embeddings, None, arguments={"values": VALUES[1]})
    assert found[2] == other[2] == 8
    assert len({*found[:2], *other[:2]}) == 4


class Decoder(nn.Module):
    """Adds what it is given for each token; `how` is what it does besides."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, inputs_embeds: Tensor, given: Tensor | None = None, **others: Any) -> Any:
        if given is None:
            given = torch.full_like(inputs_embeds, float(self.how == "absent"))
        if self.how == "mixes":
            given = given.cumsum(dim=1)
        return SimpleNamespace(last_hidden_state=inputs_embeds + given)


@pytest.mark.parametrize(
    ("how", "message"), [("right", None), ("mixes", "mixes tokens"), ("absent", "takes no given")]
)
def test_decoders_that_mix_tokens_are_refused(how: str, message: str | None) -> None:
    like, given = torch.zeros(1, 1, 2), {"given": VALUES[0]}
    if message is None:
        refuse_mixed_arguments(Decoder(how), given, None, like, absent=("given",))
        return
    with pytest.raises(UnsupportedError, match=message):
        refuse_mixed_arguments(Decoder(how), given, None, like, absent=("given",))
