"""save_pretrained writes the blocks that the kernels read, and a reader runs them where they lie in the file."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, conversion_mapping
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

import hf_accel
from hf_accel.checkpoints.readers import reader
from hf_accel.hardware.file_pages import MAPS
from hf_accel.kernels import cpu as kernels
from hf_accel.linear import QuantLinear
from hf_accel.linear.backends.cpu import Cpu
from hf_accel.linear.formats import Int2Weight, Int3Weight, Int4Weight, Int8Weight, QuantizedWeight, state
from hf_accel.linear.formats.blocks import ALIGNMENT, tensors_of
from hf_accel.patching import originals

from ...parity.families import DECODER, build
from ...parity.snapshot import bits, logits
from .test_checkpoint import without_blocks

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

Q = "model.layers.0.self_attn.q_proj"
GROUPS = {"bits": 4, "group_size": 32, "head": None}
WEIGHTS: dict[str, Any] = {
    "int8": "int8",
    "int8 in groups": {"bits": 8, "group_size": 32},
    "int4": GROUPS,
    "asymmetric": {**GROUPS, "symmetric": False},
    "int3": {**GROUPS, "bits": 3},
    "int2": {**GROUPS, "bits": 2, "symmetric": False},
}


def contents(model: PreTrainedModel) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data of a file begin, and its header."""
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    return 8 + size, json.loads(content[8 : 8 + size])


def mapped(tensor: Tensor, file: Path) -> bool:
    """Return whether the memory of a tensor is that of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.endswith(str(file))
    return False


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights stay in their files."""
    monkeypatch.setenv("HF_ACCEL_MAP_WEIGHTS", "1")


def packed(model: PreTrainedModel, name: str = Q) -> Tensor:
    layer: Any = model.get_submodule(name)
    found: Tensor = layer._packed.weight.packed
    return found


# -- the layout --------------------------------------------------------------------------------------


def numbers(*shape: int, low: int, high: int) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(7), dtype=torch.int8)


def int8(outputs: int, inputs: int) -> QuantizedWeight:
    return Int8Weight(numbers(outputs, inputs, low=-128, high=127), torch.rand(outputs, 1))


def int8_minima(outputs: int, inputs: int) -> QuantizedWeight:
    scale, minimum = torch.rand(2, outputs, inputs // 16).half()
    return Int8Weight(numbers(outputs, inputs, low=-128, high=127), scale, None, minimum)


def int4(outputs: int, inputs: int) -> QuantizedWeight:
    scale = torch.rand(outputs, inputs // 8).bfloat16()
    return Int4Weight.from_integers(numbers(outputs, inputs, low=-8, high=7), scale)


def int4_zeros(outputs: int, inputs: int) -> QuantizedWeight:
    zeros = numbers(outputs, inputs // 8, low=-8, high=7)
    return Int4Weight.from_integers(numbers(outputs, inputs, low=-8, high=7), torch.rand(outputs, inputs // 8), zeros)


def int4_minima(outputs: int, inputs: int) -> QuantizedWeight:
    scale, minimum = torch.rand(2, outputs, inputs // 16)
    return Int4Weight.from_integers(numbers(outputs, inputs, low=-8, high=7), scale).changed(weight_minimum=minimum)


def int3(outputs: int, inputs: int) -> QuantizedWeight:
    zeros = numbers(outputs, inputs // 32, low=-4, high=3)
    return Int3Weight.from_integers(numbers(outputs, inputs, low=-4, high=3), torch.rand(outputs, inputs // 32), zeros)


def int2(outputs: int, inputs: int) -> QuantizedWeight:
    scale, minimum = torch.rand(2, outputs, inputs // 16)
    return Int2Weight.from_integers(numbers(outputs, inputs, low=-2, high=1), scale).changed(weight_minimum=minimum)


OF_32 = [(int3, (64, 32)), (int3, (150, 96)), (int3, (1, 64))]
OTHERS = [
    (make, shape)
    for make in (int8, int8_minima, int4, int4_zeros, int4_minima, int2)
    for shape in ((64, 32), (150, 48), (1, 16))
]


@pytest.mark.parametrize(("make", "shape"), [*OTHERS, *OF_32])
def test_plain_torch_reads_what_kernels_packed(make: Callable[..., QuantizedWeight], shape: tuple[int, int]) -> None:
    weight, backend = make(*shape), Cpu()
    blocks = backend.blocks(backend.pack(weight))
    assert blocks is not None
    again = blocks.stored(weight.layout, shape)
    assert {n: bits(t) for n, t in state(again).items()} == {n: bits(t) for n, t in state(weight).items()}
    assert type(again) is type(weight)
    adopted = backend.adopt(blocks, weight.layout, shape)
    assert adopted is not None
    x = torch.randn(3, shape[1])
    assert torch.equal(backend.run(x, adopted, None), backend.run(x, backend.pack(weight), None))
    assert adopted.layout == backend.pack(weight).layout


def test_odd_inputs_are_padded() -> None:
    weight, backend = int8(70, 33), Cpu()
    blocks = backend.blocks(backend.pack(weight))
    assert blocks is not None
    assert blocks.weight_blocks.shape == (2, 64 * 36)
    assert torch.equal(blocks.stored(weight.layout, (70, 33)).integers(), weight.integers())


@pytest.mark.parametrize("make", [int8, int4_zeros])
def test_experts_follow_each_other(make: Callable[..., QuantizedWeight]) -> None:
    whole, backend = make(3 * 40, 32), Cpu()  # an expert ends in the middle of a block
    parts = [backend.pack(whole.part(slice(40 * i, 40 * i + 40))) for i in range(3)]
    if isinstance(whole, Int4Weight):
        assert whole.weight_zero_point is not None
    found = [backend.blocks(part) for part in parts]
    joined = type(found[0]).joined([one for one in found if one is not None])  # type: ignore[attr-defined]
    again = joined.stored(whole.layout, (40, 32), experts=3)
    assert torch.equal(again.integers(), whole.integers())
    assert torch.equal(again.dequantize(torch.float32), whole.dequantize(torch.float32))
    assert [bits(one.weight_blocks) for one in joined.parts(3)] == [bits(one.weight_blocks) for one in found if one]


# -- files -------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])  # with biases; with Conv1D
@pytest.mark.usefixtures("shared")
def test_a_file_runs_where_it_lies(family: str, weights: Any, tmp_path: Path) -> None:
    model = hf_accel.patch(build(family), weights=weights)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    data, entries = header(file)
    blocks = [entry for name, entry in entries.items() if name.endswith(".weight_blocks")]
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    assert len(blocks) == len(layers)
    assert {(data + entry["data_offsets"][0]) % ALIGNMENT for entry in blocks} == {0}
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert contents(again) == contents(model)
    assert torch.equal(logits(again), logits(model))
    assert all(mapped(packed(again, name), file.resolve()) for name in layers)
    assert [layer.layout for layer in layers.values()] == [again.get_submodule(name).layout for name in layers]


@pytest.mark.parametrize("tied", [True, False])
def test_tables_and_ties(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**DECODER, tie_word_embeddings=tied)).eval()
    hf_accel.patch(model, weights="int8").save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert contents(again) == contents(model)
    assert torch.equal(logits(again), logits(model))


def test_a_machine_without_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_accel.patch(build("qwen2"), weights=WEIGHTS["asymmetric"])
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(Cpu, "adopt", lambda *_: None)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert contents(again) == contents(model)
    assert torch.equal(logits(again), logits(model))
    layer: Any = again.get_submodule(Q)
    assert layer.layout_of_blocks is None


@pytest.mark.usefixtures("shared")
def test_pieces_are_copied_to_lines(tmp_path: Path) -> None:
    model = hf_accel.patch(build("qwen2"))
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert contents(again) == contents(model)
    names = [name for name, layer in again.named_modules() if isinstance(layer, QuantLinear)]
    assert all(packed(again, name).data_ptr() % ALIGNMENT == 0 for name in names)


def test_another_dtype(tmp_path: Path) -> None:
    build("qwen2").save_pretrained(tmp_path / "float")
    for name, context in (("blocks", pytest.MonkeyPatch.context()), ("stored", without_blocks())):
        with context:
            hf_accel.patch(build("qwen2"), weights=GROUPS).save_pretrained(tmp_path / name)
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path / n, dtype=torch.bfloat16) for n in ("blocks", "stored")]
    assert contents(loaded[0]) == contents(loaded[1])
    assert torch.equal(logits(loaded[0]), logits(loaded[1]))


@pytest.mark.usefixtures("shared")
def test_a_file_is_replaced_and_not_cut(tmp_path: Path) -> None:
    """A process that has mapped the file keeps what it had."""
    hf_accel.patch(build("qwen2")).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    before, expected = logits(model), contents(model)
    hf_accel.patch(build("qwen2", seed=1), weights=GROUPS).save_pretrained(tmp_path)
    assert torch.equal(logits(model), before)
    model.save_pretrained(tmp_path)  # over a file that others may have mapped, and its own
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(model), before)
    assert contents(AutoModelForCausalLM.from_pretrained(tmp_path)) == expected


@pytest.mark.usefixtures("shared")
def test_copies_have_memory_of_their_own(tmp_path: Path) -> None:
    hf_accel.patch(build("qwen2"), weights=GROUPS).save_pretrained(tmp_path)
    file = (tmp_path / "model.safetensors").resolve()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected, buffer = logits(model), io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert {n: bits(t) for n, t in torch.load(buffer).items()} == contents(model)
    assert f"{Q}.weight_packed" in model.state_dict()  # in memory, the stored form
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(copied), expected)
        assert not mapped(packed(copied), file)
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert packed(half.to(torch.float32)).shape == packed(model).shape
    other = hf_accel.patch(build("qwen2", seed=1), weights=GROUPS)
    model.load_state_dict(other.state_dict())
    assert torch.equal(logits(model), logits(other))
    assert contents(AutoModelForCausalLM.from_pretrained(tmp_path)) != contents(model)  # nothing went to the file


def test_weights_stay_in_their_file_unless_they_are_to_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hf_accel.patch(build("qwen2"), weights=GROUPS)
    model.save_pretrained(tmp_path)
    layer, file = model.get_submodule(Q), (tmp_path / "model.safetensors").resolve()
    for asked, stays in (("", Path(MAPS).exists()), ("0", False)):
        monkeypatch.setenv("HF_ACCEL_MAP_WEIGHTS", asked)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        weight: Any = again.get_submodule(Q)
        for tensor in (weight._packed.weight.packed, weight._packed.weight.scales):
            assert mapped(tensor, file) == stays
        assert torch.equal(logits(again), logits(model))
        assert repr(weight) == repr(layer)
    monkeypatch.setenv("HF_ACCEL_MAP_WEIGHTS", "yes")
    with pytest.raises(hf_accel.UnsupportedError, match="HF_ACCEL_MAP_WEIGHTS='yes' is not known"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.skipif(not Path(MAPS).exists(), reason="no /proc says which files are mapped")
def test_a_file_that_is_written_to_is_not_run_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_accel.patch(build("qwen2"), weights=GROUPS).save_pretrained(tmp_path)
    file, ids = tmp_path / "model.safetensors", torch.tensor([[5, 6, 7]])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with monkeypatch.context() as context:
        context.setenv("HF_ACCEL_MAP_WEIGHTS", "0")
        copied = AutoModelForCausalLM.from_pretrained(tmp_path)
    asked: Any = {"max_new_tokens": 2, "do_sample": False}
    expected, twin = model.generate(ids, **asked), copy.deepcopy(model)
    with file.open("r+b") as opened:  # the same bytes, at another time
        content = opened.read(8)
        opened.seek(0)
        opened.write(content)
    os.utime(file, ns=(0, 0))
    with pytest.raises(hf_accel.HfAccelError, match=r"model\.safetensors' was written to while a model runs from"):
        model.generate(ids, **asked)
    with pytest.raises(hf_accel.HfAccelError, match="was written to"), hf_accel.Engine(model) as engine:
        engine.submit([5, 6, 7], max_new_tokens=2).result()
    for other in (copied, twin, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert torch.equal(other.generate(ids, **asked), expected)
    file.unlink()
    assert torch.equal(copied.generate(ids, **asked), expected)


def test_a_file_is_opened_once_to_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_accel.patch(build("qwen2")).save_pretrained(tmp_path)
    opened: list[object] = []
    for module in (reader, originals):
        monkeypatch.setattr(module, "safe_open", lambda file, **keys: opened.append(file) or safe_open(file, **keys))
    assert AutoModelForCausalLM.from_pretrained(tmp_path) and len(opened) == 1


def test_undo_says_what_it_lacks(tmp_path: Path) -> None:
    hf_accel.patch(build("qwen2")).save_pretrained(tmp_path)
    with pytest.raises(hf_accel.UnsupportedError, match="has no original weights"):
        hf_accel.unpatch(AutoModelForCausalLM.from_pretrained(tmp_path))


# -- what is wrong -----------------------------------------------------------------------------------


def tensors(edit: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = load_file(folder / "model.safetensors")
        edit(content)
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def settings(**changed: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        content["quantization_config"]["modules"][Q].update(changed)
        (folder / "config.json").write_text(json.dumps(content))

    return apply


def put(name: str, edit: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return tensors(lambda content: content.update({name: edit(content[name]).contiguous()}))


WRONG: list[tuple[Callable[[Path], None], str]] = [
    (settings(blocks=2), f"{Q}': blocks=2 is not known here, where blocks are of version 1; save the model again"),
    (settings(blocks="1"), "blocks='1' is not known here"),
    (settings(bits=5, group_size=32), "blocks=1 is not known here"),
    (settings(bits=[4], group_size=32), "blocks=1 is not known here"),
    (settings(bits=3, group_size=32), f"'{Q}.weight_blocks' is"),
    (settings(bits=8), f"'{Q}.weight_blocks' is"),
    (settings(symmetric=False), f"has no '{Q}.weight_zeros'"),
    (settings(group_size=8), f"'{Q}.weight_scale' is"),
    (tensors(lambda t: t.pop(f"{Q}.weight_blocks")), f"has no '{Q}.weight_blocks'"),
    (
        tensors(lambda t: t.update({f"{Q}.weight_zeros": torch.zeros(1, 1, 64).byte()})),
        "which a layer with",
    ),
    (put(f"{Q}.weight_blocks", lambda t: t[:, :-4]), r"weight_blocks' is \[1, 1020\] .* but \[1, 1024\]"),
    (put(f"{Q}.weight_blocks", lambda t: t.view(torch.int8)), "weight_blocks' is torch.int8"),
    (put(f"{Q}.weight_scale", lambda t: t.fill_(float("nan"))), f"'{Q}.weight_scale' holds NaN or infinity"),
    (put(f"{Q}.weight_scale", lambda t: t.index_fill(2, torch.tensor([40]), float("inf"))), "holds NaN or infinity"),
]


@pytest.mark.parametrize(("damage", "text"), WRONG)
def test_refused(damage: Callable[[Path], None], text: str, tmp_path: Path) -> None:
    hf_accel.patch(build("qwen2"), weights=GROUPS).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises((hf_accel.HfAccelError, hf_accel.UnsupportedError), match=text):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_what_settings_do_not_describe_stays_in_stored_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocks = Cpu.blocks

    def with_zeros(self: Cpu, found: Any) -> Any:
        made = blocks(self, found)
        return None if made is None else type(made)(**{**tensors_of(made), "weight_zeros": made.weight_blocks})

    monkeypatch.setattr(Cpu, "blocks", with_zeros)
    model = hf_accel.patch(build("qwen2"), weights=GROUPS)
    model.save_pretrained(tmp_path)
    assert f"{Q}.weight_packed" in load_file(tmp_path / "model.safetensors")
    assert contents(AutoModelForCausalLM.from_pretrained(tmp_path)) == contents(model)


@pytest.mark.parametrize("weights", ["int8", {"bits": 4, "group_size": 32}], ids=str)
def test_names_that_transformers_would_change_are_not_written(
    weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of Kimi K2.5's vision tower become layers when it is read, and so would those of a weight."""
    get_checkpoint_conversion_mapping("llama")  # makes those of all models
    known: Any = conversion_mapping._checkpoint_conversion_mapping_cache
    monkeypatch.setitem(known, "llama", [WeightRenaming("blocks", "layers")])
    model = hf_accel.patch(LlamaForCausalLM(LlamaConfig(**DECODER)).eval(), weights=weights)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() >= {"model.blocks.0.self_attn.q_proj.weight_scale", "lm_head.weight_scale"}
    assert not any(name.endswith("weight_blocks") for name in stored)
    assert contents(hf_accel.load(tmp_path)) == contents(model)
