"""fit=: what is chosen for a memory is what estimate() counts, what is loaded needs no more, and errors name a way."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

import hf_accel
from hf_accel import AccelConfig, CacheConfig, UnsupportedError, WeightConfig
from hf_accel.checkpoints import fitting
from hf_accel.checkpoints.fitting import SPARE_SHARE, process_bytes
from hf_accel.linear import QuantModule
from hf_accel.undo.state import state_of

SHAPE: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 2048, "initializer_range": 0.2,
}  # fmt: skip
GROUPS = {"bits": 4, "group_size": 128}
TABLE = {**GROUPS, "embedding": "int8"}
WHOLE = {**GROUPS, "head": "int4", "embedding": "int4"}
WAYS: list[tuple[Any, str | None]] = [  # in the order in which they are preferred
    (None, None),
    ("int8", None),
    ({"bits": 8, "embedding": "int8"}, None),
    (TABLE, None),
    (WHOLE, None),
    (TABLE, "int8"),
    (WHOLE, "int8"),
]
TEXT = torch.randint(0, 1024, (4, 64), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the memory be the model's alone: what the process of the tests has taken is another number every time."""
    monkeypatch.setattr(fitting, "process_bytes", lambda: 0)


def saved(model: Any, folder: Path) -> Path:
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return saved(LlamaForCausalLM(LlamaConfig(**SHAPE)), tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return saved(LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)), tmp_path_factory.mktemp("tied"))


def needed(folder: Path, weights: Any, kv_dtype: str | None = None, context: int = 2048, *, inner: int = 256) -> int:
    """Return the least memory that is enough for a way to hold a model: what is counted, and what is to spare."""
    counted = hf_accel.estimate(folder, context=context, weights=weights, kv_dtype=kv_dtype, bandwidth=1e9)
    # A pass of all tokens in bfloat16, with the logits of 512 of them, as those are sampled from.
    numbers = context * (8 * 128 + 4 * inner) * 2 + min(context, 512) * 1024 * (2 + 16)
    return math.ceil((counted.total_bytes - counted.activation_bytes + numbers) / (1 - SPARE_SHARE))


def chosen(plan: hf_accel.Plan) -> tuple[WeightConfig | None, str | None, int | None]:
    cache = plan.config.cache
    assert cache is not None
    return plan.config.weights, None if cache.dtype == "auto" else cache.dtype, cache.max_tokens


def fit_lines(model: PreTrainedModel) -> list[dict[str, str]]:
    return [line for line in state_of(model).description["choices"] if line["topic"] == "fit"]


def held(model: PreTrainedModel) -> int:
    """Return the bytes of all tensors that a model has, each once."""
    found: dict[int, Tensor] = {}

    def collect(value: Any, depth: int = 0) -> None:
        if isinstance(value, Tensor):
            found.setdefault(value.data_ptr(), value)
        elif hasattr(value, "__dict__") and depth < 3:
            for part in vars(value).values():
                collect(part, depth + 1)

    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            collect(tensor)
        if isinstance(module, QuantModule):
            collect(module._packed)
    return sum(tensor.nbytes for tensor in found.values())


# -- what is chosen --------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", range(len(WAYS)), ids=[str(way) for way in WAYS])
@pytest.mark.parametrize("kind", ["folder", "tied"])
def test_the_first_that_fits(kind: str, place: int, request: pytest.FixtureRequest) -> None:
    """A memory that is just enough for one way gets it, or one that is preferred; a byte less does not."""
    folder: Path = request.getfixturevalue(kind)
    weights, dtype = WAYS[place]
    size = needed(folder, weights, dtype)
    expected = next(way for way in WAYS if needed(folder, *way) <= size)
    found, cache, tokens = chosen(hf_accel.plan(folder, fit=size))
    assert (found, cache, tokens) == (hf_accel.PatchConfig(weights=expected[0]).weights, expected[1], 2048)
    less = hf_accel.plan(folder, fit=size - 1)
    assert chosen(less) != (found, cache, tokens)


def test_all_else_fails_before_tokens_are_given_up(folder: Path) -> None:
    least = needed(folder, WHOLE, "int8", 512)
    weights, dtype, tokens = chosen(hf_accel.plan(folder, fit=needed(folder, WHOLE, "int8") - 1))
    assert (weights, dtype) == (WeightConfig(**WHOLE), "int8")
    assert tokens is not None and tokens % 16 == 0 and 512 < tokens < 2048
    assert (
        needed(folder, WHOLE, "int8", tokens)
        < needed(folder, WHOLE, "int8")
        <= needed(folder, WHOLE, "int8", tokens + 16)
    )
    assert chosen(hf_accel.plan(folder, fit=least))[2] == 512


def test_the_rest_of_the_memory_is_for_tokens(tmp_path: Path) -> None:
    """4,096 tokens have to fit; more are of use as far as the model has positions."""
    shape = {**SHAPE, "max_position_embeddings": 65536}
    saved(LlamaForCausalLM(LlamaConfig(**shape)), tmp_path)
    size = needed(tmp_path, None, context=20_000)
    weights, _, tokens = chosen(hf_accel.plan(tmp_path, fit=size))
    assert weights is None and tokens == 20_000
    assert chosen(hf_accel.plan(tmp_path, fit="6GB"))[2] == 65536
    weights, _, tokens = chosen(hf_accel.plan(tmp_path, fit=needed(tmp_path, None, context=4096) - 1))
    assert weights == WeightConfig() and tokens is not None and tokens > 4096


def test_what_was_said_stays(folder: Path) -> None:
    plan = hf_accel.plan(folder, fit="1GB", weights="int4", cache={"dtype": "int4", "max_tokens": 100})
    assert chosen(plan) == (WeightConfig(4), "int4", 100)
    plan = hf_accel.plan(folder, fit=needed(folder, None, context=64), cache={"max_tokens": 64})
    assert chosen(plan) == (None, None, 64)
    skipping = hf_accel.plan(folder, fit=needed(folder, "int8"), weights={"skip": ["o_proj"]})
    assert chosen(skipping)[0] == WeightConfig(8, embedding="int8", skip=["o_proj"])
    config = hf_accel.PatchConfig(weights="int8")
    assert chosen(hf_accel.plan(folder, fit="1GB", config=config))[0] == WeightConfig()


@pytest.mark.parametrize("memory", ["1GB", 10**9, 1e9, "0.5 GiB", "L4"])
def test_sizes_as_elsewhere(folder: Path, memory: Any) -> None:
    assert chosen(hf_accel.plan(folder, fit=memory)) == (None, None, 2048)


def test_the_memory_of_this_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "process_bytes", lambda: 10**15)  # of a device, what is free is read
    assert chosen(hf_accel.plan(folder, fit="cpu"))[0] is None
    assert chosen(hf_accel.plan(folder, fit=torch.device("cpu")))[0] is None


# -- mixed bits --------------------------------------------------------------------------------------------


def between(folder: Path, share: float, inner: int = 256) -> int:
    low, high = (needed(folder, {"bits": bits, "embedding": "int8"}, inner=inner) for bits in (4, 8))
    return round(low + share * (high - low))


def test_bits_are_mixed_by_the_rounding_error(folder: Path) -> None:
    """The linears that gain most per byte, as measured here again, and no other would fit as well."""
    size = between(folder, 0.5)
    found = chosen(hf_accel.plan(folder, fit=size))[0]
    assert found is not None and found.eight_bits and found.average_bits is None
    assert needed(folder, {**TABLE, "eight_bits": found.eight_bits}) <= size
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    units = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    gains: dict[frozenset[str], float] = {}
    for layer in range(2):
        for ends in units:
            names = [n for n, _ in model.named_modules() if f".{layer}." in n and n.rpartition(".")[2] in ends]
            weights = [model.get_submodule(name).weight.detach().float() for name in names]
            scales = [w.unflatten(1, (-1, 128)).abs().amax(-1, keepdim=True).bfloat16().float() / 8 for w in weights]
            rounded = [
                (w.unflatten(1, (-1, 128)) / s).round().clamp(-8, 8).mul(s).flatten(1)
                for w, s in zip(weights, scales, strict=True)
            ]
            error = sum(float((w - r).square().sum()) for w, r in zip(weights, rounded, strict=True))
            total = sum(float(w.square().sum()) for w in weights)
            gains[frozenset(names)] = error / total / sum(w.numel() for w in weights)
    taken = {names for names in gains if names <= set(found.eight_bits)}
    assert set().union(*taken) == set(found.eight_bits)
    assert max(gains, key=gains.__getitem__) in taken
    assert min(gains, key=gains.__getitem__) not in taken


@pytest.mark.parametrize("weights", [{}, {"weights": {"calibration": TEXT}}], ids=["rounding", "calibration"])
def test_what_has_8_bits_for_its_width_gets_no_more(weights: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = saved(LlamaForCausalLM(LlamaConfig(**SHAPE | {"intermediate_size": 172})), tmp_path)
    plan = hf_accel.plan(folder, fit=between(folder, 0.5, 172), **weights)
    bits = {p.site.name: p.config.bits for p in plan.quantized if "layers" in p.site.name}
    assert all(bits[f"model.layers.{layer}.mlp.down_proj"] == 8 for layer in range(2))
    assert {8, 4} == {number for name, number in bits.items() if "down_proj" not in name}
    config = plan.config.weights
    assert config is not None and not any("down_proj" in name for name in config.eight_bits)
    size_of = sum(
        p.site.count * p.choice.spec.weight_bytes for p in plan.quantized if p.choice and "layers" in p.site.name
    )
    count = sum(p.site.weight.numel() for p in plan.quantized if "layers" in p.site.name)
    assert config.average_bits is None or 8 * size_of / count <= config.average_bits


def test_bits_are_mixed_by_calibration(folder: Path) -> None:
    size = between(folder, 0.5)
    model = hf_accel.load(folder, fit=size, weights={"calibration": TEXT})
    plan = hf_accel.plan(folder, fit=size, weights={"calibration": TEXT})
    bits = {name: m.layout.bits for name, m in model.named_modules() if isinstance(m, QuantModule)}
    assert {p.site.name: p.config.bits for p in plan.quantized} == bits
    assert set(bits.values()) == {4, 8}
    floats = hf_accel.estimate(folder, context=2048, weights=None, bandwidth=1e9)
    assert held(model) + floats.kv_bytes + 2048 * 2048 * 2 + 512 * 1024 * 18 <= size
    found = plan.config.weights
    assert found is not None and found.average_bits is not None and not found.eight_bits
    average = found.average_bits
    linears = [m for n, m in model.named_modules() if isinstance(m, QuantModule) and "layers" in n]
    stored = 8 * sum(m.spec.weight_bytes for m in linears) / sum(m.in_features * m.out_features for m in linears)
    assert stored <= average
    assert any("as measured on calibration=" in line["reason"] for line in fit_lines(model))


# -- what is loaded ----------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["folder", "tied"])
@pytest.mark.parametrize("share", [1.0, 0.7, 0.5, 0.35])
def test_what_is_loaded_needs_no_more(kind: str, share: float, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    floats = hf_accel.estimate(folder, weights=None, bandwidth=1e9).weights_bytes
    size = needed(folder, None) - round((1 - share) * floats)
    model = hf_accel.load(folder, fit=size)
    assert chosen_of(model) == chosen(hf_accel.plan(folder, fit=size))
    output = model.generate(TEXT[:2, :9], max_new_tokens=20, return_dict_in_generate=True, use_cache=True)
    pages = output.past_key_values.pages
    cached = sum(layer.nbytes for group in pages.groups for layer in group.storages.values())
    assert cached > 0
    assert held(model) + cached <= size
    reasons = [(line["what"], line["choice"]) for line in fit_lines(model)]
    assert reasons[0][0] == "memory" and ("tokens", f"{chosen_of(model)[2]:,}") in reasons


def chosen_of(model: PreTrainedModel) -> tuple[WeightConfig | None, str | None, int | None]:
    config = state_of(model).config
    assert config.cache is not None
    return config.weights, None if config.cache.dtype == "auto" else config.cache.dtype, config.cache.max_tokens


def test_from_pretrained_takes_it_too(folder: Path) -> None:
    size = needed(folder, WHOLE)
    settings = AccelConfig(fit=size)
    loaded = [AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings) for _ in range(2)]
    assert [chosen_of(model) for model in loaded] == 2 * [chosen_of(hf_accel.load(folder, fit=size))]
    assert settings.patch == hf_accel.PatchConfig(), "the caller's own, which may be for another model next"
    assert "fit" not in settings.to_dict()


def test_what_is_saved_is_loaded_with_its_bits(folder: Path, tmp_path: Path) -> None:
    model = hf_accel.load(folder, fit=between(folder, 0.5))
    model.save_pretrained(tmp_path)
    again = hf_accel.load(tmp_path, fit=needed(folder, None))
    assert torch.equal(model(TEXT).logits, again(TEXT).logits)
    assert chosen_of(again)[2] == 2048
    assert [(line["what"], line["choice"]) for line in fit_lines(again)][1] == ("as stored", "chosen")
    with pytest.raises(UnsupportedError, match="weights of this hf_accel checkpoint are quantized already"):
        hf_accel.load(tmp_path, fit="1GB", weights="int8")


def test_undo_is_possible_where_it_was(folder: Path, tmp_path: Path) -> None:
    model = hf_accel.load(folder, fit=needed(folder, "int8"))
    stock: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(
        hf_accel.unpatch(model).model.layers[0].mlp.up_proj.weight, stock.model.layers[0].mlp.up_proj.weight
    )
    torch.save(stock.state_dict(), tmp_path / "pytorch_model.bin")
    stock.config.save_pretrained(tmp_path)
    lost = hf_accel.load(tmp_path, fit=needed(folder, "int8"))
    assert state_of(lost).config.keep_original is False
    with pytest.raises(UnsupportedError, match="keep_original=False"):
        hf_accel.unpatch(lost)


def test_encoders_have_no_tokens_to_choose(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2
    )
    saved(BertForMaskedLM(config), tmp_path)
    size = math.ceil(hf_accel.estimate(tmp_path, weights="int8", bandwidth=1e9).total_bytes / (1 - SPARE_SHARE))
    model = AutoModelForMaskedLM.from_pretrained(tmp_path, quantization_config=AccelConfig(fit=size))
    config_found = state_of(model).config
    assert config_found.weights == WeightConfig() and config_found.cache == CacheConfig()
    assert {line["what"] for line in fit_lines(model)} == {"memory", "as they are", "int8"}


def test_a_cache_that_is_not_ours_is_said_to_grow(folder: Path) -> None:
    plan = hf_accel.plan(folder, fit="1GB", cache=None)
    (line,) = (line for line in plan.lines if (line.topic, line.choice) == ("fit", "not held"))
    assert line.reason == "the cache is transformers' own and grows: cache=None"
    assert "not held" not in str(hf_accel.plan(folder, fit="1GB"))


def test_windows_hold_less(tmp_path: Path) -> None:
    saved(MistralForCausalLM(MistralConfig(**{**SHAPE, "max_position_embeddings": 8192}, sliding_window=64)), tmp_path)
    size = needed(tmp_path, None, context=8192)
    assert chosen(hf_accel.plan(tmp_path, fit=size)) == (None, None, 8192)


# -- errors ------------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("taken", [0, 50_000_000])
@pytest.mark.parametrize("keywords", [{}, {"cache": {"max_tokens": 1024}}, {"weights": "int8"}], ids=str)
def test_the_least_that_an_error_names_does(
    folder: Path, keywords: dict[str, Any], taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "process_bytes", lambda: taken)
    with pytest.raises(UnsupportedError, match="fit='100kB' is too small for LlamaForCausalLM: ") as raised:
        hf_accel.load(folder, fit="100kB", **keywords)
    text = str(raised.value)
    assert ("or lower max_tokens= of the cache" in text) == ("cache" in keywords)
    assert ("this process 50 MB besides" in text) == (taken > 0)
    least = re.search(r"give fit='(\d+)MB'", text)
    assert least is not None
    model = hf_accel.load(folder, fit=f"{least[1]}MB", **keywords)
    assert hf_accel.is_patched(model)
    with pytest.raises(UnsupportedError, match="is too small"):
        hf_accel.load(folder, fit=f"{int(least[1]) * 0.9 - 1}MB", **keywords)


def test_what_a_process_has_taken_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = needed(folder, None)
    monkeypatch.setattr(fitting, "process_bytes", lambda: 1)
    plan = hf_accel.plan(folder, fit=size)
    assert chosen(plan)[0] == WeightConfig()
    (line,) = (line for line in plan.lines if (line.topic, line.what) == ("fit", "memory"))
    assert "less 1 B that this process has taken before, less 2% to spare" in line.reason
    assert chosen(hf_accel.plan(folder, fit=size + 1))[0] is None


def test_a_process_knows_what_it_has_taken() -> None:
    before = process_bytes()
    if before == 0:
        pytest.skip("the system does not say")
    block = torch.ones(40_000_000, dtype=torch.uint8)
    assert process_bytes() - before > 30_000_000
    del block


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"fit": True}, "fit=True must be a size, as '6GB'"),
        ({"fit": -1}, "fit=-1 must be a finite number above 0"),
        ({"fit": "much"}, "the memory of 'much' is not known"),
        ({"fit": "1GB", "keep_original": True}, "leave keep_original=True out"),
        ({"fit": "1GB", "weights": "auto"}, "fit= chooses the bits, and weights='auto' would choose them again"),
        (
            {"fit": "1GB", "weights": {"average_bits": 5, "calibration": TEXT}},
            "average_bits=5 would choose them again",
        ),
        ({"fit": "1GB", "weights": {"skip": ["nothing"]}}, "skip='nothing' is the name"),
    ],
    ids=str,
)
def test_what_cannot_be_asked(folder: Path, keywords: dict[str, Any], text: str) -> None:
    for call in (hf_accel.load, hf_accel.plan):
        with pytest.raises(UnsupportedError, match=text):
            call(folder, **keywords)


def test_a_model_in_memory_has_its_bits(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="fit='1GB' is for the path of a checkpoint"):
        hf_accel.plan(AutoModelForCausalLM.from_pretrained(folder), fit="1GB")
