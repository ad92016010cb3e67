"""Layers with the gated delta rule whose queries, keys and values have projections of their own.

Those of Olmo Hybrid, and those of Kimi Linear and Ling, where each number of a key has a decay of its own (Kimi Team
2025, "Kimi Linear", arXiv 2510.26692).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...recognition.operation import UntraceableError
from ...recognition.stand_ins import StandIn
from ...recognition.trial import RandomNumbers, unwatched_twin
from ...recognition.trial_modules import trial_convolution, trial_linear
from ..gated_norms import GatedNorm, known_gated_norm
from .delta_rules import DeltaHeads, DeltaRule
from .state_pass import passes_agree

DELTA_PARTS = {"q_proj", "k_proj", "v_proj", "b_proj", "conv1d", "o_norm", "o_proj"}
ONE_DECAY, FORGET_GATE = "a_proj", "forget_gate"  # what makes decays of heads, and of each number of a key
OUTPUT_GATES = ({"g_proj"}, {"g_a_proj", "g_b_proj"})
# The attributes that say the heads of keys and of values, and their numbers: of Olmo Hybrid, and of the others.
HEADS = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
SAME_HEADS = ("num_heads", "num_heads", "head_dim", "head_dim")
NEGATIVE = "allow_neg_eigval"  # whether beta reaches from 0 to 2


class DeltaAttention(DeltaRule):
    """The gated delta rule behind a short convolution, with a projection for each of its inputs."""

    norm_name = "o_norm"
    last = "o_proj"

    def heads(self, module: Any) -> DeltaHeads:
        names = HEADS if ONE_DECAY in module._modules else SAME_HEADS
        return DeltaHeads(*(getattr(module, name) for name in names))

    def record(self, module: Any, x: StandIn) -> StandIn:
        raise UntraceableError("its projections are not one behind the other")

    def projected(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        mixed = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], dim=-1)
        gate = module.g_proj(x) if "g_proj" in module._modules else module.g_b_proj(module.g_a_proj(x))
        given: dict[str, Any] = {"b": module.b_proj(x)[0]}
        if ONE_DECAY in module._modules:
            given |= {"a": module.a_proj(x)[0], "log_rate": module.A_log, "bias": module.dt_bias}
        else:
            given |= {"a": None, "decays": module.forget_gate(x)[0].float().exp()}
        return mixed[0], gate[0], given | {"beta_factor": 2.0 if getattr(module, NEGATIVE, False) else 1.0}


def known_delta_attention(module: nn.Module) -> DeltaAttention | None:
    """Return the DeltaAttention of a module that has its parts and gives what ours does on random input; else None."""
    others = module._modules.keys() - DELTA_PARTS
    decay, gates = others & {ONE_DECAY, FORGET_GATE}, others - {ONE_DECAY, FORGET_GATE}
    if not module._modules.keys() >= DELTA_PARTS or len(decay) != 1 or gates not in OUTPUT_GATES:
        return None
    of_module = {"A_log", "dt_bias"} if ONE_DECAY in decay else set()
    numbers = [getattr(module, name, None) for name in (HEADS if of_module else SAME_HEADS)]
    numbers.append(getattr(module, "layer_idx", None))
    if module._parameters.keys() != of_module or not all(isinstance(number, int) for number in numbers):
        return None
    norm = known_gated_norm(module.o_norm)  # type: ignore[arg-type]
    if norm is None or norm.groups != 1:
        return None
    known = DeltaAttention(norm)
    return known if known.refusal(module) is None and _agrees(module, norm) else None


@torch.no_grad()
def _agrees(module: Any, norm: GatedNorm) -> bool:
    numbers, width, has_one = RandomNumbers(), 8, ONE_DECAY in module._modules
    keys, key_dim = 2, 4
    repeats, value_dim = (module.num_v_heads // module.num_k_heads, 6) if has_one else (1, key_dim)
    heads = DeltaHeads(keys, keys * repeats, key_dim, value_dim)
    *_, value_width = heads.widths
    sizes = dict(zip(("q_proj", "k_proj", "v_proj"), heads.widths, strict=True))
    sizes |= {"a_proj": heads.values, "b_proj": heads.values, "g_proj": value_width, "g_a_proj": heads.value_dim}
    parts: dict[str, Any] = {name: trial_linear(width, sizes[name]) for name in module._modules if name in sizes}
    if "g_b_proj" in module._modules:
        parts["g_b_proj"] = trial_linear(heads.value_dim, value_width)
    parts["conv1d"] = trial_convolution(sum(heads.widths), int(module.conv1d.kernel_size[0]), bias=False)
    parts["o_proj"] = trial_linear(value_width, width)
    for part in parts.values():
        part.weight.copy_(numbers(*part.weight.shape))
    parts["o_norm"] = unwatched_twin(module.o_norm, _parameters={"weight": nn.Parameter(numbers(heads.value_dim))})
    if not has_one:
        parts[FORGET_GATE] = _trial_gate(module.forget_gate, heads, width, numbers)
    parameters = {name: nn.Parameter(numbers(heads.values)) for name in module._parameters}
    theirs, ours = (unwatched_twin(module, _modules=parts, _parameters=parameters) for _ in range(2))
    for twin in (theirs, ours):
        vars(twin).update(zip(HEADS if has_one else SAME_HEADS, heads, strict=True), hidden_size=width, layer_idx=0)
        vars(twin).update(key_dim=heads.widths[0], value_dim=value_width, qkv_dim=value_width)
        twin.conv_dim = sum(heads.widths)
    return passes_agree(DeltaAttention(norm), theirs, ours, numbers(2, 9, width))


def _trial_gate(gate: nn.Module, heads: DeltaHeads, width: int, numbers: RandomNumbers) -> nn.Module:
    """Return a twin of a gate that makes a decay of each number of a key, of other sizes."""
    value_width = heads.values * heads.value_dim
    sizes = {"f_proj": (width, value_width), "f_a_proj": (width, heads.value_dim)}
    sizes["f_b_proj"] = (heads.value_dim, value_width)
    parts: dict[str, Any] = {name: trial_linear(*sizes[name]) for name in gate._modules if name in sizes}
    for part in parts.values():
        part.weight.copy_(numbers(*part.weight.shape))
    rate: Any = gate._parameters.get("A_log")
    shape = (1, 1, heads.values, 1) if rate is not None and rate.ndim == 4 else (heads.values,)
    parameters = {"A_log": nn.Parameter(numbers(*shape)), "dt_bias": nn.Parameter(numbers(value_width))}
    twin: Any = unwatched_twin(gate, _modules=parts, _parameters=parameters)
    vars(twin).update(head_dim=heads.value_dim, num_heads=heads.values, qkv_dim=value_width)
    return twin
