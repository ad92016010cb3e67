"""A quantized model goes to another process."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import os
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_accel
from hf_accel.kernels import cpu
from hf_accel.linear import QuantLinear

from ...parity.families import build, inputs

WEIGHTS: dict[str, Any] = {"none": None, "int8": "int8", "int4": {"bits": 4, "group_size": 32}}


def generate(model: PreTrainedModel) -> list[list[int]]:
    tokens: torch.Tensor = model.generate(**inputs("left"), max_new_tokens=4, do_sample=False)
    return tokens.tolist()


def child(model: PreTrainedModel, answers: Any) -> None:
    answers.put(generate(model))


class Starting:
    """Stands for a process that is being started: notes the files that it is to be given."""

    def __init__(self) -> None:
        self.files: list[int] = []

    def duplicate_for_child(self, file: int) -> int:
        self.files.append(file)
        return file

    def DupFd(self, file: int) -> int:
        return file


@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_tensor_has_a_file_of_its_own_until_the_child_runs(weights: str) -> None:
    model = hf_accel.patch(build("llama"), weights=WEIGHTS[weights])
    starting = Starting()
    multiprocessing.context.set_spawning_popen(starting)
    try:
        ForkingPickler.dumps(model)
    finally:
        multiprocessing.context.set_spawning_popen(None)
    assert starting.files
    assert len(set(starting.files)) == len(starting.files)
    assert all(os.fstat(file) for file in starting.files)


LAYOUTS: list[dict[str, Any]] = [
    {"bits": 8},
    {"bits": 8, "group_size": 32},
    {"bits": 4, "group_size": 32},
    {"bits": 4, "group_size": 32, "symmetric": False},
]


@pytest.mark.skipif(cpu.refusal() is not None, reason="only native calls hold addresses")
@pytest.mark.parametrize("weights", LAYOUTS, ids=str)
def test_no_number_moves_whose_address_native_calls_hold(weights: dict[str, Any]) -> None:
    """A pickle for another process moves its tensors to memory that both share, and their old memory is freed."""
    model = hf_accel.patch(build("llama"), weights=weights)
    before = generate(model)
    ForkingPickler.dumps(model)
    ForkingPickler.dumps(model.state_dict())
    packed = [each._packed.weight for each in model.modules() if isinstance(each, QuantLinear)]
    held = [tensor for each in packed for tensor in vars(each).values() if isinstance(tensor, torch.Tensor)]
    assert len(held) >= 2 * len(packed) > 0
    assert not any(tensor.is_shared() for tensor in held)
    assert generate(model) == before


@pytest.mark.long
@pytest.mark.parametrize("weights", WEIGHTS)
def test_spawned(weights: str) -> None:
    model = hf_accel.patch(build("llama"), weights=WEIGHTS[weights])
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=child, args=(model, answers))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert answers.get() == generate(model)
