"""Short convolutions over pages: each token's result needs its own input and those of a few tokens before it.

So their inputs stay in pages with a window, as keys and values do: tokens of many sequences can stand in one row, and
drafts, copies and preemption need nothing of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...cache.hf import CacheOverPages
from ...cache.hf.cache_argument import CACHE_NAME
from ...errors import NotRaggedError
from ...fused.kept_states import Recorded
from ...fused.site import FusedSite, SiteKind
from ...recognition.call_form import parameter_names
from ...recognition.operation import UntraceableError
from ...recognition.stand_ins import StandIn
from ...recognition.trial import RandomNumbers, Tolerance, agree, unwatched_twin
from ...recognition.trial_modules import draw_weights, trial_convolution, trial_linear
from ...recognition.unchanged import is_unobserved, replaced_in
from ...undo.journal import Mixin, mixed_class, original_class
from .recorded_parts import input_of, note_kept, record_kept_convolution, record_linear, record_product, with_parts

CONVOLUTION = SiteKind("convolution", "short convolutions", "inputs in pages", computes_all=True, multiplies=True)
PARTS = ("in_proj", "conv", "out_proj")
# What a model gives all its layers, and a convolution does not read.
OTHER_ARGUMENTS = frozenset({
    "position_ids", "position_embeddings", "use_cache", "cache_position", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict",
})  # fmt: skip


class PagedForward(Mixin):
    """A mixin for a layer that keeps something else than keys and values: it is computed where its cache has pages."""

    asks_itself = True

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[B, Q, H] -> [B, Q, H]. Raises NotRaggedError if the module was changed, or is given what is not known."""
        cache, others = pages_given(self, args, kwargs)
        if cache is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        return self.over_pages(hidden_states, cache, others.pop("attention_mask", None), others)

    def over_pages(
        self, hidden_states: Tensor, cache: CacheOverPages, attention_mask: Tensor | None, others: dict[str, Any]
    ) -> Any:
        """Compute `forward` over pages. others: the other keywords of the call."""
        raise NotImplementedError


class PagedConvolution(PagedForward):
    """A mixin for a gated short convolution: out_proj(c * conv(b * x)), where b, c and x are in_proj of the input."""

    def over_pages(
        self, hidden_states: Tensor, cache: CacheOverPages, attention_mask: Tensor | None, others: dict[str, Any]
    ) -> Tensor:
        own: Any = self
        require_pages(own, convolution_refusal(own), others)
        if attention_mask is not None:  # [B, Q], as transformers makes it for these layers
            hidden_states = hidden_states * attention_mask[:, :, None].to(hidden_states.dtype)
        before, after, x = own.in_proj(hidden_states).chunk(3, dim=-1)
        inputs = cache.layers[own.layer_idx].keep_inputs(before * x)
        result: Tensor = own.out_proj(after * convolve(inputs, own.conv))
        return result


class GatedConvolution(Recorded):
    """Records what a PagedConvolution computes in the trace of the layer around it."""

    def refusal(self, module: Any) -> str | None:
        return convolution_refusal(module)

    def recorded(self, trace: Any, module: Any, *args: Any, **given: Any) -> StandIn:
        x = input_of(trace, args, given, cache=CACHE_NAME, others=OTHER_ARGUMENTS)
        if convolution_refusal(module) is not None:
            raise UntraceableError("its convolution was changed")
        note_kept(trace, module)
        own = module._modules
        before, after, row = record_linear(own["in_proj"], x).chunk(3, dim=-1)
        core = record_kept_convolution(own["conv"], record_product(before, row), module.layer_idx)
        return record_linear(own["out_proj"], record_product(after, core))


def convolve(inputs: Tensor, conv: nn.Conv1d) -> Tensor:
    """Multiply the inputs [.., C, L] of each token by the weights of its channels, and add them up: [.., C].

    Sums are in float32 and in the order of the tokens, whatever else the pass computes, and are rounded once.
    """
    weight = conv.weight.squeeze(1).float().t().contiguous()  # torch takes several times as long for strided numbers
    total = inputs[..., 0].float() * weight[0]
    for place in range(1, len(weight)):
        total += inputs[..., place].float() * weight[place]
    return (total if conv.bias is None else total + conv.bias.float()).to(inputs.dtype)


def pages_given(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[CacheOverPages | None, dict[str, Any]]:
    """Return the pages among the arguments of a module behind its hidden states, and its other arguments by name.

    None, and no arguments, if it is given no pages.
    """
    cache = next((each for each in (*kwargs.values(), *args) if isinstance(each, CacheOverPages)), None)
    if cache is None:
        return None, {}
    named = dict(zip(parameter_names(original_class(module).forward)[1:], args, strict=False)) | dict(kwargs)
    return cache, {name: value for name, value in named.items() if value is not cache}


def require_pages(module: Any, refusal: str | None, given: dict[str, Any]) -> None:
    """Raise NotRaggedError if a layer cannot read pages.

    refusal: the reason, as one clause; None if only the keywords that it is given can be one.
    """
    unknown = [name for name, value in given.items() if value is not None and name not in OTHER_ARGUMENTS]
    refusal = refusal or (f"it is given {unknown[0]}=" if unknown else None)
    if refusal is not None:
        raise NotRaggedError(
            f"{type(module).__name__} {module.layer_idx} cannot read pages: {refusal}; patch this model with "
            "cache=None"
        )


def convolution_refusal(module: nn.Module) -> str | None:
    """Return why the convolution in a module cannot be computed by ours, as one clause; None if it can."""
    refusal = replaced_in(with_parts(module)) or causal_refusal(module._modules.get("conv"))
    # In transformers padding is zeros in front of in_proj, and a bias would make it something else behind it.
    if refusal is None and getattr(module.in_proj, "bias", None) is not None:
        return "its in_proj has a bias"
    return refusal


def causal_refusal(conv: Any) -> str | None:
    """Return why `convolve` cannot compute a convolution, as one clause; None if it can."""
    if type(conv) is not nn.Conv1d or not is_unobserved(conv):
        return "its convolution is not torch's own, or has hooks"
    channels = conv.in_channels
    depthwise = conv.groups == channels == conv.out_channels and conv.stride == conv.dilation == (1,)
    if not depthwise or conv.padding != (conv.kernel_size[0] - 1,) or conv.padding_mode != "zeros":
        return "its convolution is not a causal one of each channel"
    return None


def convolution_sites(model: nn.Module) -> Iterator[FusedSite]:
    """Find the short convolutions of a model, which get a forward over pages."""
    for name, module in model.named_modules():
        if is_known_convolution(module):
            yield FusedSite(name, module, CONVOLUTION, PagedConvolution, GatedConvolution())


def is_known_convolution(module: nn.Module) -> bool:
    """Return whether a module has the parts of a gated short convolution, and gives what ours does on random input."""
    if set(module._modules) != set(PARTS) or not isinstance(getattr(module, "layer_idx", None), int):
        return False
    return convolution_refusal(module) is None and _agrees(module)


@torch.no_grad()
def _agrees(module: nn.Module) -> bool:
    known: Any = module.conv
    numbers, width, length = RandomNumbers(), 8, int(known.kernel_size[0])
    conv = trial_convolution(width, length, bias=known.bias is not None)
    parts = {"conv": conv, "in_proj": trial_linear(width, 3 * width), "out_proj": trial_linear(width, width)}
    draw_weights(parts.values(), numbers)
    theirs, ours = (unwatched_twin(module, _modules=parts) for _ in range(2))
    ours.__class__ = mixed_class(PagedConvolution, original_class(module))
    x = numbers(2, 7, width)
    return agree(
        lambda: original_class(module).forward(theirs, x),
        lambda: ours(x, **{CACHE_NAME: _OneCall(length)}),
        Tolerance(roundings=32, absolute=1e-5),
    )


class _OneCall(CacheOverPages):
    """A cache for a trial: each of its layers is given whole sequences in one call."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.layers: Any = self

    def __getitem__(self, layer_idx: int) -> _OneCall:
        return self

    def keep_inputs(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, self.length - 1, 0)).unfold(1, self.length, 1)
