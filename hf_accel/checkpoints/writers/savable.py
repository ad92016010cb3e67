"""The reasons that keep a model from being written for other programs, and the report of one that was written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import UnsupportedError
from ...linear.formats import FLOAT8
from ...linear.hf import is_split
from ...models import unwrapped
from ...patching.check import check_model
from ...patching.printed import Line, Printed, Row, row_of, table
from ...patching.survey import other_quantizer


def savable(model: nn.Module) -> PreTrainedModel:
    """The transformers model to write. Raises UnsupportedError for one with adapters, or quantized by others."""
    inner = check_model(unwrapped(model))
    other = other_quantizer(inner)
    if other is not None:
        raise UnsupportedError(f"the model is quantized by {other}; model.save_pretrained writes it as what it is")
    if is_split(inner):
        raise UnsupportedError("the model is split over ranks; write it from one process that has the whole model")
    adapted = next((name for name, module in inner.named_modules() if hasattr(module, "base_layer")), None)
    if adapted is not None:
        raise UnsupportedError(
            f"{adapted!r} has an adapter, which this format cannot hold; call merge_and_unload() first, or save the "
            "adapter by itself"
        )
    return inner


def refuse_infinite(name: str, tensor: Tensor) -> None:
    """Raise UnsupportedError for NaN and infinity."""
    if not tensor.is_floating_point():
        return
    wrong = tensor.isnan() if tensor.dtype is FLOAT8 else ~tensor.isfinite()  # FP8 has no infinity
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise UnsupportedError(f"{name!r} holds NaN or infinity at {place}; repair the model first")


@dataclass(frozen=True, repr=False)
class Saved(Printed):
    """The report of save_compressed or save_gguf.

    print() it: a line for each kind of tensor, and what is lost. path: the folder or the file. bytes: the size of all
    its tensors.
    """

    path: Path
    bytes: int
    lines: tuple[Line, ...]

    @property
    def _all_lines(self) -> list[Line]:
        return [*self.lines, Line("bytes", "tensors", f"{self.bytes / 1e6:,.1f} MB", "")]

    def __str__(self) -> str:
        return "\n".join([f"hf_accel saved: {self.path}", *table(self._all_lines)])

    def _table_rows(self) -> Iterable[Row]:
        return [(f"hf_accel saved: {self.path}",), *map(row_of, self._all_lines)]
