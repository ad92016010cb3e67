"""Teachers: what they are given, and that they are as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForMaskedLM, DistilBertConfig, DistilBertForMaskedLM, Trainer

import hf_accel
from hf_accel.distill.teachers.live import ModelTeacher
from hf_accel.distill.trainer.callback import DistillationCallback

from ..classroom import ALPHA, TEMPERATURE, arguments, bert, distance, llama, reference, t5, texts, update


def distil(teacher: Any, **more: Any) -> DistillationCallback:
    return DistillationCallback(teacher, **{"alpha": ALPHA, "temperature": TEMPERATURE, **more})


def batch() -> dict[str, torch.Tensor]:
    return {key: torch.stack([row[key] for row in texts()]) for key in texts()[0]}


def everywhere() -> torch.Tensor:
    return torch.ones_like(batch()["input_ids"]).bool()


def test_a_teacher_is_frozen_while_it_teaches_and_no_longer() -> None:
    teacher = bert(BertForMaskedLM, 1, dropout=0.5)
    teacher.train()
    teacher.bert.embeddings.eval()
    flags = [module.training for module in teacher.modules()]
    first, second = (ModelTeacher(teacher).rows(batch(), everywhere()).logits for _ in range(2))
    assert torch.equal(first, second) and not first.requires_grad
    assert [module.training for module in teacher.modules()] == flags
    assert all(parameter.requires_grad and parameter.grad is None for parameter in teacher.parameters())


def test_it_is_as_it_was_after_an_error() -> None:
    teacher = llama(1).train()
    teacher.lm_head.forward = None
    with pytest.raises(TypeError):
        ModelTeacher(teacher).rows(batch(), everywhere())
    assert all(module.training for module in teacher.modules())


def test_labels_and_counts_are_not_for_it() -> None:
    given: list[dict[str, Any]] = []
    teacher = llama(1)
    teacher.register_forward_pre_hook(lambda module, args, kwargs: given.append(kwargs), with_kwargs=True)
    positions = torch.arange(12).expand(4, -1)
    packed = {"position_ids": positions, "cu_seq_lens_q": None, "num_items_in_batch": 3, "token_type_ids": positions}
    ModelTeacher(teacher).rows({**batch(), **packed, "output_hidden_states": True}, everywhere())
    assert set(given[0]) == {"input_ids", "attention_mask", "position_ids", "cu_seq_lens_q", "use_cache"}
    assert given[0]["use_cache"] is False


def test_left_padding_and_masks_reach_it() -> None:
    teacher, data = llama(1), batch()
    data["attention_mask"][0, :4] = 0
    masked = ModelTeacher(teacher).rows(data, everywhere()).logits
    with torch.no_grad():
        expected = teacher(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits
    assert torch.equal(masked, expected[everywhere()])


def test_bert_teaches_distilbert(tmp_path: Path) -> None:
    """BERT reads token_type_ids, DistilBERT does not; and the other way round."""
    torch.manual_seed(0)
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 32}
    small = DistilBertForMaskedLM(DistilBertConfig(vocab_size=64, dropout=0.0, attention_dropout=0.0, **sizes))
    big = bert(BertForMaskedLM, 1)
    typed = [{**row, "token_type_ids": torch.ones_like(row["input_ids"])} for row in texts()]
    for student, teacher, data in ((small, big, texts()), (big, small, typed)):
        trainer = Trainer(student, arguments(tmp_path), train_dataset=data, callbacks=[distil(teacher)])
        trainer.train()
        assert trainer.state.log_history[0]["kd_loss"] > 0


def test_a_bf16_teacher_of_a_float32_student(tmp_path: Path) -> None:
    student, teacher = llama(1), llama(2, layers=2).bfloat16()
    expected = reference(student, teacher, texts(), shift=True)
    trainer = Trainer(student, arguments(tmp_path), train_dataset=texts(), callbacks=[distil(teacher)])
    assert distance(update(trainer), expected) < 2e-3  # bfloat16 in batches of 4 and of 1


def test_decoders_read_the_same(tmp_path: Path) -> None:
    """The teacher, which starts its decoder by another token, is given the student's."""
    student, teacher = t5(1), t5(2)
    teacher.config.decoder_start_token_id = 5
    given: list[torch.Tensor] = []
    teacher.register_forward_pre_hook(
        lambda module, args, kwargs: given.append(kwargs["decoder_input_ids"]), with_kwargs=True
    )
    Trainer(student, arguments(tmp_path), train_dataset=texts(), callbacks=[distil(teacher)]).train()
    assert torch.equal(given[0], student.prepare_decoder_input_ids_from_labels(batch()["labels"]))


@pytest.mark.parametrize("fused", [False, True])
def test_a_teacher_in_int8(tmp_path: Path, fused: bool) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    student, teacher = llama(1), llama(2, **sizes)
    hf_accel.patch(teacher, weights="int8")
    with torch.no_grad():
        said = teacher(**{key: value for key, value in batch().items() if key != "labels"}).logits

    class Said(torch.nn.Module):
        config = teacher.config

        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            rows = [int((batch()["input_ids"] == ids).all(-1).nonzero()) for ids in input_ids]
            return type("Output", (), {"logits": said[rows]})

    expected = reference(student, Said(), texts(), shift=True)
    callbacks = [distil(teacher, fused=fused)]
    found = update(Trainer(student, arguments(tmp_path), train_dataset=texts(), callbacks=callbacks))
    hf_accel.unpatch(teacher)
    assert distance(found, expected) < 1e-4
