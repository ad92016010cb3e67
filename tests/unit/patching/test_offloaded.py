"""Linears that accelerate offloads to a disk or to the CPU's memory run quantized; everything else stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.linear import QuantLinear
from hf_accel.patching.check import MOVED, NOTE

from ...parity.families import build
from ...parity.test_interfaces import greedy, logits

# older transformers warn of offloaded weights
pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate\\(\\):UserWarning")
INT4 = hf_accel.WeightConfig(4, group_size=32)
UP = "model.layers.0.mlp.up_proj"
Offload = Callable[[PreTrainedModel, Path], PreTrainedModel]


def to_memory(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def to_disk(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return accelerate.disk_offload(model, folder / "offloaded", execution_device="cpu")


def loaded(model: PreTrainedModel, folder: Path, **places: str) -> PreTrainedModel:
    """from_pretrained with parts on a disk, and the others in memory."""
    model.save_pretrained(folder / "model")
    rest = dict.fromkeys(("embed_tokens", "norm", "rotary_emb"), "cpu") | places
    layers = {f"model.layers.{i}": "disk" if i else "cpu" for i in range(model.config.num_hidden_layers)}
    device_map = {f"model.{name}": place for name, place in rest.items()} | layers | {"lm_head": "cpu"}
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=device_map, offload_folder=folder / "offloaded"
    )


def partly(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return loaded(model, folder)


def first_parameter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """With the first parameter on the meta device, which model.device is."""
    return loaded(model, folder, embed_tokens="disk")


def whole(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder / "model")
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map={"": "disk"}, offload_folder=folder / "offloaded"
    )


def objects(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """What each module is, its hook, its forward and its parameters in memory: a hook makes others for each call."""
    return {
        name: (
            id(module),
            *(id(vars(module).get(key)) for key in ("_hf_hook", "forward")),
            *(p.is_meta or id(p) for p in module._parameters.values() if p is not None),
        )
        for name, module in model.named_modules()
    }


def quantized(model: PreTrainedModel) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantLinear)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", ["int8", INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("offload", [to_memory, to_disk, partly, first_parameter, whole], ids=lambda f: f.__name__)
def test_as_a_model_in_memory(offload: Offload, weights: Any, tmp_path: Path) -> None:
    reference = hf_accel.patch(build("llama"), weights=weights, fuse=False)
    model = offload(build("llama"), tmp_path)
    stock, before = logits(model), objects(model)
    hf_accel.patch(model, weights=weights, fuse=False)
    assert quantized(model) == quantized(reference)
    assert torch.equal(logits(model), logits(reference))
    assert torch.equal(greedy(model), greedy(reference))
    hf_accel.unpatch(model)
    assert objects(model) == before
    assert torch.equal(logits(model), stock)


@pytest.mark.parametrize("offload", [to_memory, to_disk], ids=lambda f: f.__name__)
def test_biases_and_weights_with_inputs_first(offload: Offload, tmp_path: Path) -> None:
    """GPT-2's Conv1D."""
    model = build("gpt2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    reference = hf_accel.patch(copy.deepcopy(model), fuse=False)
    hf_accel.patch(offload(model, tmp_path), fuse=False)
    assert len(quantized(model)) == len(quantized(reference)) > 4
    assert torch.equal(logits(model), logits(reference))


def test_exact_weights_stay_with_their_hooks(tmp_path: Path) -> None:
    model = to_disk(build("llama"), tmp_path)
    stock, expected = logits(model), greedy(build("llama"))
    hf_accel.patch(model, weights=None)
    assert not quantized(model) and (logits(model) - stock).norm() < 1e-5 * stock.norm()
    assert torch.equal(greedy(model), expected)


def test_the_disk_is_not_read_again(tmp_path: Path) -> None:
    model = hf_accel.patch(to_disk(build("llama"), tmp_path))
    expected = logits(model)
    files = [tmp_path / "offloaded" / f"{name}.weight.dat" for name in quantized(model)]
    moved = {file: file.rename(file.with_suffix(".away")) for file in files}
    assert len(moved) > 4 and torch.equal(logits(model), expected)
    for file, away in moved.items():
        away.rename(file)
    hf_accel.unpatch(model)
    assert torch.equal(logits(model), logits(build("llama")))


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    model = to_disk(build("llama"), tmp_path)
    before = objects(model)
    file = tmp_path / "offloaded" / f"{UP}.weight.dat"
    file.rename(tmp_path / "away")
    with pytest.raises(hf_accel.HfAccelError, match=rf"'{UP}.weight' cannot be read from where accelerate offloads"):
        hf_accel.patch(model)
    assert objects(model) == before and not hf_accel.is_patched(model)
    (tmp_path / "away").rename(file)
    assert torch.equal(logits(model), logits(build("llama")))


def test_a_weight_of_another_shape(tmp_path: Path) -> None:
    model = to_memory(build("llama"), tmp_path)
    hook = model.get_submodule(UP)._hf_hook
    hook.weights_map.dataset[f"{UP}.weight"] = torch.zeros(3, 5)
    with pytest.raises(hf_accel.HfAccelError, match=r"has the shape \[3, 5\] where accelerate offloads it"):
        hf_accel.patch(model)


def test_numbers_that_are_none_are_found_before_the_first_weight_is_freed(tmp_path: Path) -> None:
    model = to_memory(build("llama"), tmp_path)
    model.get_submodule(UP)._hf_hook.weights_map.dataset[f"{UP}.weight"].fill_(float("nan"))
    with pytest.raises(hf_accel.UnsupportedError, match=rf"'{UP}' cannot be quantized: the weight holds NaN"):
        hf_accel.patch(model, keep_original=False)


def test_nothing_of_accelerate_s_is_freed(tmp_path: Path) -> None:
    """keep_original=False frees what is in memory for good, and an offloaded weight is not."""
    model = to_disk(build("llama"), tmp_path)
    assert "originals stay where accelerate offloads them" in " ".join(str(hf_accel.plan(model)).split())
    hf_accel.unpatch(hf_accel.patch(model, keep_original=False))
    assert torch.equal(logits(model), logits(build("llama")))
    other = partly(build("llama"), tmp_path)
    made = str(hf_accel.plan(other, keep_original=False))
    assert "keep_original=False drops the original weights" in " ".join(made.split())
    with pytest.raises(hf_accel.UnsupportedError, match="were dropped by keep_original=False"):
        hf_accel.unpatch(hf_accel.patch(other, keep_original=False))


def test_the_plan_says_where_weights_come_from_and_counts_all(tmp_path: Path) -> None:
    made, of_memory = hf_accel.plan(to_disk(build("llama"), tmp_path)), hf_accel.plan(build("llama"))
    assert (made.bytes_before, made.bytes_after) == (of_memory.bytes_before, of_memory.bytes_after)
    assert {p.reason for p in made.quantized if NOTE in p.reason} and len(made.quantized) == len(of_memory.quantized)
    assert "on cpu" in made.title


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules:UserWarning")
def test_saved_and_loaded(tmp_path: Path) -> None:
    model = hf_accel.patch(whole(build("llama"), tmp_path), fuse=False)
    model.save_pretrained(tmp_path / "saved")
    again = hf_accel.patch(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), fuse=False)
    assert quantized(again) == quantized(model) and torch.equal(logits(again), logits(model))


def test_loaded_by_us(tmp_path: Path) -> None:
    """hf_accel.load reads a model that from_pretrained offloads."""
    build("llama").save_pretrained(tmp_path / "model")
    reference = hf_accel.load(tmp_path / "model", fuse=False)
    model = hf_accel.load(
        tmp_path / "model", fuse=False, device_map={"": "disk"}, offload_folder=tmp_path / "offloaded"
    )
    assert quantized(model) == quantized(reference) and torch.equal(logits(model), logits(reference))
    hf_accel.unpatch(model)
    assert torch.equal(logits(model), logits(build("llama")))


# -- what stays --------------------------------------------------------------------------------------------------


def another_hook(linear: Any) -> None:
    add_hook_to_module(linear, ModelHook(), append=True)


def outputs_moved_back(linear: Any) -> None:
    linear._hf_hook.io_same_device = True


def a_forward_under_the_hook(linear: Any) -> None:
    forward = linear._old_forward
    linear._old_forward = lambda x: 2 * forward(x)


def a_forward_over_the_hook(linear: Any) -> None:
    forward = linear.forward
    linear.forward = lambda x: 2 * forward(x)


def a_hook_of_another_kind(linear: Any) -> None:
    class Doubling(AlignDevicesHook):
        def post_forward(self, module: Any, output: Tensor) -> Tensor:
            return 2 * super().post_forward(module, output)

    linear._hf_hook.__class__ = Doubling


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (another_hook, MOVED),
        (outputs_moved_back, MOVED),
        (a_hook_of_another_kind, None),
        (a_forward_under_the_hook, "has a forward of its own under a hook of accelerate"),
        (a_forward_over_the_hook, "has a forward of its own under a hook of accelerate"),
    ],
)
def test_what_is_not_known_stays(change: Callable[[Any], None], reason: str | None, tmp_path: Path) -> None:
    model = to_disk(build("llama"), tmp_path)
    linear = model.get_submodule(UP)
    change(linear)
    stock = logits(model)
    if reason is None:  # whose weights a hook brings in that we do not know: nothing is patched
        with pytest.raises(hf_accel.UnsupportedError, match=f"'{UP}.weight' is on the meta device"):
            hf_accel.patch(model)
        return
    assert {p.site.name: p.reason for p in hf_accel.plan(model).linears if p.choice is None} == {UP: reason}
    hf_accel.patch(model)
    assert model.get_submodule(UP) is linear
    assert (logits(model) - stock).norm() < 0.05 * stock.norm()


def test_a_hook_that_only_doubles_in_memory(tmp_path: Path) -> None:
    """Nothing is offloaded, and the hook is of a class that is derived from accelerate's."""
    model = build("llama")
    linear = model.get_submodule(UP)
    add_hook_to_module(linear, AlignDevicesHook("cpu"))
    assert {p.reason for p in hf_accel.plan(model).linears if p.choice is None} == set()
    a_hook_of_another_kind(linear)
    stock = logits(model)
    hf_accel.patch(model)
    assert model.get_submodule(UP) is linear and (logits(model) - stock).norm() < 0.05 * stock.norm()


def test_parts_on_other_devices(tmp_path: Path) -> None:
    """Inputs may come from a GPU then, and a hook takes them to the CPU."""
    model = partly(build("llama"), tmp_path)
    model.hf_device_map = {**model.hf_device_map, "lm_head": 0}
    assert {p.reason for p in hf_accel.plan(model).linears} == {MOVED}


@pytest.mark.parametrize("device", ["cuda", 0, torch.device("cuda", 0)])
def test_what_a_gpu_computes_is_refused(device: Any, tmp_path: Path) -> None:
    """Nobody has tried it: such a model runs as it is."""
    model = to_memory(build("llama"), tmp_path)
    model.get_submodule(UP)._hf_hook.execution_device = device
    with pytest.raises(hf_accel.UnsupportedError, match=rf"'{UP}.weight' is on the meta device, since accelerate"):
        hf_accel.patch(model)


@pytest.mark.parametrize("settings", [{"method": "gptq"}, {"method": "awq"}, {"average_bits": 5}])
def test_calibration_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    model = to_memory(build("llama"), tmp_path)
    config = {"bits": 4, "group_size": 32, "calibration": torch.ones(2, 8, dtype=torch.int64), **settings}
    with pytest.raises(hf_accel.UnsupportedError, match="calibration reads all weights while the model runs"):
        hf_accel.patch(model, weights=config)


def test_layers_of_bitsandbytes_are_not_put_in(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = to_memory(build("llama"), tmp_path)
    stock = logits(model)
    assert {p.reason for p in hf_accel.plan(model, weights="nf4").linears if not p.site.is_head} == {MOVED}
    hf_accel.patch(model, weights="nf4", fuse=False)
    assert (logits(model) - stock).norm() < 1e-5 * stock.norm()
