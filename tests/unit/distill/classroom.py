"""Tiny models, unequal texts and Trainers for the tests of distillation's seam; and the reference gradient."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import (
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

VOCABULARY = 64
LABELS = (9, 3, 6, 1)  # how many tokens of each text are learnt from: unequal, so that a mean of means is wrong
ALPHA, TEMPERATURE = 0.3, 2.0
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # the newer name of the two that is there
CHECKPOINTING = next(name for name in _CHECKPOINTING if name in TrainingArguments.__dataclass_fields__)


def llama(seed: int = 0, layers: int = 1, vocab_size: int = VOCABULARY, **more: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, **more}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, num_hidden_layers=layers, pad_token_id=0, **sizes))


def mixtral(seed: int = 0) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **sizes, **experts))


def gpt2(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=32, **plain))


def bert(kind: type[PreTrainedModel], seed: int = 0, dropout: float = 0.0, **more: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    quiet = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return kind(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes, **quiet, **more))


def t5(seed: int = 0) -> T5ForConditionalGeneration:
    torch.manual_seed(seed)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, initializer_factor=0.3, **sizes)
    )


def texts(labels: Sequence[int] = LABELS, length: int = 12) -> list[dict[str, Any]]:
    """Token ids with that many labels at the end of each, padded to one length."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for count in labels:
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        goal = ids.clone()
        goal[: length - count] = -100
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": goal})
    return found


def classified(count: int = 4, classes: int = 3) -> list[dict[str, Any]]:
    return [{**text, "labels": torch.tensor(i % classes)} for i, text in enumerate(texts([1] * count))]


def arguments(folder: Path, batch: int = 4, accumulation: int = 1, **more: Any) -> TrainingArguments:
    """Plain SGD with a rate of 1, so that the update is minus the gradient; texts in their order."""
    given: dict[str, Any] = {
        "max_steps": 1, "learning_rate": 1.0, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True,
        "train_sampling_strategy": "sequential", "dataloader_pin_memory": False, **more,
    }  # fmt: skip
    return TrainingArguments(
        str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, **given
    )


def update(trainer: Trainer) -> dict[str, Tensor]:
    """What a training changes, for a rate of 1: minus the gradient of its only step."""
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    return {name: value.detach() - before[name] for name, value in trainer.model.named_parameters()}


def reference(
    student: Any, teacher: Any, batch: Sequence[dict[str, Any]], shift: bool, **given: float
) -> dict[str, Tensor]:
    """Minus the gradient of alpha * CE + (1 - alpha) * T^2 * KL over all labels of `batch`, in its own few lines.
    Keywords: alpha, temperature."""
    student, alpha = copy.deepcopy(student), given.get("alpha", ALPHA)
    temperature = given.get("temperature", TEMPERATURE)
    total, count = torch.zeros(()), 0
    for row in batch:
        inputs = {key: value[None] for key, value in row.items()}
        labels = inputs["labels"].reshape(1, -1)
        logits = student.eval()(**inputs).logits
        with torch.no_grad():
            target = teacher.eval()(**inputs).logits.float()
        logits, target = (value.reshape(1, -1, value.shape[-1]) for value in (logits, target))
        if shift:
            logits, target, labels = logits[:, :-1], target[:, :-1], labels[:, 1:]
        keep = labels != -100
        ce = cross_entropy(logits[keep], labels[keep], reduction="sum")
        soft = [log_softmax(value[keep] / temperature, -1) for value in (logits, target)]
        kl = kl_div(soft[0], soft[1], log_target=True, reduction="sum")
        total, count = total + alpha * ce + (1 - alpha) * temperature**2 * kl, count + int(keep.sum())
    parameters = dict(student.named_parameters())
    gradients = torch.autograd.grad(total / count, list(parameters.values()), allow_unused=True)
    return {name: -g if g is not None else torch.zeros(()) for name, g in zip(parameters, gradients, strict=True)}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the expected, over all parameters together."""
    apart = sum(float((found[name] - expected[name]).double().pow(2).sum()) for name in expected)
    size = sum(float(value.double().pow(2).sum()) for value in expected.values())
    return float((apart / size) ** 0.5)
