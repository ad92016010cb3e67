"""Layers with the gated delta rule over pages, as Qwen3-Next and Qwen3.5 have them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...cache.hf import RecurrentPass
from ...cache.kinds.state_sizes import StateSizes
from ...kernels.cpu import delta_rule, short_conv
from ...recognition.operation import UntraceableError
from ...recognition.stand_ins import StandIn
from ...recognition.trial import RandomNumbers, unwatched_twin
from ...recognition.trial_modules import draw_weights, trial_convolution, trial_linear
from ...undo.journal import original_class
from ..gated_norms import known_gated_norm
from .recorded_parts import parts_of_heads, record_convolution, record_joined_heads, record_linear
from .state_pass import (
    Recurrence,
    activation_refusal,
    convolved,
    is_native,
    passes_agree,
    short_convolution_refusal,
)

# The projections of Qwen3-Next, and those of Qwen3.5.
INTERLEAVED, SEPARATE = {"in_proj_qkvz", "in_proj_ba"}, {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
OTHER_PARTS = {"conv1d", "norm", "out_proj"}
RULE_PARAMETERS = {"A_log", "dt_bias"}


class DeltaHeads(NamedTuple):
    """The heads of keys and of values of a layer, and the numbers of one."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @property
    def widths(self) -> list[int]:
        """The numbers of all queries of a token, of its keys, and of its values."""
        return [self.keys * self.key_dim, self.keys * self.key_dim, self.values * self.value_dim]

    @property
    def interleaved(self) -> tuple[list[int], list[int]]:
        """The numbers of a head of keys in the projections of Qwen3-Next, next to those of the heads of values that
        share it: of queries, keys, values and gates; and of b and a.
        """
        repeats = self.values // self.keys
        return [self.key_dim, self.key_dim, repeats * self.value_dim, repeats * self.value_dim], [repeats, repeats]


class DeltaRule(Recurrence):
    """The gated delta rule behind a short convolution."""

    def heads(self, module: Any) -> DeltaHeads:
        """Return the heads of the module."""
        return DeltaHeads(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)

    def asked(self, module: Any) -> str | None:
        refusal = short_convolution_refusal(module)
        if refusal is not None:
            return refusal
        # In transformers padding is zeros in front of the projections, and a bias would make it something else.
        if any(getattr(part, "bias", None) is not None for name, part in module._modules.items() if name != self.last):
            return "its projections or its convolution have a bias"
        return activation_refusal(module)

    def sizes(self, module: Any) -> StateSizes:
        heads, kept = self.heads(module), module.conv1d.kernel_size[0] - 1
        return StateSizes(heads.values * heads.key_dim * heads.value_dim, kept * module.conv1d.in_channels)

    def compute(self, module: Any, x: Tensor, found: RecurrentPass) -> Tensor:
        heads = self.heads(module)
        mixed, gate, rule_inputs = self.projected(module, x)
        row = convolved(short_conv.ConvInputs(mixed, module.conv1d.weight.squeeze(1)), found)
        query, key, value = row.split(heads.widths, dim=-1)
        given = delta_rule.DeltaInputs(
            query.unflatten(-1, (-1, heads.key_dim)), key.unflatten(-1, (-1, heads.key_dim)),
            value.unflatten(-1, (-1, heads.value_dim)), **rule_inputs,
        )  # fmt: skip
        rule, states = delta_rule.delta_rule if is_native(mixed) else delta_rule.reference, found.storage.pages[0]
        core = rule(
            given, states=states.view(-1, heads.values, heads.key_dim, heads.value_dim), **found.states.places
        ).to(mixed.dtype)
        norm = module._modules[self.norm_name]
        normed = self.normed(norm, core.view(-1, heads.value_dim), gate.reshape(-1, heads.value_dim))
        return normed.view(len(core), -1)

    def record(self, module: Any, x: StandIn) -> StandIn:
        trace: Any = x.trace
        own, heads = module._modules, self.heads(module)
        mixed, gate, b, a = self.record_projections(module, x)
        row = record_convolution(module.conv1d, mixed)
        core = trace.put(
            "delta_rule", [row, a, b], gate.width * row.width // mixed.width, heads=heads.values,
            kv_heads=heads.keys, dim=heads.key_dim, value_dim=heads.value_dim, scale=1.0,
            weight=module._parameters["A_log"], bias=module._parameters["dt_bias"],
        )  # fmt: skip
        normed = self.record_norm(own[self.norm_name], core, gate, parts=heads.values)
        trace.operations[-1].values["round_first"] = True  # what the rule gives is rounded, too
        return record_linear(own[self.last], normed)

    def record_projections(self, module: Any, x: StandIn) -> tuple[StandIn, ...]:
        """Record the inputs of the convolution, the gates, and b and a. Raises UntraceableError."""
        own, heads = module._modules, self.heads(module)
        if own.keys() >= SEPARATE:
            return tuple(record_linear(own[f"in_proj_{name}"], x) for name in ("qkv", "z", "b", "a"))
        if not own.keys() >= INTERLEAVED:
            raise UntraceableError("its projections are not one behind the other")
        rows = (record_linear(own[name], x) for name in ("in_proj_qkvz", "in_proj_ba"))
        pairs = zip(rows, heads.interleaved, strict=True)
        *parts, gate, b, a = (part for row, sizes in pairs for part in parts_of_heads(row, heads.keys, sizes))
        return record_joined_heads(parts), *(record_joined_heads([each]) for each in (gate, b, a))

    def projected(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return the inputs of the convolution [N, C], the gates [N, Hv, Dv] or flat, and the other DeltaInputs of x
        [1, N, H]."""
        if "in_proj_qkvz" in module._modules:
            heads, rows = self.heads(module), (module.in_proj_qkvz(x), module.in_proj_ba(x))
            of_heads = (row.unflatten(-1, (heads.keys, -1)) for row in rows)
            pairs = zip(of_heads, heads.interleaved, strict=True)
            *parts, gate, b, a = (part.flatten(2) for row, sizes in pairs for part in row.split(sizes, dim=-1))
            mixed = torch.cat(parts, dim=-1)
        else:
            mixed, gate, b, a = module.in_proj_qkv(x), module.in_proj_z(x), module.in_proj_b(x), module.in_proj_a(x)
        rates = {"log_rate": module.A_log, "bias": module.dt_bias}
        return mixed[0], gate[0], {"a": a[0], "b": b[0], **rates}


def known_delta_rule(module: nn.Module) -> DeltaRule | None:
    """Return the DeltaRule of a module that has its parts and gives what ours does on random input; else None."""
    projections = module._modules.keys() - OTHER_PARTS
    if projections not in (INTERLEAVED, SEPARATE) or not module._modules.keys() >= OTHER_PARTS:
        return None
    if module._parameters.keys() != RULE_PARAMETERS or not isinstance(getattr(module, "layer_idx", None), int):
        return None
    norm = known_gated_norm(module.norm)  # type: ignore[arg-type]
    if norm is None or norm.groups != 1:
        return None
    known = DeltaRule(norm)
    return known if known.refusal(module) is None and _agrees(module, norm) else None


@torch.no_grad()
def _agrees(module: Any, norm: Any) -> bool:
    numbers, width, keys, key_dim, value_dim = RandomNumbers(), 8, 2, 4, 6
    values = keys * (module.num_v_heads // module.num_k_heads)
    key_width, value_width, length = keys * key_dim, values * value_dim, int(module.conv1d.kernel_size[0])
    channels = 2 * key_width + value_width
    sizes = {
        "in_proj_qkvz": channels + value_width, "in_proj_ba": 2 * values,
        "in_proj_qkv": channels, "in_proj_z": value_width, "in_proj_b": values, "in_proj_a": values,
    }  # fmt: skip
    parts: dict[str, Any] = {name: trial_linear(width, sizes[name]) for name in module._modules if name in sizes}
    parts["conv1d"] = trial_convolution(channels, length, bias=False)
    parts["out_proj"] = trial_linear(value_width, width)
    draw_weights(parts.values(), numbers)
    parts["norm"] = unwatched_twin(module.norm, _parameters={"weight": nn.Parameter(numbers(value_dim))})
    parameters = {name: nn.Parameter(numbers(values)) for name in RULE_PARAMETERS}
    theirs, ours = (unwatched_twin(module, _modules=parts, _parameters=parameters) for _ in range(2))
    for twin in (theirs, ours):
        twin.hidden_size, twin.num_k_heads, twin.num_v_heads, twin.layer_idx = width, keys, values, 0
        twin.head_k_dim, twin.head_v_dim, twin.key_dim, twin.value_dim = key_dim, value_dim, key_width, value_width
        twin.conv_dim = channels
    return passes_agree(DeltaRule(norm), theirs, ours, numbers(2, 9, width), generated=_whole)


def _whole(module: Any, x: Tensor, num_prompt: int) -> Tensor:
    """Compute x [B, Q, H] by the module's own code, all of it as a prompt."""
    result: Tensor = original_class(module).forward(module, x)
    return result
