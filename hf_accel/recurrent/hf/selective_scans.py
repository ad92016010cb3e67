"""Layers with the state space of Mamba over pages (Gu and Dao 2023, arXiv 2312.00752)."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from ...cache.hf import RecurrentPass
from ...cache.kinds.state_sizes import StateSizes
from ...kernels.cpu import short_conv, state_scan
from ...kernels.cpu.float_linear import FloatLinear
from ...kernels.cpu.library import FLOATS
from ...recognition.stand_ins import StandIn
from ...recognition.trial import RandomNumbers, unwatched_twin
from ...recognition.trial_modules import draw_weights, trial_convolution, trial_linear
from ..gated_norms import GatedNorm
from .recorded_parts import record_convolution, record_linear, record_rounded, record_widened
from .state_pass import Recurrence, convolved, is_native, passes_agree, scan_refusal, scanned
from .state_spaces import ACTIVATION_PART

SCAN_PARTS = {"in_proj", "conv1d", "x_proj", "dt_proj", "out_proj"}
SCAN_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")  # FalconMamba and Jamba have them
SCAN_PARAMETERS = {"A_log", "D"}
SCAN_SIZES = ("intermediate_size", "ssm_state_size", "time_step_rank")
GATE_ALONE = GatedNorm(0.0, 0, gate_first=True)


class SelectiveScan(Recurrence):
    """The scan of Mamba behind a short convolution."""

    def __init__(self, norm: GatedNorm = GATE_ALONE) -> None:
        super().__init__(norm)
        self._steps: FloatLinear | None = None

    def asked(self, module: Any) -> str | None:
        weight = module.dt_proj._parameters.get("weight")
        if weight is None or weight.dtype not in FLOATS or not weight.is_contiguous():
            return "its dt_proj has no float weight, which transformers reads"
        return scan_refusal(module)

    def sizes(self, module: Any) -> StateSizes:
        kept, channels = module.conv1d.kernel_size[0] - 1, module.intermediate_size
        return StateSizes(channels * module.ssm_state_size, kept * channels)

    def compute(self, module: Any, x: Tensor, found: RecurrentPass) -> Tensor:
        mixed, gate = module.in_proj(x)[0].chunk(2, dim=-1)
        conv, size = module.conv1d, module.ssm_state_size
        values = convolved(short_conv.ConvInputs(mixed, conv.weight.squeeze(1), conv.bias), found)
        row = module.x_proj(values.to(x.dtype)[None])
        parts = row.split([module.time_step_rank, size, size], dim=-1)
        norms = (module._modules.get(name) for name in SCAN_NORMS)
        step, b, c = ((p if norm is None else norm(p))[0] for norm, p in zip(norms, parts, strict=True))
        bias = module.dt_proj.bias
        given = state_scan.ScanInputs(
            values[:, None], self._time_steps(module.dt_proj.weight, step), b.float()[:, None], c.float()[:, None],
            log_rate=module.A_log.contiguous(), skip=module.D,
            bias=torch.zeros_like(module.D) if bias is None else bias,
        )  # fmt: skip
        return self.normed(None, scanned(given, found)[:, 0], gate)

    def record(self, module: Any, x: StandIn) -> StandIn:
        trace: Any = x.trace
        own, (inner, size, rank) = module._modules, (getattr(module, name) for name in SCAN_SIZES)
        mixed, gate = record_linear(own["in_proj"], x).chunk(2, dim=-1)
        short = record_convolution(module.conv1d, mixed)
        row = record_linear(own["x_proj"], record_rounded(short, inner))
        parts = row[..., :rank], row[..., rank : rank + size], row[..., rank + size :]
        norms = (own.get(name) for name in SCAN_NORMS)
        step, b, c = (p if norm is None else trace.norm(norm, p) for norm, p in zip(norms, parts, strict=True))
        steps = trace.put("time_steps", [step], inner, weight=own["dt_proj"]._parameters["weight"])
        selected = trace.put("join", [b, c], 2 * size, heads=1, dim=size, value_dim=size)
        core = trace.put(
            "state_scan", [short, steps, record_widened(selected)], short.width, heads=1, kv_heads=1, dim=inner,
            value_dim=size, eps=0.0, offset=inf, weight=module._parameters["A_log"],
            bias=own["dt_proj"]._parameters["bias"], skip=module._parameters["D"],
        )  # fmt: skip
        return record_linear(own[self.last], self.record_norm(None, core, gate, parts=1))

    def _time_steps(self, weight: Tensor, x: Tensor) -> Tensor:
        """Compute x [N, R] times the weight [C, R], each row as it does a single one."""
        if not is_native(x):
            return x @ weight.t()
        if self._steps is None or self._steps.weights[0] is not weight:
            self._steps = FloatLinear([weight], [None])
        return self._steps(x)


def known_selective_scan(module: nn.Module) -> SelectiveScan | None:
    """Return the SelectiveScan of a module that has its parts and gives what ours does on random input; else None."""
    own: Any = module
    names = module._modules.keys() - {ACTIVATION_PART}
    if names not in (SCAN_PARTS, SCAN_PARTS | set(SCAN_NORMS)) or module._parameters.keys() != SCAN_PARAMETERS:
        return None
    numbers = [getattr(module, name, None) for name in (*SCAN_SIZES, "layer_idx")]
    if not all(isinstance(number, int) for number in numbers) or own.A_log.shape != (numbers[0], numbers[1]):
        return None
    known = SelectiveScan()
    return known if known.refusal(module) is None and _agrees(own) else None


@torch.no_grad()
def _agrees(module: Any) -> bool:
    numbers, width, channels, size, rank = RandomNumbers(), 8, 12, 5, 3
    parts: dict[str, Any] = {
        "in_proj": trial_linear(width, 2 * channels), "x_proj": trial_linear(channels, rank + 2 * size),
        "out_proj": trial_linear(channels, width),
        "conv1d": trial_convolution(channels, int(module.conv1d.kernel_size[0]), bias=module.conv1d.bias is not None),
        "dt_proj": nn.utils.skip_init(nn.Linear, rank, channels, bias=module.dt_proj.bias is not None),
    }  # fmt: skip
    draw_weights(parts.values(), numbers)
    for name, length in zip(SCAN_NORMS, (rank, size, size), strict=True):
        if name in module._modules and not module._modules[name]._parameters:
            parts[name] = unwatched_twin(module._modules[name])
        elif name in module._modules:
            weight = nn.Parameter(1 + numbers(length) / 4)
            parts[name] = unwatched_twin(module._modules[name], _parameters={"weight": weight})
    parameters = {"A_log": nn.Parameter(numbers(channels, size)), "D": nn.Parameter(numbers(channels))}
    theirs, ours = (unwatched_twin(module, _modules=parts, _parameters=parameters) for _ in range(2))
    for twin in (theirs, ours):
        vars(twin).update(zip(SCAN_SIZES, (channels, size, rank), strict=True), hidden_size=width, layer_idx=0)
    return passes_agree(SelectiveScan(), theirs, ours, numbers(2, 9, width))
