"""Take a patch out of a model again, bit for bit, with what was done to the model since."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..attention.hf import ATTENTION_NAME
from ..config import WeightConfig
from ..errors import HfAccelError, UnsupportedError
from ..fused.composed_activation import NativeActivation
from ..linear import QuantizedWeight, QuantLinear, QuantModule, quantize
from ..linear.embedding import QuantEmbedding
from ..tensors import model_device, torchs_defaults
from ..undo.journal import Journal, Write
from ..undo.state import PART_OF, PatchState, find_state
from .check import is_offloaded, transformers_model
from .nf4_model import check_nf4
from .weight_plan import weight_plan
from .weight_sites import EmbeddingSite, takes_a_place

Model = TypeVar("Model")
# Settings that patch(), and save_pretrained() of a patched model, write into its copy of a config.
OUR_FIELDS = ("quantization_config", "tie_word_embeddings", "architectures", "dtype")


def unpatch(model: Model) -> Model:
    """Take everything that patch() did out of the model, bit for bit, and return it.

    Raises UnsupportedError if the model is not patched, an Engine runs it, or its originals were dropped by
    keep_original=False, HfAccelError if they cannot be read back or another library replaced a module since; nothing
    is changed then.
    """
    inner = transformers_model(model)
    state, outer = find_state(inner), vars(inner).get(PART_OF)
    if outer is not None:
        raise UnsupportedError(f"this is a part of a patched {outer}; call hf_accel.unpatch() on the whole")
    if state is None:
        raise UnsupportedError("the model is not patched; there is nothing to take out")
    state.generation.require_idle("unpatch()")
    state.originals.check()
    with torchs_defaults():
        _take_out(inner, state)
    return model


def _take_out(model: PreTrainedModel, state: PatchState) -> None:
    journal = state.journal
    _check_layers(model, journal)
    check_nf4(model)
    resized = resized_head(model, journal)
    table = resized_table(journal)
    kept = [write for write in journal.writes if write is not resized]
    Journal.of(kept).check(model)
    state.originals.restore()
    _catch_up(model, journal)
    if table is not None:
        give_tokens(journal, table, state.config.weights)
    folded = [(w.owner, w.new) for w in journal.writes if w.container == "_parameters"]
    if resized is not None:
        give_rows(model, resized, journal.writes)
    keep_settings(model, journal)
    journal.writes = kept
    journal.undo(model)
    for module, parameter in folded:
        module.to(parameter.device, parameter.dtype)


def _check_layers(model: PreTrainedModel, journal: Journal) -> None:
    """Raise if quantized layers were given other weights since patch(), or if something has put copies of them in."""
    placed = {id(m) for write in journal.writes if isinstance(write.new, nn.Module) for m in write.new.modules()}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantModule)}
    written = [name for name, layer in layers.items() if layer.changes]
    if written:
        raise UnsupportedError(
            f"cannot unpatch: {len(written)} quantized layers, {written[0]!r} first, have been given other weights "
            "since patch(), as merging a LoRA adapter does, and the originals know nothing of it; call "
            "hf_accel.unpatch(model) before merge_and_unload(), which then merges into the float weights, or "
            "unmerge_adapter() before unpatch"
        )
    computed = [n for n, layer in layers.items() if isinstance(layer, QuantLinear) and "bias" not in layer._parameters]
    if computed:
        raise HfAccelError(
            f"cannot unpatch: the bias of the quantized {computed[0]!r} is pruned or parametrized, and the original "
            "knows nothing of it; take that back, call hf_accel.unpatch(model), and do it to the float layer"
        )
    copied = [name for name, layer in layers.items() if id(layer) not in placed]
    if copied:
        raise HfAccelError(
            f"cannot unpatch: {copied[0]!r} is a copy of a quantized layer, which something else has put there, as "
            "PEFT's modules_to_save does; take it out, or reload the model"
        )


def _catch_up(model: PreTrainedModel, journal: Journal) -> None:
    """Do to the originals what .train(), .to() and hooks did to the quantized layers since patch()."""
    replaced: list[tuple[Any, Any]] = [(w.new, w.old) for w in journal.writes if takes_a_place(w.new)]
    copies: list[tuple[Any, Any]] = [(w.new, w.old) for w in journal.writes if isinstance(w.new, NativeActivation)]
    for copied, shared in copies:
        shared.train(copied.training)
    for layer, original in replaced:
        original.train(layer.training)
        # What accelerate offloads has no numbers to move.
        original.to(None if is_offloaded(original) else model_device(model), layer.compute_dtype)
        original._is_full_backward_hook = layer._is_full_backward_hook


# -- what was done to the model since --------------------------------------------------------------------


def resized_head(model: PreTrainedModel, journal: Journal) -> Write | None:
    """Return the write of a quantized head that resize_token_embeddings() has replaced by one of other rows."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or isinstance(head, QuantLinear):
        return None
    inputs, outputs = head.in_features, head.out_features
    for write in journal.writes:
        ours = write.new
        if write.container == "_modules" and isinstance(ours, QuantLinear) and write.mapping().get(write.key) is head:
            return write if inputs == ours.in_features and outputs != ours.out_features else None
    return None


@torch.no_grad()
def give_rows(model: PreTrainedModel, write: Write, writes: Sequence[Write]) -> None:
    """Give a resized head the original's numbers in each row that is still the quantized one's.

    It learns again where the original did, since what it was made of had no weight that could. A head that was tied is
    the embedding again, which was resized as well, in the module of before.
    """
    head, ours, original = write.mapping()[write.key], write.new, write.old
    weight = original.weight
    if head.bias is not None and original.bias is not None:
        head.bias.requires_grad_(original.bias.requires_grad)
    owners = [*model.modules(), *(w.old for w in writes if isinstance(w.old, nn.Embedding))]
    if weight.shape == head.weight.shape and any(m._parameters.get("weight") is weight for m in owners):
        original.out_features, original.bias = head.out_features, head.bias
        write.mapping()[write.key] = original
        return
    _give_numbers(head.weight, weight, ours.quantized, ours.compute_dtype)
    head.weight.requires_grad_(weight.requires_grad)


def _give_numbers(made: Tensor, original: Tensor, quantized: QuantizedWeight, dtype: torch.dtype) -> None:
    """Write the original's numbers into each row of `made` that is still the quantized one's, which was read in
    `dtype`.
    """
    rows = min(len(original), len(made))
    same = (made[:rows] == quantized.dequantize(dtype, outputs=slice(rows)).to(made)).all(1)
    made[:rows][same] = original[:rows][same].to(made)


def resized_table(journal: Journal) -> Write | None:
    """Return the write of an embedding that was quantized until resize_token_embeddings() gave it other rows, in
    floating point.
    """
    for write in journal.writes:
        old, new = write.old, write.new
        if write.container == "_modules" and isinstance(old, nn.Embedding) and isinstance(new, nn.Embedding):
            return write if not isinstance(new, QuantEmbedding) else None
    return None


@torch.no_grad()
def give_tokens(journal: Journal, write: Write, config: WeightConfig | None) -> None:
    """Give the original embedding the resized one's rows, and its own numbers where these are the quantized ones.

    config: what the model was patched with, by which a table of the embedding's own was rounded.
    """
    resized, original, weight = write.new, write.old, write.old._parameters["weight"]
    head: Any = next(
        (w.new for w in journal.writes if isinstance(w.new, QuantLinear) and w.old.weight is weight), None
    )
    if config is None or head is not None or config.for_embedding is None:
        stored = head.quantized
    else:
        stored = quantize(weight, weight_plan(EmbeddingSite("", write.old), config).config)
    made = resized.weight.detach().to(weight.dtype, copy=True)
    _give_numbers(made, weight, stored, resized.weight.dtype)
    weight.data = made
    original.num_embeddings, original.padding_idx = resized.num_embeddings, resized.padding_idx


def keep_settings(model: PreTrainedModel, journal: Journal) -> None:
    """Write into the model's own configs what was written into the copies of them that patch() has put in."""
    pairs = {id(w.new): (w.new, w.old) for w in journal.writes if isinstance(w.new, PreTrainedConfig)}
    before = pairs[id(model.config)][1] if id(model.config) in pairs else model.config
    for copied, own in pairs.values():
        _keep_settings(copied, own, before._attn_implementation)


def _keep_settings(copied: PreTrainedConfig, own: PreTrainedConfig, implementation: str | None) -> None:
    """implementation: the attention that a config without a name of its own had before patch()."""
    attends, attended = copied._attn_implementation, own._attn_implementation or implementation
    if attends not in (None, ATTENTION_NAME, attended):  # set_attn_implementation() since
        own._attn_implementation_internal = attends
    for name, value in vars(copied).items():
        before = vars(own).get(name)
        if isinstance(value, PreTrainedConfig) and isinstance(before, PreTrainedConfig):
            _keep_settings(value, before, implementation)
        elif name not in OUR_FIELDS and not name.startswith("_") and value != before:
            setattr(own, name, value)
