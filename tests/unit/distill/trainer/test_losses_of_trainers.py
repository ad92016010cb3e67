"""A teacher has its say where a trainer learns from the model's own loss; other trainers are refused by name."""

from __future__ import annotations

import contextlib
import copy
import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import Seq2SeqTrainer, Trainer

from hf_accel.distill.trainer.callback import DistillationCallback, refuse_loss
from hf_accel.distill.trainer.distillation_trainer import DistillationMixin
from hf_accel.distill.trainer.settings import DistillationSettings
from hf_accel.errors import UnsupportedError

from ..classroom import ALPHA, TEMPERATURE, arguments, distance, llama, reference, texts, update
from .test_sft import distil, words

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's packages
PROMPTS = ["w3 w4 w5", "w6 w7"] * 4


def trainers_of_trl() -> list[type]:
    experimental = importlib.import_module("trl.experimental")
    modules: list[Any] = [trl]
    for module in pkgutil.iter_modules(experimental.__path__):
        with contextlib.suppress(ImportError):  # of packages that only this trainer needs
            modules.append(importlib.import_module(f"trl.experimental.{module.name}"))
    found = {getattr(module, name) for module in modules for name in dir(module) if name.endswith("Trainer")}
    return [kind for kind in found if kind.__module__.startswith("trl.")]


def made(kind: type, folder: Path, **more: Any) -> Any:
    """A GRPOTrainer, DPOTrainer or a subclass, for one step."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    online = issubclass(kind, trl.GRPOTrainer)
    config = trl.GRPOConfig if online else trl.DPOConfig
    columns = {"prompt": PROMPTS} | ({} if online else {"chosen": [" w8"] * 8, "rejected": [" w9"] * 8})
    given = {"num_generations": 4, "max_completion_length": 4} if online else {}
    ours = {"reward_funcs": lambda completions, **rest: [float(len(c)) for c in completions]} if online else {}
    ours |= {} if online else {"ref_model": llama(1)}
    args = config(
        str(folder), max_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False,
        per_device_train_batch_size=4, gradient_checkpointing=False, **given,
    )  # fmt: skip
    data = Dataset(InMemoryTable.from_pydict(columns), fingerprint="pairs")  # hashing it would pickle pyarrow
    return kind(llama(1), args=args, train_dataset=data, processing_class=words(), **ours, **more)


def test_every_trainer_of_trl() -> None:
    """Only where SFTTrainer's loss runs is it the model's own."""
    kinds = trainers_of_trl()
    assert len(kinds) > 5
    for kind in kinds:
        trainer: Any = kind.__new__(kind)
        if kind.__name__ == "SFTTrainer":
            refuse_loss(trainer)
        else:
            with pytest.raises(UnsupportedError, match=f"^{kind.__name__} computes a loss of its own"):
                refuse_loss(trainer)


@pytest.mark.parametrize("kind", [Trainer, Seq2SeqTrainer, trl.SFTTrainer], ids=lambda kind: kind.__name__)
def test_subclasses_that_change_no_loss(kind: type) -> None:
    class More(kind):  # type: ignore[misc, valid-type]
        def compute_loss(self, *args: Any, **more: Any) -> Any:
            return super().compute_loss(*args, **more)

    for each in (kind, More):
        refuse_loss(each.__new__(each))


@pytest.mark.parametrize("kind", [trl.GRPOTrainer, trl.DPOTrainer], ids=lambda kind: kind.__name__)
def test_losses_of_policies_are_refused(kind: type, tmp_path: Path) -> None:
    class Own(kind):  # type: ignore[misc, valid-type]
        def compute_loss(self, *args: Any, **more: Any) -> Any:
            return super().compute_loss(*args, **more)

    class Mixed(DistillationMixin, kind):  # type: ignore[misc, valid-type]
        pass

    teaching = {"teacher_model": llama(2), "distillation": DistillationSettings(alpha=ALPHA)}
    for each, more in ((kind, {"callbacks": [distil(llama(2))]}), (Own, {"callbacks": [distil(llama(2))]}),
                       (Mixed, teaching)):  # fmt: skip
        trainer = made(each, tmp_path, **more)
        before = copy.deepcopy(trainer.model.state_dict())
        with pytest.raises(UnsupportedError, match=f"^{each.__name__} computes a loss of its own"):
            trainer.train()
        assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
        assert not trainer.model._forward_hooks


class Fused(Trainer):
    """A trainer by hand that asks TRL's fused head for log-probabilities, as its policies' trainers do."""

    weights = (1.0, 1.0, 1.0, 1.0)  # of the texts

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        output = model(**inputs, fused_lm_head=True)
        weighed = output.log_probs * torch.tensor(self.weights)[:, None]
        return -weighed.sum() / output.label_mask.sum()


def fused(folder: Path, *weights: float) -> Trainer:
    from trl.trainer.utils import add_fused_lm_head

    student = llama(1)
    add_fused_lm_head(student)
    trainer = Fused(student, arguments(folder), train_dataset=texts(), callbacks=[distil(llama(2))])
    trainer.weights = weights
    return trainer


def test_log_probs_of_a_trainer_by_hand(tmp_path: Path) -> None:
    trainer = fused(tmp_path, 1.0, 1.0, 1.0, 1.0)
    expected = reference(llama(1), llama(2), texts(), shift=True, alpha=ALPHA, temperature=TEMPERATURE)
    assert distance(update(trainer), expected) < 1e-5


@pytest.mark.parametrize("weights", [(1.0, -1.0, 1.0, -1.0), (1.0, 1.0, 1.0, 0.5), (-1.0,) * 4, (0.0,) * 4], ids=str)
def test_advantages_are_found_out(tmp_path: Path, weights: tuple[float, ...]) -> None:
    """Advantages and preferences weigh texts, so that the teacher would get theirs, or none at all."""
    trainer = fused(tmp_path, *weights)
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(UnsupportedError, match="did not learn from the loss of LlamaForCausalLM"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_a_loss_that_is_not_minimised(tmp_path: Path, factor: float) -> None:
    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            output = model(**inputs)
            return factor * output.loss + output.logits.square().mean()

    callback = DistillationCallback(llama(2))
    with pytest.raises(UnsupportedError, match="did not learn from"):
        Own(llama(1), arguments(tmp_path), train_dataset=texts(), callbacks=[callback]).train()
