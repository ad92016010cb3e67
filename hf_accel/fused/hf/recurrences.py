"""Layers with the gated delta rule over pages: each token's result needs the state after the token before it.

So their states stay in pages of one token each: tokens of many sequences can stand in one row, and drafts, copies and
preemption need nothing of their own. A token's numbers are the same whatever else is in the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...cache.hf import CacheOverPages, RaggedCache, layer_kinds
from ...cache.pages import Pages, TokenRange
from ...cache.states import StateGroup
from ...kernels import cpu
from ...kernels.cpu import delta_rule, short_conv
from ...kernels.cpu.library import FLOATS
from ...kernels.cpu.row_kernels import activate, rms_norm
from ...recognition.trial import RandomNumbers, Tolerance, agree, unwatched_twin
from ...recognition.unchanged import is_unobserved
from ...tensors import is_recorded
from ...undo.journal import Mixin, mixed_class, original_class
from .compressed import compressed_sites
from .convolutions import causal_refusal, convolution_sites, require_pages, trial_convolution, trial_linear
from .sites import FusedSite

RECURRENCE = "recurrence"  # the kind in the plan
# The projections of Qwen3-Next, and those of Qwen3.5.
INTERLEAVED, SEPARATE = {"in_proj_qkvz", "in_proj_ba"}, {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
OTHER_PARTS = {"conv1d", "norm", "out_proj"}
PARAMETERS = {"A_log", "dt_bias"}
# The convolution and the rule.
NATIVE = (short_conv.short_conv, delta_rule.delta_rule)
REFERENCE = (short_conv.reference, delta_rule.reference)


class PagedDeltaRule(Mixin):
    """A mixin for a layer with the gated delta rule, of Qwen3-Next and Qwen3.5."""

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """[B, Q, H] -> [B, Q, H]. Raises NotRaggedError if the module was changed, or is given what is not known."""
        if not isinstance(cache_params, CacheOverPages):
            stock: Tensor = super().forward(  # type: ignore[misc]
                hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs
            )
            return stock
        own: Any = self
        require_pages(own, recurrence_refusal(own), kwargs)
        kept, channels = own.conv1d.kernel_size[0] - 1, own.conv1d.in_channels
        state = own.num_v_heads * own.head_k_dim * own.head_v_dim
        layer = cache_params.layers[own.layer_idx]
        found = layer.states(hidden_states, state=state, inputs=kept * channels)
        if attention_mask is not None:  # [B, Q], as transformers makes it for these layers
            hidden_states = hidden_states * attention_mask[:, :, None].to(hidden_states.dtype)
        # Padding has no state: in transformers it changes none before a sequence's first token.
        mixed, z, b, a = projected(own, found.step.tokens(hidden_states[:, None]).transpose(0, 1))
        states, inputs = found.storage.pages[:2]
        places = vars(found.states)
        is_native = _is_native(mixed)
        convolve, rule = NATIVE if is_native else REFERENCE
        convolved = convolve(mixed, own.conv1d.weight.squeeze(1), kept=inputs.view(-1, kept, channels), **places)
        query, key, value = convolved.split([own.key_dim, own.key_dim, own.value_dim], dim=-1)
        given = delta_rule.DeltaInputs(
            query.unflatten(-1, (-1, own.head_k_dim)), key.unflatten(-1, (-1, own.head_k_dim)),
            value.unflatten(-1, (-1, own.head_v_dim)), a, b,
            rate=own.A_log.float().exp(), bias=own.dt_bias.float(),
        )  # fmt: skip
        core = rule(
            given, states=states.view(-1, own.num_v_heads, own.head_k_dim, own.head_v_dim), **places,
        ).to(mixed.dtype)  # fmt: skip
        layer.pass_done(found.step)
        normed = _normed(own.norm, core.view(-1, own.head_v_dim), z.reshape(-1, own.head_v_dim), is_native=is_native)
        out: Tensor = own.out_proj(normed.view(1, len(core), -1))
        return found.step.columns(out.transpose(0, 1), len(hidden_states)).squeeze(2)


def projected(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs of the convolution [N, C], the gates z [N, Hv, Dv] or flat, b and a [N, Hv] of x [1, N, H]."""
    if "in_proj_qkvz" in module._modules:
        *parts, z, b, a = module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))
        mixed = torch.cat([part.flatten(2) for part in parts], dim=-1)
    else:
        mixed, z, b, a = module.in_proj_qkv(x), module.in_proj_z(x), module.in_proj_b(x), module.in_proj_a(x)
    return mixed[0], z[0], b[0], a[0]


def _is_native(x: Tensor) -> bool:
    """Return whether our kernels may compute from x: torch does not have to see it."""
    return x.is_cpu and x.dtype in FLOATS and not is_recorded() and not x.requires_grad and cpu.refusal() is None


def _normed(norm: Any, x: Tensor, gate: Tensor, *, is_native: bool) -> Tensor:
    """Compute norm(x, gate) for rows [M, D]. Ours rounds each row as it does a single one, and torch's may not."""
    if not is_native or not is_unobserved(norm) or not type(norm).__name__.endswith("RMSNormGated"):
        result: Tensor = norm(x, gate)
        return result
    normed = rms_norm(x, norm.weight, norm.variance_epsilon)
    return activate(gate.float(), "silu", y=normed.float()).to(x.dtype)


def recurrence_refusal(module: Any) -> str | None:
    """Return why a layer's recurrence cannot be computed by ours, as one clause; None if it can."""
    conv = module._modules.get("conv1d")
    refusal = causal_refusal(conv)
    if refusal is not None:
        return refusal
    if conv.weight.dtype not in FLOATS or conv.kernel_size[0] < 2:
        return f"its convolution is over {conv.kernel_size[0]} tokens in {conv.weight.dtype}"
    # In transformers padding is zeros in front of the projections, and a bias would make it something else.
    if any(getattr(part, "bias", None) is not None for name, part in module._modules.items() if name != "out_proj"):
        return "its projections or its convolution have a bias"
    for name, part in (("it", module), ("its norm", module.norm)):
        if getattr(part, "activation", "silu") not in ("silu", "swish"):
            return f"{name} has the activation {part.activation!r}"
    return None


def recurrent_pages_refusal(device: torch.device) -> str | None:
    """Return why recurrent layers on a device cannot read pages, as one clause; None if they can."""
    if device.type not in ("cpu", "meta"):
        return "whose states are read in pages on a CPU alone"
    # Without our kernel, a prompt would take longer than transformers' own code needs for it.
    return None if cpu.refusal() is None else f"whose states only our kernels read in pages ({cpu.refusal()})"


def state_sites(model: PreTrainedModel) -> Iterator[FusedSite]:
    """Find the layers of a model whose pages are read by no other forward than ours, whatever fuse= says."""
    kinds = layer_kinds(model.config)
    if any(kind.convolves or kind.recurs for kind in kinds):
        yield from convolution_sites(model)
        yield from _recurrence_sites(model)
    if any(kind.rank is not None for kind in kinds):
        yield from compressed_sites(model)


def _recurrence_sites(model: nn.Module) -> Iterator[FusedSite]:
    """Find the recurrent layers of a model, which get a forward over pages."""
    for name, module in model.named_modules():
        if is_known_recurrence(module):
            yield FusedSite(name, module, RECURRENCE, PagedDeltaRule, None)


def is_known_recurrence(module: nn.Module) -> bool:
    """Return whether a module has the parts of a gated delta rule, and gives what ours does on random input."""
    projections = module._modules.keys() - OTHER_PARTS
    if projections not in (INTERLEAVED, SEPARATE) or not module._modules.keys() >= OTHER_PARTS:
        return False
    if module._parameters.keys() != PARAMETERS or not isinstance(getattr(module, "layer_idx", None), int):
        return False
    return recurrence_refusal(module) is None and _agrees(module)


@torch.no_grad()
def _agrees(module: Any) -> bool:
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
    for part in parts.values():
        part.weight.copy_(numbers(*part.weight.shape))
    parts["norm"] = unwatched_twin(module.norm, _parameters={"weight": nn.Parameter(numbers(value_dim))})
    parameters = {name: nn.Parameter(numbers(values)) for name in PARAMETERS}
    theirs, ours = (unwatched_twin(module, _modules=parts, _parameters=parameters) for _ in range(2))
    for twin in (theirs, ours):
        twin.hidden_size, twin.num_k_heads, twin.num_v_heads, twin.layer_idx = width, keys, values, 0
        twin.head_k_dim, twin.head_v_dim, twin.key_dim, twin.value_dim = key_dim, value_dim, key_width, value_width
        twin.conv_dim = channels
    ours.__class__ = mixed_class(PagedDeltaRule, original_class(module))
    x = numbers(2, 9, width)
    return agree(
        lambda: original_class(module).forward(theirs, x),
        lambda: _in_passes(ours, x, (5, 1, 3)),
        Tolerance(roundings=64, absolute=1e-4),
    )


def _in_passes(module: Any, x: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Compute x [B, Q, H] in passes over so many tokens of each sequence."""
    pages = Pages([StateGroup(num_blocks=2, growable=True)])
    cache, sequences = RaggedCache(pages.groups, [0]), [pages.begin() for _ in x]
    results, start = [], 0
    for count in counts:
        for sequence in sequences:
            pages.append(sequence, count)
        cache.step = pages.step([TokenRange(sequence, start, count) for sequence in sequences])
        part = module(x[:, start : start + count].reshape(1, -1, x.shape[-1]), cache_params=cache)
        results.append(part.view(len(x), count, -1))
        start += count
    return torch.cat(results, dim=1)
