"""Checkpoints of every family: load() refuses those of which transformers reports missing weights, and no others."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import hf_accel
from hf_accel import HfAccelError

from .features import ALL
from .models import Family, build, families

pytestmark = pytest.mark.long
LOST = 4  # tensors that are taken away, one at a time
HARMLESS = "num_batches_tracked"  # which transformers reports, and no model reads


@pytest.fixture(params=[family for family in families().values() if family.kind in ALL], ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Path]]:
    family: Family = request.param
    try:
        model = build(family)
        model.save_pretrained(tmp_path)
    except Exception as error:
        pytest.skip(f"cannot be built or saved: {error}")
    yield type(model), tmp_path
    shutil.rmtree(tmp_path)


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
def test_what_transformers_reports_is_refused(checkpoint: tuple[Any, Path]) -> None:
    kind, folder = checkpoint
    file = folder / "model.safetensors"
    whole = load_file(file)
    assert refused(folder) == reported(kind, folder)
    for lost in random.Random(0).sample(sorted(whole), min(LOST, len(whole) - 1)):
        save_file({name: t for name, t in whole.items() if name != lost}, file, {"format": "pt"})
        assert refused(folder) == reported(kind, folder), lost
