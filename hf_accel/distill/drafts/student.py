"""init_student: a smaller model of the same class, from a teacher's own layers, which are chosen and copied here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
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
from .token_rows import token_rows, windows

# So many tokens of dataset= are read for strategy="importance".
INFLUENCE_TOKENS = 16384
WINDOW = 512
STRATEGIES = ("uniform", "first_last", "importance")
# A config's fields about layers, besides lists with an entry for each: how many of the first or of the last are of a
# kind, and the numbers of those that are.
COUNTS_OF_FIRST = ("max_window_layers", "first_k_dense_replace", "num_dense_layers", "n_dense_layers")
COUNTS_OF_LAST = ("num_kv_shared_layers",)
NUMBERS = (
    "mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs", "full_attention_idxs",
    "full_attn_layers", "full_attention_layers", "kda_layers", "linear_attention_layers", "global_attn_idx",
)  # fmt: skip
NOT_OF_LAYERS = ("architectures", "id2label", "stage_names", "out_features", "out_indices", "pruned_heads")
OWN_NUMBER = ("layer_idx", "layer_id", "layer_index", "layer_number")


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
    """The influence of each layer on text; see `block_influence`."""
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


# -- which layers --------------------------------------------------------------------------------------


def choose_layers(
    total: int,
    num_layers: int | None,
    layers: Sequence[int] | None,
    *,
    strategy: str,
    influence: Callable[[], list[float]],
) -> list[int]:
    """Numbers of the layers that are kept, in order. influence: of each layer, asked for by "importance" alone.

    Raises UnsupportedError for layers that are not there, twice there or out of order, and an unknown strategy.
    """
    if (num_layers is None) == (layers is None):
        raise UnsupportedError(
            f"num_layers={num_layers!r} and layers={layers!r}: give one of them, how many layers to keep or which"
        )
    if layers is not None:
        return _checked(list(layers), total)
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or not 1 <= num_layers <= total:
        raise UnsupportedError(f"num_layers={num_layers!r}: the teacher has {total} layers; keep 1 to {total}")
    if strategy == "uniform":
        return [i * total // num_layers for i in range(num_layers)]
    if strategy == "first_last":
        return _first_last(total, num_layers)
    if strategy == "importance":
        return most_influential(influence(), num_layers)
    raise UnsupportedError(f"strategy={strategy!r} is not known; there are {', '.join(STRATEGIES)}")


def _checked(layers: list[int], total: int) -> list[int]:
    if not layers:
        raise UnsupportedError("layers=[] keeps none; name at least one")
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < total for i in layers):
        raise UnsupportedError(f"layers={layers}: the teacher has layers 0 to {total - 1}")
    if any(a >= b for a, b in pairwise(layers)):
        raise UnsupportedError(f"layers={layers} must rise, each once: layers work in the teacher's order")
    return layers


def _first_last(total: int, count: int) -> list[int]:
    if count == 1 and total > 1:
        raise UnsupportedError(
            "strategy='first_last' keeps two layers at least; give num_layers=2, or strategy='uniform'"
        )
    return [(2 * i * (total - 1) + count - 1) // (2 * (count - 1)) if i else 0 for i in range(count)]


def most_influential(influence: Sequence[float], count: int) -> list[int]:
    """The `count` layers of the largest influence, in order; of equals the earlier ones."""
    best = sorted(range(len(influence)), key=lambda i: (-influence[i], i))
    return sorted(best[:count])


def block_influence(layers: Sequence[nn.Module], read: Callable[[], None]) -> list[float]:
    """The block influence of each layer (ShortGPT, Men et al. 2403.03853): 1 less the mean cosine between a token's
    hidden state before and after the layer.

    read: runs the model on text without padding. Raises UnsupportedError if a layer has not run.
    """
    sums, counts = [0.0] * len(layers), [0] * len(layers)

    def watch(number: int) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            before = args[0] if args else kwargs["hidden_states"]
            behind = output[0] if isinstance(output, tuple) else output
            cosines = torch.nn.functional.cosine_similarity(before.float(), behind.float(), dim=-1)
            sums[number] += float(cosines.sum())
            counts[number] += cosines.numel()

        return after

    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_hook(watch(number), with_kwargs=True))
        read()
    if not all(counts):
        raise UnsupportedError("strategy='importance' saw no text: dataset= has no tokens; give some")
    return [1 - total / count for total, count in zip(sums, counts, strict=True)]


# -- the config ----------------------------------------------------------------------------------------


def keep_in_config(config: Any, kept: Sequence[int]) -> None:
    """Write into the config of a model (transformers', of the text part) that it has the layers `kept` alone."""
    total = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if name in COUNTS_OF_FIRST and isinstance(value, int):
            setattr(config, name, sum(i < value for i in kept))
        elif name in COUNTS_OF_LAST and isinstance(value, int):
            setattr(config, name, sum(i >= total - value for i in kept))
        elif name in NUMBERS and isinstance(value, list | tuple):
            setattr(config, name, type(value)(kept.index(i) for i in value if i in kept))
        elif name in NOT_OF_LAYERS or name.endswith(("token_id", "token_ids")):
            continue
        elif isinstance(value, list | tuple) and len(value) == total:
            setattr(config, name, type(value)(value[i] for i in kept))
    config.num_hidden_layers = len(kept)


# -- the weights ---------------------------------------------------------------------------------------


def shortened(teacher: nn.Module, student: nn.Module, total: int, kept: Sequence[int]) -> list[str]:
    """Names of the lists of layers, of which the student has only as many as are kept.

    Raises UnsupportedError if there are none: the layers then are no list, or one layer's weights serve for all.
    """
    ours = layer_lists(student, len(kept))
    names = [name for name in layer_lists(teacher, total) if name in ours]
    if not names:
        raise UnsupportedError(
            f"{type(teacher).__name__} has no list of {total} layers of which a student could keep some"
        )
    return names


def kept_names(names: Iterable[str], lists: Sequence[str], kept: Sequence[int]) -> dict[str, str]:
    """Return the teacher's modules or tensors that a student keeps: {name in the student: name in the teacher}."""
    found = {}
    for name in names:
        prefix = next((f"{one}." for one in lists if name.startswith(f"{one}.")), None)
        if prefix is None:
            found[name] = name
            continue
        number, dot, rest = name.removeprefix(prefix).partition(".")
        if int(number) in kept:
            found[f"{prefix}{kept.index(int(number))}{dot}{rest}"] = name
    return found


def check_layers(teacher: nn.Module, student: nn.Module, lists: Sequence[str], kept: Sequence[int]) -> None:
    """Raise UnsupportedError where a layer, built for its new place, is not what it was in its old one: its kind of
    attention, its window, whether it rotates."""
    theirs = dict(teacher.named_modules())
    sources = kept_names(theirs, lists, kept)
    for name, module in student.named_modules():
        if not name.startswith(tuple(f"{one}." for one in lists)):
            continue
        twin = theirs.get(sources.get(name, ""))
        if type(twin) is not type(module):
            found = "nothing" if twin is None else type(twin).__name__
            raise _changed(teacher, f"{name} is {type(module).__name__}, in the teacher it was {found}")
        for key, value in vars(module).items():
            if key in OWN_NUMBER or key.startswith("_") or key == "training" or isinstance(module, nn.Dropout):
                continue
            if isinstance(value, bool | int | float | str | None) and vars(twin).get(key, value) != value:
                raise _changed(teacher, f"{name}.{key} is {value!r}, in the teacher it was {vars(twin)[key]!r}")


def _changed(teacher: nn.Module, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(teacher).__name__}: {what}, since the config decides that by the layer's number; choose layers= "
        "that keep the pattern"
    )


@torch.no_grad()
def copy_weights(teacher: nn.Module, student: nn.Module, lists: Sequence[str], kept: Sequence[int]) -> None:
    """Give the student copies of the teacher's tensors, each in the dtype that the student's has.

    Raises UnsupportedError, before anything is written, unless both have the same tensors of the same shapes.
    """
    theirs, ours = teacher.state_dict(), student.state_dict()
    sources = kept_names(theirs, lists, kept)
    odd = sorted(sources.get(name, name) for name in sources.keys() ^ ours.keys())
    odd += [old for new, old in sources.items() if new in ours and theirs[old].shape != ours[new].shape]
    if odd:
        raise UnsupportedError(
            f"{type(teacher).__name__} is not what its config builds: {odd[0]!r} and {len(odd) - 1} more tensors "
            "have no counterpart of their shape in a model with fewer layers; merge adapters and undo changes first"
        )
    for name, tensor in ours.items():
        tensor.copy_(theirs[sources[name]])
    # Buffers that no state dict has, like rotary frequencies, where both have one of the same shape and dtype.
    buffers = dict(teacher.named_buffers())
    old_names = kept_names(buffers, lists, kept)
    for name, buffer in student.named_buffers():
        source = buffers.get(old_names.get(name, ""))
        if source is not None and source.shape == buffer.shape and source.dtype == buffer.dtype:
            buffer.copy_(source)
