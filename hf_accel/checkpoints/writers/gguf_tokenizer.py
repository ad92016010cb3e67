"""A tokenizer as llama.cpp reads it from a GGUF file.

Source: docs/gguf.md of ggml, and the vocabularies of llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...errors import UnsupportedError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama_token_type in llama.h
# How a text is cut before pairs are merged: the expression in tokenizer.json -> llama.cpp's name for it.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {LLAMA3: "llama-bpe", LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
WITHOUT_TOKENIZER = "leave tokenizer= out: the file then takes token ids alone"


def write_no_tokenizer(writer: Any) -> None:
    writer.add_tokenizer_model("no_vocab")


def write_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raises UnsupportedError for a kind that llama.cpp would cut into other tokens."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedError(
            f"{type(tokenizer).__name__} is no tokenizer of the tokenizers package; {WITHOUT_TOKENIZER}"
        )
    stored = json.loads(backend.to_str())
    model = stored["model"]
    if model["type"] != "BPE":
        raise UnsupportedError(f"a tokenizer of type {model['type']} is not written as GGUF; {WITHOUT_TOKENIZER}")
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
    """Return the tokens of all ids in order, and what kind they are."""
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
    """Score tokens so that llama.cpp, which merges the pair of the highest score, merges in the tokenizer's order."""
    rank: dict[str, int] = {}
    for number, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", ""), number)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _check_llama(stored: dict[str, Any]) -> None:
    """Raise UnsupportedError unless, as in Llama 2, a space comes before a text and spaces are written as U+2581."""
    normalizer = stored["normalizer"] or {}
    steps = normalizer.get("normalizers", [normalizer])
    kinds = [step.get("type") for step in steps]
    if kinds != ["Prepend", "Replace"] or stored["pre_tokenizer"] is not None:
        raise UnsupportedError(
            f"a tokenizer that prepares texts by {kinds} is not written as GGUF; {WITHOUT_TOKENIZER}"
        )


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
    raise UnsupportedError(f"how the tokenizer cuts a text is not known to llama.cpp; {WITHOUT_TOKENIZER}")


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
