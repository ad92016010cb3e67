"""patch() touches one model and nothing else; copies of a patched model are patched models."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel

import hf_accel

from .families import FAMILIES, build, inputs
from .snapshot import logits, snapshot

WEIGHTS = {"none": None, "int8": "int8", "int4": hf_accel.WeightConfig(bits=4, group_size=32)}


def tokens(model: PreTrainedModel) -> torch.Tensor:
    return model.generate(**inputs("left"), max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("shared_config", [False, True])
def test_another_model_of_the_class_is_untouched(shared_config: bool) -> None:
    model, other = build("mistral"), build("mistral", seed=1)
    if shared_config:
        other = type(model)(model.config).eval()
    type(model)._can_set_attn_implementation()  # whose answer newer transformers keep on the class
    before, expected, attributes = snapshot(other), tokens(other), dict(vars(type(model)))
    hf_accel.patch(model, weights="int8")
    tokens(model)
    assert snapshot(other) == before
    assert torch.equal(tokens(other), expected)
    assert other.config._attn_implementation != model.config._attn_implementation
    assert not hf_accel.is_patched(other)
    assert dict(vars(type(other))) == attributes
    assert type(model) is not type(other)
    hf_accel.patch(other)
    hf_accel.unpatch(model)
    assert hf_accel.is_patched(other)
    hf_accel.unpatch(other)
    assert snapshot(other) == before


def test_model_made_from_a_patched_models_config_is_stock() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    assert not hf_accel.is_patched(type(build("llama"))(copy.deepcopy(model.config)))


def by_pickle(model: PreTrainedModel) -> PreTrainedModel:
    return pickle.loads(pickle.dumps(model))


def by_torch(model: PreTrainedModel) -> PreTrainedModel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.covering(1)
@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_copies(family: str, weights: str, copied: Callable[[PreTrainedModel], PreTrainedModel]) -> None:
    """The copy generates the same, can be unpatched, and then is the original model; the first never notices."""
    model = build(family)
    stock, kind = logits(model), type(model)
    hf_accel.patch(model, weights=WEIGHTS[weights])
    expected = tokens(model)
    before = snapshot(model)
    other = copied(model)
    assert hf_accel.is_patched(other)
    assert torch.equal(tokens(other), expected)
    assert hf_accel.stats(other).keys() == hf_accel.stats(model).keys()
    hf_accel.unpatch(other)
    assert type(other) is kind
    assert torch.equal(logits(other), stock)
    assert snapshot(model) == before
    hf_accel.unpatch(model)
    assert torch.equal(logits(model), stock)


def test_copy_of_a_copy() -> None:
    model = hf_accel.patch(build("llama"))
    expected = tokens(model)
    assert torch.equal(tokens(copy.deepcopy(by_pickle(model))), expected)


@pytest.mark.long
def test_torch_load_in_another_process(tmp_path: Path) -> None:
    model = hf_accel.patch(build("llama"))
    torch.save(model, tmp_path / "model.pt")
    torch.save((inputs("left"), tokens(model)), tmp_path / "expected.pt")
    program = (
        "import sys, torch; model = torch.load(sys.argv[1], weights_only=False)\n"
        "given, expected = torch.load(sys.argv[2])\n"
        "assert torch.equal(model.generate(**given, max_new_tokens=8, do_sample=False), expected)\n"
        "import hf_accel; hf_accel.unpatch(model)"
    )
    root = Path(hf_accel.__file__).parents[1]
    paths = [str(tmp_path / name) for name in ("model.pt", "expected.pt")]
    subprocess.run([sys.executable, "-c", program, *paths], cwd=root, check=True)


@pytest.mark.parametrize("weights", ["none", "int8"])
def test_patched_teacher_beside_a_student(weights: str) -> None:
    """Distillation: the student trains as if its teacher were stock, or very nearly with INT8 weights."""
    gradients = []
    for patched in (False, True):
        teacher, student = build("llama"), build("llama", seed=1)
        if patched:
            hf_accel.patch(teacher, weights=WEIGHTS[weights])
        student.train()
        target = logits(teacher).softmax(-1)
        functional.cross_entropy(student(**inputs("left")).logits.mT, target.mT).backward()
        gradients.append({name: p.grad for name, p in student.named_parameters()})
        assert all(p.grad is None for p in teacher.parameters())
    tolerance = 1e-5 if weights == "none" else 0.05
    torch.testing.assert_close(gradients[1], gradients[0], rtol=tolerance, atol=tolerance)
