"""Calibration data: windows of token ids of one length, made of data of any form, and given to a model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ...config.weight_config import NAMED_DATA, WITHDRAWN_DATA
from ...errors import UnsupportedError
from ...models import evaluating, layers_config
from .named_data import named_windows

LENGTH = 512  # tokens of a window
MOST = 32  # windows
READ = 16  # times as many tokens are read, for windows that lie evenly over them
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
KNOWN_FORMS = (
    "give token ids as a tensor [n, length], a list of texts or of lists of token ids, a dataset with a column "
    "'input_ids' or 'text', or (texts, tokenizer); or a name that optimum knows: " + ", ".join(map(repr, NAMED_DATA))
)


def windows_of(calibration: object, model: PreTrainedModel) -> Tensor:
    """Return token ids that the model knows, int64 [n, length].

    A tensor [n, length] is taken as it is, and for a name of NAMED_DATA what optimum draws. All else is read one piece
    after the other, with the end of text between texts, and gives up to MOST windows of LENGTH that lie evenly over
    the tokens, or one that is shorter: what is calibrated on text of many kinds loses less.
    Raises UnsupportedError for what is none of the known forms, for no tokens, and for ids outside of the vocabulary.
    """
    data, tokenizer = _with_tokenizer(calibration)
    if isinstance(data, Tensor) and data.dim() == 2:
        windows = _as_ids(data)
    elif isinstance(data, str) and data in (*NAMED_DATA, *WITHDRAWN_DATA):
        windows = named_windows(data, tokenizer or _own_tokenizer(model), count=MOST, length=_length(model))
    else:
        windows = _cut(chain.from_iterable(_pieces(data, tokenizer, model)), _length(model))
    if not windows.numel():
        raise UnsupportedError("calibration= holds no tokens; give some 10,000 of them")
    _check_vocabulary(windows, model)
    return windows


def _with_tokenizer(calibration: object) -> tuple[Any, PreTrainedTokenizerBase | None]:
    match calibration:
        case (data, PreTrainedTokenizerBase() as tokenizer):
            return data, tokenizer
    return calibration, None


def _pieces(data: Any, tokenizer: PreTrainedTokenizerBase | None, model: PreTrainedModel) -> Iterator[Iterable[int]]:
    """Yield the token ids of each text, or of each row of ids."""
    if isinstance(data, Mapping):  # what a tokenizer returned
        data = data.get("input_ids")
    if isinstance(data, str) or (isinstance(data, Tensor) and data.dim() == 1):
        data = [data]
    if isinstance(data, Tensor) and data.dim() == 2:
        data = list(data)
    if not isinstance(data, Iterable) or isinstance(data, bytes) or (isinstance(data, Tensor) and data.dim() > 2):
        raise UnsupportedError(f"calibration= is {_kind(data)}; {KNOWN_FORMS}")
    for piece in [data] if _is_row(data) else data:
        if isinstance(piece, Mapping):
            piece = _column(piece)
        if isinstance(piece, str):
            tokenizer = tokenizer or _own_tokenizer(model)
            piece = _encoded(piece, tokenizer)
        yield _row(piece)


def _is_row(data: Any) -> bool:
    """Return whether it is one list of token ids, and no list of pieces."""
    return isinstance(data, list | tuple) and bool(data) and isinstance(data[0], int)


def _row(piece: Any) -> list[int]:
    if isinstance(piece, Tensor):
        return _as_ids(piece).flatten().tolist()
    if isinstance(piece, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in piece):
        return list(piece)
    if hasattr(piece, "__array__"):
        return _row(torch.as_tensor(piece))
    raise UnsupportedError(f"calibration= holds {_kind(piece)}; {KNOWN_FORMS}")


def _column(row: Mapping[str, Any]) -> Any:
    for name in ("input_ids", "text"):
        if name in row:
            return row[name]
    raise UnsupportedError(f"calibration= is a dataset with the columns {', '.join(map(repr, row))}; {KNOWN_FORMS}")


def _encoded(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text = text[: 8 * READ * MOST * LENGTH]  # characters; more tokens are not read
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _own_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the folder or repository that the model was loaded from."""
    where = model.config._name_or_path
    problem = "the model was not loaded from a checkpoint"
    if where:
        try:
            return AutoTokenizer.from_pretrained(where)
        except Exception as error:  # whatever is missing or broken there
            problem = f"none can be loaded from {where!r}: {str(error).splitlines()[0] if str(error) else error!r}"
    raise UnsupportedError(
        f"calibration= holds texts, but there is no tokenizer for them: {problem}; pass calibration=(texts, tokenizer)"
    )


def _cut(ids: Iterator[int], length: int) -> Tensor:
    taken = torch.tensor(list(islice(ids, READ * MOST * length)), dtype=torch.int64)
    length = max(1, min(length, len(taken)))
    windows = taken[: len(taken) // length * length].view(-1, length)
    count = min(MOST, len(windows))
    return windows[[number * len(windows) // count for number in range(count)]]


def _length(model: PreTrainedModel) -> int:
    config = layers_config(model.config)
    return min(LENGTH, getattr(config, "max_position_embeddings", None) or LENGTH)


def _as_ids(ids: Tensor) -> Tensor:
    if ids.dtype not in INTEGERS:
        raise UnsupportedError(f"calibration= is a tensor of {ids.dtype}, and token ids are integers; {KNOWN_FORMS}")
    return ids.detach().cpu().long()


def _check_vocabulary(windows: Tensor, model: PreTrainedModel) -> None:
    embedding: Any = model.get_input_embeddings()
    size = embedding.weight.shape[0]
    low, high = int(windows.min()), int(windows.max())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise UnsupportedError(
            f"calibration= holds the token id {wrong}, and the model knows 0 to {size - 1}; use the tokenizer of this "
            "model, and leave out padding"
        )


def _kind(data: object) -> str:
    shape = f" of shape {list(data.shape)}" if isinstance(data, Tensor) else ""
    return f"{type(data).__name__}{shape}"


# -- the model that they are given to ------------------------------------------------------------------------


def check_takes_ids(model: PreTrainedModel) -> None:
    """Raise UnsupportedError unless token ids alone are what the model takes."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{name} is an encoder-decoder, which calibration data cannot be fed to; use method='rtn'"
        )
    if "input_ids" not in inspect.signature(type(model).forward).parameters:
        raise UnsupportedError(f"{name} takes no token ids, which calibration data are; use method='rtn'")


def feed(model: PreTrainedModel, ids: Tensor) -> None:
    """Call the model on ids [n, length] without its head, on which nothing depends and whose logits would be large."""
    body: Any = model.base_model
    keywords = inspect.signature(body.forward).parameters
    options = {"use_cache": False} if "use_cache" in keywords else {}
    with evaluating(model):
        body(input_ids=ids.to(model.device), **options)
