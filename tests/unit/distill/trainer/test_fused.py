"""fused=True: the same gradient, from hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, Trainer

from hf_accel.distill.losses.logit_rows import HeadRows
from hf_accel.distill.teachers.live import ModelTeacher
from hf_accel.distill.trainer.callback import DistillationCallback

from ..classroom import (
    ALPHA,
    TEMPERATURE,
    VOCABULARY,
    arguments,
    distance,
    gpt2,
    llama,
    mixtral,
    reference,
    texts,
    update,
)


def gemma(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    finish = {"head_dim": 8, "final_logit_softcapping": 0.1}
    return Gemma2ForCausalLM(Gemma2Config(vocab_size=VOCABULARY, num_hidden_layers=1, **finish, **sizes))


def cohere(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return CohereForCausalLM(CohereConfig(vocab_size=VOCABULARY, num_hidden_layers=1, logit_scale=3.0, **sizes))


def distilled(folder: Path, student: Any, teacher: Any, *cut: int, fused: bool = True, **more: Any) -> Any:
    callback = DistillationCallback(teacher, alpha=ALPHA, temperature=TEMPERATURE, fused=fused)
    return update(Trainer(student, arguments(folder, *cut, **more), train_dataset=texts(), callbacks=[callback]))


@pytest.mark.parametrize(
    "make, cut",
    [(llama, (4, 1)), (llama, (2, 2)), (llama, (1, 4)), (gpt2, (2, 2)), (gemma, (2, 2)), (cohere, (2, 2))],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_update_is_the_gradient_over_all_labels(tmp_path: Path, make: Any, cut: tuple[int, int]) -> None:
    """Tied heads, softcaps and logit scales included."""
    student, teacher = make(1), make(2)
    expected = reference(student, teacher, texts(), shift=True)
    assert distance(distilled(tmp_path, student, teacher, *cut), expected) < 1e-5


def test_all_logits_are_never_there(tmp_path: Path) -> None:
    student, teacher = llama(1), llama(2)
    seen: list[int] = []
    for model in (student, teacher):
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    distilled(tmp_path, student, teacher, 2, 2)
    assert seen == [1] * 4
    batch = {key: value[None] for key, value in texts()[0].items()}
    assert isinstance(ModelTeacher(teacher).rows(batch, torch.ones(1, 12).bool(), compact=True), HeadRows)


@pytest.mark.parametrize("more", [{"bf16": True}, {}], ids=["bf16", "float32"])
def test_it_is_the_same_as_with_logits(tmp_path: Path, more: dict[str, Any]) -> None:
    dense = distilled(tmp_path, mixtral(1), llama(2), 2, 2, fused=False, **more)
    fused = distilled(tmp_path, mixtral(1), llama(2), 2, 2, **more)
    assert distance(fused, dense) < (2e-2 if more else 1e-5)
