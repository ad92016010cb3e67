"""The parameters of a model that stay tied after some of its Linears are quantized.

A quantized head is a copy of the embedding that it was tied to; tying it again would put the float weight over it. All
other ties, of an encoder's embedding to a decoder's or of biases, hold as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from transformers import PreTrainedModel

from ..undo.journal import Journal


def remaining_ties(ties: Mapping[str, str], quantized: Collection[str]) -> dict[str, str]:
    """`ties` (parameter -> the one that it is) without the weights of the modules `quantized`.

    Where a quantized weight was what others are tied to, the first of these takes its place.
    """
    gone = {f"{name}.weight" for name in quantized}
    substitutes: dict[str, str] = {}
    remaining = {}
    for target, source in ties.items():
        if target in gone:
            continue
        if source not in gone:
            remaining[target] = source
        elif source not in substitutes:
            substitutes[source] = target
        else:
            remaining[target] = substitutes[source]
    return remaining


def broken_ties(
    model: PreTrainedModel, quantized: Collection[str]
) -> Iterator[tuple[PreTrainedModel, str, dict[str, str]]]:
    """(submodel, attribute, value) to be set, once the modules `quantized` of `model` are replaced.

    transformers keeps the ties twice: those of the whole, used while it loads, and each class's own, read again by
    tie_weights(). The latter are shadowed in the instance.
    """
    for prefix, submodel in list(model.named_modules()):
        if not isinstance(submodel, PreTrainedModel):
            continue
        start = f"{prefix}." if prefix else ""
        names = {name.removeprefix(start) for name in quantized if name.startswith(start)}
        every = dict(submodel.all_tied_weights_keys)
        own = submodel.get_expanded_tied_weights_keys(all_submodels=False)
        for attribute, ties in (("all_tied_weights_keys", every), ("_tied_weights_keys", own)):
            if (remaining := remaining_ties(ties, names)) != ties:
                yield submodel, attribute, remaining


def break_ties(model: PreTrainedModel, quantized: Collection[str], journal: Journal) -> None:
    """Write `broken_ties` through the journal, and into the config, which must be the model's own, if none is left."""
    for submodel, attribute, ties in list(broken_ties(model, quantized)):
        journal.attribute(submodel, attribute, ties)
        if submodel is model and not model.all_tied_weights_keys:
            # what others, such as PEFT, look up
            model.config.tie_word_embeddings = False
            model.config.get_text_config(decoder=True).tie_word_embeddings = False
