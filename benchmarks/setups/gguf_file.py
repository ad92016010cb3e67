"""A Llama of transformers as a GGUF file, llama.cpp's format (github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .model_folder import model_file

FILE_TYPES = {"Q8_0": 7, "Q4_0": 2}  # llama_ftype in llama.h


def gguf_refuses(config: PreTrainedConfig) -> str | None:
    """None, or why a model of this config is not written here."""
    if config.model_type != "llama":
        return f"only llama models are written as GGUF here, this is {config.model_type}"
    if config.rope_parameters.get("rope_type", "default") != "default":
        return "scaled rotary embeddings are not written as GGUF here"
    return "biases are not written as GGUF here" if config.attention_bias or config.mlp_bias else None


def gguf_file(model: PreTrainedModel, kind: str) -> Path:
    """The model as "bf16", "Q8_0" or "Q4_0", in a folder that is removed when the process ends.

    Quantized as llama-quantize does by default: the head of a Q4_0 model gets 6 bits.
    """
    return model_file(model, f"{kind}.gguf", plain="bf16.gguf", write=write, quantize=partial(quantize, kind=kind))


def quantize(source: Path, target: Path, kind: str) -> None:
    import llama_cpp

    from .llama_cpp_model import start

    start()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = FILE_TYPES[kind], torch.get_num_threads()
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), parameters):
        raise RuntimeError(f"llama.cpp could not quantize {source} to {kind}")


def write(model: PreTrainedModel, path: Path) -> None:
    """Matrices in bfloat16, norms in float32; no tokenizer."""
    import gguf

    config: Any = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer: Any = gguf.GGUFWriter(path, "llama")
    write_config(writer, config)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = names.get_name(name, try_suffixes=(".weight",))
        if tensor.ndim == 1:
            writer.add_tensor(target, tensor.float().numpy())
        else:
            raw = rotary_order(name, tensor, config).bfloat16().contiguous().view(torch.uint8).numpy()
            writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_config(writer: Any, config: Any) -> None:
    import gguf

    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def rotary_order(name: str, tensor: Tensor, config: Any) -> Tensor:
    """llama.cpp rotates neighbouring outputs of a head, transformers those half a head apart."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
