"""Layers with the state space of Mamba 2 over pages (Dao and Gu 2024, arXiv 2405.21060)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...cache.hf import RecurrentPass
from ...cache.kinds.state_sizes import WITHOUT_LIMITS, StateSizes
from ...kernels.cpu import short_conv, state_scan
from ...recognition.operation import UntraceableError
from ...recognition.stand_ins import StandIn
from ...recognition.symbols import Vector
from ...recognition.trial import RandomNumbers, unwatched_twin
from ...recognition.trial_modules import draw_weights, trial_convolution, trial_linear
from ..gated_norms import GatedNorm, known_gated_norm
from .recorded_parts import record_convolution, record_linear
from .state_pass import Recurrence, convolved, passes_agree, scan_refusal, scanned

SPACE_PARTS = {"in_proj", "conv1d", "norm", "out_proj"}
ACTIVATION_PART = "act"  # is a part too, or a function
SPACE_PARAMETERS = {"A_log", "D", "dt_bias"}
SPACE_SIZES = ("num_heads", "head_dim", "n_groups", "ssm_state_size", "intermediate_size", "conv_dim")
# Numbers by which Falcon-H1 multiplies the input of in_proj, and its result.
INPUT_FACTOR, RESULT_FACTORS = "ssm_in_multiplier", "mup_vector"


class StateSpace(Recurrence):
    """The scan of Mamba 2 behind a short convolution."""

    def asked(self, module: Any) -> str | None:
        return scan_refusal(module)

    def has_limits(self, module: Any) -> bool:
        return tuple(module.time_step_limit) != WITHOUT_LIMITS

    def sizes(self, module: Any) -> StateSizes:
        kept = module.conv1d.kernel_size[0] - 1
        return StateSizes(module.intermediate_size * module.ssm_state_size, kept * module.conv_dim)

    def compute(self, module: Any, x: Tensor, found: RecurrentPass) -> Tensor:
        gate, mixed, dt = _projected(module, x)
        conv, groups, size = module.conv1d, module.n_groups, module.ssm_state_size
        row = convolved(short_conv.ConvInputs(mixed, conv.weight.squeeze(1), conv.bias), found)
        values, b, c = row.split([module.intermediate_size, groups * size, groups * size], dim=-1)
        given = state_scan.ScanInputs(
            values.unflatten(-1, (-1, module.head_dim)), dt,
            b.unflatten(-1, (groups, size)), c.unflatten(-1, (groups, size)),
            log_rate=module.A_log, bias=module.dt_bias, skip=module.D,
            limits=module.time_step_limit, limited=found.states.given,
        )  # fmt: skip
        return self.normed(module.norm, scanned(given, found).flatten(1), gate)

    def record(self, module: Any, x: StandIn) -> StandIn:
        trace: Any = x.trace
        own, inner = module._modules, module.intermediate_size
        factors = module._buffers.get(RESULT_FACTORS)
        if factors is not None:
            x = x * float(getattr(module, INPUT_FACTOR))
        row = record_linear(own["in_proj"], x)
        if factors is not None:
            if factors.dtype is not trace.dtype or factors.numel() != row.width:
                raise UntraceableError("it multiplies by numbers of another dtype")
            row = trace.multiplied(row, Vector(module._buffers, RESULT_FACTORS, factors))
        gate, mixed = row[..., :inner], row[..., inner : inner + module.conv_dim]
        lowest, highest = module.time_step_limit
        short = record_convolution(module.conv1d, mixed)
        core = trace.put(
            "state_scan", [short, row[..., inner + module.conv_dim :]], inner * short.width // mixed.width,
            heads=module.num_heads, kv_heads=module.n_groups, dim=module.head_dim, value_dim=module.ssm_state_size,
            eps=float(lowest), offset=float(highest), weight=module._parameters["A_log"],
            bias=module._parameters["dt_bias"], skip=module._parameters["D"],
        )  # fmt: skip
        normed = self.record_norm(own["norm"], core, gate, parts=max(1, self.norm.groups))
        return record_linear(own[self.last], normed)


def _projected(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gates [N, D], the inputs of the convolution [N, C] and dt [N, H] of x [1, N, hidden]."""
    factors = module._buffers.get(RESULT_FACTORS)
    if factors is None:
        row = module.in_proj(x)[0]
    else:
        row = module.in_proj(x * getattr(module, INPUT_FACTOR))[0] * factors.view(-1)
    gate, mixed, dt = row.split([module.intermediate_size, module.conv_dim, module.num_heads], dim=-1)
    return gate, mixed, dt


def known_state_space(module: nn.Module) -> StateSpace | None:
    """Return the StateSpace of a module that has its parts and gives what ours does on random input; else None."""
    own: Any = module
    if module._modules.keys() - {ACTIVATION_PART} != SPACE_PARTS or module._parameters.keys() != SPACE_PARAMETERS:
        return None
    numbers = [getattr(module, name, None) for name in (*SPACE_SIZES, "layer_idx")]
    if not all(isinstance(number, int) for number in numbers) or not hasattr(module, "time_step_limit"):
        return None
    heads, head_dim, groups, size, inner, channels, _ = numbers
    if inner != heads * head_dim or channels != inner + 2 * groups * size or heads % groups:  # type: ignore[operator]
        return None
    norm = known_gated_norm(own.norm)
    if norm is None:
        return None
    known = StateSpace(norm)
    return known if known.refusal(module) is None and _agrees(own, norm) else None


@torch.no_grad()
def _agrees(module: Any, norm: GatedNorm) -> bool:
    numbers, width, head_dim, size = RandomNumbers(), 8, 3, 5
    groups = min(module.n_groups, 2)
    heads = 2 * groups
    inner, length = heads * head_dim, int(module.conv1d.kernel_size[0])
    channels = inner + 2 * groups * size
    parts: dict[str, Any] = {
        "in_proj": trial_linear(width, inner + channels + heads), "out_proj": trial_linear(inner, width),
        "conv1d": trial_convolution(channels, length, bias=module.conv1d.bias is not None),
    }  # fmt: skip
    draw_weights(parts.values(), numbers)
    if norm.groups:
        parts["norm"] = unwatched_twin(module.norm, _parameters={"weight": nn.Parameter(numbers(inner))})
        of_norm = {"n_groups": groups if norm.groups > 1 else 1, "group_size": inner // min(norm.groups, groups)}
        vars(parts["norm"]).update({name: value for name, value in of_norm.items() if name in vars(module.norm)})
    parameters = {name: nn.Parameter(numbers(heads)) for name in SPACE_PARAMETERS}
    factors = {RESULT_FACTORS: numbers(1, 1, inner + channels + heads)} if RESULT_FACTORS in module._buffers else {}
    theirs, ours = (unwatched_twin(module, _modules=parts, _parameters=parameters, _buffers=factors) for _ in range(2))
    sizes = dict(zip(SPACE_SIZES, (heads, head_dim, groups, size, inner, channels), strict=True))
    for twin in (theirs, ours):
        vars(twin).update(sizes, hidden_size=width, layer_idx=0, chunk_size=4)
    # Small steps too, since those of a prompt may have a least one.
    parameters["dt_bias"].copy_(4 * parameters["dt_bias"] - 2)
    known = StateSpace(GatedNorm(norm.eps, min(norm.groups, groups), norm.gate_first))
    return passes_agree(known, theirs, ours, numbers(2, 9, width))
