"""What patch() and from_pretrained read of a checkpoint does not stay in memory, nor does what they replace."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.hardware import file_pages
from hf_accel.linear import QuantLinear
from hf_accel.patching import originals, pack, planning

from ...parity.families import build
from ..hardware.smaps import resident_bytes

MAPS = pytest.mark.skipif(not Path(file_pages.PAGEMAP).exists(), reason="this system has no /proc/self/pagemap")
MOST = 0.3  # of the file: a page that is read brings others with it, those of a neighbour that was given back too


@pytest.fixture(autouse=True)
def _collections_as_python_has_them() -> Iterator[None]:
    """A model points to itself: as long as it is not collected, it maps its file."""
    rarely = gc.get_threshold()
    gc.collect()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*rarely)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 70 MB: many times what the system reads around a page."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "vocab_size": 512}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    hf_accel.patch(model).save_pretrained(folder / "int8")
    return folder


def from_pretrained(folder: Path, **keywords: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **keywords)
    return model


def share_in_memory(file: Path) -> float:
    return resident_bytes(file) / file.stat().st_size


@MAPS
@pytest.mark.parametrize("keep", ["auto", True, False])
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("loading", [False, True])
def test_the_checkpoint_is_not_in_memory(loading: bool, weights: str | None, keep: Any, folder: Path) -> None:
    file, keywords = folder / "model.safetensors", {"weights": weights, "keep_original": keep}
    if loading:
        model = from_pretrained(folder, quantization_config=hf_accel.AccelConfig(**keywords))
    else:
        model = hf_accel.patch(from_pretrained(folder), **keywords)
    assert share_in_memory(file) < MOST
    if keep is False and weights is not None:
        return
    hf_accel.unpatch(model)
    assert share_in_memory(file) < MOST
    for (name, parameter), stored in zip(model.named_parameters(), from_pretrained(folder).parameters(), strict=True):
        assert torch.equal(parameter, stored), name
    assert share_in_memory(file) > 0.9  # now all was read, which shows that the file is mapped, and counted


@MAPS
def test_a_quantized_checkpoint_is_not_in_memory(folder: Path) -> None:
    model = from_pretrained(folder / "int8")
    assert share_in_memory(folder / "int8" / "model.safetensors") < MOST
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens).logits, hf_accel.patch(from_pretrained(folder))(tokens).logits)


@MAPS
def test_no_more_than_a_few_weights_are_in_memory_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model is compared with its checkpoint, and while it is packed."""
    file, shares = folder / "model.safetensors", []
    pack_weight, read_tensor = pack.pack_weight, originals.read_tensor

    def packed(*args: Any, **keywords: Any) -> Any:
        shares.append(share_in_memory(file))
        return pack_weight(*args, **keywords)

    def read(*args: Any) -> Tensor:
        shares.append(share_in_memory(file))
        return read_tensor(*args)

    monkeypatch.setattr(pack, "pack_weight", packed)
    monkeypatch.setattr(originals, "read_tensor", read)
    hf_accel.unpatch(hf_accel.patch(from_pretrained(folder)))
    assert len(shares) == 15 + 15 + 15
    assert max(shares) < 2 * MOST


@pytest.fixture
def without_collection() -> Iterator[None]:
    """Only what nothing holds any more is freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("fuse", [True, False])
def test_unpatch_frees_the_packed_weights_at_once(fuse: bool, without_collection: None) -> None:
    model = hf_accel.patch(build("llama"), fuse=fuse)
    layers = [weakref.ref(module) for module in model.modules() if isinstance(module, QuantLinear)]
    assert len(layers) == 15
    hf_accel.unpatch(model)
    assert [layer() for layer in layers] == [None] * 15


def test_freed_memory_is_given_back_as_patch_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = build("llama"), []
    monkeypatch.setattr(pack, "trim", lambda: calls.append(sum(p.numel() > 0 for p in model.model.parameters())))
    monkeypatch.setattr(pack, "TRIM", 20_000)  # bytes
    hf_accel.patch(model, keep_original=False)
    assert len(calls) > 3
    assert calls == sorted(calls, reverse=True)


def test_what_frees_nothing_leaves_malloc_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(pack, "trim", lambda: calls.append(None))
    hf_accel.patch(build("llama"), weights=None)
    assert not calls


def test_a_plan_makes_no_float_weight_of_a_quantized_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be twice the largest weight of the model."""
    model = hf_accel.patch(build("llama"))
    read = planning._bytes_read(model, ())
    assert read == planning.parameter_bytes(p for p in model.parameters() if p is not model.model.embed_tokens.weight)
    monkeypatch.setattr(QuantLinear, "weight", property(lambda layer: pytest.fail("the weight was asked for")))
    assert planning._bytes_read(model, ()) == read
