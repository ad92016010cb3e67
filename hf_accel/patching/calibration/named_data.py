"""Calibration data by the names that optimum, AutoGPTQ and transformers' GPTQConfig know: wikitext2, c4, c4-new.

optimum downloads and cuts them, so that the same name is the same data here and there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...config.weight_config import WITHDRAWN_DATA
from ...errors import HfAccelError, UnsupportedError

INSTEAD = "or give data of your own: calibration=texts"


def named_windows(name: str, tokenizer: PreTrainedTokenizerBase, *, count: int, length: int) -> Tensor:
    """Return `count` windows of a data set as optimum draws them with its seed, int64 [count, length].

    Raises UnsupportedError where optimum or datasets is not installed, or the name was withdrawn; HfAccelError if the
    data cannot be downloaded, or is too short.
    """
    if name in WITHDRAWN_DATA:
        raise UnsupportedError(f"calibration={name!r} was withdrawn by optimum; choose calibration='c4', {INSTEAD}")
    missing = [package for package in ("optimum", "datasets") if not _is_installed(package)]
    if missing:
        raise UnsupportedError(
            f"calibration={name!r} needs {' and '.join(missing)}, which is not installed: "
            f'pip install "hf_accel[optimum]", {INSTEAD}'
        )
    from optimum.gptq.data import get_dataset

    try:
        with _random_state_kept():
            drawn: list[dict[str, Tensor]] = get_dataset(name, tokenizer, nsamples=count, seqlen=length)
    except Exception as error:  # of the network, of the hub, of the disk, of data that is too short
        line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise HfAccelError(
            f"calibration={name!r} cannot be read: {type(error).__name__}: {line}; it is downloaded once from the "
            f"Hugging Face hub, so try again with a network, {INSTEAD}"
        ) from error
    return torch.cat([window["input_ids"] for window in drawn])


def _is_installed(package: str) -> bool:
    """Return whether a package is there. The folder for optimum's commands makes a module `optimum` by itself."""
    return find_spec(package) is not None and (package != "optimum" or find_spec("optimum.gptq") is not None)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Give the random numbers of the process back as they were: optimum seeds all three generators."""
    python, numpy, ours = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpus: list[Any] = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(ours)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)
