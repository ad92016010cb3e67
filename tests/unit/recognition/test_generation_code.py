"""What is read in the code around generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BambaForCausalLM, GenerationMixin, LlamaForCausalLM, Mamba2ForCausalLM, RwkvForCausalLM
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from hf_accel.recognition.generation_code import counts_nothing, inference_code, only_passes_on

METHOD = "prepare_inputs_for_generation"


class Adds(GenerationMixin):
    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        inputs["input_ids"] = input_ids + 1
        return inputs


class Calls(GenerationMixin):
    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids.clone(), **kwargs)
        inputs["attention_mask"] = None
        return inputs


class Replaces(GenerationMixin):
    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return {"attention_mask": None}


@pytest.mark.parametrize(
    ("kind", "passes"),
    [
        (Mamba2ForCausalLM, True), (BambaForCausalLM, True), (LlamaForCausalLM, False), (RwkvForCausalLM, False),
        (Adds, False), (Calls, False), (Replaces, False), (type("Below", (Mamba2ForCausalLM,), {}), True),
    ],
)  # fmt: skip
def test_methods_that_pass_on_what_they_are_given(kind: type, passes: bool) -> None:
    assert only_passes_on(kind, METHOD) is passes


UPDATE = "_update_model_kwargs_for_generation"


class HandsOnStates(GenerationMixin):
    """As RWKV's does from transformers 5.24 on."""

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], is_encoder_decoder: bool = False, num_new_tokens: int = 1
    ) -> dict[str, Any]:
        # The usual name of a cache is another one.
        if "state" in outputs:
            model_kwargs["state"] = outputs.state
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder, num_new_tokens)


class ForgetsStates(GenerationMixin):
    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], is_encoder_decoder: bool = False, num_new_tokens: int = 1
    ) -> dict[str, Any]:
        if "state" in outputs:
            model_kwargs["state"] = None
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder, num_new_tokens)


@pytest.mark.parametrize(
    ("kind", "known"), [(HandsOnStates, True), (ForgetsStates, False), (type("Below", (HandsOnStates,), {}), True)]
)
def test_states_are_handed_on_as_they_are(kind: type, known: bool) -> None:
    assert only_passes_on(kind, UPDATE) is known


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[-1])


def test_forwards_that_count_positions() -> None:
    assert counts_nothing(nn.Sequential(nn.Linear(2, 2), nn.SiLU()))
    assert not counts_nothing(nn.Sequential(nn.Linear(2, 2), Counts()))


def test_code_that_runs_in_training_alone_is_left_out() -> None:
    code = inference_code(Mamba2Mixer.forward)
    assert "self.out_proj(" in code and "self.out_proj.weight" not in code
    assert "mamba2_split_conv1d_scan_combined" not in code
