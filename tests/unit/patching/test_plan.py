from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, PerceiverConfig, PerceiverModel

import hf_accel
from hf_accel import UnsupportedError
from hf_accel.attention import AttentionBackend, AttentionSpec, choose_backend
from hf_accel.attention.hf import forward
from hf_accel.fused.projections import native_rows
from hf_accel.hardware import ISA_LEVELS
from hf_accel.kernels import cpu as kernels
from hf_accel.linear import QuantLinear
from hf_accel.patching.planning import OWN_FORWARD
from hf_accel.patching.servers import Server, servers_of
from hf_accel.undo.state import BACKEND_ATTRIBUTE

from ...parity.families import FAMILIES, build, inputs
from ...parity.snapshot import snapshot

INT4 = {"bits": 4, "group_size": 32}
KEYWORDS: list[dict[str, Any]] = [
    {},
    {"weights": None},
    {"weights": INT4},
    {"weights": {"skip": ["lm_head"]}},
    {"weights": None, "attention": "reference"},
    {"weights": None, "cache": None},
    {"weights": None, "attention": None, "cache": None},
]


def lines(plan: hf_accel.Plan, topic: str) -> list[dict[str, str]]:
    return [choice for choice in plan.to_dict()["choices"] if choice["topic"] == topic]


@pytest.mark.covering(1)
@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_plan_changes_nothing(family: str, keywords: dict[str, Any]) -> None:
    model = build(family)
    before = snapshot(model)
    hf_accel.plan(model, **keywords)
    assert snapshot(model) == before


def test_a_patched_model_has_no_plan() -> None:
    """What it said of one that is patched was not what patch() had done."""
    model = hf_accel.patch(build("llama"))
    for keywords, reason in (({}, "what patch\\(\\) would do"), ({"weights": None}, "patched already, with weights")):
        with pytest.raises(UnsupportedError, match=reason):
            hf_accel.plan(model, **keywords)
    assert hf_accel.plan(hf_accel.unpatch(model)).quantized


def test_a_parameter_in_the_place_of_an_input_embedding_stays() -> None:
    sizes = {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2}
    model = PerceiverModel(PerceiverConfig(d_model=16, num_blocks=1, **sizes, num_self_attention_heads=2)).eval()
    assert isinstance(model.get_input_embeddings(), nn.Parameter)
    x = torch.randn(2, 5, 16)
    expected = model(inputs=x).last_hidden_state
    hf_accel.patch(model, weights=None)
    assert torch.allclose(model(inputs=x).last_hidden_state, expected, atol=1e-5)
    assert torch.equal(hf_accel.unpatch(model)(inputs=x).last_hidden_state, expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_patch_does_what_the_plan_says(family: str, keywords: dict[str, Any]) -> None:
    model = build(family)
    plan = hf_accel.plan(model, **keywords)
    hf_accel.patch(model, **keywords)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert {p.site.name for p in plan.quantized} == layers.keys()
    for planned in plan.quantized:
        layer = layers[planned.site.name]
        assert layer.choice is not None and planned.choice is not None
        assert layer.choice.backend is planned.choice.backend
        assert planned.choice is not None
        assert layer.spec == planned.choice.spec
    backends = [vars(m)[BACKEND_ATTRIBUTE].backend.name for m in model.modules() if BACKEND_ATTRIBUTE in vars(m)]
    assert backends == [a.backend.name for a in plan.attention]
    cache = model.generate(**inputs("single"), max_new_tokens=2, return_dict_in_generate=True).past_key_values
    assert isinstance(cache, hf_accel.PagedCache) == (plan.stock_cache is None)


@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
def test_bytes_are_those_of_the_patched_model(keywords: dict[str, Any]) -> None:
    """The quantized layers' own count, and every tensor left: a second way to the same number."""
    model = build("gpt2")
    plan = hf_accel.plan(model, **keywords)
    before = {p.data_ptr(): p.nbytes for p in model.parameters()}
    assert plan.bytes_before == sum(before.values())
    hf_accel.patch(model, **keywords)
    left = {p.data_ptr(): p.nbytes for p in model.parameters()}
    quantized = sum(m.spec.weight_bytes for m in model.modules() if isinstance(m, QuantLinear))
    assert plan.bytes_after == sum(left.values()) + quantized


def test_least_time_follows_the_bytes_read() -> None:
    """All weights but the embedding table, unless it is the head as well."""
    for family, skipped in (("llama", "model.embed_tokens.weight"), ("gpt2", None)):
        model = build(family)
        plan = hf_accel.plan(model)
        read = sum(p.nbytes for name, p in model.named_parameters() if name != skipped)
        assert plan.seconds_before == pytest.approx(read / plan.bandwidth)
        replaced = sum(p.site.weight.nbytes for p in plan.quantized)
        stored = sum(p.choice.spec.weight_bytes for p in plan.quantized if p.choice)
        assert plan.seconds_after == pytest.approx((read - replaced + stored) / plan.bandwidth)


def test_every_choice_has_a_reason() -> None:
    for keywords in KEYWORDS:
        data = hf_accel.plan(build("gemma2"), **keywords).to_dict()
        again = json.loads(json.dumps(data))
        assert hf_accel.PatchConfig.build(again["config"]) == hf_accel.PatchConfig.build(**keywords)
        assert [c["topic"] for c in data["choices"]] == sorted(
            (c["topic"] for c in data["choices"]),
            key=[
                "cpu kernels",
                "attention",
                "weights",
                "fused",
                "cache",
                "generate",
                "passes",
                "training",
                "undo",
                "exactness",
                "bytes",
                "speed",
            ].index,
        )
        assert all(choice["reason"] and choice["choice"] for choice in data["choices"])


def test_text() -> None:
    text = str(hf_accel.plan(build("gemma2"), weights=INT4))
    assert text.startswith("hf_accel plan: Gemma2ForCausalLM, 0.0 M parameters, float32 on cpu\n")
    for part in (
        "1 layers, full",
        "1 layers, window 8",
        "int4 group 32",
        "1 head [101x32]",
        "paged, block 16, float32",
    ):
        assert part in text
    assert not any(line != line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize(
    ("keywords", "topic", "part"),
    [
        ({"weights": {"skip": ["up_proj"]}}, "weights", "named in skip="),
        ({"weights": {"head": None}}, "weights", "head=None"),
        ({"weights": None}, "weights", "weights=None: read in place"),
        ({"attention": None, "cache": None}, "attention", "attention=None"),
        ({"attention": None}, "cache", "attention=None leaves attention stock"),
        ({"cache": None}, "cache", "cache=None"),
        ({"cache": {"max_tokens": 64}}, "cache", "64 tokens"),
        ({"cache": {"prefix_sharing": False}}, "cache", "prefixes not shared"),
        ({"weights": None}, "undo", "no weight is replaced"),
        ({"keep_original": False}, "undo", "keep_original=False drops the original weights"),
        ({"keep_original": True}, "undo", "originals stay in memory, 0.1 MB: keep_original=True"),
        ({}, "undo", "no safetensors checkpoint holds the same weights"),
    ],
    ids=str,
)
def test_reasons(keywords: dict[str, Any], topic: str, part: str) -> None:
    plan = hf_accel.plan(build("llama"), **keywords)
    assert any(part in line["reason"] for line in lines(plan, topic))


def test_undo_from_a_checkpoint(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert str(tmp_path) in lines(hf_accel.plan(model), "undo")[0]["reason"]
    assert hf_accel.plan(model, keep_original=True).on_disk is None
    changed = copy.deepcopy(model)
    changed.model.layers[0].mlp.up_proj.weight.data.zero_()
    assert hf_accel.plan(changed).on_disk is None


def test_only_if_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """weights="auto" leaves alone what was measured to be slower, layer by layer."""
    from hf_accel.linear import BackendChoice

    monkeypatch.setattr(BackendChoice, "seconds", property(lambda self: float(self.spec.in_features)))
    monkeypatch.setattr(BackendChoice, "stock_seconds", property(lambda self: 50.0))
    plan = hf_accel.plan(build("llama"), weights="auto")
    slow = [p for p in plan.linears if p.choice is None]
    assert {p.site.name.rsplit(".", 1)[1] for p in slow} == {"down_proj"}  # the one with 64 inputs
    assert {p.reason for p in slow} == {"int8 was measured to be slower than stock"}


def test_model_without_linears() -> None:
    model = build("llama")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, nn.Identity())
    assert lines(hf_accel.plan(model), "weights")[0]["reason"] == "the model has no Linear modules"


@pytest.mark.covering(1)
@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_fits_the_screen(family: str, keywords: dict[str, Any]) -> None:
    """And says everything: wrapped, not cut."""
    plan = hf_accel.plan(build(family), **keywords)
    assert max(map(len, str(plan).splitlines())) <= 100
    words = str(plan).split()
    for line in plan.lines:
        assert set(line.reason.split()) | set(line.choice.split()) <= set(words)


def test_a_word_longer_than_the_column_is_shown_whole(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 50)
    build("llama").save_pretrained(folder)
    text = str(hf_accel.plan(AutoModelForCausalLM.from_pretrained(folder)))
    assert max(map(len, text.splitlines())) <= 100
    assert str(folder) in text.replace("\n", "").replace(" ", "")


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
def test_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_accel.patching.explain import cpu_kernels

    monkeypatch.setattr(cpu_kernels, "refusal", lambda: None)
    monkeypatch.setattr(cpu_kernels, "isa", lambda: "avx2")
    for better, reason in ((None, "1 thread"), ("not amx: no", "1 thread; not amx: no")):
        monkeypatch.setattr(cpu_kernels, "better_level", lambda better=better: better)
        assert lines(hf_accel.plan(build("llama")), "cpu kernels") == [
            {"topic": "cpu kernels", "what": "C++", "choice": "avx2", "reason": reason}
        ]
    monkeypatch.setattr(cpu_kernels, "refusal", lambda: "cpu kernels: not built (no compiler)")
    (line,) = lines(hf_accel.plan(build("llama")), "cpu kernels")
    assert (line["choice"], line["reason"]) == ("not used", "not built (no compiler)")


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
@pytest.mark.parametrize(
    ("family", "keywords", "why"),
    [
        ("llama", {}, None),
        ("llama", {"weights": None, "deterministic": True}, None),
        ("llama", {"weights": None}, f"float linears of more than {native_rows(torch.float32)} rows go to torch"),
        ("llama", {"weights": None, "fuse": False}, "torch's float linear"),
        ("llama", {"attention": "sdpa"}, "sdpa's attention"),
        ("llama", {"weights": {"activations": None}}, "linear rounds by batch size"),
        ("gemma2", {}, "attention within a window"),
        ("gpt2", {"weights": None}, "float linears of more than 128 rows go to torch"),
        ("gpt2", {"weights": None, "deterministic": True}, None),
    ],
)
def test_row_invariance_is_claimed_where_it_holds(family, keywords, why) -> None:
    model = build(family)
    line = next(c for c in hf_accel.plan(model, **keywords).to_dict()["choices"] if c["topic"] == "exactness")
    assert line["choice"] == ("yes" if why is None else "no")
    if why is not None:
        assert why in line["reason"]
        with pytest.raises(hf_accel.UnsupportedError, match="deterministic=True cannot be met"):
            hf_accel.plan(model, weights=None, fuse=False, deterministic=True)


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
@pytest.mark.parametrize("deterministic", [False, True])
def test_float_linears_say_for_how_many_rows_they_are_native(deterministic: bool) -> None:
    rows = "any number of rows" if deterministic else f"up to {native_rows(torch.float32)} rows"
    plan = hf_accel.plan(build("llama"), weights=None, deterministic=deterministic)
    (line,) = (each for each in lines(plan, "fused") if "float linears" in each["what"])
    assert line["choice"] == f"native for {rows}"


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
def test_experts_bound_the_rows_of_drafts_where_linears_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX tiles multiply any number of rows, but not by the experts of gpt-oss, whose weights are [in, out]."""
    monkeypatch.setattr("hf_accel.fused.projections.level_in_use", lambda: ISA_LEVELS["amx"])
    assert hf_accel.plan(build("llama").bfloat16(), weights=None).invariant_rows is None
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 6, "num_experts_per_tok": 2}
    mixtral, oss = MixtralConfig(**sizes), GptOssConfig(**sizes, head_dim=16)
    plans = [
        hf_accel.plan(AutoModelForCausalLM.from_config(config).eval().bfloat16(), weights=None)
        for config in (mixtral, oss)
    ]
    assert [plan.invariant_rows for plan in plans] == [None, 4 * 6 // 2]
    plans[1].model.config.num_experts_per_tok = 0  # not known: a token takes no expert twice
    assert plans[1].invariant_rows == 4


def test_layers_that_were_quantized_before_are_row_invariant_or_refused(tmp_path: Path) -> None:
    folders = {}
    for activations in ("auto", None):
        folders[activations] = tmp_path / str(activations)
        model = hf_accel.patch(build("llama"), weights={"activations": activations}, keep_original=True)
        model.save_pretrained(folders[activations])
    if kernels.refusal() is None:
        loaded = hf_accel.load(folders["auto"], deterministic=True)
        layers = [module for module in loaded.modules() if isinstance(module, QuantLinear)]
        assert layers and all(layer.row_invariant and layer.choice.backend.row_invariant for layer in layers)
    with pytest.raises(hf_accel.UnsupportedError, match="reference's INT8 linear rounds by batch size"):
        hf_accel.load(folders[None], deterministic=True)
    assert not any(module.row_invariant for module in hf_accel.load(folders[None]).modules() if _is_quantized(module))


def _is_quantized(module: nn.Module) -> bool:
    return isinstance(module, QuantLinear)


def test_routers_and_experts_round_each_row_as_one_alone() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config = MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, num_local_experts=3)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert "MixtralExperts" not in str(hf_accel.plan(model).variant)
    if kernels.refusal() is not None:
        with pytest.raises(hf_accel.UnsupportedError, match="products of MixtralTopKRouter are torch's"):
            hf_accel.plan(model, weights="int8", deterministic=True)
        return
    ids = torch.randint(64, (7, 9))
    for weights in ("int8", None):
        hf_accel.patch(model, weights=weights, deterministic=True)
        with torch.no_grad():
            together, alone = (model.generate(each, **GREEDY).logits for each in (ids, ids[2:3]))
        assert all(torch.equal(many[2:3], one) for many, one in zip(together, alone, strict=True))
        hf_accel.unpatch(model)


GREEDY: dict[str, Any] = {
    "do_sample": False, "max_new_tokens": 5, "eos_token_id": None, "output_logits": True,
    "return_dict_in_generate": True,
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["paged", {"dtype": "int8"}, {"dtype": "int4"}], ids=str)
def test_passes_take_the_planned_attention_until_the_model_changes(
    family: str, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[AttentionSpec] = []

    def note(spec: AttentionSpec, name: str, *, row_invariant: bool) -> AttentionBackend:
        chosen.append(spec)
        return choose_backend(spec, name, row_invariant=row_invariant)[0]

    monkeypatch.setattr(forward, "_choose", note)
    model = hf_accel.patch(build(family), weights=None, cache=cache, fuse=False)
    model.generate(**inputs("single"), max_new_tokens=4)
    assert chosen == []
    model.to(torch.bfloat16)
    model.generate(**inputs("single"), max_new_tokens=2)
    assert {spec.dtype for spec in chosen} == {torch.bfloat16}


def test_heads_that_int4_cannot_hold_are_refused_with_the_way_out() -> None:
    """An odd head; int8 holds it, which the error says."""
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.head_dim = 7
    with pytest.raises(hf_accel.UnsupportedError, match=r"cache= was asked for, but .* a head has 7; take 'int8'"):
        hf_accel.plan(model, weights=None, cache={"dtype": "int4"})
    assert hf_accel.plan(model, weights=None, cache={"dtype": "int8"}).stock_cache is None


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
def test_each_linear_has_one_server() -> None:
    """A forward of its own is a layer's own however its parent is called; what is replaced does not have it then."""
    model = build("llama")
    own, packed, taken = (
        model.get_submodule(f"model.layers.0.mlp.{name}") for name in ("gate_proj", "up_proj", "down_proj")
    )
    for module in (own, packed):
        module.forward = lambda x, module=module: type(module).forward(module, x)
    plan = hf_accel.plan(model, weights={"bits": 8, "skip": ["gate_proj", "down_proj"]})
    planned = {p.site.module: p for p in plan.linears if p.choice is not None}
    servers = servers_of(model, planned, {site.module for site in plan.fused.linears}, None)
    assert (servers[own], servers[packed], servers[taken]) == (Server.FOREIGN, Server.KERNELS, Server.KERNELS)
    assert servers.keys() == {module for module in model.modules() if isinstance(module, nn.Linear)}
    assert [dropped.reason for dropped in plan.fused.dropped if dropped.name == "model.layers.0.mlp"] == [OWN_FORWARD]

    class EverySplit:
        def joins(self, name: str) -> bool:
            return "o_proj" in name

    split: Any = EverySplit()
    for name, module in model.named_modules():
        if name.endswith("o_proj"):
            assert servers_of(model, planned, (), split)[module] is Server.RANKS
            assert servers_of(model, planned, (), None)[module] is Server.KERNELS
    assert servers_of(model, {}, (), None)[taken] is Server.TORCH
