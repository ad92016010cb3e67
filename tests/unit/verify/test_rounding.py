from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

import hf_accel
from hf_accel.kernels import cpu as kernels
from hf_accel.linear import QuantLinear
from hf_accel.linear.activations import round_groups
from hf_accel.verify import rounding as module
from hf_accel.verify.passes import History, started
from hf_accel.verify.references import quantized_reference
from hf_accel.verify.rounding import Jitter, ReferenceModel, flip_nearest, largest_difference

from ...devices import multiply_pairs
from ...parity import test_chunks
from ...parity.families import FAMILIES, build, prompts
from ...parity.snapshot import snapshot

HISTORY = prompts(1, 20)
T5_SIZES = {
    "vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip


def judge(model: PreTrainedModel, history: torch.Tensor = HISTORY, num_prompt: int = 12) -> tuple[Any, float, str]:
    return ReferenceModel(model, "r").judge(History(history, num_prompt), {})


@pytest.fixture
def no_arbiter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_ARBITER", 0)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_against_float32(family: str) -> None:
    """The arbiter is the same model in float32, and its distance from bfloat16 counts at least twice."""
    model = build(family, dtype=torch.bfloat16)
    logits, rounding, dtype = judge(model)
    exact = copy.deepcopy(model).float()(HISTORY).logits[0, -1]
    assert dtype == "float32"
    torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-4)
    distance = float((model(HISTORY).logits[0, -1].float() - exact).abs().max())
    assert 2 * distance <= rounding < 8 * distance
    assert rounding < 0.2 * float(exact.abs().max())


@torch.no_grad()
def test_without_an_arbiter_the_models_own_dtype_judges(no_arbiter: None) -> None:
    model = build("llama", dtype=torch.bfloat16)
    logits, rounding, dtype = judge(model)
    own, exact = model(HISTORY).logits[0, -1].float(), copy.deepcopy(model).float()(HISTORY).logits[0, -1]
    assert dtype == "bfloat16"
    assert torch.equal(logits, own)
    distance = float((own - exact).abs().max())
    assert distance / 2 < rounding < 8 * distance  # the stand-in is of the size of the real thing


@torch.no_grad()
def test_a_product_that_returns_more_stays_as_it_is(no_arbiter: None) -> None:
    """As of Llama 4's router."""
    model = test_chunks.model_of().bfloat16()
    logits, rounding, _ = judge(model)
    assert torch.equal(logits, model(HISTORY).logits[0, -1].float())
    assert 0 < rounding < float(logits.abs().max())


@torch.no_grad()
def test_the_stand_in_is_a_way_of_its_own(no_arbiter: None) -> None:
    """A history of one token has no other."""
    model, history = build("llama", dtype=torch.bfloat16), prompts(1, 1)
    logits, rounding, _ = judge(model, history, num_prompt=1)
    distance = float((logits - copy.deepcopy(model).float()(history).logits[0, -1]).abs().max())
    floor = 2 * 2**-7 * float(logits.abs().max())
    assert rounding > max(floor, distance / 2)


def test_float32_is_judged_by_float64() -> None:
    logits, rounding, dtype = judge(build("llama"))
    assert dtype == "float64"
    assert 0 < rounding < 1e-4 * float(logits.abs().max())


def test_rounding_is_at_least_a_unit_in_the_last_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "largest_difference", lambda ways: 0.0)
    logits, rounding, _ = judge(build("llama", dtype=torch.bfloat16))
    assert rounding == pytest.approx(2 * 2**-7 * float(logits.abs().max()), rel=0.05)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_histories(length: int) -> None:
    assert judge(build("llama"), prompts(1, length), num_prompt=length)[1] > 0


def test_the_steps_are_a_way_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference whose single steps differ is a reference that rounds badly, and knows it."""
    model = build("llama")
    calls = []

    def spoil(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(kwargs["input_ids"].shape[1])
        if calls[-1] == 1:
            output.logits += 0.25 * torch.linspace(-1, 1, 101)

    before = judge(model)[1]
    model.register_forward_hook(spoil, with_kwargs=True)
    assert judge(model)[1] == pytest.approx(2 * 0.25, rel=0.01)
    assert before < 1e-3
    assert calls.count(1) == 8 and 12 in calls  # the prompt, then one by one


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
@pytest.mark.parametrize("kv", ["auto", "int8", "int4", "int8-int4"])
def test_decisions_of_integers_count(kv: Any) -> None:
    """In float32 the ways agree to the last bits, until one of them rounds an activation the other way."""
    weights = "int8" if kv == "auto" else None
    model = hf_accel.patch(build("llama"), weights=weights, cache=hf_accel.CacheConfig(dtype=kv))
    reference = quantized_reference(model)
    before = snapshot(reference)
    logits, rounding, _ = judge(reference)
    # one number in each head of eight goes by a whole step, which is most of what a head has in int4
    assert 1e-3 < rounding / float(logits.abs().max()) < (0.8 if "int4" in kv else 0.2)
    assert snapshot(reference) == before


def test_float_activations_have_no_decisions() -> None:
    model = hf_accel.patch(build("llama"), weights=hf_accel.WeightConfig(activations=None))
    logits, rounding, _ = judge(quantized_reference(model))
    assert rounding < 1e-4 * float(logits.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "size"), [(64, 64), (64, 16), (40, 32), (5, 128)])
def test_one_number_of_a_row_goes_to_the_next_level(columns: int, size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(6, 3, columns) * torch.logspace(-3, 3, 18).view(6, 3, 1)).to(dtype)
    flipped = flip_nearest(x, size)
    for before, after in zip(x.view(-1, columns), flipped.view(-1, columns), strict=True):
        changed = (before != after).nonzero().flatten()
        assert len(changed) == 1
        start = int(changed[0]) // size * size
        group = before[start : start + size].float()
        step = group.abs().max() / 127
        old, new = ((v[changed[0]].float() / step).round() for v in (before, after))
        assert abs(old - new) == 1
        gaps = []
        for part in before.float().split(size):
            levels = part / (part.abs().max() / 127)
            gaps.append((levels - levels.floor() - 0.5).abs())
        assert torch.cat(gaps).argmin() == changed[0]


def test_a_turned_decision_reaches_the_product() -> None:
    x = torch.randn(4, 256)
    rounded = [round_groups(rows, 128) for rows in (x, flip_nearest(x, 128))]
    assert ((rounded[0] != rounded[1]).sum(-1) == 1).all()


def test_one_number_of_a_range_goes_to_the_next_level() -> None:
    x = torch.randn(5, 64) + 3
    flipped = flip_nearest(x, 64, of_range=True)
    step = (x.amax(-1) - x.amin(-1)) / 15
    changed = (flipped != x).nonzero()
    assert changed[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert ((flipped - x).abs().sum(-1) < step).all() and ((flipped - x).abs().sum(-1) > step / 2.001).all()
    assert torch.equal(flip_nearest(x[:, :1].expand(5, 64), 64, of_range=True), x[:, :1].expand(5, 64))


def test_zeros_have_no_decisions() -> None:
    x = torch.zeros(2, 64)
    assert torch.equal(flip_nearest(x, 32), x)
    x[0, 40:] = torch.randn(24)
    assert (flip_nearest(x, 32) != x).sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jitter(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    x = torch.randn(50, 50).to(dtype)
    state = torch.get_rng_state()
    moved = [Jitter(dtype)(torch.nn.Identity(), (), x) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*moved)
    relative = ((moved[0].double() - x.double()) / x.double()).abs()
    assert float(relative.max()) <= eps
    assert 0.1 < float((relative > 0).double().mean()) < 0.9


def mixture(seed: int) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "initializer_range": 0.1}
    config = MixtralConfig(vocab_size=512, num_hidden_layers=1, **sizes, **experts)
    model: MixtralForCausalLM = MixtralForCausalLM(config).bfloat16().eval()
    return model


@torch.no_grad()
@pytest.mark.parametrize("seed", [1, 4])
def test_a_router_may_choose_another_expert(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts are as good as each other for the last token: which of them computes it, rounding decides."""
    model = mixture(seed)
    gate, seen = model.model.layers[0].mlp.gate, []
    with monkeypatch.context() as patch:
        forward = gate.forward
        patch.setattr(gate, "forward", lambda x: (seen.append(x.reshape(-1, 64)[-1].float()), forward(x))[1])
        model(HISTORY)
    last, across = seen[0], torch.randn(64)
    across -= last * (across @ last) / (last @ last)
    gate.weight.copy_(torch.stack([across, -across, -last, -last]))
    of_each = []
    for expert in (0, 1):
        kept = gate.weight.clone()
        gate.weight[1 - expert] = -last
        of_each.append(model(HISTORY).logits[0, -1].float())
        gate.weight.copy_(kept)
    apart = float((of_each[0] - of_each[1]).abs().max())
    assert apart > 1
    assert judge(model)[1] >= apart


@torch.no_grad()
@pytest.mark.parametrize(
    ("is_mixture", "needed", "passes"), [(True, 1e-30, 8), (True, torch.inf, 64), (False, torch.inf, 0)]
)
def test_a_mixture_is_computed_again_until_that_explains_a_difference(
    is_mixture: bool, needed: float, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mixture(0) if is_mixture else build("llama")
    seeds: list[int] = []
    monkeypatch.setattr(module, "jittered_products", lambda _, seed: nullcontext(seeds.append(seed)))
    asked: list[torch.Tensor] = []
    logits, _, _ = ReferenceModel(model, "r").judge(
        History(HISTORY, 12), {}, needed=lambda logits: (asked.append(logits), needed)[1]
    )
    assert seeds == list(range(passes))
    assert all(each is logits for each in asked) and bool(asked) is (passes > 0)


def test_spread() -> None:
    inf = torch.inf
    assert (
        largest_difference(
            [torch.tensor([1.0, 2.0, -inf]), torch.tensor([1.5, 1.0, -inf]), torch.tensor([0.75, 2, 3])]
        )
        == 1
    )
    assert largest_difference([torch.tensor([-inf]), torch.tensor([-inf])]) == 0


def test_a_large_model_has_no_arbiter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", dtype=torch.bfloat16)
    size = 4 * sum(p.numel() for p in model.parameters())
    for largest, there in ((size, True), (size - 1, False)):
        monkeypatch.setattr(module, "LARGEST_ARBITER", largest)
        assert (ReferenceModel(model, "r").arbiter is not None) is there


def test_an_arbiter_has_to_leave_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    size = 8 * sum(p.numel() for p in model.parameters())
    for free, there in ((2 * size, True), (2 * size - 1, False), (None, True)):
        monkeypatch.setattr(module, "detect", lambda device, free=free: type("H", (), {"free_memory": free}))
        assert (ReferenceModel(model, "r").arbiter is not None) is there


def test_quantized_layers_are_only_watched() -> None:
    model = hf_accel.patch(build("llama"), weights="int8")
    reference = quantized_reference(model)
    judge(reference)
    assert not any(m._forward_pre_hooks for m in reference.modules() if isinstance(m, QuantLinear))


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
@pytest.mark.parametrize(("family", "halved"), [("llama", 0), ("t5", 1)])
def test_what_encoders_keep_in_bfloat16_is_a_way_of_its_own(
    monkeypatch: pytest.MonkeyPatch, family: str, halved: int
) -> None:
    multiply_pairs(monkeypatch, does=True)
    model = build("llama") if family == "llama" else T5ForConditionalGeneration(T5Config(**T5_SIZES)).eval()
    reference, passes = quantized_reference(hf_accel.patch(model, weights="int8")), []
    halves = module.halved_results
    monkeypatch.setattr(module, "halved_results", lambda model: (passes.append(model), halves(model))[1])
    rounding = ReferenceModel(reference, "r").judge(started(reference, HISTORY % 50, {}), {})[1]
    assert len(passes) == halved and rounding > 0
