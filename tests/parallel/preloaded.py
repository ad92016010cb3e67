"""What the process imports that is forked for each rank. It runs nothing, so that it has no threads to lose."""

from __future__ import annotations

import gc
import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_ACCEL_MEASURE": "0"}  # before transformers is imported

from . import context_ranks, lost_jobs, serving_jobs, split_jobs, tensor_jobs

gc.freeze()  # what is here already is looked at by no collection of a rank

__all__ = ["context_ranks", "lost_jobs", "serving_jobs", "split_jobs", "tensor_jobs"]
