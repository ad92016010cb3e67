"""Losses from hidden states are those of the logits, gradients included, and the logits are never whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hf_accel.distill.losses import row_losses
from hf_accel.distill.losses.distillation_loss import distillation_loss, loss_sums
from hf_accel.distill.losses.logit_rows import DenseRows, Head, HeadRows, Rows, TopRows
from hf_accel.distill.losses.objective import LOSSES, Objective
from hf_accel.errors import UnsupportedError

from .largest import LargestTensor
from .oracle import logits_of, relative_error, softened, total

BATCH, LENGTH, WIDTH, CLASSES = 3, 7, 8, 37
COUNT = BATCH * LENGTH
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.3},
    "all": {"bias": True, "softcap": 2.0, "scale": 3.0},
}
OBJECTIVE = Objective(0.4, 2.0, "jsd", 0.3)


def fused_sums(hidden: Tensor, head: Head, *rest: Any, chunk_bytes: int | None = None, **more: Any) -> Any:
    """`loss_sums` of hidden states. chunk_bytes: of logits at once; None for what suits a CPU."""
    with mock.patch.object(row_losses, "CHUNK_BYTES", chunk_bytes or row_losses.CHUNK_BYTES):
        return loss_sums(HeadRows(hidden, head), *rest, **more)


def head_of(
    width: int, classes: int = CLASSES, *, bias: bool = False, dtype: Any = torch.float64, **rest: Any
) -> Head:
    weight = torch.randn(classes, width, dtype=dtype)
    return Head(weight, torch.randn(classes, dtype=dtype) if bias else None, **rest)


def states(width: int = WIDTH, rows: int = COUNT, dtype: Any = torch.float64) -> Tensor:
    return torch.randn(rows, width, dtype=dtype)


def labels_of(rows: int = COUNT, classes: int = CLASSES) -> Tensor:
    return torch.randint(0, classes, (rows,))


def gradients(sums: Any, hidden: Tensor, head: Head, *, weight: float = 1.0) -> list[Tensor]:
    """The total that `sums` makes of hidden and head, and its gradients in hidden, weight and bias."""
    leaves = [x.clone().requires_grad_() for x in (hidden, head.weight, head.bias) if isinstance(x, Tensor)]
    made = weight * sums(leaves[0], replace(head, weight=leaves[1], bias=leaves[2] if len(leaves) > 2 else None))
    return [made.detach(), *torch.autograd.grad(made, leaves)]


def agree(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) <= tolerance


# -- equal to the dense form ---------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5, COUNT])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_autograd_of_whole_logits(kind: str, chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    hidden, head, labels = states(), head_of(WIDTH, **HEADS[kind]), labels_of()
    teacher = 3 * torch.randn(COUNT, CLASSES, dtype=torch.float64)

    def plain(x: Tensor, given: Head) -> Tensor:
        return total(logits_of(x, given), teacher, OBJECTIVE, labels)

    def ours(x: Tensor, given: Head) -> Tensor:
        rows = DenseRows(teacher.to(dtype))
        budget = chunk * CLASSES * dtype.itemsize
        return fused_sums(x, given, rows, OBJECTIVE, labels, chunk_bytes=budget).total

    bias = None if head.bias is None else head.bias.to(dtype)
    narrow = replace(head, weight=head.weight.to(dtype), bias=bias)
    agree(gradients(ours, hidden.to(dtype), narrow), gradients(plain, hidden, head), tolerance)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("teacher", ["hidden states", "best tokens", "logits", "called"])
def test_every_loss_of_every_kind_of_teacher(loss: str, teacher: str) -> None:
    objective = Objective(0.4, 2.0, loss, 0.3)
    hidden, head, labels = states(), head_of(WIDTH, **HEADS["all"]), labels_of()
    spoken, speaker = states(12), head_of(12, bias=True, softcap=4.0, scale=1.5)
    logits = logits_of(spoken, speaker)
    best = softened(logits, objective).topk(6)
    linear = nn.Linear(12, CLASSES, dtype=torch.float64)
    linear.load_state_dict({"weight": speaker.weight, "bias": speaker.bias})
    rows: dict[str, Rows] = {
        "hidden states": HeadRows(spoken, speaker),
        "best tokens": TopRows(best.indices, best.values, CLASSES),
        "logits": DenseRows(logits),
        "called": HeadRows(spoken, Head(linear, softcap=4.0, scale=1.5, num_classes=CLASSES)),
    }
    ids = best.indices if teacher == "best tokens" else None

    def ours(x: Tensor, given: Head) -> Tensor:
        return fused_sums(x, given, rows[teacher], objective, labels, chunk_bytes=5 * CLASSES * 8).total

    expected = gradients(lambda x, given: total(logits_of(x, given), logits, objective, labels, ids=ids), hidden, head)
    agree(gradients(ours, hidden, head), expected, 1e-12)


@pytest.mark.parametrize("shift", [True, False])
def test_a_batch_with_labels(shift: bool) -> None:
    hidden, head = states().view(BATCH, LENGTH, WIDTH), head_of(WIDTH, bias=True)
    spoken, speaker = states(12).view(BATCH, LENGTH, 12), head_of(12)
    labels = labels_of().view(BATCH, LENGTH)
    labels[:, ::3] = -100
    chosen = labels[:, 1:] != -100 if shift else labels != -100
    options = {"alpha": 0.3, "temperature": 3.0, "loss": "rkl", "shift": shift, "num_items": 5}

    def dense(x: Tensor, given: Head) -> Tensor:
        return distillation_loss(logits_of(x, given), logits_of(spoken, speaker), labels, **options)

    def select(x: Tensor) -> Tensor:
        return (x[:, :-1] if shift else x)[chosen]

    for rows in (HeadRows(spoken, speaker), HeadRows(select(spoken), speaker), DenseRows(logits_of(spoken, speaker))):
        fused = gradients(
            lambda x, given, rows=rows: distillation_loss(HeadRows(x, given), rows, labels, **options),
            hidden,
            head,
        )
        agree(fused, gradients(dense, hidden, head), 1e-12)


def test_padded_vocabularies() -> None:
    hidden, head, labels = states(), head_of(WIDTH, CLASSES + 3, bias=True), labels_of()
    spoken, speaker = states(12), head_of(12)

    def ours(x: Tensor, given: Head) -> Tensor:
        return fused_sums(x, given, HeadRows(spoken, speaker), OBJECTIVE, labels).total

    def plain(x: Tensor, given: Head) -> Tensor:
        return total(logits_of(x, given)[:, :CLASSES], logits_of(spoken, speaker), OBJECTIVE, labels)

    found = gradients(ours, hidden, head)
    agree(found, gradients(plain, hidden, head), 1e-12)
    assert not found[2][CLASSES:].any() and not found[3][CLASSES:].any()
    wide = HeadRows(spoken, head_of(12, CLASSES + 9))
    kept = replace(wide.head, weight=wide.head.weight[:CLASSES])
    values = [fused_sums(hidden, head, rows, OBJECTIVE, size=CLASSES).kd for rows in (wide, HeadRows(spoken, kept))]
    assert relative_error(*values) <= 1e-12


def test_tied_embeddings() -> None:
    ids, labels, teacher = labels_of(), labels_of(), torch.randn(COUNT, CLASSES, dtype=torch.float64)

    def gradient(fused: bool) -> Tensor:
        torch.manual_seed(1)
        embedding = nn.Embedding(CLASSES, WIDTH, dtype=torch.float64)
        hidden = torch.tanh(embedding(ids))
        head = Head(embedding.weight)
        if fused:
            loss = fused_sums(hidden, head, DenseRows(teacher), OBJECTIVE, labels, chunk_bytes=3000).total
        else:
            loss = total(logits_of(hidden, head), teacher, OBJECTIVE, labels)
        loss.backward()
        assert embedding.weight.grad is not None
        return embedding.weight.grad

    assert relative_error(gradient(True), gradient(False)) <= 1e-12


def test_gradcheck() -> None:
    head, teacher, labels = head_of(3, 5, **HEADS["all"]), torch.randn(4, 5, dtype=torch.float64), labels_of(4, 5)

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        given = replace(head, weight=weight, bias=bias)
        return fused_sums(hidden, given, DenseRows(teacher), OBJECTIVE, labels, chunk_bytes=80).total

    leaves = [x.requires_grad_() for x in (states(3, 4), head.weight, head.bias)]
    assert torch.autograd.gradcheck(ours, leaves)


# -- what is not needed --------------------------------------------------------------------------------


def sums_of(hidden: Tensor, head: Head, **rest: Any) -> Any:
    torch.manual_seed(2)
    return fused_sums(hidden, head, DenseRows(torch.randn(COUNT, CLASSES).double()), OBJECTIVE, labels_of(), **rest)


def test_frozen_parts_get_no_gradient() -> None:
    hidden, head = states(), head_of(WIDTH, bias=True)
    everything = gradients(lambda x, given: sums_of(x, given).total, hidden, head)
    leaf = hidden.clone().requires_grad_()
    (found,) = torch.autograd.grad(sums_of(leaf, head).total, leaf)
    assert torch.equal(found, everything[1])
    for name, expected in (("weight", everything[2]), ("bias", everything[3])):
        leaf = getattr(head, name).clone().requires_grad_()
        (found,) = torch.autograd.grad(sums_of(hidden, replace(head, **{name: leaf})).total, leaf)
        assert torch.equal(found, expected)
    assert not sums_of(hidden, head).total.requires_grad


def test_a_frozen_head_costs_no_product() -> None:
    hidden, head = states().requires_grad_(), head_of(WIDTH)
    with LargestTensor() as made:
        sums_of(hidden, head).total.backward()
    assert CLASSES * WIDTH * 8 not in made.bytes


def test_sums_are_for_looking_at() -> None:
    hidden, head = states().requires_grad_(), head_of(WIDTH)
    sums = sums_of(hidden, head)
    assert relative_error(sums.total, 0.4 * sums.ce + 0.6 * sums.kd) <= 1e-14
    assert sums.total.requires_grad and not sums.ce.requires_grad and not sums.kd.requires_grad


def test_weights_on_the_loss_reach_every_gradient() -> None:
    hidden, head = states(), head_of(WIDTH, bias=True)
    once = gradients(lambda x, given: sums_of(x, given).total, hidden, head)
    twice = gradients(lambda x, given: sums_of(x, given).total, hidden, head, weight=0.125)
    agree(twice, [0.125 * x for x in once], 1e-14)
    leaf = hidden.requires_grad_()
    loss = sums_of(leaf, head).total
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_accumulated_parts_add_up() -> None:
    hidden, head, labels = states(), head_of(WIDTH), labels_of()
    teacher = torch.randn(COUNT, CLASSES, dtype=torch.float64)

    def ours(x: Tensor, given: Head) -> Tensor:
        parts = [slice(0, 4), slice(4, COUNT)]
        return sum(fused_sums(x[p], given, DenseRows(teacher[p]), OBJECTIVE, labels[p]).total for p in parts)

    def plain(x: Tensor, given: Head) -> Tensor:
        return total(logits_of(x, given), teacher, OBJECTIVE, labels)

    agree(gradients(ours, hidden, head), gradients(plain, hidden, head), 1e-12)


def test_nothing_to_learn_from_is_a_gradient_of_nothing() -> None:
    for objective, labels in ((OBJECTIVE, None), (Objective(0.0), labels_of()), (Objective(1.0), None)):
        found = gradients(lambda x, h, o=objective, y=labels: fused_sums(x, h, None, o, y).total, states(), head_of(8))
        assert not any(x.any() for x in found)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_no_label_at_all_is_a_loss_of_nothing(alpha: float) -> None:
    hidden, head = states().view(BATCH, LENGTH, WIDTH).requires_grad_(), head_of(WIDTH)
    labels = torch.full((BATCH, LENGTH), -100)
    teacher = DenseRows(torch.randn(BATCH, LENGTH, CLASSES, dtype=torch.float64))
    leaf = head.weight.requires_grad_()
    loss = distillation_loss(HeadRows(hidden, head), teacher, labels, alpha=alpha)
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not leaf.grad.any()


def test_with_alpha_of_one_there_need_be_no_teacher() -> None:
    hidden, head, labels = states(), head_of(WIDTH), labels_of()
    found = distillation_loss(HeadRows(hidden, head), None, labels, alpha=1.0, shift=False)
    assert relative_error(found, nn.functional.cross_entropy(logits_of(hidden, head), labels)) <= 1e-12


# -- dtypes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_half_precision_is_as_near_as_the_dense_form(dtype: torch.dtype, kind: str, monkeypatch: Any) -> None:
    """Both against float64. The head's gradient is added up in float32, over as many chunks as there may be."""
    monkeypatch.setattr(row_losses, "PRODUCT_BYTES", 5 * WIDTH * 2)
    rows = 300
    hidden, head, labels = states(rows=rows, dtype=dtype), head_of(WIDTH, dtype=dtype, **HEADS[kind]), labels_of(rows)
    teacher = DenseRows(torch.randn(rows, CLASSES, dtype=dtype))

    def dense(x: Tensor, given: Head) -> Tensor:
        return loss_sums(DenseRows(logits_of(x, given)), teacher, OBJECTIVE, labels).total

    def fused(x: Tensor, given: Head) -> Tensor:
        return fused_sums(x, given, teacher, OBJECTIVE, labels, chunk_bytes=8 * CLASSES).total

    exact_head = replace(head, weight=head.weight.double(), bias=None if head.bias is None else head.bias.double())
    exact = gradients(dense, hidden.double(), exact_head)
    found, plain = gradients(fused, hidden, head), gradients(dense, hidden, head)
    assert [x.dtype for x in found] == [torch.float32, *[dtype] * (len(found) - 1)]
    for ours, theirs, true in zip(found, plain, exact, strict=True):
        assert relative_error(ours, true) <= max(1.5 * relative_error(theirs, true), torch.finfo(dtype).eps)


def test_autocast_is_heeded() -> None:
    """As a linear layer under autocast: products in bfloat16, gradients of what is float32 in float32."""
    hidden, head, labels = states(dtype=torch.float32), head_of(WIDTH, dtype=torch.float32, bias=True), labels_of()
    spoken, speaker = states(12, dtype=torch.float32), head_of(12, dtype=torch.float32)

    def dense(x: Tensor, given: Head) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, said = logits_of(x, given), logits_of(spoken, speaker)
            assert logits.dtype == said.dtype == torch.bfloat16
            return loss_sums(DenseRows(logits), DenseRows(said), OBJECTIVE, labels).total

    def fused(x: Tensor, given: Head) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fused_sums(x, given, HeadRows(spoken, speaker), OBJECTIVE, labels, chunk_bytes=400).total

    found, expected = gradients(fused, hidden, head), gradients(dense, hidden, head)
    assert [x.dtype for x in found] == [torch.float32] * 4
    assert relative_error(found[0], expected[0]) <= 1e-6
    agree(found[1:], expected[1:], 2**-7)


def test_autocast_keeps_no_copy_without_a_gradient() -> None:
    """Its cache of weights would hand the copy made under no_grad to layers that train."""
    layer = nn.Linear(WIDTH, CLASSES, bias=False)
    hidden, labels = states(dtype=torch.float32), labels_of()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused_sums(hidden, Head(layer.weight), None, Objective(1.0), labels)
        layer(hidden).float().sum().backward()
    assert layer.weight.grad is not None


# -- memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "all"])
@pytest.mark.parametrize("teacher", ["hidden states", "best tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_never_whole(dtype: torch.dtype, teacher: str, kind: str, monkeypatch: Any) -> None:
    rows, classes, chunk = 256, 2048, 1 << 16
    monkeypatch.setattr(row_losses, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(row_losses, "TILE_BYTES", chunk // 4)
    hidden, head = states(rows=rows, dtype=dtype), head_of(WIDTH, classes, dtype=dtype, **HEADS[kind])
    said: Rows = HeadRows(states(12, rows, dtype), head_of(12, classes, dtype=dtype))
    if teacher == "best tokens":
        said = TopRows(torch.arange(8).expand(rows, 8), torch.full((rows, 8), -3.0), classes)
    for leaf in (hidden, head.weight):
        leaf.requires_grad_()
    with LargestTensor() as made:
        fused_sums(hidden, head, said, OBJECTIVE, labels_of(rows, classes)).total.backward()
    assert hidden.grad is not None
    of_the_head = classes * WIDTH * 4
    assert max(made.bytes) <= max(chunk, of_the_head) < rows * classes * dtype.itemsize // 8


# -- refusals ------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    hidden, head, rows = states(), head_of(WIDTH), DenseRows(torch.randn(COUNT, CLASSES))
    linear = nn.Linear(WIDTH, CLASSES)
    for match, call in {
        "num_classes": lambda: Head(linear),
        "leave bias out": lambda: Head(linear, bias=linear.bias, num_classes=CLASSES),
        "softcap=0": lambda: replace(head, softcap=0.0),
        "the head's bias is": lambda: replace(head, bias=torch.zeros(3)),
        "the head's weight is": lambda: Head(torch.zeros(4, 4, dtype=torch.int8)),
        "num_classes=3, but": lambda: replace(head, num_classes=3),
        "dense weight": lambda: fused_sums(hidden, Head(linear, num_classes=9), rows, OBJECTIVE),
        "hidden states are": lambda: fused_sums(hidden[:, 1:], head, rows, OBJECTIVE),
        "the teacher: 4 rows": lambda: fused_sums(hidden, head, rows[:4], OBJECTIVE),
        "label 37 is not": lambda: fused_sums(hidden, head, rows, OBJECTIVE, labels_of() * 0 + CLASSES),
        "no teacher": lambda: distillation_loss(HeadRows(hidden, head), None, labels_of(), shift=False),
        "are \\[8\\]": lambda: distillation_loss(HeadRows(hidden[0], head), None, None),
        "ids are": lambda: TopRows(torch.zeros(2, 3).long(), torch.zeros(2, 4), 9),
    }.items():
        with pytest.raises(UnsupportedError, match=match):
            call()
