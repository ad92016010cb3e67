"""Matrix memories of xLSTM over pages (Beck et al. 2024, arXiv 2405.04517): C = f C + i k v, n = f n + i k, and a
result q C / max(|q n|, 1), with f a sigmoid and i an exponential.

This is the scan of Mamba 2 with one more channel for n. The gates are capped, so that nothing overflows without the
largest exponent that transformers takes out of all; that one counts in what keeps a result from a division by zero.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...cache.hf import CacheOverPages, RecurrentPass
from ...cache.hf.cache_argument import STATES_NAME
from ...cache.kinds.state_sizes import StateSizes
from ...errors import NotRaggedError
from ...fused.site import FusedSite, SiteKind
from ...kernels.cpu import state_scan
from ...models import modules_by_name
from ...recognition.source import tree_of
from ...recognition.trial import RandomNumbers, unwatched_twin
from ...recognition.trial_modules import draw_weights
from ...recognition.unchanged import is_unobserved
from ...undo.journal import Mixin, original_class
from .selective_scans import GATE_ALONE
from .state_pass import Recurrence, over_pages, passes_agree, scanned

CAPPED_GATES = ("igate_preact", "fgate_preact")
WIDE = ("q", "k", "v", "ogate_preact")
MEMORY_PARTS = {*CAPPED_GATES, *WIDE, "ogate_act_fn", "mlstm_backend", "multihead_norm", "out_proj"}
LARGEST_GATE = 40.0  # of a cap: exponentials of more might overflow in sums
LEAST_STEP = 1e-12
IN_BLOCK = re.compile(r"blocks\.(\d+)\.")  # the layer in the name of a module
STATES = "rnn_state"
OF_CACHE = {STATES, "rnn_state_initial", "seqlen_offset"}  # what a decoder's code uses of a cache of its own class
MEMORIES = SiteKind(
    "own states", "decoders", "pages in place of their own states", "its code uses nothing else of them"
)


class LayerStates:
    """Stands for the states of one layer in a ragged pass. Code finds none of them, and copies none."""

    def __init__(self, cache: CacheOverPages) -> None:
        self.cache = cache

    def __len__(self) -> int:
        return 0


class OwnStates:
    """Stands for a cache of states by layer, in front of a cache over pages."""

    seqlen_offset = 0

    def __init__(self, cache: CacheOverPages) -> None:
        self.states = LayerStates(cache)

    @property
    def rnn_state(self) -> OwnStates:
        return self

    def __getitem__(self, layer: int) -> LayerStates:
        return self.states


class TakesStates(Mixin):
    """A mixin for a decoder that hands the states of a cache of its own class to its layers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the decoder returns. Raises NotRaggedError for more tokens than it computes at once."""
        cache = kwargs.get(STATES_NAME)
        if not isinstance(cache, CacheOverPages):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        given = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        most = self.config.max_inference_chunksize  # type: ignore[attr-defined]
        if given.shape[1] > most:
            raise NotRaggedError(f"{type(self).__name__} computes {most} tokens at once, and is given more")
        found = super().forward(*args, **kwargs | {STATES_NAME: OwnStates(cache)})  # type: ignore[misc]
        found[STATES_NAME] = cache
        return found


def own_state_sites(model: nn.Module) -> Iterator[FusedSite]:
    """Find the decoders of a model that hand the states of a cache of their own class to their layers."""
    for name, module in modules_by_name(model):
        if hands_states_on(module):
            yield FusedSite(name, module, MEMORIES, TakesStates, None)


def hands_states_on(module: nn.Module) -> bool:
    """Return whether a decoder uses the states of its layers in a cache, and nothing else that a pass has not."""
    tree = tree_of(original_class(module).forward) if hasattr(module, "blocks") else None
    nodes = ast.walk(tree) if tree is not None else ()
    used = {
        node.attr for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == STATES_NAME
    }  # fmt: skip
    return STATES in used and used <= OF_CACHE


class PagedMemory(Mixin):
    """A mixin for a layer with a matrix memory."""

    asks_itself = True

    def forward(self, x: Tensor, state: Any = None) -> Any:
        """[B, Q, H] -> [B, Q, H], and the state as it was given. Raises what PagedRecurrence raises."""
        if isinstance(state, LayerStates):
            return over_pages(self, x, state.cache, {}), state
        return super().forward(x, state)  # type: ignore[misc]


class MatrixMemory(Recurrence):
    """A layer with a matrix memory, a norm of each head, and a gate. layer: the index of its decoder layer."""

    mixin = PagedMemory
    computes_padding = stays_with_row = True

    def __init__(self, layer: int) -> None:
        super().__init__(GATE_ALONE)
        self._layer = layer

    def __reduce__(self) -> Any:
        return type(self), (self._layer,)

    def layer_of(self, module: Any) -> int:
        return self._layer

    def asked(self, module: Any) -> str | None:
        config = module.config
        if not is_unobserved(module.mlstm_backend) or config.mode != "inference":
            return "its memory has hooks, or is one for training"
        cap = config.gate_soft_cap
        return None if isinstance(cap, float) and 0 < cap <= LARGEST_GATE else f"its gates have the cap {cap}"

    def sizes(self, module: Any) -> StateSizes:
        heads, norm = module.config.num_heads, module.multihead_norm
        return StateSizes(module.qk_dim * (norm.head_dim + 1), 2 * heads)

    def compute(self, module: Any, x: Tensor, found: RecurrentPass) -> Tensor:
        config, own = module.config, module._modules
        heads, cap = config.num_heads, config.gate_soft_cap
        query, key, value, gate = (own[name](x)[0] for name in WIDE)
        query, key, value = (each.float().unflatten(-1, (heads, -1)) for each in (query, key, value))
        entered, kept = (cap * torch.tanh(own[name](x)[0].float() / cap) for name in CAPPED_GATES)
        step, zeros = F.softplus(-kept).clamp(min=LEAST_STEP), value.new_zeros(heads)  # the decay is exp(-step)
        given = F.pad(value, (0, 1), value=1.0) * (entered.exp() / step)[..., None]
        out = scanned(
            state_scan.ScanInputs(given, -kept, key, query, log_rate=zeros, bias=zeros, skip=zeros), found
        ) * float(query.shape[-1] ** -0.5)
        largest = _largest(entered.double(), -step.double(), found)
        below = out[..., -1:].abs().clamp(min=1.0) + config.eps * largest.exp()[..., None]
        normed: Tensor = own["multihead_norm"]((out[..., :-1] / below).to(x.dtype)[None])
        result: Tensor = own["ogate_act_fn"](gate) * normed.flatten(2)[0]
        return result


def _largest(entered: Tensor, decays: Tensor, found: RecurrentPass) -> Tensor:
    """Return the largest exponent of what each token's state holds, [N, heads], and write those that are kept.

    entered, decays: the logarithms of both gates [N, heads], float64. Two numbers of float32 hold each that is kept,
    so that it does not matter where a pass ends.
    """
    places, pages = found.states, found.storage.pages[1].flatten(1)
    before = pages[places.before.clamp(min=0)].double().unflatten(-1, (2, -1)).sum(1)
    before = before.masked_fill((places.before < 0)[:, None], 0.0)
    counts = places.starts.diff()
    if bool((counts == 1).all()):
        found_here = decays + torch.maximum(before, entered - decays)
    else:
        parts = zip(decays.split(counts.tolist()), entered.split(counts.tolist()), before, strict=True)
        sums = [(total := part.cumsum(0)) + torch.maximum(first, (own - total).cummax(0).values)
                for part, own, first in parts if len(part)]  # fmt: skip
        found_here = torch.cat(sums)
    is_kept = places.slots >= 0
    rounded = found_here.float()
    pages[places.slots[is_kept]] = torch.cat([rounded, (found_here - rounded).float()], dim=1)[is_kept]
    return rounded


def known_matrix_memory(module: nn.Module, name: str) -> MatrixMemory | None:
    """Return the MatrixMemory of a module that has its parts and gives what ours does on random input; else None.

    name: of the module in its model, which says the layer.
    """
    layer = IN_BLOCK.search(f"{name}.")
    if layer is None or module._modules.keys() != MEMORY_PARTS or module._parameters or module._buffers:
        return None
    known = MatrixMemory(int(layer[1]))
    return known if known.refusal(module) is None and _agrees(module) else None


@torch.no_grad()
def _agrees(module: Any) -> bool:
    numbers, width, heads, size = RandomNumbers(), 8, 2, 4
    inner = 2 * heads * size
    sizes = {"q": heads * size, "k": heads * size, "v": inner, "ogate_preact": inner}
    sizes |= dict.fromkeys(CAPPED_GATES, heads)
    parts: dict[str, Any] = {}
    for name, outputs in {**sizes, "out_proj": width}.items():
        inputs, bias = inner if name == "out_proj" else width, module._modules[name].bias is not None
        parts[name] = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias)
    draw_weights(parts.values(), numbers)
    norm = module.multihead_norm
    parameters = {
        name: each if each is None else nn.Parameter(numbers(inner)) for name, each in norm._parameters.items()
    }
    parts["multihead_norm"] = unwatched_twin(norm, _parameters=parameters)
    vars(parts["multihead_norm"]).update(num_heads=heads, head_dim=inner // heads, num_features=inner)
    parts |= {name: module._modules[name] for name in ("ogate_act_fn", "mlstm_backend")}
    config = SimpleNamespace(**{
        name: getattr(module.config, name) for name in ("mode", "gate_soft_cap", "eps", "weight_mode")
    }, num_heads=heads)  # fmt: skip
    theirs, ours = (unwatched_twin(module, _modules=parts) for _ in range(2))
    for twin in (theirs, ours):
        vars(twin).update(config=config, qk_dim=heads * size, v_dim=inner)
    return passes_agree(MatrixMemory(0), theirs, ours, numbers(2, 9, width), generated=_as_generated)


def _as_generated(module: Any, x: Tensor, num_prompt: int) -> Tensor:
    """Compute x [B, Q, H] by the module's own code: a prompt, and the others one by one."""
    results, state, forward = [], None, original_class(module).forward
    for part in x.split([num_prompt, *[1] * (x.shape[1] - num_prompt)], dim=1):
        result, state = forward(module, part, state)
        results.append(result)
    return torch.cat(results, dim=1)
