"""verify() of an encoder: every form of a batch next to its reference, what quantization costs, and the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import HfAccelError, UnsupportedError
from ..patching.patch import is_patched, stock_twin
from ..undo.state import state_of
from .certificate import Agreement, Certificate, EncoderCost, PassVerdict
from .encoded import compare_vectors, encoder_batches, encoder_vectors, padding_id
from .references import is_quantized, quantized_reference
from .rounding import (
    ReferenceModel,
    flipped_inputs,
    halved_results,
    jittered_products,
    largest_difference,
    may_keep_halves,
    rounds_inputs,
)

DRAWN_TOKENS = 48  # of the longest text that is drawn
Batches = Mapping[str, Mapping[str, Tensor]]
NOT_GIVEN = "not compared, since no float model was given to compare with; pass reference="


def verify_encoder(
    model: PreTrainedModel, texts: Sequence[Tensor] | Mapping[str, Tensor] | None, given: ReferenceModel | None
) -> Certificate:
    """Compare passes of a patched encoder with its reference, and lower bits with the float model.

    texts: token ids [1, n] each, or inputs as the model takes them; None: random ones. given: the float model that was
    given; None: an unpatched copy. Raises UnsupportedError for inputs that cannot be made.
    """
    _check(model)
    batches, inputs = _batches(model, texts)
    undo = NOT_GIVEN if given is None else _undone(model, given)
    if not is_quantized(model):
        reference = given or _unpatched(model)
        return Certificate(reference.name, verdicts(model, reference, batches), inputs=inputs, undo=undo)
    exact = ReferenceModel(quantized_reference(model), "the quantized reference")
    found = verdicts(model, exact, batches)
    del exact
    cost, no_cost = None, None
    try:
        stock = given or _unpatched(model)
    except HfAccelError as error:
        no_cost = str(error)
    else:
        compared = [v.batch for v in found if v.refused is None]
        cost = _cost(model, stock, [batches[name] for name in compared])
    return Certificate("the quantized reference", found, cost, no_cost, inputs=inputs, undo=undo)


def _check(model: PreTrainedModel) -> None:
    if model.config.is_encoder_decoder:
        raise UnsupportedError(
            f"verify() knows decoders and encoders, and {type(model).__name__} is the body of an encoder-decoder; "
            "pass the model with its head, or its encoder"
        )


def _unpatched(model: PreTrainedModel) -> ReferenceModel:
    if not is_patched(model):
        raise UnsupportedError("the model is not patched; patch it, or pass reference= to compare two models")
    originals = state_of(model).originals
    if originals.lost or originals.never_there:
        raise UnsupportedError("the model has no original weights to compare with; pass reference=")
    return ReferenceModel(stock_twin(model), "the unpatched model")


def _batches(model: PreTrainedModel, texts: Any) -> tuple[Batches, str]:
    if texts is None:
        return encoder_batches(model, DRAWN_TOKENS), "random inputs"
    if isinstance(texts, Mapping):
        return {"the inputs given": {name: values.to(model.device) for name, values in texts.items()}}, "as given"
    alone = {f"text {number}": _padded(model, [ids]) for number, ids in enumerate(texts)}
    together = {f"all {len(texts)} texts, padded": _padded(model, texts)} if len(texts) > 1 else {}
    return alone | together, "the texts given"


def _padded(model: PreTrainedModel, texts: Sequence[Tensor]) -> dict[str, Tensor]:
    rows = [ids[0] for ids in texts]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(rows, batch_first=True, padding_value=padding_id(model)),
        "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
    }


def verdicts(model: PreTrainedModel, reference: ReferenceModel, batches: Batches) -> tuple[PassVerdict, ...]:
    """Compare every batch. Raises UnsupportedError if the reference takes none: then nothing was compared."""
    found = tuple(_verdict(model, reference, name, inputs) for name, inputs in batches.items())
    if all(verdict.refused is not None for verdict in found):
        raise UnsupportedError(
            f"{reference.name} takes none of the batches: {found[0].batch}: {found[0].refused}; pass inputs as its "
            "forward takes them, by name"
        )
    return found


def _verdict(
    model: PreTrainedModel, reference: ReferenceModel, batch: str, inputs: Mapping[str, Tensor]
) -> PassVerdict:
    try:
        expected = encoder_vectors(reference.model, inputs)
    except UnsupportedError:
        raise
    except Exception as error:  # whatever stock says of a form of mask
        return PassVerdict(batch, refused=f"{type(error).__name__}: {error}".splitlines()[0])
    rounding, dtype = _rounding(reference, inputs, expected)
    return PassVerdict(batch, compare_vectors(encoder_vectors(model, inputs), expected), rounding, dtype)


def _rounding(
    reference: ReferenceModel, inputs: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> tuple[tuple[float, ...], str]:
    """Return twice the error that rounding makes in each output of the reference, relative to its largest number.

    It is measured as `rounding` says, by passes that are equally valid. Also returns the dtype of the widest.
    """
    model = reference.model
    ways = [expected]
    if rounds_inputs(model):
        with flipped_inputs(model):
            ways.append(encoder_vectors(model, inputs))
    if may_keep_halves(model):
        with halved_results(model):
            ways.append(encoder_vectors(model, inputs))
    with jittered_products(model):
        ways.append(encoder_vectors(model, inputs))
    widest = model.dtype
    if reference.arbiter is not None:
        widest = reference.arbiter.dtype
        wide = {n: v.to(widest) if v.is_floating_point() else v for n, v in inputs.items()}
        ways.append(encoder_vectors(reference.arbiter, wide))
    least = torch.finfo(model.dtype).eps
    found = []
    for name, values in expected.items():
        largest = float(values.abs().max().clamp(min=1e-30))
        found.append(2 * max(largest_difference([way[name] for way in ways]) / largest, least))
    return tuple(found), str(widest).removeprefix("torch.")


def _cost(model: PreTrainedModel, stock: ReferenceModel, batches: Sequence[Mapping[str, Tensor]]) -> EncoderCost:
    found = [
        one
        for inputs in batches
        for one in compare_vectors(encoder_vectors(model, inputs), encoder_vectors(stock.model, inputs))
    ]
    found.sort(key=lambda one: one.output)
    return EncoderCost(stock.name, tuple(_whole(list(same)) for _, same in groupby(found, lambda one: one.output)))


def _whole(agreements: Sequence[Agreement]) -> Agreement:
    """Return the agreement of one output over all batches."""
    rows = sum(one.rows for one in agreements)
    return Agreement(
        agreements[0].output,
        rows,
        min(one.cosine for one in agreements),
        sum(one.rows * one.mean_cosine for one in agreements) / rows,
        max(one.difference for one in agreements),
    )


def _undone(model: PreTrainedModel, given: ReferenceModel) -> str:
    """Return how an unpatched copy of the model compares with the float model that was given: classes and bits."""
    try:
        copied = _unpatched(model).model
    except HfAccelError as error:
        return f"not compared: {error}"
    modules, others = (dict(one.named_modules()) for one in (copied, given.model))
    if {n: type(m).__qualname__ for n, m in modules.items()} != {n: type(m).__qualname__ for n, m in others.items()}:
        return "not compared: the model that was given has other modules"
    left = [name for name, module in modules.items() if hasattr(type(module), "original_class")]
    if left:
        return f"{len(left)} modules of an unpatched copy have a class of the patch, {left[0]!r} first"
    ours, theirs = copied.state_dict(), given.model.state_dict()
    other = [name for name, values in theirs.items() if not _same_bits(ours.get(name), values)]
    if other or ours.keys() != theirs.keys():
        return f"{len(other)} of {len(theirs)} tensors are not those of {given.name}, {(other or ['names'])[0]} first"
    return f"an unpatched copy has all modules and, bit for bit, all {len(theirs)} tensors of {given.name}"


def _same_bits(ours: Tensor | None, theirs: Tensor) -> bool:
    if ours is None or ours.dtype is not theirs.dtype or ours.shape != theirs.shape:
        return False
    one, other = (values.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for values in (ours, theirs))
    return torch.equal(one, other)
