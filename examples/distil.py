"""Distil a model into one of half its depth, beside the same student trained on text alone: a few minutes on a CPU."""

import sys
from pathlib import Path

import torch
from plot import plot
from train_tiny_model import read_modules
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import hf_accel

PATH, STEPS = Path(__file__).parent / "stdlib-tiny", int(sys.argv[1]) if len(sys.argv) > 1 else 200
teacher, tokenizer = AutoModelForCausalLM.from_pretrained(PATH), AutoTokenizer.from_pretrained(PATH)


def rows(text: str) -> list[dict[str, list[int]]]:
    ids = tokenizer(text, verbose=False)["input_ids"]
    return [{"input_ids": ids[i : i + 128], "labels": ids[i : i + 128]} for i in range(0, len(ids) - 128, 128)]


def train(*callbacks: hf_accel.DistillationCallback) -> list[tuple[float, float]]:
    student = hf_accel.init_student(teacher, num_layers=2, strategy="first_last", dtype=torch.float32)
    args = TrainingArguments("distilled", max_steps=STEPS, learning_rate=2e-3, bf16=True, eval_strategy="steps",
        eval_steps=-(-STEPS // 8), save_strategy="no", report_to=[], use_cpu=True)  # fmt: skip
    trainer = Trainer(student, args, train_dataset=texts, eval_dataset=held_out, callbacks=[*callbacks])
    trainer.train()
    return [(log["step"], log["eval_loss"]) for log in trainer.state.log_history if "eval_loss" in log]


texts, held_out = rows("\n".join(read_modules()[0][:150])), rows((PATH / "heldout.txt").read_text())[:64]
curves = {"text alone": train(), "distilled": train(hf_accel.DistillationCallback(teacher, alpha=0.1, temperature=1))}
print({name: f"held-out loss {points[-1][1]:.3f}" for name, points in curves.items()})
plot("distil.png", "a student of 2 layers, from a teacher of 4", {"held-out loss": curves})
