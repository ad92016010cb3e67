"""Layers with the state space of Mamba for each of several heads, as Zamba has them, over pages (Glorioso et al. 2024,
arXiv 2405.16712).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...cache.hf import RecurrentPass
from ...cache.kinds.state_sizes import StateSizes
from ...kernels.cpu import head_products, short_conv, state_scan
from ...kernels.cpu.library import FLOATS
from ...recognition.trial import RandomNumbers, unwatched_twin
from ...recognition.trial_modules import draw_weights, trial_convolution, trial_linear
from .selective_scans import GATE_ALONE
from .state_pass import Recurrence, convolved, is_native, passes_agree, scan_refusal, scanned
from .state_spaces import ACTIVATION_PART

HEADED_PARTS = {"in_proj", "conv1d", "out_proj"}
HEADED_PARAMETERS = {"x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D"}
HEADED_SIZES = ("n_mamba_heads", "mamba_head_dim", "ssm_state_size", "time_step_rank", "intermediate_size")


class HeadedScan(Recurrence):
    """The scan of Mamba of each head, behind a short convolution."""

    def asked(self, module: Any) -> str | None:
        if any(weight.dtype not in FLOATS or weight.stride(-1) != 1 for weight in module._parameters.values()):
            return "its scan has weights that are not float"
        return scan_refusal(module)

    def sizes(self, module: Any) -> StateSizes:
        kept, channels = module.conv1d.kernel_size[0] - 1, module.intermediate_size
        return StateSizes(channels * module.ssm_state_size, kept * channels)

    def compute(self, module: Any, x: Tensor, found: RecurrentPass) -> Tensor:
        mixed, gate = module.in_proj(x)[0].unflatten(-1, (-1, 2)).unbind(-1)
        native = is_native(mixed)
        conv, heads, size = module.conv1d, module.n_mamba_heads, module.ssm_state_size
        inputs = short_conv.ConvInputs(mixed.contiguous(), conv.weight.squeeze(1), conv.bias)
        values = convolved(inputs, found).unflatten(-1, (heads, -1))  # [N, H, P]
        parts = _of_heads(values.to(x.dtype), module.x_proj_weight, native=native)
        dt, b, c = parts.split([module.time_step_rank, size, size], dim=-1)
        dt = _of_heads(dt, module.dt_proj_weight, native=native)
        results = []
        for head in range(heads):
            given = state_scan.ScanInputs(
                values[:, head, None], dt[:, head], b[:, head, None].float(), c[:, head, None].float(),
                log_rate=module.A_log[head].float(), bias=module.dt_proj_bias[head].float(),
                skip=module.D[head].float(),
            )  # fmt: skip
            places = {name: _of_head(slots, name, head, heads) for name, slots in found.states.places.items()}
            results.append(scanned(given, found, places))
        return self.normed(None, torch.cat(results, dim=1).flatten(1), gate)


def _of_head(slots: Tensor, name: str, head: int, heads: int) -> Tensor:
    """Return where the states of one head are, in pages of which each holds those of all heads."""
    return slots if name == "starts" else torch.where(slots < 0, slots, slots * heads + head)


def _of_heads(x: Tensor, weight: Tensor, *, native: bool) -> Tensor:
    """Compute x [N, H, I] times the weights [H, O, I] of each head: [N, H, O]. Each token is as it is alone."""
    if not native:
        return head_products.reference(x, weight)
    out = x.new_empty(*x.shape[:2], weight.shape[1])
    head_products.head_products(x, weight, out=out)
    return out


def known_headed_scan(module: nn.Module) -> HeadedScan | None:
    """Return the HeadedScan of a module that has its parts and gives what ours does on random input; else None."""
    own: Any = module
    if module._modules.keys() - {ACTIVATION_PART} != HEADED_PARTS or module._parameters.keys() != HEADED_PARAMETERS:
        return None
    numbers = [getattr(module, name, None) for name in (*HEADED_SIZES, "layer_idx")]
    if not all(isinstance(number, int) for number in numbers):
        return None
    heads, dim, size, _rank, channels, _ = numbers
    if channels != heads * dim or own.A_log.shape != (heads, dim, size):  # type: ignore[operator]
        return None
    known = HeadedScan(GATE_ALONE)
    return known if known.refusal(module) is None and _agrees(own) else None


@torch.no_grad()
def _agrees(module: Any) -> bool:
    numbers, width, heads, dim, size, rank = RandomNumbers(), 8, 2, 6, 5, 3
    channels = heads * dim
    parts: dict[str, Any] = {
        "in_proj": trial_linear(width, 2 * channels), "out_proj": trial_linear(channels, width),
        "conv1d": trial_convolution(channels, int(module.conv1d.kernel_size[0]), bias=module.conv1d.bias is not None),
    }  # fmt: skip
    draw_weights(parts.values(), numbers)
    shapes = {
        "x_proj_weight": (heads, rank + 2 * size, dim), "dt_proj_weight": (heads, dim, rank),
        "dt_proj_bias": (heads, dim), "A_log": (heads, dim, size), "D": (heads, dim),
    }  # fmt: skip
    parameters = {name: nn.Parameter(numbers(*shape)) for name, shape in shapes.items()}
    theirs, ours = (unwatched_twin(module, _modules=parts, _parameters=parameters) for _ in range(2))
    for twin in (theirs, ours):
        vars(twin).update(zip(HEADED_SIZES, (heads, dim, size, rank, channels), strict=True))
        vars(twin).update(hidden_size=width, layer_idx=0)
    return passes_agree(HeadedScan(GATE_ALONE), theirs, ours, numbers(2, 9, width))
