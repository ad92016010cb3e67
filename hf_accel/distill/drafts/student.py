"""init_student: a smaller model of the same class, from a teacher's own layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from ...errors import UnsupportedError
from ...keywords import checked_keywords
from ...models import evaluating, layer_lists, layers_config
from ...patching.patch import is_patched, stock_twin
from ..teachers.teacher import takes_teacher_model
from .kept_layers import (
    block_influence,
    check_layers,
    choose_layers,
    copy_weights,
    keep_in_config,
    shortened,
)
from .token_rows import token_rows, windows

# So many tokens of dataset= are read for strategy="importance".
INFLUENCE_TOKENS = 16384
WINDOW = 512


@takes_teacher_model
@checked_keywords()
def init_student(
    teacher_model: PreTrainedModel,
    *,
    num_layers: int | None = None,
    layers: Sequence[int] | None = None,
    strategy: str = "uniform",
    dataset: Any = None,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    share_embeddings: bool = False,
) -> PreTrainedModel:
    """A new model of the teacher's class with some of its layers, and its embeddings, last norm and head. All of it is
    copied, trainable, and in the teacher's mode; the teacher stays as it is, patched or not.

    num_layers: how many to keep, chosen by `strategy`; or layers: their numbers, rising.
    strategy: of N layers keep n: "uniform" layers 0, N/n, 2N/n, ..., rounded down; "first_last" the first, the last
        and those evenly between; "importance" those of the largest block influence (ShortGPT, 2403.03853) on
        `dataset`, of which 16384 tokens are read: rows of token ids, dicts with input_ids, or texts with `tokenizer`.
    dtype: of all weights; None for the teacher's own.
    share_embeddings: the embeddings and the head are the teacher's own memory, and frozen: for a draft.

    Raises UnsupportedError for an encoder-decoder, a quantized teacher, an adapter that is not merged, and layers that
    would not be what they were.
    """
    source = _floats_of(teacher_model)
    total = layers_config(source.config).num_hidden_layers
    influence = partial(_influence, source, dataset, tokenizer)
    kept = choose_layers(total, num_layers, layers, strategy=strategy, influence=influence)
    if share_embeddings and dtype not in (None, source.get_input_embeddings().weight.dtype):
        raise UnsupportedError(f"share_embeddings=True shares memory, which stays as it is; leave dtype={dtype} out")
    student = _built(source, kept, dtype)
    lists = shortened(source, student, total, kept)
    check_layers(source, student, lists, kept)
    if dtype is None:
        _take_dtypes(source, student)
    copy_weights(source, student, lists, kept)
    if share_embeddings:
        _share(source, student)
    if getattr(source, "generation_config", None) is not None:
        student.generation_config = copy.deepcopy(source.generation_config)
    return student.train(teacher_model.training)


def _influence(model: PreTrainedModel, dataset: Any, tokenizer: Any) -> list[float]:
    """See `block_influence`."""
    if dataset is None:
        raise UnsupportedError("strategy='importance' is measured on text; give dataset=, or another strategy")
    total = layers_config(model.config).num_hidden_layers
    lists = layer_lists(model.get_decoder(), total)
    if not lists:
        raise UnsupportedError(f"{type(model).__name__} has no list of {total} layers to measure")
    rows = token_rows(dataset, model, tokenizer=tokenizer, limit=INFLUENCE_TOKENS)

    def read() -> None:
        left = INFLUENCE_TOKENS
        for window in windows(rows, WINDOW):
            model(input_ids=torch.tensor([window[:left]], device=model.device))
            left -= len(window)
            if left <= 1:
                return

    with torch.no_grad(), evaluating(model):
        return block_influence(list(next(iter(lists.values()))), read)


def _floats_of(teacher: PreTrainedModel) -> Any:
    """The teacher's weights before any patch, in a model that is not patched."""
    adapted = hasattr(teacher, "get_base_model") or getattr(teacher, "_hf_peft_config_loaded", False)
    if not adapted and not isinstance(teacher, PreTrainedModel):
        raise UnsupportedError(f"the teacher is a {type(teacher).__name__}; give a transformers model")
    if adapted or any(hasattr(module, "base_layer") for module in teacher.modules()):  # of PEFT's, in its base too
        raise UnsupportedError(
            "the teacher has an adapter; give what merge_and_unload() returns, or load the base model without it"
        )
    if teacher.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{type(teacher).__name__} is an encoder-decoder, of which init_student cannot tell which half to cut; "
            "build one from a config with fewer layers and load the teacher's state dict into it"
        )
    source = stock_twin(teacher) if is_patched(teacher) else teacher
    if getattr(source, "is_quantized", False) or getattr(source.config, "quantization_config", None) is not None:
        raise UnsupportedError(
            "the teacher's weights are quantized; load the float checkpoint, and keep this to teach"
        )
    if any(tensor.is_meta for tensor in source.state_dict().values()):
        raise UnsupportedError("some of the teacher's weights are offloaded; load it whole")
    return source


def _built(source: Any, kept: list[int], dtype: torch.dtype | None) -> Any:
    """A model of the teacher's class on its device, whose weights are whatever was in memory."""
    config = copy.deepcopy(source.config)
    config.name_or_path = ""  # a checkpoint of the teacher does not hold the student
    keep_in_config(layers_config(config), kept)
    device = source.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), no_init_weights():
        student = type(source)._from_config(config, dtype=dtype or source.dtype)
    student.tie_weights()
    return student.to(device)


def _take_dtypes(source: Any, student: Any) -> None:
    """Give each module the dtype of its counterpart: a teacher may keep some in float32. Layers do not differ."""
    theirs = {name.rpartition(".")[0]: p.dtype for name, p in source.named_parameters()}
    for name, parameter in student.named_parameters():
        dtype = theirs.get(name.rpartition(".")[0], parameter.dtype)
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def _share(source: Any, student: Any) -> None:
    """Parameters of the student's own, frozen, over the teacher's memory."""
    pairs = [(source.get_input_embeddings(), student.get_input_embeddings())]
    if source.get_output_embeddings() is not None:
        pairs.append((source.get_output_embeddings(), student.get_output_embeddings()))
    shared: dict[int, nn.Parameter] = {}
    for theirs, ours in pairs:
        for name, parameter in theirs.named_parameters(recurse=False):
            if id(parameter) not in shared:
                shared[id(parameter)] = nn.Parameter(parameter.data, requires_grad=False)
            setattr(ours, name, shared[id(parameter)])
