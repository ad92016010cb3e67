"""Small encoders as folders: alone, with the files of sentence-transformers, and with a head for scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

WORDS = 60
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2,
}  # fmt: skip
NAMES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *(f"w{n}" for n in range(WORDS))])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def save_encoder(path: Path, *, kind: Any = BertModel, **config: Any) -> None:
    torch.manual_seed(0)
    kind(BertConfig(vocab_size=WORDS + len(SPECIAL), max_position_embeddings=40, **SIZES, **config)).save_pretrained(
        path
    )
    tokenizer().save_pretrained(path)


def save_ranker(path: Path, **config: Any) -> None:
    save_encoder(path, kind=BertForSequenceClassification, **config)


def save_decoder(path: Path) -> None:
    """A decoder as embedders are published: with its class for texts under architectures."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=WORDS + len(SPECIAL), num_key_value_heads=2, head_dim=16, max_position_embeddings=40, **SIZES
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer().save_pretrained(path)


def add_modules(
    path: Path, pooling: dict[str, Any], *, dense: int | None = None, normalize: bool = True, **prompts: Any
) -> None:
    """Write the files of sentence-transformers around a model."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Dense", "Dense")] if dense else []
    modules += [(f"{len(modules)}_Normalize", "Normalize")] if normalize else []
    for index, (inner, kind) in enumerate(modules):
        (path / inner).mkdir(exist_ok=True)
        modules[index] = {  # type: ignore[call-overload]
            "idx": index, "name": str(index), "path": inner, "type": f"sentence_transformers.models.{kind}",
        }  # fmt: skip
    write(path / "modules.json", modules)
    write(path / "sentence_bert_config.json", {"max_seq_length": 32, "do_lower_case": False})
    write(path / "config_sentence_transformers.json", prompts)
    write(path / "1_Pooling" / "config.json", {"word_embedding_dimension": SIZES["hidden_size"], **pooling})
    if dense:
        torch.manual_seed(1)
        width = SIZES["hidden_size"] * max(1, sum(key.startswith("pooling_mode_") for key in pooling))
        save_file(
            {f"linear.{key}": value for key, value in nn.Linear(width, dense).state_dict().items()},
            path / "2_Dense" / "model.safetensors",
        )
        write(path / "2_Dense" / "config.json", {
            "in_features": width, "out_features": dense, "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        })  # fmt: skip


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
