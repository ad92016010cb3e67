"""Checkpoints of every family: load() refuses those of which transformers reports missing weights, and no others."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import hf_accel
from hf_accel import HfAccelError

from .features import ALL
from .models import Family, build, families

pytestmark = pytest.mark.long
PARTS = 24  # of all families, which nobody collects: that would load them all
LOST = 4  # tensors that are taken away, one at a time
HARMLESS = "num_batches_tracked"  # which transformers reports, and no model reads


def saved(family: Family, folder: Path) -> Any:
    """The class of a model that was saved; None if it cannot be built or saved."""
    try:
        model = build(family)
        model.save_pretrained(folder)
    except Exception:
        return None
    return type(model)


def reported(kind: Any, folder: Path) -> bool:
    """Whether transformers says that weights are missing, or raises."""
    try:
        missing = kind.from_pretrained(folder, output_loading_info=True)[1]["missing_keys"]
    except RuntimeError:
        return True
    return any(not name.endswith(HARMLESS) for name in missing)


def refused(folder: Path) -> bool:
    try:
        hf_accel.load(folder, weights=None)
    except HfAccelError:
        return True
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_what_transformers_reports_is_refused(part: int, tmp_path: Path) -> None:
    folder, checked = tmp_path / "checkpoint", 0
    for family in [family for family in families().values() if family.kind in ALL][part::PARTS]:
        kind = saved(family, folder)
        if kind is not None:
            checked += 1
            file = folder / "model.safetensors"
            whole = load_file(file)
            assert refused(folder) == reported(kind, folder), family
            for lost in random.Random(0).sample(sorted(whole), min(LOST, len(whole) - 1)):
                save_file({name: t for name, t in whole.items() if name != lost}, file, {"format": "pt"})
                assert refused(folder) == reported(kind, folder), (family, lost)
        shutil.rmtree(folder, ignore_errors=True)
    assert checked > 0
