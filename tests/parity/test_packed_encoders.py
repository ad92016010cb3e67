"""Encoders whose rows are sequences side by side, as the patches of images are: stock's numbers, or stock's path."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Glm4vVisionConfig, PreTrainedModel, Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3VLVisionConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel, Qwen2VLVisionBlock
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import hf_accel
from hf_accel.attention.hf import ATTENTION_NAME
from hf_accel.fused.encoder_rows import packed_layout
from hf_accel.fused.projections import PatchProduct
from hf_accel.kernels import cpu as kernels
from hf_accel.recognition.call_form import CallForm, usual_form
from hf_accel.recognition.operation import UntraceableError
from hf_accel.recognition.trace import Trace
from tests.families.models import enliven

from .test_encoders import counted, module_by_module, undo_is_exact

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

SIZES: dict[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": 4}
QWEN2 = Qwen2VLConfig(vision_config=SIZES | {"embed_dim": 64, "hidden_size": 48, "mlp_ratio": 2}).vision_config
WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1]}
QWEN2_5 = Qwen2_5_VLConfig(
    vision_config=SIZES | WINDOWS | {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 48}
).vision_config
OTHERS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 48}
TOWERS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "Qwen2-VL": (Qwen2VisionTransformerPretrainedModel, QWEN2),
    "Qwen2.5-VL": (Qwen2_5_VisionTransformerPretrainedModel, QWEN2_5),
    "Qwen3-VL": (Qwen3VLVisionModel, Qwen3VLVisionConfig(**SIZES, **OTHERS, deepstack_visual_indexes=[0])),
    "GLM-4V": (Glm4vVisionModel, Glm4vVisionConfig(**SIZES, **OTHERS, image_size=32)),
}
GRIDS = {"one": [[1, 4, 6]], "several": [[1, 2, 2], [1, 6, 10], [1, 4, 4]], "video": [[3, 4, 6], [1, 2, 2]]}


def build(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    kind, config = TOWERS[family]
    torch.manual_seed(0)
    model = kind(copy.deepcopy(config))
    enliven(model)
    return model.to(dtype).eval()


def images(model: PreTrainedModel, grids: list[list[int]]) -> dict[str, Tensor]:
    grid = torch.tensor(grids)
    torch.manual_seed(1)
    weight = next(module.weight for module in model.modules() if isinstance(module, nn.Conv3d))
    patches = torch.randn(int(grid.prod(1).sum()), weight[0].numel(), dtype=weight.dtype)
    return {"hidden_states": patches, "grid_thw": grid}


def same(ours: Any, stock: Any, tolerance: float) -> None:
    for name in ("last_hidden_state", "pooler_output"):
        torch.testing.assert_close(ours[name], stock[name], rtol=0, atol=tolerance * float(stock[name].abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", TOWERS)
@torch.no_grad()
def test_outputs_are_stocks(family: str, dtype: torch.dtype) -> None:
    stock, ours = build(family, dtype), hf_accel.patch(build(family, dtype), weights=None)
    for name, grids in GRIDS.items():
        if name == "video" and family == "GLM-4V":  # stock's takes one grid for each frame
            continue
        given = images(stock, grids)
        with counted() as calls:
            found = ours(**given)
        assert calls == {"EncoderLayerCalls": 2, "layers": 2}
        same(found, stock(**given), 2e-5 if dtype is torch.float32 else 0.04)


@torch.no_grad()
def test_many_rows_and_a_whole_model() -> None:
    stock, ours = build("Qwen2-VL"), hf_accel.patch(build("Qwen2-VL"), weights=None)
    given = images(stock, [[1, 20, 30], [1, 4, 4]])  # more rows than a native product of floats takes
    with counted() as calls:
        found = ours(**given)
    assert calls["layers"] == 2
    same(found, stock(**given), 2e-5)
    undo_is_exact(build("Qwen2-VL"), images(stock, GRIDS["several"]))


@torch.no_grad()
def test_quantized_layers_are_those_of_their_modules() -> None:
    ours = hf_accel.patch(build("Qwen2.5-VL"), weights="int8")
    given = images(ours, GRIDS["several"])
    with counted() as calls:
        found = ours(**given)
    assert calls["layers"] == 2
    with module_by_module():
        same(found, ours(**given), 0.02)  # a level of an activation may round to its neighbour


# -- known or stock --------------------------------------------------------------------------------------


class Changed(nn.Module):
    """The attention of a block, with other code where packed sequences are taken apart."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(attention.__dict__)


def attend(module: Any, qkv: Any, scaling: float | None = None) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]
    return function(module, *qkv, None, scaling=scaling or module.scaling, dropout=0.0, is_causal=False)[0]


def heads_of(module: Any, x: Any) -> Any:
    heads = module.qkv(x).reshape(x.shape[0], 3, module.num_heads, -1).permute(1, 0, 2, 3).unbind(0)
    return tuple(each.transpose(0, 1).unsqueeze(0) for each in heads)


class Plain(Changed):
    def forward(self, hidden_states: Any, cu_seqlens: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        parts = [torch.split(each, lengths, dim=2) for each in heads_of(self, hidden_states)]
        outs = [attend(self, qkv) for qkv in zip(*parts, strict=True)]
        return self.proj(torch.cat(outs, dim=1).reshape(hidden_states.shape[0], -1))


class OverAll(Changed):
    def forward(self, hidden_states: Any, cu_seqlens: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        return self.proj(attend(self, heads_of(self, hidden_states)).reshape(hidden_states.shape[0], -1))


class FirstAlone(Changed):
    def forward(self, hidden_states: Any, cu_seqlens: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        parts = [torch.split(each, lengths, dim=2) for each in heads_of(self, hidden_states)]
        outs = [attend(self, [part[0] for part in parts])]
        return self.proj(torch.cat(outs, dim=1).reshape(hidden_states.shape[0], -1))


class OtherScales(Changed):
    def forward(self, hidden_states: Any, cu_seqlens: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        parts = [torch.split(each, lengths, dim=2) for each in heads_of(self, hidden_states)]
        outs = [attend(self, qkv, 1 / (1 + n)) for n, qkv in enumerate(zip(*parts, strict=True))]
        return self.proj(torch.cat(outs, dim=1).reshape(hidden_states.shape[0], -1))


class KeysOfOthers(Changed):
    def forward(self, hidden_states: Any, cu_seqlens: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        q, k, v = (torch.split(each, lengths, dim=2) for each in heads_of(self, hidden_states))
        outs = [attend(self, each) for each in zip(q, k[::-1], v[::-1], strict=True)]
        return self.proj(torch.cat(outs, dim=1).reshape(hidden_states.shape[0], -1))


class OtherPlaces(Changed):
    def forward(self, hidden_states: Any, cu_seqlens: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        lengths = (cu_seqlens[2:] - cu_seqlens[:-2]).tolist()
        parts = [torch.split(each, lengths, dim=2) for each in heads_of(self, hidden_states)]
        outs = [attend(self, qkv) for qkv in zip(*parts, strict=True)]
        return self.proj(torch.cat(outs, dim=1).reshape(hidden_states.shape[0], -1))


def traced(kind: type[Changed]) -> list[str]:
    block = Qwen2VLVisionBlock(QWEN2).eval()
    block.attn = kind(block.attn)
    usual = usual_form(type(block))
    assert usual.tensors == {"cu_seqlens", "position_embeddings"}
    trace = Trace(torch.float32, attention=ATTENTION_NAME)
    trace.layer(block, 64, CallForm(usual.states, usual.tensors, table_dtype=torch.float32, in_rows=False))
    return [operation.kind for operation in trace.operations]


def test_code_that_takes_sequences_apart_and_joins_them_is_known() -> None:
    assert traced(Plain) == ["layer_norm", "linear", "attend", "linear", "layer_norm", "linear", "linear", "add"]


@pytest.mark.parametrize("kind", [OverAll, FirstAlone, OtherScales, KeysOfOthers, OtherPlaces])
def test_other_code_ends_the_trace(kind: type[Changed]) -> None:
    with pytest.raises(UntraceableError):
        traced(kind)


@pytest.mark.parametrize("starts", [[0, 3], [1, 8], [0, 5, 3, 8], [], [0]], ids=str)
def test_places_that_do_not_divide_the_row_are_stocks(starts: list[int]) -> None:
    assert packed_layout(torch.tensor(starts, dtype=torch.int32), (1, 8), in_rows=False) is None
    assert packed_layout(torch.tensor([0.0, 8.0]), (1, 8), in_rows=False) is None
    layout = packed_layout(torch.tensor([0, 3, 3, 8]), (1, 8), in_rows=False)
    assert layout is not None and layout.ragged.kv_len.tolist() == [3, 5]


@torch.no_grad()
def test_a_block_with_other_tables_runs_its_own_code() -> None:
    stock, ours = build("Qwen2-VL"), hf_accel.patch(build("Qwen2-VL"), weights=None)
    x, starts = torch.randn(7, 64), torch.tensor([0, 2, 7], dtype=torch.int32)
    table = torch.randn(1, 16)
    for cos in (torch.randn(7, 16), table):  # one for each token, and one for all of them
        given = {"cu_seqlens": starts, "position_embeddings": (cos, cos.flip(1))}
        with counted() as calls:
            found = ours.blocks[0](x, **given)
        assert calls["layers"] == (cos is not table)
        torch.testing.assert_close(found, stock.blocks[0](x, **given), rtol=1e-4, atol=1e-5)


# -- patches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_convolution_of_patches_is_a_product_and_others_are_stocks(bias: bool, monkeypatch: Any) -> None:
    products: list[tuple[int, ...]] = []
    linear = torch.nn.functional.linear

    def watched(x: Tensor, *others: Any) -> Tensor:
        products.append(tuple(x.shape))
        return linear(x, *others)

    monkeypatch.setattr("hf_accel.fused.projections.F.linear", watched)
    stock = nn.Conv3d(3, 10, (2, 4, 4), stride=(2, 4, 4), bias=bias)
    ours = copy.deepcopy(stock)
    ours.__class__ = type("Ours", (PatchProduct, nn.Conv3d), {})
    for shape in [(5, 3, 2, 4, 4), (1, 3, 2, 4, 4), (2, 3, 4, 8, 4)]:
        x = torch.randn(shape)
        torch.testing.assert_close(ours(x), stock(x), rtol=1e-4, atol=1e-5)
    assert products == [(5, 96), (1, 96)]
    stock.padding = ours.padding = (0, 1, 1)
    torch.testing.assert_close(ours(x[:, :, :2, :4]), stock(x[:, :, :2, :4]))
    assert len(products) == 2
