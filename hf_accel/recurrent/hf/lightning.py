"""Lightning attention over pages: linear attention with a decay of each head (Qin et al. 2024, arXiv 2401.04658).

MiniMax uses it. Its state is that of Mamba 2 with steps of one: S = decay S + k v; out = q S.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...cache.hf import CacheOverPages, RecurrentPass
from ...cache.hf.cache_argument import CACHE_NAME
from ...cache.kinds.state_sizes import StateSizes
from ...kernels.cpu import state_scan
from ...recognition.trial import RandomNumbers, unwatched_twin
from ...recognition.trial_modules import draw_weights, trial_linear
from ...undo.journal import original_class
from ..gated_norms import GatedNorm
from .convolutions import PagedForward
from .state_pass import Recurrence, over_pages, passes_agree, scanned

LIGHTNING_PARTS = {"act_fn", "norm", "qkv_proj", "out_proj", "output_gate"}
LIGHTNING_SIZES = ("num_attention_heads", "head_dim", "block_size", "layer_idx")
SLOPES = "slope_rate"  # the buffer that says how fast each head forgets
DECAYS = ("query_decay", "key_decay", "diagonal_decay")  # buffers that say the same of the tokens of a block
ONE_STEP = (1.0, 1.0)  # a step within these limits is one


class PagedLightning(PagedForward):
    """A mixin for lightning attention, which a decoder layer calls as it calls other attention."""

    def over_pages(
        self, hidden_states: Tensor, cache: CacheOverPages, attention_mask: Tensor | None, others: dict[str, Any]
    ) -> tuple[Tensor, None]:
        return over_pages(self, hidden_states, cache, others), None


class LightningAttention(Recurrence):
    """Linear attention with a decay of each head, a norm, and a gate."""

    mixin = PagedLightning
    stays_with_row = True

    def asked(self, module: Any) -> str | None:
        slopes = module._buffers.get(SLOPES)
        if slopes is None or slopes.shape != (module.num_attention_heads, 1, 1):
            return "its heads have no decay each"
        if slopes.is_meta:
            return None
        made = dict(zip(DECAYS, module.decay_factors(slopes), strict=True))
        # They are rounded to the model's dtype, which a state in float32 has no use for.
        same = (torch.allclose(made[name], module._buffers[name], rtol=0.02, atol=0.02) for name in DECAYS)
        return None if all(same) else f"its {DECAYS[0]} was not made from its {SLOPES}"

    def sizes(self, module: Any) -> StateSizes:
        return StateSizes(module.num_attention_heads * module.head_dim**2, 0)

    def compute(self, module: Any, x: Tensor, found: RecurrentPass) -> Tensor:
        heads, size = module.num_attention_heads, module.head_dim
        row = module.act_fn(module.qkv_proj(x))[0].float()
        query, key, value = row.unflatten(-1, (heads, 3 * size)).split(size, dim=-1)
        given = state_scan.ScanInputs(
            value, row.new_zeros(len(row), heads), key, query, log_rate=module.slope_rate.float().view(-1).log(),
            bias=row.new_zeros(heads), skip=row.new_zeros(heads), limits=ONE_STEP,
        )  # fmt: skip
        return self.normed(module.norm, scanned(given, found).flatten(1), module.output_gate(x)[0])

    def _by_torch(self, norm: Any, x: Tensor, gate: Tensor) -> Tensor:
        result: Tensor = norm(x[None])[0] * gate.sigmoid()
        return result


def known_lightning_attention(module: nn.Module) -> LightningAttention | None:
    """Return the LightningAttention of a module that uses its parts and gives what ours does on random input."""
    own: Any = module
    if module._modules.keys() != LIGHTNING_PARTS or module._buffers.keys() != {SLOPES, *DECAYS}:
        return None
    numbers = [getattr(module, name, None) for name in LIGHTNING_SIZES]
    eps = getattr(own.norm, "variance_epsilon", None)
    if module._parameters or not all(isinstance(number, int) for number in numbers) or not isinstance(eps, float):
        return None
    known = LightningAttention(GatedNorm(eps, 1, gate_first=False, activation="sigmoid"))
    return known if known.refusal(module) is None and _agrees(own, known.norm) else None


class _Kept:
    """The cache of the module's own code in a trial."""

    def __init__(self) -> None:
        self.state: Tensor | None = None

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.state

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self.state = state


@torch.no_grad()
def _agrees(module: Any, norm: GatedNorm) -> bool:
    numbers, width, heads, size, block = RandomNumbers(), 8, 3, 4, 4
    parts: dict[str, Any] = {
        "qkv_proj": trial_linear(width, 3 * heads * size), "out_proj": trial_linear(heads * size, width),
        "output_gate": trial_linear(width, heads * size),
    }  # fmt: skip
    draw_weights(parts.values(), numbers)
    parts["norm"] = unwatched_twin(module.norm, _parameters={"weight": nn.Parameter(numbers(heads * size))})
    theirs, ours = (unwatched_twin(module, _modules=parts) for _ in range(2))
    slopes = numbers(heads, 1, 1).abs()
    for twin in (theirs, ours):
        vars(twin).update(zip(LIGHTNING_SIZES, (heads, size, block, 0), strict=True))
        made = dict(zip(DECAYS, twin.decay_factors(slopes), strict=True))
        vars(twin)["_buffers"] = {SLOPES: slopes, **made}
    return passes_agree(LightningAttention(norm), theirs, ours, numbers(2, 9, width), generated=_as_generated)


def _as_generated(module: nn.Module, x: Tensor, num_prompt: int) -> Tensor:
    """Compute x [B, Q, H] by the module's own code: a prompt in blocks, and the others one by one."""
    given, forward = {CACHE_NAME: _Kept()}, original_class(module).forward
    return torch.cat([forward(module, part, None, None, **given)[0] for part in x.split([num_prompt, 4], dim=1)], 1)
