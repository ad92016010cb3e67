"""Experts with quantized weights, against a loop over QuantLinears and against transformers' own forwards."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen3MoeConfig

import hf_accel
from hf_accel.config import WeightConfig
from hf_accel.errors import HfAccelError, UnsupportedError
from hf_accel.linear import LinearSpec, QuantExperts, QuantLinear, QuantModule, choose, quantize
from hf_accel.linear.experts import parts_of
from hf_accel.linear.formats import readable, state
from hf_accel.linear.hf import experts_refusal
from hf_accel.patching.weight_groups import fitted
from hf_accel.undo.state import state_of

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=40 * 8, num_experts=7, num_experts_per_tok=3),
    "gpt_oss": GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}  # fmt: skip
WEIGHTS = {
    "int8": {"bits": 8},
    "fp8": {"format": "fp8"},
    "int4": {"bits": 4, "group_size": 32},
    "int4 asymmetric": {"bits": 4, "group_size": 32, "symmetric": False},
}
IDS = torch.arange(1, 14).view(1, -1)


def make(name, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=dtype).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.08)
    return model


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, QuantExperts)]


def by_linears(original, config, x, *, index, weights):
    """The sum over a token's experts, each computed by QuantLinears made of its float weights."""
    transposed = getattr(original, "is_transposed", False)
    layers = []
    for name in ("gate_up_proj", "down_proj"):
        parameter = original._parameters[name]
        floats = parameter.transpose(1, 2) if transposed else parameter
        biases = original._parameters.get(f"{name}_bias")
        made = []
        for i, weight in enumerate(floats):
            kept = fitted(config, weight.shape[1])[0]
            choice = choose(LinearSpec.of(weight, kept))
            bias = None if biases is None else biases[i].detach().clone()
            made.append(QuantLinear.from_packed(choice.backend.quantize(weight, kept), bias, choice=choice))
        layers.append(made)
    rows = []
    for token in range(len(x)):
        terms = []
        for slot, expert in enumerate(index[token].tolist()):
            hidden = layers[0][expert](x[token : token + 1])
            out = layers[1][expert](type(original)._apply_gate(original, hidden))
            terms.append(out * weights[token, slot : slot + 1])
        rows.append(torch.stack(terms, dim=1).sum(1).to(x.dtype))
    return torch.cat(rows)


@pytest.mark.covering(1)
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_bits_are_those_of_linears_one_by_one(name, weights, dtype):
    model, config = make(name, dtype), WeightConfig(**WEIGHTS[weights])
    original = model.model.layers[0].mlp.experts
    hf_accel.patch(model, weights=config, keep_original=True)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, QuantExperts)
    generator = torch.Generator().manual_seed(1)
    for tokens, top_k in [(1, 1), (1, 3), (2, 2), (9, 4), (0, 2)]:
        x = torch.randn(tokens, 64, generator=generator).to(dtype)
        # the last expert is chosen by nobody, and some token chooses the same twice
        index = torch.randint(0, experts.num_experts - 1, (tokens, top_k), generator=generator)
        scores = torch.rand(tokens, top_k, generator=generator)
        got = experts(x, index, scores)
        assert got.dtype is dtype and got.shape == x.shape
        if tokens:
            expected = by_linears(original, config, x, index=index, weights=scores)
            if all(held.choice.backend.row_invariant for held in experts.weights.values()):
                assert torch.equal(got, expected)
            else:  # without the library: products of floats round by the number of rows, decisions of INT8 after them
                torch.testing.assert_close(got.float(), expected.float(), atol=0.02, rtol=0.02)


@torch.no_grad()
@pytest.mark.parametrize(("inner", "layout"), [(96, (4, 32)), (72, (8, None))])
def test_the_weights_of_an_expert_may_have_groups_of_their_own(inner, layout):
    """64 divides the 64 inputs of gate and up; of the inputs of down, 32 does, or no group."""
    config = MixtralConfig(**SIZES | {"intermediate_size": inner}, num_local_experts=3, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    original = model.model.layers[0].mlp.experts
    hf_accel.patch(model, weights="int4", keep_original=True)
    experts = model.model.layers[0].mlp.experts
    layouts = {key: (held.layout.bits, held.layout.group_size) for key, held in experts.weights.items()}
    assert layouts == {"gate_up_proj": (4, 64), "down_proj": layout}
    x, index, scores = torch.randn(5, 64), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]]), torch.rand(5, 2)
    expected = by_linears(original, WeightConfig(4), x, index=index, weights=scores)
    if all(held.choice.backend.row_invariant for held in experts.weights.values()):
        assert torch.equal(experts(x, index, scores), expected)
    else:
        torch.testing.assert_close(experts(x, index, scores), expected, atol=0.02, rtol=0.02)


@pytest.mark.covering(1)
@torch.no_grad()
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_dequantized_model_of_stock_says_the_same(name, weights):
    """Activations in floating point, so that only the order of sums differs."""
    model = make(name)
    hf_accel.patch(model, weights=WEIGHTS[weights] | {"activations": None, "head": None}, keep_original=True)
    for layer in model.modules():
        if isinstance(layer, QuantModule):  # others compute INT4 in bfloat16
            layer.requested_backend = "reference"
            layer.unpack().pack()
    dense = make(name)
    for name_, module in dense.named_modules():
        other = model.get_submodule(name_) if name_ else model
        if isinstance(other, QuantLinear):
            module.weight.data = other.quantized.dequantize(torch.float32)
        elif isinstance(other, QuantExperts):
            for key, held in other.weights.items():
                weight = held.dense(torch.float32)
                module._parameters[key].data = weight.transpose(1, 2) if other.is_transposed else weight
    assert len(experts_of(model)) == 2
    torch.testing.assert_close(model(IDS).logits, dense(IDS).logits, atol=1e-4, rtol=1e-4)
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(IDS, **settings), dense.generate(IDS, **settings))


@pytest.mark.parametrize("name", CONFIGS)
def test_unpatch_gives_back_every_bit(name):
    model = make(name, torch.bfloat16)
    before, modules = {k: v.clone() for k, v in model.state_dict().items()}, list(model.modules())
    hf_accel.patch(model, weights="int8")
    assert len(experts_of(model)) == 2
    hf_accel.unpatch(model)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[k], v) for k, v in before.items())
    assert list(model.modules()) == modules


@pytest.mark.covering(1)
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_saved_and_loaded_it_is_the_same_model(name, weights, dtype, tmp_path):
    model = make(name, dtype)
    model.save_pretrained(tmp_path / "float")
    floats = {key: value.clone() for key, value in model.state_dict().items()}
    hf_accel.patch(model, weights=WEIGHTS[weights])
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype)(IDS).logits, expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(experts_of(model)[0]))):
        assert len(experts_of(other)) > 0
    assert torch.equal(copy.deepcopy(model)(IDS).logits, expected)
    for keep in ("auto", True, False):
        loaded = hf_accel.load(tmp_path / "float", weights=WEIGHTS[weights], keep_original=keep, dtype=dtype)
        assert torch.equal(loaded(IDS).logits, expected)
        if keep is not False:
            hf_accel.unpatch(loaded)
            assert all(torch.equal(value, floats[key]) for key, value in loaded.state_dict().items())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("loads_patched", [False, True])
@pytest.mark.parametrize("shards", ["50GB", "100KB"])
def test_originals_are_read_back_from_the_experts_of_a_checkpoint(name, loads_patched, shards, tmp_path):
    """Mixtral's and Qwen3-MoE's checkpoints hold one tensor for each expert and projection, gpt-oss's one for all."""
    make(name).save_pretrained(tmp_path, max_shard_size=shards)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    floats = {key: value.clone() for key, value in stock.state_dict().items()}
    if loads_patched:
        settings = hf_accel.AccelConfig(weights="int8")
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings)
    else:
        assert "read back from" in str(hf_accel.plan(stock))
        parameters = [parameter for m in stock.modules() if hasattr(m, "down_proj") for parameter in [m.down_proj]]
        model = hf_accel.patch(stock)
        assert all(p.numel() == 0 for p in parameters if isinstance(p, torch.nn.Parameter))
    dropped = {source.name for _, source in state_of(model).originals.dropped}
    assert {f"model.layers.{i}.mlp.experts.{key}" for i in (0, 1) for key in ("gate_up_proj", "down_proj")} <= dropped
    hf_accel.unpatch(model)
    after = model.state_dict()
    assert after.keys() == floats.keys() and all(torch.equal(value, floats[key]) for key, value in after.items())


def test_an_expert_that_changed_on_disk_is_not_read_back(tmp_path):
    make("mixtral").save_pretrained(tmp_path)
    model = hf_accel.patch(AutoModelForCausalLM.from_pretrained(tmp_path))
    other = make("mixtral", seed=0)
    with torch.no_grad():
        other.model.layers[1].mlp.experts.gate_up_proj[3, 5, 7] += 1
    other.save_pretrained(tmp_path)
    with pytest.raises(HfAccelError, match=r"gate_up_proj' in .* has changed since patch\(\)"):
        hf_accel.unpatch(model)


def test_a_checkpoint_with_half_of_the_experts_is_refused(tmp_path):
    model = hf_accel.patch(make("mixtral"), weights="int8")
    model.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("0.mlp.experts.quantized_down", "9.nowhere"))
    with pytest.raises(UnsupportedError, match="nowhere"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    import json

    settings = json.loads(config)
    del settings["quantization_config"]["modules"]["model.layers.0.mlp.experts.quantized_down"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedError, match="only a part of the experts"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("skip", ["experts", "mlp.experts", "model.layers.1.mlp.experts"])
def test_skip_leaves_experts(skip):
    model = hf_accel.patch(make("mixtral"), weights={"bits": 8, "skip": [skip]})
    assert len(experts_of(model)) == (1 if "layers" in skip else 0)


def test_groups_that_do_not_fit_leave_experts_with_the_reason():
    model = make("mixtral")
    plan = hf_accel.plan(model, weights={"bits": 4, "group_size": 64})  # 96 inputs of down
    line = next(line for line in plan.lines if "experts" in line.what)
    assert line.choice == "as is" and "group_size=64 does not divide the 96 inputs" in line.reason


def test_the_plan_counts_their_bytes():
    model = make("mixtral", torch.bfloat16)
    skipped = hf_accel.plan(model, weights={"bits": 8, "skip": ["experts"]})
    plan = hf_accel.plan(model, weights="int8")
    numbers = 2 * 5 * (2 * 96 * 64 + 64 * 96)
    scales = 2 * 5 * (2 * 96 + 64) * 2
    assert skipped.bytes_after - plan.bytes_after == numbers - scales
    assert any("weights of experts" in line.what and "int8 by" in line.choice for line in plan.lines)


class TestKnownOrStock:
    def test_another_forward_stays(self):
        model = make("mixtral")
        experts = model.model.layers[0].mlp.experts

        class Other(type(experts)):
            def forward(self, *args):
                return super().forward(*args) * 2

        experts.__class__ = Other
        assert "a forward of its own" in experts_refusal(experts)
        assert experts_refusal(model.model.layers[1].mlp.experts) is None

    def test_a_gate_that_the_forward_does_not_use_stays(self):
        """The eager forward of Mixtral computes the gate itself."""
        experts = make("mixtral").model.layers[0].mlp.experts

        class Other(type(experts)):
            def _apply_gate(self, gate_up):
                return gate_up.chunk(2, dim=-1)[1]

        experts.__class__ = Other
        assert "is not what we know" in experts_refusal(experts)

    def test_another_implementation_stays(self):
        model = make("mixtral")
        model.config._experts_implementation_internal = "deepgemm"
        assert "'deepgemm'" in experts_refusal(model.model.layers[0].mlp.experts)

    def test_more_parameters_stay(self):
        experts = make("mixtral").model.layers[0].mlp.experts
        experts.scale = torch.nn.Parameter(torch.ones(1))
        assert "not what its settings say" in experts_refusal(experts)

    def test_experts_in_parallel_stay(self):
        experts = make("mixtral").model.layers[0].mlp.experts
        experts._is_expert_parallel = True
        assert "a part of the experts" in experts_refusal(experts)

    def test_an_expert_that_is_not_there_is_refused(self):
        model = hf_accel.patch(make("mixtral"), weights="int8")
        with pytest.raises(UnsupportedError, match="expert 5 was chosen, but there are 5"):
            experts_of(model)[0](torch.ones(1, 64), torch.tensor([[5]]), torch.ones(1, 1))


@pytest.mark.parametrize("weights", [*WEIGHTS.values(), {"bits": 3, "group_size": 32, "symmetric": False}], ids=str)
@pytest.mark.parametrize(("count", "rows"), [(3, 5), (2, 8), (1, 3), (4, 64)])
def test_parts_come_together_again(weights, count, rows):
    floats = torch.randn(count, rows, 64, generator=torch.Generator().manual_seed(0))
    config = WeightConfig(**weights)
    whole = quantize(floats.flatten(0, 1), config)
    parts = parts_of(whole, count)
    for part, weight in zip(parts, floats, strict=True):
        alone = quantize(weight, config)
        pairs = zip(state(part).values(), state(alone).values(), strict=True)
        assert all(torch.equal(readable(a), readable(b)) for a, b in pairs)
    again = type(whole).joined(parts)
    assert type(again) is type(whole)
    assert all(
        torch.equal(readable(a), readable(b))
        for a, b in zip(state(again).values(), state(whole).values(), strict=True)
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_the_dequantized_experts(name):
    model = make(name)
    hf_accel.patch(model, weights={"bits": 8, "activations": None}, keep_original=True)
    experts = experts_of(model)[0]
    dense = experts.original()
    x, index = torch.randn(4, 64), torch.tensor([[0, 1], [1, 2], [2, 0], [3, 1]])
    scores = torch.rand(4, 2)
    grads = []
    for module in (experts, dense):
        inputs, weights = x.clone().requires_grad_(), scores.clone().requires_grad_()
        module(inputs, index, weights).square().sum().backward()
        grads.append((inputs.grad, weights.grad))
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        assert got.abs().max() > 0


def test_what_verify_and_the_report_say():
    model = hf_accel.patch(make("mixtral"), weights="int8")
    report = hf_accel.quantization_report(model, IDS)
    held = [weights for experts in experts_of(model) for weights in experts.weights.values()]
    linears = [m for m in model.modules() if isinstance(m, QuantLinear)]
    assert report.weight_bytes == sum(layer.spec.weight_bytes for layer in [*held, *linears])
    assert hf_accel.verify(model, IDS, max_new_tokens=4).explained


def test_calibrated_methods_round_experts_to_nearest():
    model = make("mixtral")
    plan = hf_accel.plan(
        model, weights={"bits": 4, "group_size": 32, "method": "gptq", "calibration": IDS.repeat(2, 1)}
    )
    line = next(line for line in plan.lines if "experts" in line.what)
    assert "rounded to nearest: calibration does not reach experts" in line.reason and "gptq" not in line.choice


def test_dequantized_experts_stand_in_the_files_of_other_engines(tmp_path):
    from safetensors.torch import load_file

    model = hf_accel.patch(make("mixtral"), weights="int8")
    saved = hf_accel.save_compressed(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    dense = experts_of(model)[1].weights["down_proj"].dense(torch.float32)
    prefix = "model.layers.1.block_sparse_moe.experts"
    assert all(torch.equal(tensors[f"{prefix}.{i}.w2.weight"], dense[i]) for i in range(5))
    assert "dequantized" in str(saved)


def test_twins_share_the_packed_weights():
    model = hf_accel.patch(make("mixtral"), weights="int8")
    from hf_accel.patching.twin import twin

    first, second = (experts_of(m)[0].weights["down_proj"] for m in (model, twin(model)))
    assert first is not second and first._packed.parts[0] is second._packed.parts[0]


def test_to_another_dtype_and_back():
    model = hf_accel.patch(make("mixtral"), weights="int8")
    experts = experts_of(model)[0]
    x, index = torch.randn(3, 64), torch.tensor([[0, 1], [2, 3], [4, 0]])
    before = experts(x, index, torch.ones(3, 2))
    experts.bfloat16()
    assert experts.compute_dtype is torch.bfloat16
    rounded = experts(x.bfloat16(), index, torch.ones(3, 2))
    assert F.cosine_similarity(rounded.float().flatten(), before.flatten(), dim=0) > 0.999
