from __future__ import annotations

import copy
import math
import time
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, LlamaConfig, Qwen3Config

from hf_accel.config import WeightConfig
from hf_accel.errors import UnsupportedError
from hf_accel.estimate import estimate
from hf_accel.estimate.devices import SPEEDS, speed_of

from .shapes import GEMMA2_2B, GPT2, MISTRAL_7B, MIXTRAL_8X7B, QWEN2_HALF_B, TINY, llama_70b

GB = 1e9
FAST = {"bandwidth": 1e12, "compute": 1e14}


@pytest.mark.parametrize("name", TINY)
def test_against_a_model_that_is_really_built(name):
    config, context = TINY[name], 16
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.bfloat16)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(3, context, dtype=torch.long), past_key_values=cache, use_cache=True)
    kept = [t for layer in cache.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]

    for source in (config, model):
        result = estimate(source, context=context, batch=3, dtype=torch.bfloat16, **FAST)
        assert result.weights_bytes == sum(p.nbytes for p in model.parameters())
        assert result.parameters == sum(p.numel() for p in model.parameters())
        assert result.kv_bytes == sum(tensor.nbytes for tensor in kept if tensor is not None)


class TestLlama70B:
    def test_kv_cache_with_and_without_grouped_heads(self):
        for kv_heads, gigabytes in ((64, 83.9), (8, 10.5)):
            result = estimate(llama_70b(kv_heads=kv_heads), context=32_000, **FAST)
            assert result.kv_bytes / GB == pytest.approx(gigabytes, abs=0.05)

    def test_weights_in_bf16(self):
        assert estimate(llama_70b(), context=1, **FAST).weights_bytes / GB == pytest.approx(141.1, abs=0.05)

    def test_weights_at_4_bits(self):
        """Linears are 4 bits with a bf16 scale per 128, the head 8 bits, the embedding table stays bf16."""
        kinds = estimate(llama_70b(), context=1, weights="int4", **FAST).weights_by_kind
        table = 128256 * 8192
        linears = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192)
        assert kinds["linears"] == linears // 2
        assert kinds["head"] == table
        assert kinds["linears"] + kinds["head"] == pytest.approx(35 * GB, rel=0.01)
        assert kinds["scales"] == linears // 128 * 2 + 128256 * 2
        assert kinds["embeddings"] == 2 * table
        assert sum(kinds.values()) / GB == pytest.approx(38.4, abs=0.05)

    @pytest.mark.parametrize(
        ("dtype", "context", "per_head", "all_heads"),
        [("float16", 8192, 134e6, 8.6e9), ("float32", 32768, 4.3e9, 275e9)],
    )
    def test_naive_attention_holds_the_square_of_the_context(self, dtype, context, per_head, all_heads):
        attention = estimate(llama_70b(dtype=dtype), context=context, **FAST).attention_bytes
        assert attention.naive_per_head == pytest.approx(per_head, rel=0.005)
        assert attention.naive == pytest.approx(all_heads, rel=0.005)
        batched = estimate(llama_70b(dtype=dtype), context=context, batch=3, **FAST).attention_bytes
        assert batched == (3 * attention.naive, attention.naive_per_head, 3 * attention.tiled)

    def test_tiled_attention_grows_with_the_context_only(self):
        short, long = (estimate(llama_70b(), context=n, **FAST).attention_bytes for n in (8192, 65536))
        assert short.tiled < short.naive / 100
        assert long.tiled < 8 * short.tiled
        assert long.naive == 64 * short.naive

    def test_reading_150_gb_at_1_5_tb_per_second_takes_a_tenth_of_a_second(self):
        result = estimate(llama_70b(), context=32_000, bandwidth=1.5e12)
        assert result.read_bytes / GB == pytest.approx(150, rel=0.01)
        assert result.seconds_per_token == pytest.approx(0.1, rel=0.01)

    def test_decode_is_bound_by_memory_and_prefill_by_compute(self):
        a100 = {"bandwidth": 2e12, "compute": 312e12}
        assert estimate(llama_70b(), context=4096, **a100).bound == ("compute", "memory")
        assert estimate(llama_70b(), context=16, **a100).bound == ("memory", "memory")
        assert estimate(llama_70b(), context=128, batch=256, **a100).bound == ("compute", "compute")

    def test_building_the_shape_is_quick_and_takes_no_memory(self):
        start = time.perf_counter()
        estimate(llama_70b(), context=32_000, **FAST)
        assert time.perf_counter() - start < 10


class TestMixtureOfExperts:
    EXPERTS = 32 * 8 * 3 * 14336 * 4096 * 2  # bytes

    def test_all_experts_are_stored_and_two_of_eight_are_read(self):
        result = estimate(MIXTRAL_8X7B, context=1, **FAST)
        assert result.weights_bytes / GB == pytest.approx(93.4, abs=0.05)
        assert result.weights_by_kind["experts"] == self.EXPERTS
        embeddings = 32000 * 4096 * 2
        assert result.read_bytes == pytest.approx(
            result.weights_bytes - embeddings - 0.75 * self.EXPERTS + result.kv_bytes, rel=1e-9
        )

    @pytest.mark.parametrize(("batch", "distinct"), [(2, 3.5), (4, 8 * (1 - 0.75**4)), (400, 8.0)])
    def test_a_batch_reads_the_distinct_ones(self, batch, distinct):
        one, many = (estimate(MIXTRAL_8X7B, context=1, batch=size, **FAST) for size in (1, batch))
        extra = many.read_bytes - many.kv_bytes - (one.read_bytes - one.kv_bytes)
        assert extra == pytest.approx((distinct - 2) / 8 * self.EXPERTS, rel=1e-6)

    @pytest.mark.parametrize(("weights", "share"), [("int4", 4), ("int8", 2), ("nf4", 1)])
    def test_fused_experts_are_quantized(self, weights, share):
        stored = estimate(MIXTRAL_8X7B, context=1, weights=weights, **FAST).weights_by_kind
        assert stored["experts"] == self.EXPERTS / share


@pytest.mark.parametrize(
    ("config", "context", "kv_bytes"),
    [
        (MISTRAL_7B, 1000, 2 * 2 * 8 * 128 * 32 * 1000),
        (MISTRAL_7B, 32_000, 2 * 2 * 8 * 128 * 32 * 4096),
        (GEMMA2_2B, 32_000, 2 * 2 * 4 * 256 * 13 * (4096 + 32_000)),
        (GEMMA2_2B, 4096, 2 * 2 * 4 * 256 * 26 * 4096),
    ],
    ids=["inside", "beyond", "every other layer", "at the window"],
)
def test_a_sliding_window_bounds_the_cache(config, context, kv_bytes):
    assert estimate(config, context=context, **FAST).kv_bytes == kv_bytes


def test_int8_cache_has_a_scale_per_token_and_head():
    result = estimate(llama_70b(), context=1000, batch=3, kv_dtype="int8", **FAST)
    assert result.kv_bytes == 3 * 2 * 80 * 8 * 1000 * (128 + 2)
    plain = estimate(llama_70b(), context=1000, batch=3, **FAST)
    assert plain.kv_bytes == estimate(llama_70b(), context=1000, batch=3, kv_dtype="auto", **FAST).kv_bytes
    assert plain.kv_bytes == 3 * 2 * 80 * 8 * 1000 * 256


class TestTiedEmbeddings:
    TABLE = 151936 * 896

    def test_the_table_is_counted_once_and_read_as_the_head(self):
        result = estimate(QWEN2_HALF_B, context=1, **FAST)
        assert result.parameters == 494_032_768
        assert result.weights_bytes == 2 * 494_032_768
        assert result.read_bytes == result.weights_bytes + result.kv_bytes

    def test_a_quantized_head_is_a_copy(self):
        result = estimate(QWEN2_HALF_B, context=1, weights="int8", **FAST)
        assert result.weights_by_kind["head"] == self.TABLE
        assert result.weights_by_kind["embeddings"] == 2 * self.TABLE
        assert result.read_bytes == result.weights_bytes + result.kv_bytes - 2 * self.TABLE

    @pytest.mark.parametrize(("bits", "scales"), [(8, 2 * 151936), (4, 2 * 151936 * 7)])
    def test_an_embedding_that_looks_up_in_the_head_costs_nothing(self, bits, scales):
        config = WeightConfig(embedding="auto") if bits == 8 else WeightConfig(head="int4", embedding="int4")
        result = estimate(QWEN2_HALF_B, context=1, weights=config, **FAST)
        assert result.weights_by_kind["head"] == self.TABLE * bits // 8
        assert "embeddings" not in result.weights_by_kind
        kept = estimate(QWEN2_HALF_B, context=1, weights=replace(config, embedding=None), **FAST)
        assert kept.weights_bytes - result.weights_bytes == 2 * self.TABLE
        alone = estimate(QWEN2_HALF_B, context=1, weights=replace(config, embedding=None, head=None), **FAST)
        assert kept.weights_bytes - alone.weights_bytes == self.TABLE * bits // 8 + scales
        assert result.read_bytes == result.weights_bytes + result.kv_bytes

    @pytest.mark.parametrize(
        ("config", "megabytes"),
        [
            (Qwen3Config(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                         num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True), 385),
            (LlamaConfig(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                         num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True), 770),
            (Gemma3TextConfig(vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26,
                              num_attention_heads=4, num_key_value_heads=1, head_dim=256), 665),
        ],
        ids=["Qwen3-0.6B", "Llama-3.2-1B", "Gemma-3-1B"],
    )  # fmt: skip
    def test_small_models_in_int4_hold_one_table(self, config, megabytes):
        weights = WeightConfig(4, embedding="auto")
        result = estimate(config, context=1, weights=weights, dtype=torch.bfloat16, **FAST)
        assert result.weights_bytes <= megabytes * 1e6

    def test_a_head_left_alone_still_shares(self):
        result = estimate(QWEN2_HALF_B, context=1, weights=WeightConfig(head=None), **FAST)
        assert result.weights_by_kind["head"] == 2 * self.TABLE
        assert "embeddings" not in result.weights_by_kind


class TestGPT2:
    LINEARS = 12 * 768 * (3 * 768 + 768 + 2 * 3072)

    def test_conv1d_is_a_linear(self):
        kinds = estimate(GPT2, context=1, weights="int8", **FAST).weights_by_kind
        outputs = 12 * (3 * 768 + 768 + 3072 + 768)
        assert kinds["linears"] == self.LINEARS
        assert kinds["scales"] == 4 * (outputs + 50257)
        assert estimate(GPT2, context=1, weights="int4", **FAST).weights_by_kind["linears"] == self.LINEARS // 2

    def test_learned_positions_are_embeddings_that_are_not_read(self):
        result = estimate(GPT2, context=1, **FAST)
        assert result.weights_by_kind["embeddings"] == 1024 * 768 * 4
        assert result.read_bytes == result.weights_bytes - 1024 * 768 * 4 + result.kv_bytes


def test_skipped_linears_stay_as_they_are():
    every, some = (
        estimate(GPT2, context=1, weights=WeightConfig(skip=skip), **FAST).weights_by_kind["linears"]
        for skip in ((), ("mlp.c_proj", "h.0.attn.c_attn"))
    )
    with pytest.raises(UnsupportedError, match="skip='roj' is the name, or the end of the name, of no Linear"):
        estimate(GPT2, context=1, weights=WeightConfig(skip=["roj"]), **FAST)
    assert some - every == 3 * (12 * 3072 * 768 + 768 * 2304)


def test_group_size_is_respected():
    shapes = (
        estimate(llama_70b(), context=1, weights=WeightConfig(bits=4, group_size=size, head=None), **FAST)
        for size in (128, 32)
    )
    coarse, fine = (shape.weights_by_kind["scales"] for shape in shapes)
    assert fine == 4 * coarse


def test_dtype_is_the_configs_unless_given():
    assert estimate(llama_70b(), context=1, **FAST).dtype == "bfloat16"
    wide = estimate(llama_70b(), context=1, dtype=torch.float32, **FAST)
    assert wide.dtype == "float32"
    assert wide.weights_bytes == 2 * estimate(llama_70b(), context=1, **FAST).weights_bytes
    assert estimate(TINY["llama"], context=1, **FAST).dtype == "float32"


def test_cost_per_million_tokens():
    result = estimate(llama_70b(), context=1000, price_per_hour=7.2, bandwidth=1.5e12)
    assert result.cost_per_million_tokens == pytest.approx(1e6 * result.seconds_per_token * 7.2 / 3600)
    batched = estimate(llama_70b(), context=1000, batch=8, price_per_hour=7.2, bandwidth=1.5e12)
    assert batched.cost_per_million_tokens == pytest.approx(1e6 * batched.seconds_per_token / 8 * 0.002)
    assert estimate(llama_70b(), context=1000, **FAST).cost_per_million_tokens is None


def test_total_is_the_sum_of_what_is_in_memory_together():
    result = estimate(llama_70b(), context=1000, batch=2, **FAST)
    parts = (result.weights_bytes, result.kv_bytes, result.attention_bytes.tiled, result.activation_bytes)
    assert result.total_bytes == sum(parts)
    # residual stream and norm, gate, up and their product: [2, 1000, 2 * 8192 + 3 * 28672] in bf16
    assert result.activation_bytes == 2 * 1000 * (2 * 8192 + 3 * 28672) * 2


def test_a_slow_machine_is_bound_by_compute_in_time_too():
    work = estimate(llama_70b(), context=1000, bandwidth=1e15, compute=1e9)
    linears = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192) + 128256 * 8192
    scores = 80 * 2 * 64 * 128 * 1000
    assert work.bound == ("compute", "compute")
    assert work.seconds_per_token == pytest.approx(2 * (linears + scores) / 1e9)


def test_the_machine_is_measured_if_nothing_is_given():
    result = estimate(TINY["llama"], context=8)
    assert math.isfinite(result.seconds_per_token)
    assert result.seconds_per_token >= result.read_bytes / result.bandwidth


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"context": 0}, "context=0 must be an integer of at least 1"),
        ({"context": 1.5}, "context=1.5 must be an integer"),
        ({"context": 1, "batch": 0}, "batch=0 must be an integer of at least 1"),
        ({"context": 1, "weights": "int3"}, "weights='int3' is not known"),
        ({"context": 1, "weights": "nf3"}, "weights='nf3' is not known"),
        ({"context": 1, "kv_dtype": "fp4"}, "kv_dtype='fp4' is not known; choose one of None, 'auto', 'int8'"),
        ({"context": 1, "dtype": "bf16"}, "dtype='bf16' must be a dtype of torch, as torch.bfloat16"),
        ({"context": 1, "bandwidth": 0}, "bandwidth=0 must be a finite number above 0"),
        ({"context": 1, "compute": float("nan")}, "compute=nan must be a finite number above 0"),
        ({"context": 1, "compute_fp8": -1}, "compute_fp8=-1 must be a finite number above 0"),
        ({"context": 1, "price_per_hour": "2"}, "price_per_hour='2' must be a finite number above 0"),
        (
            {"context": 1, "weights": WeightConfig(bits=4, group_size=128)},
            "group_size=128 does not divide the 64 inputs",
        ),
    ],
)
def test_bad_values_are_clear_errors(keywords, message):
    with pytest.raises(UnsupportedError, match=message):
        estimate(TINY["llama"], **keywords)


def test_prompts_in_fp8_take_as_long_as_fp8_takes():
    """At the speed that is given; a step of few sequences keeps floats."""
    limits = {"context": 4096, "weights": "fp8", "bandwidth": 1e15, "compute": 1e14}
    plain, fast = estimate(llama_70b(), **limits), estimate(llama_70b(), **limits, compute_fp8=2e14)
    linears = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192)
    assert plain.prefill_seconds - fast.prefill_seconds == pytest.approx(2 * linears * 4096 * (1e-14 - 0.5e-14))
    assert plain.seconds_per_token == fast.seconds_per_token
    assert estimate(llama_70b(), **{**limits, "weights": "nf4"}, compute_fp8=2e14).prefill_seconds == (
        estimate(llama_70b(), **{**limits, "weights": "nf4"}).prefill_seconds
    )


def test_speeds_of_devices_in_fp8():
    h100, a100 = speed_of("H100 80GB"), speed_of("NVIDIA A100")
    assert h100 == (2039e9, 756e12, 1513e12) and a100 == (1555e9, 312e12, None)
    assert all(fp8 is None or 1.9 * compute < fp8 < 2.1 * compute for _, compute, fp8 in SPEEDS.values())


def test_the_config_is_left_as_it_was():
    config = llama_70b()
    before = copy.deepcopy(vars(config))
    estimate(config, context=10, dtype=torch.float16, **FAST)
    assert vars(config) == before
