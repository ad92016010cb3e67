"""What every test starts from: no network, one thread, and torch's generator at the same place."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Generator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ["HF_ACCEL_MEASURE"] = "0"  # seconds for each model on a GPU, and a file in the cache folder of the user
# Threads that have nothing to do sleep: as many test processes as processors run, and those that wait for a turn would
# keep a processor from the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of processes that tests start; a test may set another number

import torch

from hf_accel.kernels import triton
from hf_accel.kernels.cpu import library

from .devices import multiply_pairs
from .interpreter import correct_interpreter
from .selection import mark_others_long

if triton.is_interpreted():
    correct_interpreter()

# Their first test takes as long as hundreds of others: at the end, one process would work and the others be idle.
FIRST = ("test_triton.py", "test_benchmarks.py")
RARELY = (20_000, 10, 10)  # by Python's own 700 new objects, a tenth of the time goes into looking for garbage
torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other
for device in (torch.cuda, torch.mtia, torch.xpu):
    # Of a device that is not there, torch.manual_seed() keeps the seed and a traceback: longer than most tests take.
    if not device.is_available():
        device.manual_seed_all = lambda seed: None


def pytest_configure(config: pytest.Config) -> None:
    # Tests call a cache as all supported releases understand it. That the package itself takes the name which is not
    # deprecated, tests/parity/test_cache_names.py holds.
    config.addinivalue_line("filterwarnings", "ignore:`(past_key_values|cache_params)` is deprecated:FutureWarning")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay: of their million objects, no later collection of garbage looks at one again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*RARELY)
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries count at the end what was not freed, and complain


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is long
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_others_long(items)
    items.sort(key=lambda item: item.path.name not in FIRST)


@pytest.fixture(scope="module", autouse=True)
def _what_stays() -> None:
    """So is what the files before this one have imported or keep: a Trainer collects garbage several times."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def in_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of quantized weights keep float32 inside, as their modules do, also where the CPU multiplies bfloat16."""
    if library.refusal() is None:
        multiply_pairs(monkeypatch, does=False)
