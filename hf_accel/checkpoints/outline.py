"""A checkpoint's model without its weights, so that a plan takes a second whatever the model's size."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..config.fit import Fit, take_fit
from ..config.patch_config import PatchConfig, PatchKeywords, takes_patch_keywords
from ..errors import UnsupportedError
from ..estimate.shapes import load_config, on_meta, stored_config
from ..linear.hf import stored_experts
from ..patching.check import is_patched_with, transformers_model
from ..patching.originals import Stored, checkpoint_files
from ..patching.plan import Plan
from ..patching.planning import planned
from ..patching.weight_plan import WeightPlan
from ..tensors import torchs_defaults
from .fitting import fit_into, parameters_in
from .readers.reader import headers_of

SMALL_TENSOR = 2**20  # bytes; more are pages of their own


@takes_patch_keywords
def plan(
    model: Any,
    *,
    dtype: torch.dtype | None = None,
    fit: Any = None,
    **keywords: Unpack[PatchKeywords],
) -> Plan:
    """Return the plan of `patch(model, **keywords)`, with its reasons, without changing anything.

    model: a model, what holds one (as patch() takes it), or the path or name of a float checkpoint, of which no weight
    is read. dtype: to load a checkpoint in; None takes that of config.json. fit: a memory, for which bits, cache and
    tokens of a checkpoint are chosen, as hf_accel.load(path, fit=...) does; where bits are mixed its weights are read.
    Raises UnsupportedError for a model that is patched, for a checkpoint that is quantized already, for what only its
    weights could tell (AWQ, average_bits), and for a memory that is too small.
    """
    given: dict[str, Any] = {"fit": fit, **keywords}
    asked = take_fit(given)
    settings = PatchConfig.build(**given)
    if isinstance(model, (str, os.PathLike)):
        return _plan_of(model, settings, dtype, asked)
    if asked is not None:
        raise UnsupportedError(f"fit={fit!r} is for the path of a checkpoint; give its path, as load() takes it")
    if dtype is not None:
        raise UnsupportedError(f"dtype={dtype} is for the path of a checkpoint; a model has its own: leave dtype= out")
    if is_patched_with(transformers_model(model), settings):
        raise UnsupportedError(
            "the model is patched already, and plan() says what patch() would do; call it before patch(), or after "
            "hf_accel.unpatch(model)"
        )
    with torchs_defaults():
        return planned(model, settings)


def _plan_of(path: str | os.PathLike[str], settings: PatchConfig, dtype: torch.dtype | None, fit: Fit | None) -> Plan:
    """Return the Plan for the model that the float checkpoint `path` holds, without reading its weights."""
    if os.fspath(path).endswith(".gguf"):
        raise UnsupportedError(f"{os.fspath(path)!r}: the plan of a GGUF file is made when it is loaded")
    described = load_config(path)
    if stored_config(described) is not None:
        raise UnsupportedError(f"{os.fspath(path)!r} is quantized already; load it, and its plan is made then")
    if fit is None and settings.weights is not None and settings.weights.needs_data:
        raise UnsupportedError("which layers a calibrated plan changes is known by their weights; load the model")
    stored = checkpoint_files(os.fspath(path))

    def find_originals(model: PreTrainedModel, linears: Sequence[WeightPlan]) -> dict[str, Stored] | None:
        return _stored_equally(model, linears, stored)

    model = outline(described, dtype=dtype)
    if fit is None:
        return planned(model, settings, find_originals=find_originals)
    with torchs_defaults():
        files = sorted({str(file) for file in stored.values()})
        fitted = fit_into(model, settings, fit, device_type="cpu", read=parameters_in(model, files))
    if fitted.settings.weights is not None and fitted.settings.weights.needs_data:  # calibration runs the model
        model = type(model).from_pretrained(path, dtype=model.dtype)
    return fitted.explained(planned(model, fitted.settings, find_originals=find_originals))


def outline(config: PreTrainedConfig, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Make a model on the CPU whose weights nobody has written, so that they take no memory.

    Buffers are real. dtype: None takes the config's, else float32.
    """
    chosen = dtype or config.dtype or torch.float32
    shapes = on_meta(config, dtype=chosen)
    weights = {name: _untouched(p) for name, p in shapes.named_parameters()}
    model: PreTrainedModel = type(shapes).from_pretrained(
        None, config=copy.deepcopy(config), state_dict=weights, dtype=chosen
    )
    return model.eval()


def _untouched(like: Tensor) -> Tensor:
    """Make an empty contiguous tensor, a large one in pages that the system gives out when they are written to."""
    empty = torch.empty_like(like, device="cpu")
    return empty.zero_() if empty.nbytes < SMALL_TENSOR else empty


def _stored_equally(
    model: PreTrainedModel, linears: Sequence[WeightPlan], stored: dict[str, Path]
) -> dict[str, Stored] | None:
    """Return where each weight to be replaced is stored; None unless all are there, in the dtype that they are loaded
    in.
    """
    files: dict[str, Stored] = {**stored, **stored_experts(model, stored)}
    names = [p.site.stored_name for p in linears if p.replaces]
    if not stored or any(name not in files for name in names):
        return None
    first = next((name for name in names if name in stored), None)
    if first is not None and dict(headers_of([stored[first]]))[first].dtype is not model.dtype:
        return None
    return files
