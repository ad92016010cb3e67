"""What is compared of encoders, of texts, images and sound: the plan of their layers, and their passes as stock's.

Words besides those of features.py. native: each layer is one native call. partly native: some layers are. module by
module: none is, for the reason that the plan gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_accel.errors import UnsupportedError
from hf_accel.fused.hf.encoder_sites import LAYER
from hf_accel.verify.encoded import encoder_batches, encoder_vectors

from .comparison import NotTried, StockCannot, by_stock, close, given, told
from .features import Case, Outcome, feature

ENCODING = ("texts", "images", "sound")
TOKENS = 13  # more than the windows of configs.py
Batches = dict[str, dict[str, Tensor]]


@feature("layers", *ENCODING)
def _layers(case: Case) -> Outcome:
    fused = case.plan.fused
    native = sum(site.kind == LAYER for site in fused.sites)
    reasons = Counter(dropped.reason for dropped in fused.dropped if dropped.kind == LAYER)
    told_by_plan = [line.reason for line in case.plan.lines if (line.topic, line.what) == ("passes", "layers")]
    if native and not reasons:
        return Outcome("native", f"{native} of {native}")
    reason = "; ".join(reasons) or "; ".join(told_by_plan)
    return Outcome("partly native" if native else "module by module", reason)


@feature("padding", *ENCODING)
def _padding(case: Case) -> Outcome:
    lines = [line for line in case.plan.lines if (line.topic, line.what) == ("passes", "padding")]
    return Outcome(lines[0].choice, lines[0].reason) if lines else Outcome("none", "inputs have one size")


@feature("pass", *ENCODING)
def _pass(case: Case) -> Outcome:
    """With weights=None the outputs of every form of batch, within 1e-4 of the largest number."""
    refused = []
    for name, inputs in _batches(case.stock).items():
        try:
            expected = by_stock(lambda given=inputs: _encode(case.stock, given))
        except StockCannot as reason:
            refused.append(reason)
            continue
        ours = _encode(case.patched, inputs)
        for output, theirs in expected.items():

            def ask(model: PreTrainedModel, inputs: Any = inputs, output: str = output) -> Tensor:
                return _encode(model, inputs)[output]

            close(f"{name}: {output}", ours[output], theirs, tolerance=1e-4, stock=case.stock, ask=ask)
    if len(refused) == len(_batches(case.stock)):
        raise refused[0]
    return Outcome("as stock")


def _encode(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = encoder_vectors(model, given(model, inputs))
    if not all(values.isfinite().all() for values in found.values()):
        raise ValueError("numbers that are not finite")
    return found


def _batches(model: PreTrainedModel) -> Batches:
    """Batches as a certificate compares them, or else inputs of other forms that stock takes."""
    try:
        found: Batches = encoder_batches(model, TOKENS, rows=3)
    except (UnsupportedError, AttributeError) as error:  # a model of images that says it starts from tokens
        found, reasons = {}, [str(error)]
    else:
        reasons = [reason for inputs in found.values() if (reason := _refusal(model, inputs)) is not None]
        if len(reasons) < len(found):
            return found
    for inputs in _other_forms(model):
        reason = _refusal(model, inputs)
        if reason is None:
            return {"other inputs": inputs}
        reasons.append(reason)
    raise NotTried(f"stock takes no inputs that are made here: {'; '.join(dict.fromkeys(reasons))[:200]}")


def _refusal(model: PreTrainedModel, inputs: dict[str, Tensor]) -> str | None:
    try:
        encoder_vectors(model, inputs)
    except Exception as error:
        return told(error)
    return None


def _other_forms(model: Any) -> Iterator[dict[str, Tensor]]:
    """Spectrograms, [frames, mels] or the other way round, and videos."""
    name, config, draw = model.main_input_name, model.config, torch.Generator().manual_seed(0)
    size = getattr(config, "image_size", None) or 32
    height, width = size if isinstance(size, list | tuple) else (size, size)
    if name == "pixel_values":
        frames = getattr(config, "num_frames", None) or 2
        yield {name: torch.randn(2, frames, getattr(config, "num_channels", 3), height, width, generator=draw)}
        return
    widths = [getattr(config, field, None) for field in ("num_mel_bins", "feature_projection_input_dim", "input_size")]
    frames = getattr(config, "max_length", None) or 2 * getattr(config, "max_source_positions", 32)
    for mels in filter(None, widths):
        for shape in ((2, frames, mels), (2, mels, frames), (2, 64, mels)):
            yield {name: torch.randn(*shape, generator=draw)}
