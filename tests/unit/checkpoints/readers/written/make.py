"""Writes the checkpoints in this folder with the packages that write such files for others.

    python make.py WRITER    llm_compressor, auto_awq, auto_gptq, gptq_model or llama_cpp

Each writer needs releases of torch and transformers that the others do not take, and so a virtual environment of its
own: llmcompressor 0.14.0.1; autoawq 0.2.7.post3; auto-gptq 0.7.1 with transformers 4.44.2; gptqmodel 7.6.0;
llama-cpp-cffi 0.3.0 with gguf 0.19.0 and this package. What was installed is noted in `writers.json` in each folder.

llm-compressor and llama.cpp's quantizer write whole checkpoints. Of AutoAWQ, AutoGPTQ and GPTQModel it is the packers
of a Linear and the classes of their configs, since their own loops over a model do not know transformers' classes of
today or need data. Beside each checkpoint lies `products.safetensors`: what the writer's own decoder makes of each
Linear, times the same vectors; files of llama.cpp are compared with transformers' loader.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
GROUP = 32
SIZES = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 32,
}  # fmt: skip
CONFIG = SIZES | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
LAYER = "model.layers.0"
LINEARS = {
    **{f"{LAYER}.self_attn.{name}_proj": rows for name, rows in {"q": 64, "k": 32, "v": 32, "o": 64}.items()},
    **{f"{LAYER}.mlp.{name}_proj": 64 for name in ("gate", "up", "down")},
}
Decoded = dict[str, Tensor]


def weights() -> dict[str, Tensor]:
    """Of a Llama, in bfloat16. Every fifth output has no negative weight in its first group: a zero point of 0."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(rows, 64, generator=generator) * 0.1 for name, rows in LINEARS.items()}
    for tensor in tensors.values():
        tensor[1::5, :GROUP] = tensor[1::5, :GROUP].abs()
    norms = [f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm", "model.norm"]
    tensors |= {name: torch.randn(32, 64, generator=generator) for name in ("model.embed_tokens", "lm_head")}
    tensors |= {name: torch.rand(64, generator=generator) + 0.5 for name in norms}
    return {f"{name}.weight": tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def vectors(inputs: int) -> Tensor:
    """[in, 2] in float64."""
    return torch.randn(inputs, 2, generator=torch.Generator().manual_seed(1)).double()


def finish(folder: Path, decoded: Decoded, *packages: str) -> None:
    """decoded: weights [out, in] by the names of Linears."""
    products = {name: (weight.double() @ vectors(weight.shape[1])).float() for name, weight in decoded.items()}
    save_file(products, folder / "products.safetensors")
    note(folder, *packages)


def note(folder: Path, *packages: str) -> None:
    for file in folder.iterdir():
        file.chmod(0o644)
    installed = {name: version(name) for name in (*packages, "torch")}
    (folder / "writers.json").write_text(json.dumps(installed, indent=1) + "\n")
    print(folder.name, installed)


def emptied(name: str) -> Path:
    shutil.rmtree(HERE / name, ignore_errors=True)
    (HERE / name).mkdir()
    return HERE / name


# -- packers of a Linear -------------------------------------------------------------------------------


def linears() -> Iterator[tuple[str, nn.Linear]]:
    for name in LINEARS:
        weight = weights()[f"{name}.weight"].float()
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight
        yield name, linear


def assemble(
    name: str, config: dict[str, Any], packed: dict[str, nn.Module], decoded: Decoded, *packages: str
) -> None:
    """A checkpoint of packed Linears and the model's other tensors, those in float16, as the packers have them."""
    folder = emptied(name)
    tensors = {key: t.half() for key, t in weights().items() if key.removesuffix(".weight") not in LINEARS}
    for linear, module in packed.items():
        tensors |= {f"{linear}.{key}": t.contiguous() for key, t in module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    content = CONFIG | {"torch_dtype": "float16", "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(content, indent=1) + "\n")
    finish(folder, decoded, *packages)


def grouped(find: Callable[[Tensor], tuple[Tensor, Tensor]], weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zero points [out, groups] by a function of the inputs of a group."""
    found = [find(part) for part in weight.split(GROUP, dim=1)]
    return torch.cat([scale for scale, _ in found], dim=1), torch.cat([zero for _, zero in found], dim=1)


def auto_gptq() -> None:
    from auto_gptq import BaseQuantizeConfig
    from auto_gptq.nn_modules.qlinear.qlinear_cuda_old import QuantLinear
    from auto_gptq.quantization.quantizer import Quantizer

    for bits, sym in ((4, True), (4, False), (8, True)):

        def find(part: Tensor, bits: int = bits, sym: bool = sym) -> tuple[Tensor, Tensor]:
            quantizer = Quantizer()
            quantizer.configure(bits, perchannel=True, sym=sym)
            quantizer.find_params(part, weight=True)
            return quantizer.scale, quantizer.zero

        packed, decoded = {}, {}
        for name, linear in linears():
            layer = QuantLinear(
                bits, GROUP, linear.in_features, linear.out_features, False, weight_dtype=torch.float32
            )
            layer.pack(linear, *grouped(find, linear.weight.data), None)
            layer.scales = layer.scales.half().float()
            decoded[name] = layer(torch.eye(linear.in_features)).t()
            layer.scales = layer.scales.half()
            packed[name] = layer
        config = BaseQuantizeConfig(bits=bits, group_size=GROUP, sym=sym, desc_act=False).to_dict()
        kind = f"auto_gptq_{bits}_bits{'' if sym else '_asymmetric'}"
        assemble(kind, config | {"quant_method": "gptq"}, packed, decoded, "auto-gptq", "transformers", "numpy")


def gptq_model() -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.quantization.quantizer import Quantizer
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for bits, sym, form in ((4, False, "gptq"), (4, False, "gptq_v2"), (8, True, "gptq")):
        settings = QuantizeConfig(bits=bits, group_size=GROUP, sym=sym, desc_act=False, format=form)

        def find(part: Tensor, settings: Any = settings) -> tuple[Tensor, Tensor]:
            quantizer = Quantizer(settings)
            quantizer.configure(perchannel=True)
            quantizer.find_params(part, weight=True)
            return quantizer.scale, quantizer.zero

        packed, decoded = {}, {}
        for name, linear in linears():
            layer = TorchLinear(
                bits=bits, group_size=GROUP, sym=sym, desc_act=False, in_features=linear.in_features,
                out_features=linear.out_features, bias=False, register_buffers=True,
            )  # fmt: skip
            scale, zero = grouped(find, linear.weight.data)
            layer.pack(linear, scale, zero, torch.arange(linear.in_features, dtype=torch.int32) // GROUP)
            layer.post_init()
            half = layer.scales
            layer.scales = half.float()
            decoded[name] = layer.dequantize_weight().t()
            layer.scales = half
            if form == "gptq":
                convert_gptq_v2_to_v1_format_module(layer, settings)
            packed[name] = layer
        kind = f"gptq_model_{bits}_bits{'' if sym else '_asymmetric'}{'_v2' if form == 'gptq_v2' else ''}"
        meta = {"meta": {"quantizer": [f"gptqmodel:{version('gptqmodel')}"]}}
        assemble(kind, settings.to_dict() | meta, packed, decoded, "gptqmodel", "transformers")


def auto_awq() -> None:
    from awq.models._config import AwqConfig
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.packing_utils import dequantize_gemm

    quantizer = AwqQuantizer.__new__(AwqQuantizer)
    quantizer.w_bit, quantizer.group_size, quantizer.zero_point = 4, GROUP, True
    packed, decoded = {}, {}
    for name, linear in linears():
        linear.weight.data, scales, zeros = quantizer.pseudo_quantize_tensor(linear.weight.data)
        layer = WQLinear_GEMM.from_linear(linear, 4, GROUP, False, scales.t().contiguous(), zeros.t().contiguous())
        decoded[name] = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, GROUP).t()
        packed[name] = layer
    config = AwqConfig(w_bit=4, q_group_size=GROUP, zero_point=True, version="gemm").to_transformers_dict()
    assemble("auto_awq", config, packed, decoded, "autoawq", "transformers")


# -- whole checkpoints ---------------------------------------------------------------------------------


def float_folder() -> Path:
    folder = emptied("float")
    save_file(weights(), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


SCHEMES = {
    "w4a16": "W4A16", "w4a16_asymmetric": "W4A16_ASYM", "w8a16": "W8A16", "w8a8": "W8A8", "w4a8": "W4A8",
    "fp8_static": "FP8", "fp8_dynamic": "FP8_DYNAMIC", "fp8_block": "FP8_BLOCK",
}  # fmt: skip


def llm_compressor() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    ids = torch.randint(0, 32, (8, 16), generator=torch.Generator().manual_seed(0)).tolist()
    words = Tokenizer(models.WordLevel({str(number): number for number in range(32)}, unk_token="0"))
    data = {
        "dataset": Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 16] * 8}),
        "processor": PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0"), "max_seq_length": 16,
        "num_calibration_samples": 8, "pipeline": "basic",
    }  # fmt: skip
    source = float_folder()
    for kind, preset in SCHEMES.items():
        scheme = preset_name_to_scheme(preset, ["Linear"])
        if scheme.weights.group_size:
            scheme.weights.group_size = GROUP
        if scheme.weights.block_structure:
            scheme.weights.block_structure = [32, 32]
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        recipe = QuantizationModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
        oneshot(model=model, recipe=recipe, **(data if kind == "fp8_static" else {}))
        folder = emptied(f"llm_compressor_{kind}")
        model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        for leftover in folder.iterdir():
            if leftover.name not in ("config.json", "model.safetensors"):
                leftover.unlink()
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        decoder = BaseCompressor.get_value_from_registry(config["format"])
        decoded = {}
        for name in LINEARS:
            parts = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
            parts["weight_scale"] = parts["weight_scale"].float()  # it decodes in the dtype of the scales
            decoded[name] = decoder.decompress(parts, scheme)["weight"]
        finish(folder, decoded, "llmcompressor", "compressed-tensors", "transformers")
    shutil.rmtree(source)


def llama_cpp() -> None:
    from llama import llama_cpp as library
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_accel

    lib, ffi = library.lib, library.ffi
    source = emptied("float")
    # The types by llama_ftype of llama.h. Blocks of K types hold 256 numbers: with heads of 32, o_proj gets another.
    for kind, number, head in (("q4_k_m", 15, 32), ("q2_k", 10, 128)):
        folder = emptied(f"llama_cpp_{kind}")
        torch.manual_seed(0)
        wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": head}
        hf_accel.save_gguf(LlamaForCausalLM(LlamaConfig(**SIZES | wide)), source / "float.gguf")
        parameters = ffi.new("struct llama_model_quantize_params *", lib.llama_model_quantize_default_params())
        parameters.ftype, parameters.nthread = number, 1
        paths = [ffi.new("char[]", str(path).encode()) for path in (source / "float.gguf", folder / "model.gguf")]
        assert lib.llama_model_quantize(*paths, parameters) == 0
        note(folder, "llama-cpp-cffi", "gguf", "transformers")
    shutil.rmtree(source)


if __name__ == "__main__":
    {f.__name__: f for f in (llm_compressor, auto_awq, auto_gptq, gptq_model, llama_cpp)}[sys.argv[1]]()
