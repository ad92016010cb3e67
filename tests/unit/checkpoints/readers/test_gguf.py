"""hf_accel.load() of GGUF files: the numbers of transformers' own loader, in the bits that the file has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

import hf_accel
from hf_accel import HfAccelError, UnsupportedError
from hf_accel.checkpoints.readers.ggml_blocks import TYPES
from hf_accel.linear import QuantLinear

from .test_ggml_blocks import SCALES_AT

gguf = pytest.importorskip("gguf")

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SIZES = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128, "head_dim": 64,
}  # fmt: skip
IDS = torch.arange(3, 15)[None]


def random_blocks(kind: str, rows: int, inputs: int, generator: np.random.Generator) -> np.ndarray:
    """Blocks of small numbers. Any other type than TYPES has is written as bytes that nobody reads."""
    size, count = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][::-1]
    blocks = generator.integers(0, 256, (rows, inputs // count, size), dtype=np.uint8)
    if kind == "F16":
        return generator.standard_normal((rows, inputs)).astype(np.float16)
    for at in SCALES_AT.get(kind, [0]):
        scales = (generator.random((rows, inputs // count, 1)) * 1e-3).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def write(
    path: Path, kind: str, *, architecture: str = "llama", tied: bool = False, settings: dict[str, Any] | None = None,
    more: dict[str, np.ndarray] | None = None, leave_out: str | None = None, head: str | None = None,
) -> Path:  # fmt: skip
    """A small model in blocks of random bytes, embedding and norms in floats."""
    head_dim = 128 if architecture == "qwen3" else 64  # transformers does not read that of a Qwen3 file
    config = CONFIGS[architecture](**SIZES | {"head_dim": head_dim}, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(64)
    for name, value in (settings or {}).items():
        writer.add_key_value(f"{architecture}.{name}", value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), SIZES["num_hidden_layers"])
    generator = np.random.default_rng(0)
    for name, tensor in model.state_dict().items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target == leave_out or (tied and name == "lm_head.weight"):
            continue
        if tensor.ndim == 1 or (name == "model.embed_tokens.weight" and not tied):
            writer.add_tensor(target, generator.standard_normal(tuple(tensor.shape)).astype(np.float32))
        else:
            this = head if head and name == "lm_head.weight" else kind
            blocks = random_blocks(this, *tensor.shape, generator)
            raw = None if this == "F16" else gguf.GGMLQuantizationType[this]
            writer.add_tensor(target, blocks, raw_dtype=raw)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stock(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def agrees(model: Any, reference: Any) -> None:
    """Each weight is the very same number, and so are the other tensors."""
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear):
            layer = model.get_submodule(name)
            assert isinstance(layer, QuantLinear), name
            assert torch.equal(layer.quantized.dequantize(torch.float32), module.weight), name
    linears = {name for name, module in reference.named_modules() if isinstance(module, torch.nn.Linear)}
    own = model.state_dict()
    for name, tensor in reference.state_dict().items():
        if name.removesuffix(".weight") not in linears:
            assert torch.equal(own[name], tensor), name
    with torch.no_grad():
        got, expected = model(IDS).logits, reference(IDS).logits
    assert (got - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_of_each_type(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", kind)
    model = hf_accel.load(path)
    agrees(model, stock(path))
    assert model.get_submodule("model.layers.0.mlp.up_proj").layout.bits == TYPES[kind].layout.bits


@pytest.mark.covering(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_architectures_and_ties(architecture: str, tied: bool, tmp_path: Path) -> None:
    """A head that shares the embedding's blocks keeps them; the embedding is looked up in floats."""
    path = write(tmp_path / "model.gguf", "Q8_0", architecture=architecture, tied=tied)
    model = hf_accel.load(path, cache={"block_size": 8})
    agrees(model, stock(path))
    assert model.generate(IDS, max_new_tokens=4, min_new_tokens=4).shape == (1, IDS.shape[1] + 4)


def test_mixed_types_are_saved_and_loaded(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "Q4_K", head="Q6_K")
    model = hf_accel.load(path, dtype=torch.bfloat16)
    assert model.dtype is torch.bfloat16 and model.lm_head.layout.bits == 8
    assert model.lm_head.quantized.weight_scale.dtype is torch.float32
    model.save_pretrained(tmp_path / "saved")
    again = hf_accel.load(tmp_path / "saved")
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    for (name, one), (other, two) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other and one.dtype is two.dtype and torch.equal(one, two)


def llama3_factors(factor: float, *, theta: float = 10000.0) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    result = []
    for frequency in 1.0 / theta ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64):
        length = 2 * torch.pi / frequency
        if length < 8192 / 4:
            result.append(1.0)
        elif length > 8192 / 1:
            result.append(factor)
        else:
            smooth = (8192 / length - 1) / (4 - 1)
            result.append(float(1 / ((1 - smooth) / factor + smooth)))
    return np.array(result, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_factors_of_llama_3(factor: float, tmp_path: Path) -> None:
    """transformers' own loader passes over them."""
    path = write(tmp_path / "model.gguf", "Q8_0", more={"rope_freqs.weight": llama3_factors(factor)})
    model = hf_accel.load(path)
    rope = model.config.rope_parameters
    assert rope["rope_type"] == "llama3" and rope["factor"] == factor and rope["rope_theta"] == 10000.0
    assert not torch.equal(model.model.rotary_emb.inv_freq, stock(path).model.rotary_emb.inv_freq)


def test_float_files_are_patched(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "F16")
    model = hf_accel.load(path, weights={"bits": 4, "group_size": 32})
    assert model.get_submodule("model.layers.0.mlp.up_proj").layout.bits == 4 and model.dtype is torch.float16
    exact = hf_accel.load(path, weights=None, dtype="float32")
    with torch.no_grad():
        # Sums of float32 differ between CPUs by more than ours do from the exact ones.
        expected = stock(path).double()(IDS).logits
        torch.testing.assert_close(exact(IDS).logits.double(), expected, rtol=1e-4, atol=1e-4)


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["IQ4_NL", "IQ4_XS", "IQ2_XS", "TQ1_0", "MXFP4"])
def test_types_that_are_not_read(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", kind)
    with pytest.raises(UnsupportedError, match=f"as {kind}, of which .*Q4_K.* are read; load it as transformers does"):
        hf_accel.load(path)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        (
            {"more": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}},
            "'blk.0.attn_sinks.weight', which .* no place",
        ),
        ({"more": {"anything": np.ones(4, np.float32)}}, "'anything', which .* has no place for"),
        ({"more": {"rope_freqs.weight": np.linspace(1, 8, 32).astype(np.float32)}}, "not as Llama 3.1 does"),
        ({"more": {"rope_freqs.weight": np.full(16, 8, np.float32)}}, "not as Llama 3.1 does"),
        ({"leave_out": "blk.0.ffn_up.weight"}, "no 'model.layers.0.mlp.up_proj.weight'"),
        ({"leave_out": "output_norm.weight"}, "no 'model.norm.weight'"),
        ({"settings": {"rope.scaling.type": "yarn"}}, "llama.rope.scaling.type='yarn', which transformers does not"),
        ({"settings": {"rope.scaling.factor": 4.0}}, "llama.rope.scaling.factor=4.0"),
        ({"settings": {"expert_count": 8}}, "expert_count=8"),
        ({"settings": {"attention.scale": 0.5}}, "attention.scale=0.5"),
        ({"settings": {"logit_scale": 2.0}}, "logit_scale=2.0"),
    ],
)
def test_what_transformers_would_pass_over(keywords: dict[str, Any], text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "Q8_0", **keywords)
    with pytest.raises(HfAccelError, match=text):
        hf_accel.load(path)


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 200, 2000, -1000, -1])
def test_files_that_were_cut(keep: int, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "Q4_0")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(HfAccelError, match="cannot be read as a GGUF file"):
        hf_accel.load(path)


@pytest.mark.parametrize("at", [0, 4, 8, 16])
def test_files_with_a_wrong_header(at: int, tmp_path: Path) -> None:
    """The magic number, the version, the number of tensors and of settings."""
    path = write(tmp_path / "model.gguf", "Q4_0")
    data = bytearray(path.read_bytes())
    data[at : at + 4] = b"\xff\xff\xff\x7f"
    path.write_bytes(data)
    with pytest.raises(HfAccelError, match="cannot be read as a GGUF file"):
        hf_accel.load(path)


def test_other_architectures_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="architecture 'mamba', of which llama, qwen2, qwen3 are read"):
        hf_accel.load(path)
    with pytest.raises(HfAccelError, match="cannot be read"):
        hf_accel.load(tmp_path / "none.gguf")
    with pytest.raises(UnsupportedError, match="leave weights= out"):
        hf_accel.load(write(tmp_path / "other.gguf", "Q8_0"), weights="int8")


def test_scales_that_are_not_finite(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "Q8_0")
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.attn_v.weight")
    tensor.data[0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    reader.data.flush()
    with pytest.raises(HfAccelError, match=r"layers\.1\.self_attn\.v_proj\.weight_scale' holds NaN or infinity"):
        hf_accel.load(path)
