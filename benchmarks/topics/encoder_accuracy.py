"""The accuracy of a small encoder, trained here to say which package of Python's library a passage comes from."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import hf_accel
from hf_accel.checkpoints.load import load_tokenizer
from hf_accel.patching.twin import twin

from ..harness.settings import Settings
from ..harness.tables import Table
from ..harness.texts import SHIPPED

PACKAGES = ("asyncio", "ctypes", "email", "idlelib", "importlib", "multiprocessing", "tkinter", "unittest")
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
LENGTH, BATCH = 48, 32  # tokens of a passage, passages of a step
STEPS, TESTED = 1000, 2000
RATE = 2e-3
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NOTE = (
    "A BERT that was trained here on passages of Python's library, to tell packages of it apart, over the last fifth "
    "of each module, which it was not trained on. kept: of the accuracy of stock in float32."
)


def accuracy(settings: Settings) -> Table:
    steps, tested = (STEPS // 8, TESTED // 8) if settings.quick else (STEPS, TESTED)
    tokenizer, seed = load_tokenizer(str(SHIPPED)), settings.seed
    read, held_out = texts(tokenizer)
    stock = trained(read, len(tokenizer), steps=steps, seed=seed)
    passages, labels = drawn(held_out, tested, torch.Generator().manual_seed(seed + 1))
    models = {"stock": stock, "exact": hf_accel.patch(twin(stock), weights=None), "int8": hf_accel.patch(twin(stock))}
    answers = {name: answered(model, passages) for name, model in models.items()}
    right = {name: share(found, labels) for name, found in answers.items()}
    rows = [
        {
            "model": name,
            "accuracy_share": right[name],
            "kept_share": right[name] / right["stock"],
            "same_answers_share": share(found, answers["stock"]),
        }
        for name, found in answers.items()
    ]
    print(f"    accuracy: {rows}", flush=True)
    return Table(f"Accuracy: {tested} passages of {len(PACKAGES)} packages", rows, NOTE)


def share(answers: Tensor, expected: Tensor) -> float:
    return (answers == expected).double().mean().item()


def texts(tokenizer: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens of each package, to train on, and the last fifth of each of its modules, to test on."""
    root, read, held_out = Path(sysconfig.get_paths()["stdlib"]), [], []
    for package in PACKAGES:
        modules = [path.read_text(encoding="utf-8") for path in sorted((root / package).glob("*.py"))]
        ids = [torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in modules]
        read.append(torch.cat([one[: len(one) * 4 // 5] for one in ids]))
        held_out.append(torch.cat([one[len(one) * 4 // 5 :] for one in ids]))
    return read, held_out


def drawn(packages: list[Tensor], count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Passages [count, LENGTH], which begin anywhere in a package's text, and the numbers of the packages."""
    labels = torch.randint(len(packages), (count,), generator=generator)
    passages = []
    for text in (packages[label] for label in labels.tolist()):
        start = int(torch.randint(len(text) - LENGTH + 1, (), generator=generator))
        passages.append(text[start : start + LENGTH])
    return torch.stack(passages), labels


def trained(packages: list[Tensor], words: int, *, steps: int, seed: int) -> Any:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    config = BertConfig(
        **SIZES, vocab_size=words, num_labels=len(packages), max_position_embeddings=LENGTH, **NO_DROPOUT
    )
    model = BertForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in range(steps):
        passages, labels = drawn(packages, BATCH, generator)
        model(input_ids=passages, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


@torch.inference_mode()
def answered(model: Any, passages: Tensor) -> Tensor:
    """The packages' numbers as the model chooses them."""
    return torch.cat([model(input_ids=batch).logits.argmax(-1) for batch in passages.split(BATCH)])
