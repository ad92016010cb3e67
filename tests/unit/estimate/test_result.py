from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from hf_accel.errors import UnsupportedError
from hf_accel.estimate import estimate, result
from hf_accel.hardware import detect

from .shapes import llama_70b

ESTIMATE = estimate(llama_70b(), context=32_000, weights="int4", kv_dtype="int8", bandwidth=1.5e12, price_per_hour=2.0)


def test_fits_into_bytes():
    assert ESTIMATE.fits(ESTIMATE.total_bytes)
    assert not ESTIMATE.fits(ESTIMATE.total_bytes - 1)
    assert ESTIMATE.fits(80e9)


def test_fits_into_the_free_memory_of_a_device(monkeypatch):
    exactly = dataclasses.replace(detect(), free_memory=ESTIMATE.total_bytes)
    assert ESTIMATE.fits(exactly)
    assert not ESTIMATE.fits(dataclasses.replace(exactly, free_memory=ESTIMATE.total_bytes - 1))
    asked = []
    monkeypatch.setattr(result, "detect", lambda device: asked.append(device) or exactly)
    assert ESTIMATE.fits("cuda:1") and ESTIMATE.fits(torch.device("cpu"))
    assert asked == ["cuda:1", torch.device("cpu")]


def test_unknown_free_memory_is_an_error():
    with pytest.raises(UnsupportedError, match="the free memory of cpu is unknown; give fits\\(\\) a number of bytes"):
        ESTIMATE.fits(dataclasses.replace(detect(), free_memory=None))


def test_to_dict_survives_json():
    data = json.loads(json.dumps(ESTIMATE.to_dict()))
    assert data["attention_bytes"] == {"naive": 131_072_000_000, "naive_per_head": 2_048_000_000, "tiled": 12386304}
    assert data["bound"] == {"prefill": "compute", "decode": "memory"}
    assert data["weights_by_kind"] == ESTIMATE.weights_by_kind
    assert (data["weights"], data["kv_dtype"], data["dtype"]) == ("int4", "int8", "bfloat16")
    assert set(data) == {field.name for field in dataclasses.fields(ESTIMATE)} - {"counted"}


def test_the_table():
    assert str(ESTIMATE).splitlines() == [
        "model        LlamaForCausalLM, 70.6 billion parameters in bfloat16",
        "request      32,000 tokens of context, batch 1",
        "weights      int4, 38.4 GB (linears 34.2 GB, embeddings 2.1 GB, scales 1.07 GB, head 1.05 GB, other 2.64 MB)",
        "KV cache     int8, 5.32 GB",
        "attention    12.4 MB tiled; naive 131 GB, 2.05 GB a head",
        "activations  6.55 GB",
        "total        50.3 GB",
        "prefill      compute bound, at least 38.2 s",
        "decode       memory bound, at least 0.0278 s a token",
        "             reads 41.7 GB at 1.5 TB/s",
        "cost         15.4 a million output tokens",
        "             0.662 a million input tokens",
    ]
    assert "cost" not in str(dataclasses.replace(ESTIMATE, cost_per_million_tokens=None))


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (83.9e9, "83.9 GB"), (999.7e9, "1 TB"), (5e15, "5e+03 TB")],
)
def test_units_are_decimal(size, text):
    assert result.in_units(size) == text


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("24GB", 24),
        ("1.5 tb", 1500),
        ("16GiB", 17.179869184),
        ("A100", 40),
        ("A100 80GB", 80),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("H100", 80),
        ("NVIDIA H100 80GB HBM3", 80),
        ("h200", 141),
        ("L4", 24),
        ("Tesla T4", 16),
        ("NVIDIA GeForce RTX 4090", 24),
        ("rtx-4060 Ti 16 GB", 16),
    ],
)
def test_fits_into_a_size_or_a_device_by_its_name(name, gigabytes):
    assert dataclasses.replace(ESTIMATE, total_bytes=gigabytes * 1e9).fits(name)
    assert not dataclasses.replace(ESTIMATE, total_bytes=gigabytes * 1e9 + 1).fits(name)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("A101", "the memory of 'A101' is not known; did you mean 'A10.*Or give its size, such as '24GB'"),
        ("potato", "the memory of 'potato' is not known; give its size, such as '24GB'"),
        ("A100 60GB", "the A100 is sold with 40 GB or 80 GB; give one of these"),
        ("A100 80MB", "the A100 is sold with 40 GB or 80 GB"),
        ("24", "the memory of '24' is not known; give its size"),
        ("cuda:x", "device='cuda:x' is not one that torch knows"),
        (None, "device=None is not one that torch knows"),
    ],
)
def test_where_nothing_is_known_to_fit(where, message):
    with pytest.raises(UnsupportedError, match=message):
        ESTIMATE.fits(where)
