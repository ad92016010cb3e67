"""What llama.cpp must know of a model beside its weights: names, hyperparameters, the order of rotated rows, tokens.

Source: docs/gguf.md of ggml, convert_hf_to_gguf.py of llama.cpp and the vocabularies there.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...errors import UnsupportedError
from ...models import head_dim


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's name of a model type. neighbours: it rotates neighbouring outputs of a head there."""

    name: str
    neighbours: bool


ARCHITECTURES = {
    "llama": Architecture("LLAMA", neighbours=True),
    "mistral": Architecture("LLAMA", neighbours=True),
    "qwen2": Architecture("QWEN2", neighbours=False),
    "qwen3": Architecture("QWEN3", neighbours=False),
}
SCALED = ("linear", "llama3")  # rotary embeddings whose frequencies are divided by constants


def gguf_refusal(config: PreTrainedConfig) -> str | None:
    """None, or why a model of this config is not written as GGUF, as one clause."""
    settings: Any = config
    if config.model_type not in ARCHITECTURES:
        return f"only {', '.join(ARCHITECTURES)} models are written as GGUF here, this is {config.model_type!r}"
    rotary = settings.rope_parameters
    kind = rotary.get("rope_type", "default")
    if kind != "default" and kind not in SCALED:
        return f"rotary embeddings of type {kind!r} are not written as GGUF here"
    if rotary.get("partial_rotary_factor", 1) != 1:
        return "rotary embeddings of a part of a head are not written as GGUF here"
    if settings.hidden_act != "silu":
        return f"llama.cpp computes silu in a {config.model_type} model, this has {settings.hidden_act!r}"
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if windows or (config.model_type == "mistral" and getattr(config, "sliding_window", None)):
        return "attention within a window is not written as GGUF here"
    return None


def check_gguf(model: PreTrainedModel) -> Architecture:
    """Raises UnsupportedError for a model that is not written as GGUF, and where the package gguf is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedError("writing GGUF takes the package gguf; install it with `pip install hf_accel[gguf]`")
    refusal = gguf_refusal(model.config)
    if refusal is None and not type(model).__name__.endswith("ForCausalLM"):
        refusal = f"llama.cpp takes models with a language model's head, this is {type(model).__name__}"
    if refusal is not None:
        raise UnsupportedError(f"{refusal}; use save_compressed or save_pretrained")
    return ARCHITECTURES[model.config.model_type]


def write_settings(writer: Any, config: Any) -> None:
    """The hyperparameters of a model."""
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def frequency_factors(config: Any) -> Tensor | None:
    """What llama.cpp divides each rotary frequency by, float32 [head_dim / 2]; None where that is 1."""
    kind = config.rope_parameters.get("rope_type", "default")
    if kind == "default":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    exponents = torch.arange(0, head_dim(config), 2, dtype=torch.float32) / head_dim(config)
    plain = 1.0 / config.rope_parameters["rope_theta"] ** exponents
    return plain / scaled


def rotated_rows(name: str, config: Any) -> Tensor | None:
    """The order of the outputs of q_proj and k_proj where llama.cpp rotates neighbours, int64 [out]; else None.

    transformers rotates outputs half a head apart: the first of each pair are in a head's first half.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or not ARCHITECTURES[config.model_type].neighbours:
        return None
    size = head_dim(config)
    return torch.arange(heads * size).view(heads, 2, size // 2).transpose(1, 2).flatten()


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama_token_type in llama.h
# How a text is cut before pairs are merged: the expression in tokenizer.json -> llama.cpp's name for it.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {LLAMA3: "llama-bpe", LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
WAY_OUT = "leave tokenizer= out: the file then takes token ids alone"


def write_no_tokenizer(writer: Any) -> None:
    writer.add_tokenizer_model("no_vocab")


def write_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raises UnsupportedError for a kind that llama.cpp would cut into other tokens."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedError(f"{type(tokenizer).__name__} is no tokenizer of the tokenizers package; {WAY_OUT}")
    stored = json.loads(backend.to_str())
    model = stored["model"]
    if model["type"] != "BPE":
        raise UnsupportedError(f"a tokenizer of type {model['type']} is not written as GGUF; {WAY_OUT}")
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    tokens, types = _tokens(stored, vocab_size)
    if model.get("byte_fallback"):
        _check_llama(stored)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_add_space_prefix(True)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(stored))
        writer.add_token_merges(merges)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _write_special(writer, tokenizer)


def _tokens(stored: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """All ids in order: their tokens and what kind they are."""
    added = {entry["id"]: entry for entry in stored["added_tokens"]}
    by_id = {number: token for token, number in stored["model"]["vocab"].items()}
    by_id |= {number: entry["content"] for number, entry in added.items()}
    if max(by_id) >= vocab_size:
        raise UnsupportedError(
            f"the tokenizer has the id {max(by_id)}, and the model {vocab_size} embeddings; pass the model's tokenizer"
        )
    tokens, types = [], []
    for number in range(vocab_size):
        token = by_id.get(number)
        tokens.append(f"[PAD{number}]" if token is None else token)
        if token is None:
            types.append(UNUSED)
        elif token == stored["model"].get("unk_token"):
            types.append(UNKNOWN)
        elif number in added:
            types.append(CONTROL if added[number]["special"] else USER_DEFINED)
        else:
            is_byte = stored["model"].get("byte_fallback") and len(token) == 6 and token.startswith("<0x")
            types.append(BYTE if is_byte else NORMAL)
    return tokens, types


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """llama.cpp merges the pair whose token has the highest score: the earlier its merge, the higher."""
    rank: dict[str, int] = {}
    for number, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", ""), number)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _check_llama(stored: dict[str, Any]) -> None:
    """Llama 2 puts a space before a text and writes spaces as U+2581."""
    normalizer = stored["normalizer"] or {}
    steps = normalizer.get("normalizers", [normalizer])
    kinds = [step.get("type") for step in steps]
    if kinds != ["Prepend", "Replace"] or stored["pre_tokenizer"] is not None:
        raise UnsupportedError(f"a tokenizer that prepares texts by {kinds} is not written as GGUF; {WAY_OUT}")


def _pre_tokenizer(stored: dict[str, Any]) -> str:
    pre = stored["pre_tokenizer"] or {}
    steps = pre.get("pretokenizers", [pre])
    expressions = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    known = len(byte_level) == 1 and len(expressions) + 1 == len(steps) and not byte_level[0]["add_prefix_space"]
    if known and not expressions and byte_level[0]["use_regex"]:
        return "gpt-2"
    if known and len(expressions) == 1 and expressions[0] in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[expressions[0]]
    raise UnsupportedError(f"how the tokenizer cuts a text is not known to llama.cpp; {WAY_OUT}")


def _write_special(writer: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = {
        "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id,
        "unk": tokenizer.unk_token_id, "pad": tokenizer.pad_token_id,
    }  # fmt: skip
    for name, number in ids.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    encoded: list[int] = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(ids["bos"] is not None and encoded[:1] == [ids["bos"]])
    writer.add_add_eos_token(ids["eos"] is not None and len(encoded) > 1 and encoded[-1:] == [ids["eos"]])
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        writer.add_chat_template(template)
