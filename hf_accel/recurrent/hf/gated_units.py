"""Gated linear recurrent units over pages, as RecurrentGemma has them (De et al. 2024, "Griffin", arXiv 2402.19427).

Their state has one number for each channel: h = a h + sqrt(1 - a^2) (input gate) x. This is the scan of Mamba with
states of size one.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...cache.hf import CacheOverPages, RecurrentPass
from ...cache.hf.cache_argument import CACHE_NAME
from ...cache.kinds.state_sizes import StateSizes
from ...kernels.cpu import head_products, short_conv, state_scan
from ...kernels.cpu.library import FLOATS
from ...recognition.trial import RandomNumbers, unwatched_twin
from ...recognition.trial_modules import draw_weights, trial_convolution
from ...recognition.unchanged import is_unobserved
from ...undo.journal import Mixin, original_class
from .selective_scans import GATE_ALONE
from .state_pass import Recurrence, convolved, is_native, over_pages, passes_agree, scanned, short_convolution_refusal

UNIT_PARTS = {"linear_x", "linear_y", "linear_out", "conv_1d", "rg_lru", "act_fn"}
GATES = ("input_gate", "recurrent_gate")
GATE_PARAMETERS = {f"{gate}_{kind}" for gate in GATES for kind in ("weight", "bias")}
RATE = "recurrent_param"
SHARPNESS = 8.0  # by which the logarithm of a decay is multiplied
FORGOTTEN = 1000.0  # a decay of exp(-1000) is 0
LEAST_LOGARITHM = 1e-12  # of the logarithm of a decay; below it, the input has the factor 0
LAYER = re.compile(r"layers\.(\d+)\.")  # the decoder layer in the name of a module


class PagedUnit(Mixin):
    """A mixin for a block with a gated recurrent unit, which a decoder layer calls as it calls attention."""

    asks_itself = True

    def forward(
        self, input_states: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """[B, Q, H] -> [B, Q, H]. Raises what PagedRecurrence raises, and UnsupportedError for padding."""
        cache = kwargs.get(CACHE_NAME)
        if isinstance(cache, CacheOverPages):
            given = {name: value for name, value in kwargs.items() if value is not cache}
            return over_pages(self, input_states, cache, {"position_ids": position_ids, **given}), None
        stock: tuple[Tensor, None] = super().forward(  # type: ignore[misc]
            input_states, position_ids, attention_mask, **kwargs
        )
        return stock


class GatedUnit(Recurrence):
    """A gated linear recurrent unit behind a short convolution, times an activated linear layer."""

    mixin = PagedUnit
    reads_positions = computes_padding = stays_with_row = True
    last = "linear_out"

    def __init__(self, layer_idx: int) -> None:
        super().__init__(GATE_ALONE)
        self._layer_idx = layer_idx

    def __reduce__(self) -> Any:
        return type(self), (self._layer_idx,)

    def layer_of(self, module: Any) -> int:
        return self._layer_idx

    def asked(self, module: Any) -> str | None:
        unit = module.rg_lru
        if not is_unobserved(unit):
            return "its recurrent unit has hooks"
        if any(weight.dtype not in FLOATS or not weight.is_contiguous() for weight in unit._parameters.values()):
            return "its gates have weights that are not float"
        return short_convolution_refusal(module, "conv_1d")

    def sizes(self, module: Any) -> StateSizes:
        kept, channels = module.conv_1d.kernel_size[0] - 1, module.lru_width
        return StateSizes(channels, kept * channels)

    def compute(self, module: Any, x: Tensor, found: RecurrentPass) -> Tensor:
        mixed, gate, conv = module.linear_x(x)[0], module.act_fn(module.linear_y(x))[0], module.conv_1d
        weight = conv.weight.squeeze(1)
        # The convolution has no activation, and its kernel always has one: s = relu(s) - relu(-s), without rounding.
        above, below = (
            convolved(short_conv.ConvInputs(mixed, sign * weight, sign * conv.bias, "relu"), found) for sign in (1, -1)
        )
        given = _scan_inputs(module.rg_lru, above - below, x.dtype, found.positions)
        return scanned(given, found)[:, 0] * gate.float()


def _scan_inputs(unit: Any, x: Tensor, dtype: torch.dtype, positions: Any) -> state_scan.ScanInputs:
    """Return what the scan reads so that exp(-step) are the decays of x [N, C] float32, and b (step x) its inputs.

    dtype: in which the gates read x. positions: of the tokens, [N]; one at position 0 forgets what was before it.
    """
    channels = x.shape[1]
    heads = x.to(dtype).unflatten(-1, (unit.num_attention_heads, -1))
    entered, kept = (_gate(unit, name, heads).float().sigmoid() for name in GATES)
    decay = -SHARPNESS * kept * F.softplus(unit.recurrent_param.float())  # its logarithm
    factor = torch.sqrt(1 - torch.exp(2 * decay))
    first = (positions == 0)[:, None]
    factor, step = factor.masked_fill(first, 1.0), (-decay).clamp(min=LEAST_LOGARITHM).masked_fill(first, FORGOTTEN)
    given, zeros = x * entered * factor / step, x.new_zeros(channels)
    ones = x.new_ones(len(x), 1, 1)
    before_softplus = step + torch.log(-torch.expm1(-step))
    return state_scan.ScanInputs(
        given[:, None], before_softplus, ones, ones, log_rate=zeros[:, None], bias=zeros, skip=zeros
    )


def _gate(unit: Any, name: str, x: Tensor) -> Tensor:
    """Compute what a gate is before its sigmoid, of x [N, H, I]: [N, H * I]. Each token is as it is alone."""
    weight, bias = getattr(unit, f"{name}_weight"), getattr(unit, f"{name}_bias")
    if is_native(x):
        out = torch.empty_like(x)
        head_products.head_products(x, weight, out=out, transposed=True)
    else:
        out = head_products.reference(x, weight, transposed=True)
    return (out + bias).flatten(1)


def known_gated_unit(module: nn.Module, name: str) -> GatedUnit | None:
    """Return the GatedUnit of a module that has its parts and gives what ours does on random input; else None.

    name: of the module in its model, which says the layer.
    """
    unit: Any = module._modules.get("rg_lru")
    if module._modules.keys() != UNIT_PARTS or unit._parameters.keys() != GATE_PARAMETERS | {RATE}:
        return None
    layer, own = LAYER.search(f"{name}."), vars(unit)
    heads, size = own.get("num_attention_heads"), own.get("block_width")
    width = getattr(module, "lru_width", None)
    if layer is None or unit._modules or unit._buffers or not isinstance(width, int) or width != heads * size:
        return None
    # Transformers' cache of the convolution has as many channels as the model.
    convolution: Any = module.conv_1d
    if width != getattr(module, "hidden_size", None) or convolution.bias is None:
        return None
    known = GatedUnit(int(layer[1]))
    return known if known.refusal(module) is None and _agrees(module) else None


@torch.no_grad()
def _agrees(module: Any) -> bool:
    numbers, heads, size = RandomNumbers(), 2, 4
    width = heads * size
    parts: dict[str, Any] = {
        name: nn.utils.skip_init(nn.Linear, width, width) for name in UNIT_PARTS if "linear" in name
    }
    parts["conv_1d"] = trial_convolution(width, int(module.conv_1d.kernel_size[0]), bias=True)
    draw_weights(parts.values(), numbers)
    shapes = {f"{gate}_weight": (heads, size, size) for gate in GATES} | {
        f"{gate}_bias": (heads, size) for gate in GATES
    }
    parameters = {name: nn.Parameter(numbers(*shape)) for name, shape in ({RATE: (width,)} | shapes).items()}
    twins = []
    for _ in range(2):
        unit = unwatched_twin(module.rg_lru, _parameters=parameters)
        vars(unit).update(num_attention_heads=heads, block_width=size, recurrent_states=None)
        twin = unwatched_twin(module, _modules=parts | {"rg_lru": unit})
        vars(twin).update(lru_width=width, hidden_size=width, conv1d_state=None)
        twins.append(twin)
    theirs, ours = twins
    return passes_agree(GatedUnit(0), theirs, ours, numbers(2, 9, width), generated=_as_generated)


def _as_generated(module: nn.Module, x: Tensor, num_prompt: int) -> Tensor:
    """Compute x [B, Q, H] by the module's own code, which keeps its state: a prompt, and the others one by one."""
    positions, forward = torch.arange(x.shape[1]).expand(x.shape[:2]), original_class(module).forward
    cuts = [num_prompt, *[1] * (x.shape[1] - num_prompt)]
    pairs = zip(x.split(cuts, 1), positions.split(cuts, 1), strict=True)
    return torch.cat([forward(module, part, at, None, use_cache=True)[0] for part, at in pairs], dim=1)
