"""Steps on the student's own samples, against stock generate and Trainer's own counts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_accel.distill.trainer.distillation_trainer import DistillationTrainer
from hf_accel.distill.trainer.on_policy import StudentSampler, prompts_of
from hf_accel.distill.trainer.settings import DistillationSettings
from hf_accel.errors import UnsupportedError
from hf_accel.patching.patch import is_patched

from ..classroom import ALPHA, distance, llama, reference, texts, update
from .test_trainer import trainer

GREEDY: dict[str, Any] = {"lmbda": 1.0, "max_new_tokens": 5, "sampling_top_k": 1}  # of one token: the best


class Recorder(DistillationTrainer):
    """Keeps what each step was trained on, and the weights that it began with."""

    def get_batch_samples(self, *args: Any) -> Any:
        found = super().get_batch_samples(*args)
        record = {"batches": found[0], "items": found[1], "student": copy.deepcopy(self.model)}
        vars(self).setdefault("steps", []).append(record)
        return found


def recorder(folder: Path, student: Any = None, **more: Any) -> Recorder:
    made = trainer(folder, student, **more)
    made.__class__ = Recorder
    return made  # type: ignore[return-value]


def said(batch: dict[str, Any]) -> list[list[int]]:
    """Every row's prompt and completion, without padding."""
    return [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


def test_samples_come_from_the_weights_of_their_step(tmp_path: Path) -> None:
    """Greedy samples are what stock generate makes of a copy of the student, as it was when the step began."""
    made = recorder(tmp_path, llama(1, layers=2), batch=2, accumulation=2, max_steps=3, learning_rate=3.0, **GREEDY)
    made.train()
    completions = []
    for step in made.steps:
        student = step["student"].eval()
        assert not is_patched(student)
        for batch, rows in zip(step["batches"], (texts()[:2], texts()[2:]), strict=True):
            for row, found, labels in zip(rows, said(batch), batch["labels"], strict=True):
                prompt = row["input_ids"][row["labels"] == -100]
                expected = student.generate(
                    prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=5, do_sample=False,
                    use_cache=True, pad_token_id=0,
                )  # fmt: skip
                assert found == expected[0].tolist()
                assert labels[labels != -100].tolist() == found[len(prompt) :]
                completions.append(tuple(found[len(prompt) :]))
        assert step["items"] == sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step["batches"])
    assert completions[:4] != completions[4:8], "the student should have changed its mind"


@pytest.mark.parametrize(("batch", "accumulation"), [(4, 1), (1, 4)])
def test_an_update_is_that_of_the_reference_on_the_samples(batch: int, accumulation: int, tmp_path: Path) -> None:
    """The distance from the teacher alone: alpha is for labels, and these words are none. Samples end at unequal
    lengths, by their end token."""
    student, teacher = llama(1, eos_token_id=list(range(1, 20))), llama(2, layers=2)
    made = recorder(
        tmp_path, student, teacher=teacher, batch=batch, accumulation=accumulation, lmbda=1.0, max_new_tokens=6
    )
    before = copy.deepcopy(student)
    found = update(made)
    rows = []
    for part in made.steps[0]["batches"]:
        for ids, mask, labels in zip(*(part[k] for k in ("input_ids", "attention_mask", "labels")), strict=True):
            rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    lengths = [int((row["labels"] != -100).sum()) for row in rows]
    assert len(set(lengths)) > 1 and max(lengths) <= 6
    assert distance(found, reference(before, teacher, rows, shift=True, alpha=0.0)) < 1e-5


def test_the_same_seed_gives_the_same_samples_and_another_others(tmp_path: Path) -> None:
    def samples(**more: Any) -> list[Any]:
        made = recorder(tmp_path, llama(1), batch=2, accumulation=2, max_steps=2, lmbda=1.0, max_new_tokens=8, **more)
        made.train()
        return [said(batch) for step in made.steps for batch in step["batches"]]

    first, again, other = samples(), samples(), samples(seed=1)
    assert first == again
    assert first != other
    assert first[0] != first[2], "steps on the same prompts draw anew"


def test_a_share_of_the_steps_is_sampled() -> None:
    def sampler(lmbda: float, seed: int = 0) -> list[bool]:
        made = StudentSampler(DistillationSettings(lmbda=lmbda), seed, [1], 0)
        return [made.takes(step) for step in range(2000)]

    assert sum(sampler(1.0)) == 2000 and sum(sampler(0.0)) == 0
    assert 530 < sum(sampler(0.3)) < 670  # 600 and more than three standard deviations of 20
    assert sampler(0.3) == sampler(0.3) != sampler(0.3, seed=1)


def test_sampling_leaves_the_student_and_torch_as_they_were(tmp_path: Path) -> None:
    student = llama(1, layers=2).train()
    student.model.layers[0].eval()
    student.generation_config.repetition_penalty = 5.0
    flags = {name: module.training for name, module in student.named_modules()}
    kinds = {name: type(module) for name, module in student.named_modules()}
    made = StudentSampler(DistillationSettings(max_new_tokens=4), 0, [1], 0)
    batch = {k: torch.stack([row[k] for row in texts()]) for k in texts()[0]}
    before = torch.get_rng_state()
    made.batches(student, [batch], step=0, process=0)
    assert torch.equal(before, torch.get_rng_state())
    assert {name: module.training for name, module in student.named_modules()} == flags
    assert {name: type(module) for name, module in student.named_modules()} == kinds
    assert student.generation_config.repetition_penalty == 5.0 and not is_patched(student)


def test_samples_are_from_the_students_own_distribution() -> None:
    """2000 first tokens against the softmax of its logits; a penalty in its generation_config has no say."""
    student = llama(1, vocab_size=8)
    student.lm_head.weight.data *= 30
    student.generation_config.repetition_penalty = 50.0
    prompt = torch.tensor([[3, 4, 5]])
    made = StudentSampler(DistillationSettings(max_new_tokens=1, prompt_tokens=3), 0, [], 0)
    ids = prompt.expand(2000, 3)
    (batch,) = made.batches(student, [{"input_ids": ids, "labels": ids}], step=0, process=0)
    found = torch.bincount(batch["input_ids"][:, 3], minlength=8).double()
    with torch.no_grad():
        expected = student.eval()(prompt).logits[0, -1].double().softmax(-1) * 2000
    assert 0.2 < expected.max() / 2000 < 0.95
    large = expected > 5
    assert ((found - expected)[large] ** 2 / expected[large]).sum() < 30  # of 7 degrees of freedom: 1 in 10,000


def test_logs_count_samples(tmp_path: Path) -> None:
    made = trainer(tmp_path, batch=2, accumulation=2, max_steps=8, logging_steps=8, lmbda=0.5, max_new_tokens=3)
    made.train()
    (line,) = [line for line in made.state.log_history if "loss" in line]
    takes = sum(made._sampler.takes(step) for step in range(8))
    assert 0 < takes < 8 and line["on_policy_steps"] == takes
    assert line["on_policy_tokens"] == takes * 4 * 3 and line["on_policy_length"] == 3
    expected = ALPHA * line["ce_loss"] * (8 - takes) / 8
    assert line["loss"] > expected  # the rest is the teacher's


def test_prompts_are_what_the_labels_leave_out() -> None:
    ids = torch.tensor([[0, 5, 6, 7], [5, 6, 7, 0]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    labels = torch.tensor([[-100, -100, 6, 7], [-100, -100, -100, -100]])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    assert prompts_of(batch, None) == [[5], [5, 6, 7]]
    assert prompts_of(batch, 2) == [[5, 6], [5, 6]]
    with pytest.raises(UnsupportedError, match="prompt_tokens"):
        prompts_of({**batch, "labels": ids}, None)
    with pytest.raises(UnsupportedError, match="pixel_values"):
        prompts_of({**batch, "pixel_values": ids}, None)
    with pytest.raises(UnsupportedError, match="packed"):
        prompts_of({"input_ids": ids, "labels": labels, "position_ids": torch.tensor([[0, 1, 0, 1]] * 2)}, None)
