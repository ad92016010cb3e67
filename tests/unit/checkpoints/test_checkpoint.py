"""A quantized checkpoint that was damaged or edited is refused by name, whatever was done to it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

import hf_accel
from hf_accel import HfAccelError, UnsupportedError
from hf_accel.linear import QuantLinear
from hf_accel.linear.backends.cpu import Cpu

from ...parity.families import build
from ...parity.snapshot import bits, logits

Q = "model.layers.0.self_attn.q_proj"
WEIGHTS = {
    "int8": "int8",
    "int4": {"bits": 4, "group_size": 32, "head": None},
    "asymmetric": {"bits": 4, "group_size": 32, "symmetric": False, "head": None},
}


@contextmanager
def without_blocks() -> Iterator[None]:
    """Write as a machine does that has no kernels for blocks."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Cpu, "blocks", lambda self, packed: None)
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for kind, weights in WEIGHTS.items():
        folders[kind] = tmp_path_factory.mktemp(kind)
        with without_blocks():
            hf_accel.patch(build("qwen2"), weights=weights).save_pretrained(folders[kind])  # qwen2: biases
    folders["shards"] = tmp_path_factory.mktemp("shards")
    hf_accel.patch(build("qwen2")).save_pretrained(folders["shards"], max_shard_size="10KB")
    return folders


@pytest.fixture
def checkpoint(checkpoints: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(checkpoints[kind], tmp_path / kind))


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


Tensors = dict[str, Tensor]
Edit = Callable[[Any], object]


def tensors(edit: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        content = load_file(file)
        edit(content)
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, file, metadata={"format": "pt"})

    return apply


def config(edit: Edit) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "config.json"
        content = json.loads(file.read_text())
        edit(content)
        file.write_text(json.dumps(content))

    return apply


def modules(edit: Edit) -> Callable[[Path], None]:
    return config(lambda c: edit(c["quantization_config"]["modules"]))


def cast(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    return tensors(lambda t: t.update({name: t[name].to(dtype)}))


def change(name: str, edit: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return tensors(lambda t: t.update({name: edit(t[name])}))


def put(name: str, place: tuple[int, ...], value: float) -> Callable[[Path], None]:
    return change(name, lambda t: t.index_put(tuple(torch.tensor([i]) for i in place), torch.tensor([value]).to(t)))


def drop(name: str) -> Callable[[Path], None]:
    return tensors(lambda t: t.pop(name))


def add(name: str, tensor: Tensor) -> Callable[[Path], None]:
    return tensors(lambda t: t.update({name: tensor}))


def setting(**settings: Any) -> Callable[[Path], None]:
    return modules(lambda m: m[Q].update(settings))


def cut(size: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])

    return apply


def shard(edit: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda folder: edit(sorted(folder.glob("*.safetensors"))[1])


NAN, INFINITY = float("nan"), float("inf")
MUTATIONS: list[tuple[str, Callable[[Path], None], str]] = [
    # -- the dtype of a tensor
    ("int8", cast(f"{Q}.weight", torch.int64), f"'{Q}.weight' is torch.int64 .* must be torch.int8 with bits=8"),
    ("int8", cast(f"{Q}.weight", torch.int16), f"'{Q}.weight' is torch.int16"),
    ("int8", cast(f"{Q}.weight", torch.uint8), f"'{Q}.weight' is torch.uint8"),
    ("int8", cast(f"{Q}.weight", torch.float32), f"'{Q}.weight' is torch.float32"),
    ("int8", cast(f"{Q}.weight", torch.bool), f"'{Q}.weight' is torch.bool"),
    ("int8", cast(f"{Q}.weight", torch.float8_e4m3fn), f"'{Q}.weight' is (F8_E4M3|torch.float8_e4m3fn)"),
    ("int8", cast(f"{Q}.weight_scale", torch.int8), f"'{Q}.weight_scale' is torch.int8 .* a floating-point dtype"),
    ("int8", cast(f"{Q}.weight_scale", torch.int64), f"'{Q}.weight_scale' is torch.int64"),
    ("int8", cast(f"{Q}.weight_scale", torch.float8_e5m2), f"'{Q}.weight_scale' is (F8_E5M2|torch.float8_e5m2)"),
    ("int8", cast(f"{Q}.bias", torch.int32), f"'{Q}.bias' is torch.int32"),
    ("int8", cast("model.embed_tokens.weight", torch.int8), "'model.embed_tokens.weight' is torch.int8"),
    ("int8", cast("model.norm.weight", torch.int64), "'model.norm.weight' is torch.int64"),
    ("int4", cast(f"{Q}.weight_packed", torch.int64), f"'{Q}.weight_packed' is torch.int64 .* must be torch.int32"),
    ("int4", cast(f"{Q}.weight_packed", torch.float32), f"'{Q}.weight_packed' is torch.float32"),
    ("int4", cast(f"{Q}.weight_shape", torch.int32), f"'{Q}.weight_shape' is torch.int32"),
    ("asymmetric", cast(f"{Q}.weight_zero_point", torch.int8), f"'{Q}.weight_zero_point' is torch.int8"),
    # -- its shape
    ("int8", change(f"{Q}.weight", lambda t: t[:-1]), rf"'{Q}.weight' is \[31, 32\] .* but \[32, 32\]"),
    ("int8", change(f"{Q}.weight", lambda t: t.flatten()), rf"'{Q}.weight' is \[1024\]"),
    ("int8", change(f"{Q}.weight_scale", lambda t: t.flatten()), rf"'{Q}.weight_scale' is \[32\] .* but \[32, 1\]"),
    ("int8", change(f"{Q}.weight_scale", lambda t: t[0, 0]), rf"'{Q}.weight_scale' is \[\]"),
    ("int8", change(f"{Q}.weight_scale", lambda t: t.expand(-1, 2)), rf"'{Q}.weight_scale' is \[32, 2\]"),
    ("int8", change(f"{Q}.bias", lambda t: t[None]), rf"'{Q}.bias' is \[1, 32\]"),
    ("int8", change("lm_head.weight", lambda t: t[:-1]), r"'lm_head.weight' is \[100, 32\]"),
    ("int8", change("model.norm.weight", lambda t: t[:-1]), r"'model.norm.weight' is \[31\]"),
    ("int4", change(f"{Q}.weight_packed", lambda t: t[:, :-1]), rf"'{Q}.weight_packed' is \[32, 3\]"),
    ("int4", change(f"{Q}.weight_scale", lambda t: t.repeat(1, 2)), "'.*q_proj.weight_scale' is .* group_size=32"),
    ("int4", change(f"{Q}.weight_shape", lambda t: t[:1]), rf"'{Q}.weight_shape' is \[1\]"),
    ("asymmetric", change(f"{Q}.weight_zero_point", lambda t: t[:-1]), rf"'{Q}.weight_zero_point' is \[3, 1\]"),
    # -- its numbers
    ("int8", put(f"{Q}.weight_scale", (3, 0), NAN), rf"'{Q}.weight_scale' holds NaN or infinity at \[3, 0\]"),
    ("int8", put(f"{Q}.weight_scale", (0, 0), INFINITY), f"'{Q}.weight_scale' holds NaN or infinity"),
    ("int8", put(f"{Q}.weight_scale", (0, 0), -INFINITY), f"'{Q}.weight_scale' holds NaN or infinity"),
    ("int8", put("lm_head.weight_scale", (100, 0), NAN), r"'lm_head.weight_scale' holds NaN .* \[100, 0\]"),
    ("int4", put(f"{Q}.weight_scale", (5, 0), NAN), f"'{Q}.weight_scale' holds NaN or infinity"),
    ("int4", put(f"{Q}.weight_shape", (0,), 64), rf"'{Q}.weight_shape' is \[64, 32\] .* the layer is \[32, 32\]"),
    # -- the set of tensors
    ("int8", drop(f"{Q}.weight"), f"no '{Q}.weight', which a layer with bits=8 needs"),
    ("int8", drop(f"{Q}.weight_scale"), f"no '{Q}.weight_scale'"),
    ("int8", drop(f"{Q}.bias"), f"no '{Q}.bias'"),
    ("int8", drop("lm_head.weight_scale"), "no 'lm_head.weight_scale'"),
    ("int8", drop("model.embed_tokens.weight"), "no 'model.embed_tokens.weight', which Qwen2ForCausalLM needs"),
    ("int8", drop("model.norm.weight"), "no 'model.norm.weight'"),
    ("int4", drop(f"{Q}.weight_packed"), f"no '{Q}.weight_packed'"),
    ("int4", drop(f"{Q}.weight_shape"), f"no '{Q}.weight_shape'"),
    ("asymmetric", drop(f"{Q}.weight_zero_point"), f"no '{Q}.weight_zero_point', .* symmetric=False needs"),
    ("int8", add(f"{Q}.weight_zero_point", torch.zeros(4, 1)), f"holds '{Q}.weight_zero_point', which a layer"),
    ("int8", add(f"{Q}.input_scale", torch.ones(1)), f"holds '{Q}.input_scale'"),
    ("int8", add("model.layers.2.mlp.up_proj.weight", torch.ones(2)), "holds 'model.layers.2.mlp.up_proj.weight'"),
    ("int8", add("model.extra", torch.ones(2)), "holds 'model.extra', which Qwen2ForCausalLM has no place for"),
    ("int4", add(f"{Q}.weight", torch.ones(32, 32)), f"holds '{Q}.weight', which a layer with bits=4"),
    # -- what config.json says of a layer
    ("int8", setting(bits=4), "group_size=128 does not divide the 32 inputs"),
    ("int8", setting(bits=4, group_size=32), f"no '{Q}.weight_packed', which a layer with bits=4, group_size=32"),
    ("int4", setting(bits=3), f"'{Q}.weight_packed' is .* in the checkpoint, but .* with bits=3"),
    ("int4", setting(bits=8), f"no '{Q}.weight', which a layer with bits=8"),
    ("int8", setting(bits=5), f"module '{Q}': bits=5 is not known; choose one of 8, 4"),
    ("int8", setting(bits="8"), "bits='8' is not known"),
    ("int8", setting(bits=None), "bits=None is not known"),
    ("int8", setting(bits=True), "bits=True is not known"),
    ("int8", setting(symmetric=False), "symmetric=False is for 4 bits"),
    ("int4", setting(symmetric=False), f"no '{Q}.weight_zero_point'"),
    ("asymmetric", setting(symmetric=True), f"holds '{Q}.weight_zero_point', which a layer with .* symmetric=True"),
    ("int4", setting(group_size=16), "weight_scale' is .*, but .* with bits=4, group_size=16"),
    ("int4", setting(group_size=64), "group_size=64 does not divide the 32 inputs"),
    ("int8", setting(activations="int4"), "activations='int4' is not known"),
    ("int8", setting(rounding="up"), f"module '{Q}': 'rounding' is not known; a module has bits, "),
    ("int8", modules(lambda m: m[Q].pop("bits")), f"module '{Q}': bits is missing"),
    # -- and of the model
    ("int8", modules(lambda m: m.pop(Q)), f"'{Q}.weight' is torch.int8|holds '{Q}.weight_scale'"),
    ("int8", config(lambda c: c["quantization_config"].pop("modules")), "holds 'lm_head.weight_scale'"),
    ("int8", modules(lambda m: m.update({"model.layers.7": m[Q]})), "'model.layers.7', which .* has not"),
    ("int8", modules(lambda m: m.update({"": m[Q]})), "quantizes '', which is a Qwen2ForCausalLM here"),
    ("int8", modules(lambda m: m.update({"model.norm": m[Q]})), "'model.norm', which is a Qwen2RMSNorm here"),
    ("int8", modules(lambda m: m.update({"model.embed_tokens": m[Q]})), "which is a Embedding here, no plain Linear"),
    ("int8", modules(lambda m: m.update({Q: 8})), f"modules: '{Q}' has the settings 8, which must be a dict"),
    ("int8", config(lambda c: c["quantization_config"].update(modules=[Q])), "must give the settings of each"),
    ("int8", config(lambda c: c["quantization_config"].update(weights="int3")), "weights='int3' is not known"),
    ("int8", config(lambda c: c["quantization_config"].update(colour="red")), "unknown keyword 'colour'"),
    ("int8", config(lambda c: c["quantization_config"].update(weights={"bit": 8})), "unknown keyword 'bit'"),
    ("int8", config(lambda c: c["quantization_config"].update(cache={"block_size": 0})), "block_size=0 must be"),
    ("int8", config(lambda c: c["quantization_config"].update(attention="flash")), "attention='flash' is not known"),
    ("int8", config(lambda c: c.update(hidden_size=64)), "is .* in the checkpoint, but .* config.json describes"),
    ("int8", config(lambda c: c.update(vocab_size=100)), r"'lm_head.weight' is \[101, 32\] .* but \[100, 32\]"),
    ("int8", config(lambda c: c.update(num_hidden_layers=3, layer_types=None)), "no 'model.layers.2"),
    ("int8", config(lambda c: c.update(num_hidden_layers=1, layer_types=None)), "'model.layers.1.*has not"),
    # -- the files
    ("int8", cut(0), "model.safetensors cannot be read"),
    ("int8", cut(100), "model.safetensors cannot be read"),
    ("int8", cut(20000), "model.safetensors cannot be read: .*; copy or download it again, or save"),
    ("int8", lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 1000), "safetensors cannot be read"),
    ("shards", shard(lambda file: file.unlink()), "00002-of-.*.safetensors cannot be read"),
    ("shards", shard(lambda file: file.write_bytes(file.read_bytes()[:300])), "00002-of-.* cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "mutate", "text"), [pytest.param(*m, id=f"{i}-{m[0]}") for i, m in enumerate(MUTATIONS)]
)
def test_refused(kind: str, mutate: Callable[[Path], None], text: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(kind)
    mutate(folder)
    with pytest.raises(HfAccelError, match=f"(?s){text}"):
        load(folder)


def test_there_are_many() -> None:
    assert len(MUTATIONS) >= 60


@pytest.mark.parametrize("kind", [*WEIGHTS, "shards"])
def test_what_was_not_touched_loads(kind: str, checkpoint: Callable[[str], Path]) -> None:
    model = load(checkpoint(kind))
    expected = hf_accel.patch(build("qwen2"), weights=WEIGHTS.get(kind, "int8"))
    assert bits(logits(model)) == bits(logits(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scales_of_another_float_dtype_load(dtype: torch.dtype, checkpoint: Callable[[str], Path]) -> None:
    """As when a model is loaded in another dtype."""
    folder = checkpoint("int8")
    cast(f"{Q}.weight_scale", dtype)(folder)
    assert logits(load(folder)).isfinite().all()


def test_another_class_may_have_a_new_head(tmp_path: Path) -> None:
    hf_accel.patch(build("llama"), weights={"head": None}).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert isinstance(model.model.layers[1].mlp.up_proj, QuantLinear)
    assert not isinstance(model.score, QuantLinear)


def test_a_class_without_the_quantized_head_is_refused(tmp_path: Path) -> None:
    hf_accel.patch(build("llama")).save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedError, match=r"quantizes '.*', which LlamaModel has not; load it with the class that"
    ):
        AutoModel.from_pretrained(tmp_path)


STATES: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda t: t.pop("lm_head.weight_scale"), "no 'lm_head.weight_scale'"),
    (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].long()}), "'lm_head.weight' is torch.int64"),
    (lambda t: t["lm_head.weight_scale"].fill_(NAN), "'lm_head.weight_scale' holds NaN"),
]


@pytest.mark.parametrize(("edit", "text"), [*STATES, (lambda t: None, None)])
def test_a_state_dict(edit: Callable[[Tensors], object], text: str | None) -> None:
    """Which is handed over, so that there is no file to look into before."""
    model = hf_accel.patch(build("llama"))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    edit(state)
    settings = LlamaConfig.from_dict(model.config.to_dict())
    if text is None:
        loaded = LlamaForCausalLM.from_pretrained(None, config=settings, state_dict=state)
        assert bits(logits(loaded)) == bits(logits(model))
        return
    with pytest.raises(HfAccelError, match=text):
        LlamaForCausalLM.from_pretrained(None, config=settings, state_dict=state)


def test_a_float_checkpoint_that_asks_to_be_patched(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    config(lambda c: c.update(quantization_config={"quant_method": "hf_accel", "weights": "int8"}))(tmp_path)
    assert bits(logits(load(tmp_path))) == bits(logits(hf_accel.patch(build("llama"))))
