from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from hf_accel.errors import UnsupportedError
from hf_accel.hardware import detect


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv("HF_ACCEL_ISA", raising=False)


def test_this_machine():
    hardware = detect()
    assert hardware == detect(torch.device("cpu")) or hardware.free_memory != detect().free_memory
    assert hardware.device == "cpu"
    assert hardware.name
    assert 1 <= hardware.usable_cores <= (os.cpu_count() or 1)
    assert hardware.physical_cores >= 1
    assert hardware.threads == torch.get_num_threads()
    assert hardware.compute_capability is None
    if hardware.total_memory is not None and hardware.free_memory is not None:
        assert 0 <= hardware.free_memory <= hardware.total_memory


def test_threads_and_override_are_read_anew(monkeypatch):
    threads = detect().threads
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert detect().threads == threads + 1
    monkeypatch.setenv("HF_ACCEL_ISA", "portable")
    assert detect().isa == "portable"


def test_a_bad_override_is_an_error(monkeypatch):
    monkeypatch.setenv("HF_ACCEL_ISA", "fast")
    with pytest.raises(UnsupportedError, match="HF_ACCEL_ISA='fast' is not known"):
        detect()


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        detect().threads = 3


@pytest.mark.parametrize("device", ["mps", "meta"])
def test_other_devices_are_refused(device):
    with pytest.raises(UnsupportedError, match=f"device='{device}' cannot be described; use 'cpu' or 'cuda'"):
        detect(device)


def test_cuda_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="torch sees no CUDA device here; use 'cpu'"):
        detect("cuda:1")


def test_a_gpu_is_described_by_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 80))
    gpu = detect("cuda:1")
    assert (gpu.device, gpu.name, gpu.compute_capability) == ("cuda:1", "GPU 1", (9, 0))
    assert (gpu.total_memory, gpu.free_memory) == (80, 30)
    assert gpu.isa == detect("cpu").isa
