from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from transformers import AutoModelForCausalLM, LlamaModel, PreTrainedModel, TextGenerationPipeline

import hf_accel
from hf_accel import UnsupportedError
from hf_accel.patching.check import check_model
from hf_accel.patching.planning import make_plan

from ...parity.families import build, prompts
from ...parity.letters import letters


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList([model])


NOT_A_MODEL: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: None, "NoneType; pass the model that from_pretrained returned"),
    "a path": (
        lambda: "some/path",
        r"load it first, as with AutoModelForCausalLM.from_pretrained\('some/path'\)",
    ),
    "a module": (lambda: nn.Linear(2, 2), "Linear; pass the model that from_pretrained returned"),
    "weights": (lambda: build("llama").state_dict(), "OrderedDict; pass the model that from_pretrained returned"),
    "a class": (lambda: LlamaModel, "the class LlamaModel; pass a model of it, as its from_pretrained returns one"),
    "a config": (lambda: build("llama").config, r"make a model of it first, as with .*from_config\(config\)"),
    "a tokenizer": (letters, "pass the model that it is the tokenizer of"),
    "compiled": (
        lambda: torch.compile(build("llama"), backend="eager"),
        r"compiled: pass model\._orig_mod, or patch before",
    ),
    "data parallel": (lambda: nn.DataParallel(build("llama")), r"in it, model\.module$"),
    "compiled within": (
        lambda: Wrapped(torch.compile(build("llama"), backend="eager")),  # type: ignore[arg-type]
        r"compiled: pass model\.inner\.0\._orig_mod, or patch before",
    ),
}


@pytest.mark.parametrize("what", NOT_A_MODEL)
def test_not_a_model(what: str) -> None:
    make, message = NOT_A_MODEL[what]
    given: Any = make()
    plan, verify = partial(make_plan, config=hf_accel.PatchConfig()), partial(hf_accel.verify, prompts=[[1, 2]])
    for function in (plan, hf_accel.patch, hf_accel.unpatch, hf_accel.stats, verify):
        with pytest.raises(UnsupportedError, match=f"PreTrainedModel, not on .*{message}"):
            function(given)
    assert not hf_accel.is_patched(given)


def test_what_is_within_can_be_patched() -> None:
    """What the errors propose, tried."""
    ids = prompts(1, 5)
    for make in (
        partial(torch.compile, backend="eager"),
        nn.DataParallel,
        lambda model: TextGenerationPipeline(model, letters()),
    ):
        model = build("llama")
        given = make(model)
        names = ("_orig_mod", "module", "model")
        inner = next(getattr(given, name) for name in names if name in vars(given).get("_modules", vars(given)))
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)
        hf_accel.patch(inner, weights=None)
        assert torch.equal(inner.generate(ids, max_new_tokens=4, do_sample=False), expected)
        hf_accel.unpatch(inner)


def test_a_compiled_model_knows_that_it_is_patched() -> None:
    model = torch.compile(hf_accel.patch(build("llama")), backend="eager")
    model.generate(prompts(1, 5), max_new_tokens=2)
    assert hf_accel.is_patched(model)
    assert hf_accel.stats(model)["new_tokens"] == 2
    with pytest.raises(UnsupportedError, match=r"compiled: pass model\._orig_mod"):
        hf_accel.unpatch(model)
    assert not hf_accel.is_patched(hf_accel.unpatch(model._orig_mod))


def test_meta_device() -> None:
    config = build("llama").config
    with torch.device("meta"):
        model = type(build("llama"))(config)
    with pytest.raises(UnsupportedError, match=r"'model.embed_tokens.weight' is on the meta device"):
        check_model(model)


def test_what_accelerate_offloads() -> None:
    """To the CPU it is known where each hook brings its weights: test_offloaded.py. Here another module's does it."""
    model = build("llama")
    norm = model.model.norm
    cpu_offload(model, execution_device=torch.device("cpu"))
    check_model(model)
    del norm._hf_hook
    with pytest.raises(UnsupportedError, match=r"accelerate brings it in .* load the model without offloading"):
        hf_accel.patch(model)


def test_inside_of_a_peft_wrapper() -> None:
    class Wrapper(nn.Module):
        def get_base_model(self) -> PreTrainedModel:
            return model

    model = build("llama")
    assert check_model(Wrapper()) is model
    assert check_model(model) is model


@pytest.mark.parametrize(
    ("skip", "hint"),
    [
        ("lm_haed", "did you mean 'lm_head'?"),
        ("mlp", "did you mean 'mlp.down_proj', 'mlp.gate_proj', 'mlp.up_proj'?"),
        ("model", r"did you mean 'model.layers.0.mlp.down_proj', .*, \.\.\.\?"),
        ("xyz", "there are 'down_proj', 'gate_proj', 'k_proj', 'lm_head'"),
        ("roj", "of no Linear"),
        ("self_attn.*", "of no Linear"),
    ],
)
def test_a_name_in_skip_that_skips_nothing(skip: str, hint: str) -> None:
    model = build("llama")
    for function in (hf_accel.plan, hf_accel.patch):
        with pytest.raises(hf_accel.UnsupportedError, match=f"skip='{re.escape(skip)}' is .*{hint}"):
            function(model, weights={"skip": ["q_proj", skip]})
    assert not hf_accel.is_patched(model)


def test_what_is_meant_by_a_module_that_is_no_linear_skips_it() -> None:
    """What the error proposes is taken."""
    names = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
    plan = hf_accel.plan(build("llama"), weights={"skip": names})
    assert {p.site.name.rpartition(".")[2] for p in plan.linears if p.choice is None} == {n[4:] for n in names}


def test_a_name_in_skip_that_skips_nothing_while_loading(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    config = hf_accel.AccelConfig(weights={"skip": ["qproj"]})
    with pytest.raises(hf_accel.UnsupportedError, match=r"skip='qproj' is .* did you mean 'q_proj'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
