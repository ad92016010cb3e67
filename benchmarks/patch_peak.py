"""Peak memory of one patch(), in a process of its own.

python -m benchmarks.patch_peak bench-1b LAYERS WEIGHTS, with 0 for all layers
"""

from __future__ import annotations

import json
import sys

import hf_accel

from .models import load_model, weight_bytes
from .peak import peak_bytes


def main(name: str, layers: str, weights: str) -> None:
    model = load_model(name, layers=int(layers) or None)
    before = weight_bytes(model)
    # the originals are not kept: what is asked is how much memory a model needs in order to become smaller
    peak = peak_bytes(lambda: hf_accel.patch(model, weights=weights, keep_original=False))
    print(json.dumps({"model_bytes": before, "patch_peak_bytes": peak, "patched_bytes": weight_bytes(model)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
