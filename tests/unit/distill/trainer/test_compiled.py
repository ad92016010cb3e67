"""A student under torch.compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Trainer

from hf_accel.distill.trainer.callback import DistillationCallback

from ..classroom import ALPHA, TEMPERATURE, arguments, distance, llama, reference, texts, update

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # of torch's compiler


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("by", ["trainer", "user"])
def test_update_is_the_gradient_over_all_labels(tmp_path: Path, by: str, fused: bool) -> None:
    """Evaluated before it is trained, so that a graph without hooks is there first."""
    torch.compiler.reset()
    student, teacher = llama(1), llama(2, layers=2)
    expected = reference(student, teacher, texts(), shift=True)
    callback = DistillationCallback(teacher, alpha=ALPHA, temperature=TEMPERATURE, fused=fused)
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"} if by == "trainer" else {}
    args = arguments(tmp_path, 2, 2, eval_on_start=True, remove_unused_columns=False, **compiled)
    model = student if by == "trainer" else torch.compile(student, backend="eager")
    trainer = Trainer(model, args, train_dataset=texts(), eval_dataset=texts(), callbacks=[callback])
    found = {name.removeprefix("_orig_mod."): value for name, value in update(trainer).items()}
    assert distance(found, expected) < 1e-5
    assert not student._forward_hooks and not model._forward_hooks
