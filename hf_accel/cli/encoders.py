"""The encoders' topic of hf-accel bench: one input, a batch, and a padded batch, stock and patched in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_accel.estimate.lengths import longest_text
from hf_accel.verify.encoded import compare_encoders, encoder_inputs

from .measurement import BASELINE, WrongResultError, finish, ratios, take_turns
from .topics import Report, Sizes, both

LEAST_COSINE = 0.8  # of any single vector; the coarsest weights that are of use stay above it


def encode(model: PreTrainedModel, keywords: Mapping[str, Any], sizes: Sizes, report: Report) -> list[dict[str, Any]]:
    """Measure passes of an encoder, and return one row for each model and batch.

    Texts come alone, in a batch of one length, and in a batch of lengths from an eighth to the whole; images and sound
    have one length. cosine: the lowest between a vector of the model's and stock's. Raises WrongResultError for a
    model that computes something else, which is then not timed.
    """
    models = both(model, keywords)
    context = longest_text(model, sizes.context)
    rows = []
    for what, lengths in _batches(sizes.batch, context, padded=model.main_input_name == "input_ids").items():
        inputs = encoder_inputs(model, lengths)
        agreements = {}
        for name, one in models.items():
            report(f"comparing {name} with stock")
            agreements[name] = found = compare_encoders(one, models[BASELINE], inputs)[0]
            if not found.cosine >= LEAST_COSINE:  # NaN too
                raise WrongResultError(
                    f"{name}: of {found.rows} vectors of {found.output} one has a cosine of {found.cosine:.3g} to "
                    "stock's, and that is no rounding: nothing was timed; take more bits (--weights int8 or none)"
                )
        seconds = take_turns(
            {name: partial(_time, one, inputs) for name, one in models.items()}, rounds=sizes.rounds, report=report
        )
        for name, values in seconds.items():
            each, middle = ratios(seconds[BASELINE], values), statistics.median(values)
            rows.append({
                "name": name, "what": what, "seconds": middle, "per_second": len(lengths) / middle,
                "ratio": statistics.median(each), "lowest_ratio": min(each), "highest_ratio": max(each),
                "cosine": agreements[name].cosine,
            })  # fmt: skip
    return rows


def _batches(batch: int, context: int, *, padded: bool) -> dict[str, list[int]]:
    """Return the lengths of the inputs of each batch, by what it is called."""
    found = {"one input": [context]}
    if batch > 1:
        found[f"{batch} of one length"] = [context] * batch
    if batch > 1 and padded:
        least = max(1, context // 8)
        found[f"{batch} of {least} to {context}"] = [
            least + (context - least) * index // (batch - 1) for index in range(batch)
        ]
    return found


@torch.no_grad()
def _time(model: PreTrainedModel, inputs: Mapping[str, Any]) -> float:
    start = time.perf_counter()
    model(**inputs)
    finish(model.device.type)
    return time.perf_counter() - start
