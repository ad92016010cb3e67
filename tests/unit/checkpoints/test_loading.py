"""from_pretrained with an AccelConfig is patch() of the loaded model, without the float model in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.checkpoints import loading
from hf_accel.checkpoints.loading import Packer
from hf_accel.linear import QuantLinear, choose, quantize
from hf_accel.linear.backends import onednn, torch_int4
from hf_accel.patching.originals import Source
from hf_accel.undo.state import state_of

from ...parity.families import DECODER, FAMILIES, build, inputs
from ...parity.snapshot import bits

INT4 = {"bits": 4, "group_size": 32}


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def save(family: str, folder: Path, **keywords: Any) -> Path:
    build(family).save_pretrained(folder, **keywords)
    return folder


def load(folder: Path, keywords: dict[str, Any] | None = None, **others: Any) -> PreTrainedModel:
    config = hf_accel.AccelConfig(**(keywords or {}))
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **others)


def contents(model: PreTrainedModel) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def description(model: PreTrainedModel) -> dict[str, Any]:
    """What patch() has noted, without what was measured."""
    noted = copy.deepcopy(state_of(model).description)
    noted["choices"] = [choice for choice in noted["choices"] if choice["topic"] != "speed"]
    return {key: noted[key] for key in ("model", "config", "choices", "weight_bytes")}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the parameters that were packed while loading."""
    names: list[str] = []
    take = Packer.take

    def spy(self: Packer, name: str, tensor: Tensor, stored_as: str | None) -> Tensor:
        placeholder = take(self, name, tensor, stored_as)
        assert placeholder.shape == tensor.shape
        if placeholder is not tensor:
            assert placeholder.untyped_storage().nbytes() == tensor.itemsize
            names.append(name)
        return placeholder

    monkeypatch.setattr(Packer, "take", spy)
    return names


SKIPPING = {"skip": ["up_proj"], "head": None}
KEYWORDS: list[dict[str, Any]] = [
    {},
    {"weights": INT4},
    {"weights": SKIPPING, "attention": "reference"},
    {"keep_original": False},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_that_of_patch(
    family: str, keywords: dict[str, Any], threads: int, tmp_path: Path, taken: list[str]
) -> None:
    save(family, tmp_path)
    if keywords.get("weights") == SKIPPING and family == "gpt2":
        keywords = {**keywords, "weights": {**SKIPPING, "skip": ["c_fc"]}}
    keywords = {"fuse": False, **keywords}  # which norms are fused depends on where torch aligned their weights
    loaded = load(tmp_path, keywords)
    expected = hf_accel.patch(AutoModelForCausalLM.from_pretrained(tmp_path), **keywords)
    assert contents(loaded) == contents(expected)
    assert description(loaded) == description(expected)
    assert repr(loaded) == repr(expected)
    assert {n: p.shape for n, p in loaded.named_parameters()} == {n: p.shape for n, p in expected.named_parameters()}
    quantized = {name for name, m in loaded.named_modules() if isinstance(m, QuantLinear)}
    head = {"lm_head"} if family == "gpt2" else set()  # tied: made from the embedding
    assert set(taken) == {f"{name}.weight" for name in quantized - head}
    generated = (m.generate(**inputs("left"), max_new_tokens=6, do_sample=False) for m in (loaded, expected))
    assert torch.equal(*generated)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_reads_the_float_weights(family: str, threads: int, tmp_path: Path) -> None:
    save(family, tmp_path)
    model = hf_accel.unpatch(load(tmp_path))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert contents(model) == contents(stock)
    assert not any(isinstance(m, QuantLinear) for m in model.modules())
    assert all(p.requires_grad and p.is_contiguous() for p in model.parameters())
    assert str(model.config) == str(stock.config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype(dtype: torch.dtype, tmp_path: Path, taken: list[str]) -> None:
    """The file holds float32: the way back is to read it and to convert it again."""
    save("llama", tmp_path)
    model = load(tmp_path, dtype=dtype)
    assert len(taken) == 15
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert contents(model) == contents(hf_accel.patch(copy.deepcopy(stock)))
    assert contents(hf_accel.unpatch(model)) == contents(stock)


@pytest.mark.parametrize("device_map", [None, "cpu", "auto", {"": "cpu"}, torch.device("cpu")], ids=str)
def test_device_map(device_map: Any, tmp_path: Path, taken: list[str]) -> None:
    save("llama", tmp_path)
    model = load(tmp_path, device_map=device_map)
    assert len(taken) == 15
    assert contents(model) == contents(hf_accel.patch(AutoModelForCausalLM.from_pretrained(tmp_path)))


def test_shards(tmp_path: Path, taken: list[str]) -> None:
    save("llama", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = load(tmp_path)
    assert len(taken) == 15
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert contents(hf_accel.unpatch(model)) == contents(expected)


def test_names_without_a_prefix(tmp_path: Path, taken: list[str]) -> None:
    """A checkpoint of the base model: the way back has to know the name in the file."""
    build("llama").model.save_pretrained(tmp_path)
    config = LlamaConfig(**DECODER)
    model = LlamaForCausalLM.from_pretrained(tmp_path, config=config, quantization_config=hf_accel.AccelConfig())
    assert len(taken) == 14  # the head is not in the file
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "layers.0.mlp.up_proj.weight" in set(file.keys())
    hf_accel.unpatch(model)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, build("llama").model.layers[0].mlp.up_proj.weight)


def test_tied_weights(tmp_path: Path, taken: list[str]) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**DECODER, tie_word_embeddings=True)).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert "lm_head.weight" not in taken
    assert len(taken) == 14
    assert isinstance(model.lm_head, QuantLinear)
    hf_accel.unpatch(model)
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("keywords", [{"keep_original": True}, {"weights": None}], ids=str)
def test_what_keeps_the_float_weights_loads_them(keywords: dict[str, Any], tmp_path: Path, taken: list[str]) -> None:
    save("llama", tmp_path)
    model = load(tmp_path, keywords)
    assert taken == []
    (tmp_path / "model.safetensors").unlink()
    assert contents(hf_accel.unpatch(model)) == contents(build("llama"))


@pytest.mark.parametrize("keep", ["auto", False])
def test_weights_from_memory(keep: Any, taken: list[str]) -> None:
    """No file to read them from again: they stay, or are given up on demand."""
    stock = build("llama")
    model = LlamaForCausalLM.from_pretrained(
        None, config=stock.config, state_dict=stock.state_dict(),
        quantization_config=hf_accel.AccelConfig(keep_original=keep),
    )  # fmt: skip
    assert len(taken) == (0 if keep == "auto" else 15)
    if keep == "auto":
        assert contents(hf_accel.unpatch(model)) == contents(stock)
    else:
        with pytest.raises(hf_accel.UnsupportedError, match="15 original weights were dropped by keep_original=False"):
            hf_accel.unpatch(model)


def test_few_float_weights_at_a_time(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been handed over is packed and dropped before much more is."""
    save("llama", tmp_path)
    under_way, most = 0, 0
    take, pack_weight = Packer.take, loading.pack_weight

    def counted(self: Packer, name: str, tensor: Tensor, stored_as: str | None) -> Tensor:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        return take(self, name, tensor, stored_as)

    def packed(*args: Any, **keywords: Any) -> Any:
        nonlocal under_way
        result = pack_weight(*args, **keywords)
        under_way -= 1
        return result

    monkeypatch.setattr(Packer, "take", counted)
    monkeypatch.setattr(loading, "pack_weight", packed)
    load(tmp_path)
    assert under_way == 0
    assert most <= threads + 1


def test_a_weight_that_cannot_be_quantized_is_named(threads: int, tmp_path: Path) -> None:
    model = build("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(hf_accel.UnsupportedError, match=r"'model.layers.1.mlp.up_proj' cannot .* NaN or infinity"):
        load(tmp_path)


def test_bad_keyword_is_told_before_anything_is_read(tmp_path: Path, taken: list[str]) -> None:
    save("llama", tmp_path)
    with pytest.raises(hf_accel.UnsupportedError, match="group_size=128 does not divide the 32 inputs of"):
        load(tmp_path, {"weights": {"bits": 4, "group_size": 128}})
    assert taken == []


def test_a_checkpoint_that_changed_since(tmp_path: Path) -> None:
    save("llama", tmp_path)
    model = load(tmp_path)
    file = tmp_path / "model.safetensors"
    aside = file.rename(tmp_path / "aside")
    build("llama", seed=1).save_pretrained(tmp_path)
    with pytest.raises(hf_accel.HfAccelError, match=r"cannot unpatch: '.*' in .* has changed since patch"):
        hf_accel.unpatch(model)
    aside.replace(file)
    assert contents(hf_accel.unpatch(model)) == contents(build("llama"))


def test_save_and_load_again(tmp_path: Path) -> None:
    save("gpt2", tmp_path / "float")
    model = load(tmp_path / "float")
    model.save_pretrained(tmp_path / "quantized")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized")
    assert contents(again) == contents(model)
    with pytest.raises(hf_accel.UnsupportedError, match="the checkpoint is quantized and has no original weights"):
        hf_accel.unpatch(again)


def test_a_loaded_model_can_be_copied(tmp_path: Path) -> None:
    save("llama", tmp_path)
    other = copy.deepcopy(load(tmp_path))
    assert contents(hf_accel.unpatch(other)) == contents(build("llama"))


def test_backends_are_tried_out_of_the_meta_device() -> None:
    """transformers makes the model on meta and in its dtype; what a backend learns there it would keep for good."""
    with torch.device("meta"), loading.torchs_defaults():
        assert torch.ones(1).device.type == "cpu"
        assert torch.ones(1).dtype == torch.float32
    torch.set_default_dtype(torch.bfloat16)
    try:
        with loading.torchs_defaults():
            assert torch.ones(1).dtype == torch.float32
        assert torch.ones(1).dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_backend_that_is_first_tried_while_loading(tmp_path: Path) -> None:
    for probe in (choose, torch_int4.block_size, onednn.is_exact):
        probe.cache_clear()
    weights = {**INT4, "activations": None}
    save("llama", tmp_path)
    model = load(tmp_path, {"weights": weights}, dtype=torch.bfloat16)
    for probe in (choose, torch_int4.block_size, onednn.is_exact):
        probe.cache_clear()
    expected = hf_accel.patch(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), weights=weights)
    assert repr(model) == repr(expected)  # it names the backends


def test_a_tensor_that_was_changed_on_the_way_is_packed_as_it_is(tmp_path: Path) -> None:
    """A conversion of transformers may permute rows: then the file's tensor is not the model's."""
    name = "model.layers.0.mlp.up_proj"
    linear = next(p for p in hf_accel.plan(build("llama"), weights="int8").quantized if p.site.name == name)
    stored, files = linear.site.weight.detach().clone(), {"a": tmp_path / "x.safetensors"}
    save_file({"a": stored}, files["a"])
    for tensor in (stored, stored.flip(0)):
        packer = Packer([linear], device_type="cpu", files=files, lose=False)
        packer.take(f"{name}.weight", tensor, "a")
        packed = packer.finish()[name]
        assert packed.source == Source.of(tensor, files["a"], "a")
        restored = packed.choice.backend.unpack(packed.weight).dequantize(torch.float32)
        expected = quantize(tensor, linear.config).dequantize(torch.float32)
        assert torch.equal(restored, expected)
