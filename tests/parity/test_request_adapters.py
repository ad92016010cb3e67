"""Adapters of requests: each gets the tokens that PEFT gives it alone, whatever the others of its passes ask for."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_accel
from hf_accel import UnsupportedError

from ..unit.generation.tape import install
from . import test_chunks, test_compressed, test_convolutions
from .families import build, prompts
from .recurrent_models import LAYERS, state_space_of
from .snapshot import snapshot
from .speculating import OracleTree

peft = pytest.importorskip("peft")

NEW = 7
KINDS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": "all-linear", "lora_alpha": 8},
    "rs": {"target_modules": ["q_proj", "k_proj", "up_proj"], "r": 6, "lora_alpha": 8, "use_rslora": True},
    "few": {"target_modules": r".*\.1\.mlp\.(gate|down)_proj", "r": 9, "lora_alpha": 27},
    "patterns": {
        "target_modules": ["o_proj", "down_proj", "gate_proj"], "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {"0.self_attn.o_proj": 16},
    },
}  # fmt: skip
NAMES = [None, *KINDS]
IDS: list[list[int]] = [row[: 5 + 4 * number] for number, row in enumerate(prompts(5, 40).tolist())]


@torch.no_grad()
def adapted(model: Any, name: str, **others: Any) -> Any:
    outer = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", **KINDS[name], **others}))
    generator = torch.Generator().manual_seed(len(name))
    for key, parameter in sorted(outer.named_parameters()):
        if "lora_" in key:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return outer.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an adapter of each kind."""
    folder = tmp_path_factory.mktemp("adapters")
    for name in KINDS:
        adapted(build("llama"), name).save_pretrained(folder / name)
    return folder


def alone(model: Any, ids: list[int], new: int = NEW) -> list[int]:
    given = torch.tensor([ids])
    out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False)
    return out[0, len(ids) :].tolist()


def expected(folder: Path, weights: Any, ids: list[list[int]], new: int = NEW) -> list[list[int]]:
    """PEFT's tokens of each prompt, the first with no adapter, the next with each, and so on."""
    found = []
    for number, row in enumerate(ids):
        model, name = build("llama"), NAMES[number % len(NAMES)]
        if weights is not None:
            hf_accel.patch(model, weights=weights)
        outer = model if name is None else peft.PeftModel.from_pretrained(model, folder / name).eval()
        found.append(alone(outer, row, new))
    return found


def served(
    folder: Path,
    model: Any,
    ids: list[list[int]],
    new: int = NEW,
    *,
    names: Sequence[str | None] = NAMES,
    **settings: Any,
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the tokens of requests with these adapters in turn, and what the engine says of itself."""
    with hf_accel.Engine(model, **settings) as engine:
        for name in KINDS:
            engine.load_adapter(name, folder / name)
        rows = [
            engine.submit(row, max_new_tokens=new, temperature=0, seed=0, adapter=names[number % len(names)])
            for number, row in enumerate(ids)
        ]
        return [row.result().tokens for row in rows], engine.stats


@pytest.mark.parametrize("weights", [None, "int8", {"bits": 4, "group_size": 32}], ids=["exact", "int8", "int4"])
def test_tokens_are_those_of_peft(folder: Path, weights: Any) -> None:
    model = build("llama")
    hf_accel.patch(model, weights=weights)
    wanted = expected(folder, weights, IDS)
    assert len({tuple(row) for row in wanted}) == len(IDS)
    got, stats = served(folder, model, IDS)
    assert got == wanted and stats["passes"] < len(IDS) * NEW  # several in a pass


def test_branches_of_drafts_have_the_adapter_of_their_request(folder: Path) -> None:
    model, new = build("llama"), 24
    wanted = expected(folder, None, IDS, new)
    hf_accel.patch(model, weights=None)
    known = {(tuple(row), 0): tokens for row, tokens in zip(IDS, wanted, strict=True)}
    config = hf_accel.SpeculativeConfig(drafter=OracleTree(known), num_draft=4, max_nodes=12)
    got, stats = served(folder, model, IDS, new, speculative=config)
    assert got == wanted and stats["speculation"]["branched"]


def test_passes_of_many_tokens(folder: Path) -> None:
    """Layers run module by module in a pass of more tokens than their native calls take."""
    model, ids = build("llama"), [row * 12 for row in IDS]
    wanted = expected(folder, None, ids)
    hf_accel.patch(model, weights=None)
    assert served(folder, model, ids, token_budget=None)[0] == wanted


def test_without_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_accel.linear.adapters.refusal", lambda: "not here")
    model, ids = build("llama"), [row * 12 for row in IDS]
    hf_accel.patch(model, weights=None)
    assert served(folder, model, ids, token_budget=None)[0] == expected(folder, None, ids)


@pytest.mark.covering(1)
@pytest.mark.parametrize("own", [None, "few"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_rows_keep_their_bits_next_to_other_adapters(folder: Path, weights: Any, own: str | None) -> None:
    """In bfloat16 too, where what is rounded once and what is rounded twice differ; also in layers that adapters of
    neighbours change and the row's own one does not.
    """
    model = build("llama", dtype=torch.bfloat16)
    hf_accel.patch(model, weights=weights)

    def logprobs(neighbours: list[str]) -> list[float]:
        with hf_accel.Engine(model) as engine:
            if own is not None:
                engine.load_adapter("own", folder / own)
            named = own and "own"
            rows = [engine.submit(IDS[2], max_new_tokens=NEW, temperature=0, logprobs=0, adapter=named)]
            for name in neighbours:
                engine.load_adapter(name, folder / name)
                rows.append(engine.submit(IDS[3], max_new_tokens=NEW, temperature=0, adapter=name))
            return [each.logprob for each in rows[0].result().logprobs]

    assert logprobs([]) == logprobs(["all"]) == logprobs(["few", "rs", "patterns"])


def test_preemption_and_drafts(folder: Path) -> None:
    model, ids = build("llama"), IDS * 3
    hf_accel.patch(model, weights=None, cache={"block_size": 4})
    wanted = expected(folder, None, IDS, 20)
    got, stats = served(folder, model, ids, 20, max_tokens=96, speculative="ngram")
    assert got == wanted * 3 and stats["preemptions"], stats
    got, _ = served(
        folder, model, ids, 20, speculative=hf_accel.SpeculativeConfig(drafter=build("llama", seed=3), num_draft=3)
    )
    assert got == wanted * 3


def test_samples_share_an_adapter(folder: Path) -> None:
    model = build("llama")
    hf_accel.patch(model, weights=None)
    with hf_accel.Engine(model) as engine:
        engine.load_adapter("all", folder / "all")
        found = engine.submit(IDS[1], n=3, max_new_tokens=NEW, temperature=0, adapter="all").results()
    assert [each.tokens for each in found] == [alone(adapted(build("llama"), "all"), IDS[1])] * 3


def test_prefixes_are_not_shared_between_adapters(folder: Path) -> None:
    model, ids = build("llama"), IDS[4] * 3
    hf_accel.patch(model, weights=None)
    with hf_accel.Engine(model) as engine:
        hits, found = [], []
        for name in KINDS:
            engine.load_adapter(name, folder / name)
        for name in (*NAMES, *NAMES):
            before = engine.stats["prefix_hits"]
            found.append(engine.submit(ids, max_new_tokens=NEW, temperature=0, adapter=name).result().tokens)
            hits.append(engine.stats["prefix_hits"] - before)
        assert not any(hits[: len(NAMES)]) and all(hits[len(NAMES) :])
        assert found[: len(NAMES)] == found[len(NAMES) :] == expected(folder, None, [ids] * len(NAMES))
        engine.unload_adapter("all")
        engine.load_adapter("all", folder / "few")  # another one by the name of the first
        assert engine.submit(ids, max_new_tokens=NEW, temperature=0, adapter="all").result().tokens == found[3]
        engine.load_adapter("again", folder / "all")  # and the first by another name
        before = engine.stats["prefix_hits"]
        assert engine.submit(ids, max_new_tokens=NEW, temperature=0, adapter="again").result().tokens == found[1]
        assert engine.stats["prefix_hits"] > before


def test_unloading_while_requests_run(folder: Path) -> None:
    model = build("llama")
    hf_accel.patch(model, weights=None)
    before = snapshot(model)
    with hf_accel.Engine(model, max_running=1) as engine:
        engine.load_adapter("all", folder / "all")
        kept = weakref.ref(engine.adapters.named("all"))
        rows = [engine.submit(IDS[1], max_new_tokens=NEW, temperature=0, adapter="all") for _ in range(4)]
        engine.unload_adapter("all")
        with pytest.raises(UnsupportedError, match=r"no adapter 'all' is loaded.*load_adapter"):
            engine.submit(IDS[1], adapter="all")
        with pytest.raises(UnsupportedError, match="no adapter 'all' is loaded"):
            engine.unload_adapter("all")
        engine.load_adapter("all", folder / "few")
        with pytest.raises(UnsupportedError, match="'all' is loaded already; unload it first"):
            engine.load_adapter("all", folder / "all")
        wanted = alone(adapted(build("llama"), "all"), IDS[1])
        assert [row.result().tokens for row in rows] == [wanted] * 4
        del rows
        engine.submit(IDS[1], max_new_tokens=1).result()
        gc.collect()
        assert kept() is None, "its matrices stay in memory"
    assert snapshot(model) == before
    assert not any(module._forward_hooks for module in model.modules())


def test_a_batch(folder: Path) -> None:
    model = build("llama")
    hf_accel.patch(model, weights=None)
    paths = [None if name is None else folder / name for name in NAMES]
    found = model.generate_batch(IDS, max_new_tokens=NEW, do_sample=False, adapter=paths)
    assert [each.generated_tokens for each in found.values()] == expected(folder, None, IDS)
    found = model.generate_batch(IDS[:1], max_new_tokens=NEW, do_sample=False, adapter=str(folder / "all"))
    assert found["req_0"].generated_tokens == alone(adapted(build("llama"), "all"), IDS[0])
    with pytest.raises(UnsupportedError, match="adapter has 2 folders for 1 prompts"):
        model.generate_batch(IDS[:1], adapter=[None, None])


# -- what does not fit ---------------------------------------------------------------------------------------


def changed(folder: Path, place: Path, *, settings: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """A copy of an adapter with other settings and tensors; None takes one out."""
    config = json.loads((folder / "all" / "adapter_config.json").read_text()) | (settings or {})
    held = load_file(folder / "all" / "adapter_model.safetensors") | tensors
    place.mkdir()
    (place / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: each for name, each in held.items() if each is not None}, place / "adapter_model.safetensors")
    return place


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"
A, B, LATER = f"{FIRST}.lora_A.weight", f"{FIRST}.lora_B.weight", "base_model.model.model.layers.7.mlp.up_proj"


SHORT = {"target_modules": [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]}


@pytest.mark.parametrize(
    ("settings", "tensors", "reason"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type 'IA3' is not 'LORA'"),
        ({"use_dora": True}, {}, "use_dora=True is not known"),
        ({"modules_to_save": ["lm_head"]}, {}, r"modules_to_save=\['lm_head'\] is not known"),
        ({"something_new": 3}, {}, "something_new=3 is not known"),
        ({"bias": "all"}, {}, "bias='all' changes biases of the model"),
        ({"init_lora_weights": "pissa"}, {}, "'pissa' was trained next to other weights"),
        ({"lora_alpha": None}, {}, "lora_alpha=None is no positive number"),
        ({"r": 5}, {}, "has rank 4, and adapter_config.json says 5"),
        ({"target_modules": ["k_proj"]}, {}, "do not name it, so that PEFT leaves it out"),
        ({"exclude_modules": ["q_proj"]}, {}, r"its exclude_modules \['q_proj'\] name it, so that PEFT leaves it out"),
        ({"exclude_modules": r".*\.0\..*"}, {}, "its exclude_modules .* name it"),
        ({**SHORT, "layers_to_transform": [1]}, {}, r"layers_to_transform \[1\] do not name it"),
        ({**SHORT, "layers_to_transform": 0, "layers_pattern": "blocks"}, {}, "layers_to_transform 0 do not name it"),
        ({"target_modules": "("}, {}, r"cannot be read \(missing"),
        ({}, {A: None}, "has only matrix B of A and B"),
        ({}, {A: torch.ones(4, 31)}, r"it changes a layer \[32, 31\], and that of the model is \[32, 32\]"),
        ({}, {A: torch.ones(3, 32)}, "have no common rank"),
        ({}, {A: torch.ones(4, 32, dtype=torch.int32)}, "its matrices are torch.int32"),
        ({}, {f"{FIRST}.lora_magnitude_vector": torch.ones(32)}, "is no matrix A or B of a linear layer"),
        (
            {},
            {f"{LATER}.lora_A.weight": torch.ones(4, 32), f"{LATER}.lora_B.weight": torch.ones(64, 4)},
            "no such layer",
        ),
    ],
)
def test_adapters_that_do_not_fit(
    folder: Path, tmp_path: Path, settings: dict[str, Any], tensors: dict[str, Any], reason: str
) -> None:
    place = changed(folder, tmp_path / "adapter", settings=settings, **tensors)
    with hf_accel.Engine(patched()) as engine:
        with pytest.raises(UnsupportedError, match=reason):
            engine.load_adapter("own", place)
        assert engine.adapters.names == []


def patched(family: str = "llama", **settings: Any) -> Any:
    model = build(family)
    hf_accel.patch(model, **{"weights": None, **settings})
    return model


def test_other_places_of_a_model(folder: Path, tmp_path: Path) -> None:
    """The head gets rows of its own, and Conv1D of GPT-2 is no linear layer."""
    names = {"head": "lm_head", "embedding": "model.embed_tokens"}
    reasons = {"head": "it is not a linear layer of the decoder", "embedding": "it is a Embedding"}
    with hf_accel.Engine(patched()) as engine:
        for kind, name in names.items():
            more = {f"base_model.model.{name}.lora_A.weight": torch.ones(4, 32),
                    f"base_model.model.{name}.lora_B.weight": torch.ones(101, 4)}  # fmt: skip
            with pytest.raises(UnsupportedError, match=reasons[kind]):
                engine.load_adapter(kind, changed(folder, tmp_path / kind, **more))
        with pytest.raises(UnsupportedError, match=r"adapter_config.json cannot be read.*give a folder"):
            engine.load_adapter("none", tmp_path)
    with hf_accel.Engine(patched("gpt2")) as engine, pytest.raises(UnsupportedError, match="has no such layer"):
        engine.load_adapter("foreign", folder / "all")
    outer = adapted(patched(), "all")
    with (
        hf_accel.Engine(outer) as engine,
        pytest.raises(UnsupportedError, match="PEFT has put adapters into it already"),
    ):
        engine.load_adapter("second", folder / "all")


def test_a_linear_layer_that_returns_more_than_its_product(tmp_path: Path) -> None:
    """Llama 4's router is one."""
    model = test_chunks.model_of()
    name, router = next((n, m) for n, m in model.named_modules() if n.endswith(".router"))
    tensors = {"A": torch.randn(2, router.in_features), "B": torch.randn(router.out_features, 2)}
    save_file({f"base_model.model.{name}.lora_{key}.weight": x for key, x in tensors.items()},
              tmp_path / "adapter_model.safetensors")  # fmt: skip
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": [name]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with (
        hf_accel.Engine(hf_accel.patch(model, weights=None)) as engine,
        pytest.raises(UnsupportedError, match="Llama4Router returns a tuple"),
    ):
        engine.load_adapter("router", tmp_path)


def test_a_model_that_changes_under_its_adapters(folder: Path) -> None:
    """Nothing of an adapter is left out without a word."""
    model = patched()
    with hf_accel.Engine(model) as engine:
        engine.load_adapter("all", folder / "all")
        layer = model.model.layers[1].mlp
        layer.up_proj = copy.deepcopy(layer.up_proj)
        with pytest.raises(UnsupportedError, match="has not called each of their layers once"):
            engine.submit(IDS[0], max_new_tokens=2, adapter="all").result()
        assert engine.submit(IDS[0], max_new_tokens=2).result().tokens


OTHER_KINDS: dict[str, Callable[[], Any]] = {
    name: partial(test_compressed.model_of, name) for name in ("MiniCPM3", "DeepseekV3")
} | {
    name: partial(state_space_of, name, LAYERS, tokens=4, repeats=1) for name in ("granite", "jamba", "nemotron_h")
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_layers_that_are_other_native_calls(kind: str, tmp_path: Path) -> None:
    """Compressed keys, experts behind a call, and states: their layers compute such passes module by module."""
    build_one = OTHER_KINDS[kind]
    names = ["q_a_proj", "q_proj", "in_proj", "o_proj", "output_linear"]
    outer = adapted(build_one(), "all", target_modules=names)
    outer.save_pretrained(tmp_path / "all")
    wanted = [alone(build_one(), IDS[0]), alone(outer, IDS[1])]
    assert wanted[1] != alone(build_one(), IDS[1])
    model = hf_accel.patch(build_one(), weights=None)
    with hf_accel.Engine(model) as engine:
        engine.load_adapter("all", tmp_path / "all")
        given = [(IDS[0], None), (IDS[1], "all")]
        jobs = [engine.submit(row, max_new_tokens=NEW, temperature=0, adapter=name) for row, name in given]
        assert [job.result().tokens for job in jobs] == wanted


def test_an_adapter_of_what_makes_keys_and_values_is_refused(tmp_path: Path) -> None:
    """Its weight multiplies queries and results, so that it is not called on the rows of a pass."""
    adapted(test_compressed.model_of(), "all", target_modules=["kv_b_proj"]).save_pretrained(tmp_path / "all")
    with hf_accel.Engine(hf_accel.patch(test_compressed.model_of(), weights=None)) as engine:
        with pytest.raises(UnsupportedError, match="load an adapter that leaves this layer as it is"):
            engine.load_adapter("all", tmp_path / "all")
        assert engine.submit(IDS[0], max_new_tokens=2).result().tokens


def test_a_layer_with_a_convolution(tmp_path: Path) -> None:
    """Its linear layers are part of a native call, to which those of an adapter are added."""
    outer = adapted(test_convolutions.model_of(), "all")
    outer.save_pretrained(tmp_path / "all")
    wanted = [alone(test_convolutions.model_of(), IDS[0]), alone(outer, IDS[1])]
    model = hf_accel.patch(test_convolutions.model_of(), weights=None)
    with hf_accel.Engine(model) as engine:
        engine.load_adapter("all", tmp_path / "all")
        given = [(IDS[0], None), (IDS[1], "all")]
        jobs = [engine.submit(row, max_new_tokens=NEW, temperature=0, adapter=name) for row, name in given]
        assert [job.result().tokens for job in jobs] == wanted
    assert all(calls.programme is not None for calls in test_convolutions.layer_calls(model))


def test_a_pass_with_adapters_is_no_graph(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would hold what the adapters of its capture add.

    Each request has one: a pass of one without may be prepared ahead, if the engine takes it before the others come.
    """
    wanted = expected(folder, None, IDS)[1:]
    install(monkeypatch)
    model = build("llama")
    hf_accel.patch(model, weights=None, attention="tape")
    got, stats = served(folder, model, IDS[1:], names=list(KINDS))
    assert got == wanted and stats["graphs"]["eager"]["some of its rows have adapters"] >= NEW - 1
    assert stats["graphs"]["ahead"]["launched"] == 0
