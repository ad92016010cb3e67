"""Hidden states and relations learnt through a Trainer, against gradients of plain torch from what transformers
itself calls hidden states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertForMaskedLM, BertForSequenceClassification

from hf_accel.distill.losses.inside import NOWHERE
from hf_accel.distill.trainer.transfer import Projections, documents_of
from hf_accel.errors import UnsupportedError

from ..classroom import CHECKPOINTING, bert, classified, distance, gpt2, llama, t5, texts, update
from .test_trainer import trainer

ONLY: dict[str, Any] = {"alpha": 1.0}  # so that transfer and CE are all there is


def padded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each text loses its first i tokens to padding on the left."""
    for i, row in enumerate(rows):
        row["attention_mask"][:i], row["input_ids"][:i] = 0, 0
    return rows


def gradients(total: Tensor, student: nn.Module, *more: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(total, [*student.parameters(), *more], allow_unused=True))


def expected_update(student: Any, total: Tensor) -> dict[str, Tensor]:
    named = dict(student.named_parameters())
    found = gradients(total, student)
    return {name: torch.zeros(()) if g is None else -g for name, g in zip(named, found, strict=True)}


def each_row(student: Any, teacher: Any, data: list[dict[str, Any]], shift: bool) -> Any:
    """(outputs of student and teacher with hidden states, which positions count) of each row."""
    for row in data:
        inputs = {name: value[None] for name, value in row.items()}
        ours = student.eval()(**inputs, output_hidden_states=True)
        with torch.no_grad():
            theirs = teacher.eval()(**inputs, output_hidden_states=True)
        keep = row["labels"] != -100
        yield ours, theirs, nn.functional.pad(keep[1:], (0, 1)) if shift else keep


@pytest.mark.parametrize("kind", ["mse", "cosine"])
@pytest.mark.parametrize(("batch", "accumulation"), [(4, 1), (1, 4)])
def test_hidden_states(kind: str, batch: int, accumulation: int, tmp_path: Path) -> None:
    student, teacher = llama(1, layers=3), llama(2, layers=5)
    ours = trainer(
        tmp_path, copy.deepcopy(student), teacher, batch=batch, accumulation=accumulation, hidden_weight=0.3,
        hidden_loss=kind, hidden_layer_map=["1:2", "2:4"], train_dataset=padded(texts()), **ONLY,
    )  # fmt: skip
    total, count = torch.zeros(()), 0
    for mine, theirs, keep in each_row(student, teacher, padded(texts()), shift=True):
        total, count = total + mine.loss * keep.sum(), count + int(keep.sum())
        for left, right in ((1, 2), (2, 4)):
            s, t = mine.hidden_states[left][0, keep], theirs.hidden_states[right][0, keep]
            apart = ((s - t) ** 2).sum(-1) / (t**2).sum(-1)
            apart = apart if kind == "mse" else 1 - (s * t).sum(-1) / (s.norm(dim=-1) * t.norm(dim=-1))
            total = total + 0.3 * apart.sum() / 2
    assert distance(update(ours), expected_update(student, total / count)) < 1e-5


@pytest.mark.parametrize("accumulation", [1, 4])
def test_projections_between_unequal_widths(accumulation: int, tmp_path: Path) -> None:
    """They learn with the student: plain SGD of rate 1, so their update is minus the gradient."""
    student, teacher = llama(1, layers=2), llama(2, layers=4, hidden_size=32)
    ours = trainer(
        tmp_path, copy.deepcopy(student), teacher, batch=4 // accumulation, accumulation=accumulation,
        hidden_weight=0.3, hidden_layer_map=["1:2"], seed=11, **ONLY,
    )  # fmt: skip
    weight = Projections([1], 16, 32, seed=11).weights["1"]
    total, count = torch.zeros(()), 0
    for mine, theirs, keep in each_row(student, teacher, texts(), shift=True):
        s, t = mine.hidden_states[1][0, keep] @ weight.T, theirs.hidden_states[2][0, keep]
        total = total + mine.loss * keep.sum() + 0.3 * (((s - t) ** 2).sum(-1) / (t**2).sum(-1)).sum()
        count += int(keep.sum())
    expected, changed = gradients(total / count, student, weight)[-1], update(ours)
    found = ours._transfer.projections.weights["1"] - weight
    torch.testing.assert_close(found.detach(), -expected, rtol=1e-4, atol=1e-6)
    assert distance(changed, expected_update(student, _again(student, teacher, weight))) < 1e-5


def _again(student: Any, teacher: Any, weight: Tensor) -> Tensor:
    total, count = torch.zeros(()), 0
    for mine, theirs, keep in each_row(student, teacher, texts(), shift=True):
        s, t = mine.hidden_states[1][0, keep] @ weight.detach().T, theirs.hidden_states[2][0, keep]
        total = total + mine.loss * keep.sum() + 0.3 * (((s - t) ** 2).sum(-1) / (t**2).sum(-1)).sum()
        count += int(keep.sum())
    return total / count


def llama_vectors(model: Any, hidden: tuple[Tensor, ...], layer: int) -> list[Tensor]:
    block = model.model.layers[layer - 1]
    x, attention = block.input_layernorm(hidden[layer - 1]), block.self_attn
    return [x @ p.weight.T for p in (attention.q_proj, attention.k_proj, attention.v_proj)]


def gpt2_vectors(model: Any, hidden: tuple[Tensor, ...], layer: int) -> list[Tensor]:
    block = model.transformer.h[layer - 1]
    return list((block.ln_1(hidden[layer - 1]) @ block.attn.c_attn.weight + block.attn.c_attn.bias).chunk(3, -1))


def bert_vectors(model: Any, hidden: tuple[Tensor, ...], layer: int) -> list[Tensor]:
    attention, x = model.bert.encoder.layer[layer - 1].attention.self, hidden[layer - 1]
    return [x @ p.weight.T + p.bias for p in (attention.query, attention.key, attention.value)]


FAMILIES: dict[str, Any] = {
    "llama": (lambda: (llama(1, layers=2), llama(2, layers=3, hidden_size=32)), llama_vectors, (2, 3), True),
    "gpt2": (lambda: (gpt2(1), gpt2(2)), gpt2_vectors, (1, 1), True),
    "bert": (lambda: (bert(BertForMaskedLM, 1), bert(BertForMaskedLM, 2)), bert_vectors, (1, 1), False),
}


@pytest.mark.parametrize(
    ("family", "batch", "accumulation"),  # BERT's own loss is a mean of each micro-batch
    [("llama", 4, 1), ("llama", 1, 4), ("gpt2", 4, 1), ("gpt2", 2, 2), ("bert", 4, 1)],
)
def test_attention_relations(family: str, batch: int, accumulation: int, tmp_path: Path) -> None:
    make, vectors, (left, right), causal = FAMILIES[family]
    student, teacher = make()
    for parameter in (*student.parameters(), *teacher.parameters()):
        parameter.data *= 6  # relations that differ
    ours = trainer(
        tmp_path, copy.deepcopy(student), teacher, batch=batch, accumulation=accumulation, attention_weight=2.0,
        relation_heads=4, train_dataset=padded(texts()), **ONLY,
    )  # fmt: skip
    total, count, data = torch.zeros(()), 0, padded(texts())
    for row, (mine, theirs, keep) in zip(data, each_row(student, teacher, data, causal), strict=True):
        total, count = total + mine.loss * keep.sum(), count + int(keep.sum())
        both = [vectors(m, o.hidden_states, at)
                for m, o, at in ((student, mine, left), (teacher, theirs, right))]  # fmt: skip
        for s, t in zip(*both, strict=True):
            total = total + 2.0 * relations(s[0], t[0].detach(), keep, row["attention_mask"], causal=causal)
    assert distance(update(ours), expected_update(student, total / count)) < 1e-4


def relations(s: Tensor, t: Tensor, keep: Tensor, mask: Tensor, *, causal: bool) -> Tensor:
    total = torch.zeros(())
    for i in keep.nonzero().flatten().tolist():
        seen = [k for k in range(len(s)) if mask[k] and (k <= i or not causal)]
        for h in range(4):
            a, b = (x[:, h * x.shape[1] // 4 : (h + 1) * x.shape[1] // 4] for x in (s, t))
            log_a, log_b = (torch.log_softmax(x[seen] @ x[i] / x.shape[1] ** 0.5, -1) for x in (a, b))
            total = total + (log_b.exp() * (log_b - log_a)).sum() / 4
    return total


def test_checkpointed_layers_give_the_same_update(tmp_path: Path) -> None:
    def changed(**more: Any) -> dict[str, Tensor]:
        keywords = {"hidden_weight": 0.1, "attention_weight": 1.0, **more}
        return update(trainer(tmp_path, llama(1, layers=2), llama(2, layers=2, hidden_size=32), **keywords))

    assert distance(changed(**{CHECKPOINTING: True}), changed()) < 1e-6


def test_reentrant_checkpoints_are_refused(tmp_path: Path) -> None:
    kinds = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}}
    with pytest.raises(UnsupportedError, match="use_reentrant"):
        trainer(tmp_path, llama(1, layers=2), llama(2, layers=2), attention_weight=1.0, **kinds).train()


def test_a_classifier_learns_from_all_its_tokens(tmp_path: Path) -> None:
    """Each text counts once, however long it is."""
    student, teacher = (bert(BertForSequenceClassification, seed, num_labels=3) for seed in (1, 2))
    data = padded(classified())
    ours = trainer(tmp_path, copy.deepcopy(student), teacher, train_dataset=data, hidden_weight=0.7, **ONLY)
    total = torch.zeros(())
    for row in data:
        inputs = {name: value[None] for name, value in row.items()}
        outputs = [model.eval()(**inputs, output_hidden_states=True) for model in (student, teacher)]
        real = row["attention_mask"].bool()
        s, t = (output.hidden_states[1][0, real] for output in outputs)
        total = total + outputs[0].loss + 0.7 * (((s - t.detach()) ** 2).sum(-1) / (t.detach() ** 2).sum(-1)).mean()
    assert distance(update(ours), expected_update(student, total / len(data))) < 1e-5


def test_packed_texts_do_not_see_each_other() -> None:
    inputs = {"position_ids": torch.tensor([[0, 1, 2, 0, 1]]), "attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}
    assert documents_of(inputs, torch.zeros(1, 5)).tolist() == [[1, 1, 1, 2, NOWHERE]]


def test_what_transfer_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="the student has 1 layers, the teacher 2"):
        trainer(tmp_path, hidden_weight=1.0, hidden_layer_map=["2:2"]).train()
    with pytest.raises(UnsupportedError, match="relation_heads=5"):
        trainer(tmp_path, attention_weight=1.0, relation_heads=5).train()
    with pytest.raises(UnsupportedError, match="not one stack"):
        trainer(tmp_path, t5(1), t5(2), attention_weight=1.0).train()
