"""Started by test_processes.py in one process, and in two by accelerate: a training whose result it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Trainer

from hf_accel.distill.trainer.callback import DistillationCallback
from hf_accel.distill.trainer.distillation_trainer import DistillationTrainer

from ..classroom import arguments, llama, texts
from .test_trainer import SETTINGS, config


def main(kind: str, folder: Path, batch: int) -> None:
    """kind: "callback"; "trainer", whose projections learn too; or "sampled", on the student's best guesses."""
    data = texts([9, 3, 6, 1, 2, 8, 1, 5, 4, 4, 7, 2])  # unequal between processes and micro-batches
    given = {"max_steps": 3, "learning_rate": 0.3, "max_grad_norm": 0.5, "per_device_eval_batch_size": 1}
    student, teacher = llama(1, layers=2), llama(2, layers=3)
    if kind == "callback":
        follow = DistillationCallback(teacher, **SETTINGS)
        trainer = Trainer(student, arguments(folder, batch, 2, **given), train_dataset=data, callbacks=[follow])
    else:
        more = {"hidden_weight": 0.1, "attention_weight": 1.0}
        if kind == "sampled":
            more = {"lmbda": 0.7, "max_new_tokens": 4, "sampling_top_k": 1}
            student.generation_config.eos_token_id = list(range(1, 30))  # samples of unequal lengths
        else:
            teacher = llama(2, layers=3, hidden_size=32)
        trainer = DistillationTrainer(
            student,
            teacher_model=teacher,
            args=config(folder, batch, 2, **given, **more),
            train_dataset=data,
            eval_dataset=data,
        )
    trainer.train()
    metrics = trainer.evaluate(data)
    if trainer.is_world_process_zero():
        lines = [line for line in trainer.state.log_history if "loss" in line]
        metrics = {k: v for k, v in metrics.items() if k in ("eval_kd_loss", "eval_acceptance")}
        found = {"processes": trainer.accelerator.num_processes, "lines": lines, "metrics": metrics}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.json").write_text(json.dumps(found))
        save_file({name: value.detach() for name, value in student.named_parameters()}, folder / "weights.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, batch, *kinds = sys.argv[1:]
    for kind in kinds:
        main(kind, Path(folder) / kind, int(batch))
