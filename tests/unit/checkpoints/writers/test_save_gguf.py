"""save_gguf, read by the gguf package, by transformers and by llama.cpp, where these are installed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import hf_accel
from hf_accel import UnsupportedError, save_gguf
from hf_accel.checkpoints.writers.gguf_model import frequency_factors, gguf_refusal, rotated_rows
from hf_accel.checkpoints.writers.gguf_tokenizer import write_tokenizer
from hf_accel.models import head_dim

from ....parity.dequantize import dequantized
from ....parity.families import DECODER, build
from ....parity.snapshot import bits, snapshot

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SHAPE = {**DECODER, "hidden_size": 128, "intermediate_size": 160, "head_dim": 32}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "llama, biases": lambda: LlamaConfig(**SHAPE, attention_bias=True),
    "llama, tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama 3": lambda: LlamaConfig(**SHAPE, rope_parameters=dict(LLAMA3_ROPE)),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**{name: value for name, value in SHAPE.items() if name != "head_dim"}),
    "qwen3": lambda: Qwen3Config(**SHAPE, tie_word_embeddings=True),
}
WEIGHTS: dict[str, Any] = {
    "float": None,
    "int8": "int8",
    "int4": {"bits": 4, "group_size": 32},
    "asymmetric": {"bits": 4, "group_size": 32, "symmetric": False},
}
LINEAR_BLOCKS = {"float": "BF16", "int8": "Q8_0", "int4": "Q4_0", "asymmetric": "Q4_1"}


def make(name: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    config = CONFIGS[name]()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        for own, parameter in model.named_parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, mean=0.0 if own.endswith("bias") else 1.0, std=0.1)
    return model.to(dtype).eval()


def pair(name: str, weights: str, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model, patched, and a stock one in float32 with the values that it computes with."""
    stock = make(name, dtype)
    if WEIGHTS[weights] is None:
        return stock, copy.deepcopy(stock).float()
    model = hf_accel.patch(copy.deepcopy(stock), weights=WEIGHTS[weights], keep_original=True)
    oracle = copy.deepcopy(stock).float()
    return model, dequantized(oracle, model).float()


# -- the gguf package ----------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_file_holds_what_the_model_computes_with(name: str, weights: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model, oracle = pair(name, weights)
    before = snapshot(model)
    saved = save_gguf(model, tmp_path / "model.gguf")
    assert snapshot(model) == before and [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert saved.bytes == sum(tensor.n_bytes for tensor in reader.tensors)
    assert tensors["blk.1.ffn_down.weight"].tensor_type.name == LINEAR_BLOCKS[weights]
    assert ("output.weight" in tensors) == (weights != "float" or not model.config.tie_word_embeddings)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, reader_architecture(reader)), 2)
    for own, parameter in oracle.named_parameters():
        tensor = tensors.pop(names.get_name(own, try_suffixes=(".weight", ".bias")))
        read = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).view(parameter.shape)
        rows = rotated_rows(own, model.config)
        expected = parameter.detach() if rows is None else parameter.detach()[rows]
        torch.testing.assert_close(read, expected, rtol=2**-8, atol=2**-9 if weights == "asymmetric" else 1e-6)
    assert tensors.keys() <= {"rope_freqs.weight"} and bool(tensors) == (name == "llama 3")


def reader_architecture(reader: Any) -> str:
    return str(bytes(reader.fields["general.architecture"].parts[-1]).decode()).upper()


def test_layers_without_blocks_are_dense(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    config = LlamaConfig(**{**SHAPE, "intermediate_size": 172})
    model = hf_accel.patch(LlamaForCausalLM(config).eval())
    saved = save_gguf(model, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F32" and kinds["blk.0.ffn_up.weight"] == "Q8_0"
    assert "dequantized: no blocks hold them" in " ".join(str(saved).split())
    assert "scales change by up to" in " ".join(str(saved).split())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_transformers_loads_it(dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model, oracle = pair("llama", "int8", dtype)
    save_gguf(model, tmp_path / "model.gguf")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ids = torch.arange(1, 40).view(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, oracle(ids).logits, atol=0.05, rtol=0.05)


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", ["int8", "int4", "asymmetric"])
@pytest.mark.parametrize("name", ["llama, tied", "qwen2"])
def test_what_was_saved_is_loaded_and_saved_again(name: str, weights: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model, oracle = pair(name, weights)
    save_gguf(model, tmp_path / "first.gguf")
    loaded = hf_accel.load(tmp_path / "first.gguf")
    save_gguf(loaded, tmp_path / "second.gguf")
    first, second = (gguf.GGUFReader(tmp_path / f"{which}.gguf").tensors for which in ("first", "second"))
    again = {tensor.name: bytes(tensor.data) for tensor in second}
    blocks = {tensor.name: bytes(tensor.data) for tensor in first if tensor.tensor_type.name.startswith("Q")}
    assert len(blocks) == 15 and blocks.items() <= again.items()
    ids = torch.arange(1, 30).view(1, -1)
    with torch.no_grad():
        error = (loaded(ids).logits - oracle(ids).logits).pow(2).mean() / oracle(ids).logits.var()
    assert error < 1e-2
    if weights == "asymmetric":
        with pytest.raises(UnsupportedError, match="has minima for zero points, which vLLM does not read"):
            hf_accel.save_compressed(loaded, tmp_path / "out")
    else:
        label = {"int8": "W8A16 in groups of 32", "int4": "W4A16 in groups of 32"}[weights]
        assert label in str(hf_accel.save_compressed(loaded, tmp_path / "out"))


# -- llama.cpp -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_llama_cpp_computes_the_same(name: str, weights: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    from benchmarks.setups.llama_cpp_model import LlamaCppModel

    model, oracle = pair(name, weights, torch.float32 if weights == "float" else torch.bfloat16)
    save_gguf(model, tmp_path / "model.gguf")
    ids = torch.randint(1, 101, (1, 48), generator=torch.Generator().manual_seed(6))
    found = LlamaCppModel(tmp_path / "model.gguf", model.config)(input_ids=ids).logits[0]
    expected = oracle(ids).logits[0]
    error = (found - expected).pow(2).mean() / expected.var()
    # llama.cpp rounds activations to 8 bits beside quantized weights, and K and V to float16: enough to change which
    # of two nearly equal tokens of an untrained model comes first, so that only a float model's tokens are compared
    assert error < (1e-5 if weights == "float" else 1e-2)
    if weights == "float":
        assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.95


# -- tokenizers ----------------------------------------------------------------------------------------

TEXTS = ["def f(x):\n    return x + 1  # ten 10 100", "Hello world, it's  3 o'clock", "naïve café 数", " a", ""]


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|end|>", eos_token="<|end|>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2 has it."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    words = ["▁", "a", "e", "o", "l", "h", "H", "w", "r", "d", "▁w", "or", "▁wor", "ld", "▁world", "ll", "He", "Hello"]
    vocab |= {word: 259 + number for number, word in enumerate([*words, "llo", "▁Hello"])}
    merges = [
        ("▁", "w"), ("o", "r"), ("▁w", "or"), ("l", "d"), ("▁wor", "ld"), ("l", "l"), ("H", "e"), ("ll", "o"),
        ("He", "llo"), ("▁", "Hello"),
    ]  # fmt: skip
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=False
    )


@pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback])
def test_llama_cpp_cuts_a_text_into_the_same_tokens(tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    llama_cpp = pytest.importorskip("llama_cpp")
    words = tokenizer()
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": len(words) + 3})).eval()
    save_gguf(model, tmp_path / "model.gguf", tokenizer=words)
    reader = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    try:
        for text in TEXTS:
            assert reader.tokenize(text.encode(), add_bos=False) == words(text)["input_ids"]
        assert reader.token_eos() == words.eos_token_id and reader.token_bos() == words.bos_token_id
    finally:
        reader.close()


class Writer:
    """Takes what is said of a vocabulary."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.said.update({name: value})


def test_ids_without_a_token_are_unused() -> None:
    words, writer = byte_level(), Writer()
    write_tokenizer(writer, words, len(words) + 2)
    assert writer.said["add_token_list"][-2:] == [f"[PAD{len(words)}]", f"[PAD{len(words) + 1}]"]
    assert writer.said["add_token_types"][:2] == [3, 1] and writer.said["add_token_types"][-2:] == [5, 5]
    assert writer.said["add_tokenizer_pre"] == "gpt-2" and writer.said["add_add_bos_token"] is False


def test_scores_rank_merges() -> None:
    writer = Writer()
    write_tokenizer(writer, byte_fallback(), 300)
    tokens, scores = writer.said["add_token_list"], writer.said["add_token_scores"]
    assert scores[tokens.index("▁w")] > scores[tokens.index("or")] > scores[tokens.index("▁Hello")] > scores[5]
    assert writer.said["add_token_types"][:5] == [2, 3, 3, 6, 6]


def other_pieces() -> PreTrainedTokenizerFast:
    words = byte_level()
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return words


def word_pieces() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordPiece({"a": 0}, unk_token="a")))


@pytest.mark.parametrize(
    ("tokenizer", "size", "message"),
    [
        (other_pieces, 400, "how the tokenizer cuts a text is not known to llama.cpp; leave tokenizer= out"),
        (word_pieces, 400, "a tokenizer of type WordPiece is not written"),
        (byte_level, 200, "and the model 200 embeddings"),
        (lambda: object(), 400, "object is no tokenizer"),
    ],
)
def test_tokenizers_that_are_refused(tokenizer: Any, size: int, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        write_tokenizer(Writer(), tokenizer(), size)


# -- models --------------------------------------------------------------------------------------------


def test_rows_of_a_rotated_head_come_side_by_side() -> None:
    config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=1)
    rows = rotated_rows("model.layers.0.self_attn.q_proj.weight", config)
    assert rows is not None and rows.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert rotated_rows("model.layers.0.self_attn.k_proj.bias", config).tolist() == [0, 2, 1, 3]  # type: ignore[union-attr]
    assert rotated_rows("model.layers.0.self_attn.v_proj.weight", config) is None
    assert rotated_rows("model.layers.0.self_attn.q_proj.weight", Qwen2Config()) is None


def test_frequencies() -> None:
    assert frequency_factors(LlamaConfig()) is None
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    factors = frequency_factors(LlamaConfig(**SHAPE, rope_parameters=linear))
    assert factors is not None and factors.tolist() == pytest.approx([2.0] * 16)
    factors = frequency_factors(LlamaConfig(**SHAPE, rope_parameters=dict(LLAMA3_ROPE)))
    assert factors is not None and factors[0] == pytest.approx(1) and factors[-1] == pytest.approx(8)
    assert head_dim(Qwen2Config(hidden_size=64, num_attention_heads=4)) == 16


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaConfig(), None),
        (LlamaConfig(hidden_act="gelu"), "computes silu in a llama model, this has 'gelu'"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "type 'dynamic'"),
        (MistralConfig(sliding_window=8), "within a window"),
        (Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1), "within a window"),
    ],
)
def test_models_that_are_refused(config: Any, reason: str | None) -> None:
    refusal = gguf_refusal(config)
    assert refusal is None if reason is None else reason in str(refusal)


def test_other_models_and_places_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(UnsupportedError, match="this is 'gpt2'; use save_compressed"):
        save_gguf(build("gpt2"), tmp_path / "model.gguf")
    with pytest.raises(UnsupportedError, match=r"llama.cpp takes models with a language model's head, this is Llama"):
        save_gguf(make("llama").model, tmp_path / "model.gguf")
    with pytest.raises(UnsupportedError, match=r"is a folder; name a file in it"):
        save_gguf(make("llama"), tmp_path)
    broken = make("llama")
    broken.model.norm.weight.data[3] = torch.nan
    (tmp_path / "model.gguf").write_text("the old one")
    with pytest.raises(UnsupportedError, match=r"'model.norm.weight' holds NaN or infinity at \[3\]"):
        save_gguf(broken, tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert (tmp_path / "model.gguf").read_text() == "the old one"


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install hf_accel\[gguf\]"):
        save_gguf(make("llama"), tmp_path / "model.gguf")


def test_weights_are_as_they_were(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = make("llama", torch.float32)
    before = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    save_gguf(model, tmp_path / "model.gguf")
    assert {name: bits(tensor) for name, tensor in model.state_dict().items()} == before
