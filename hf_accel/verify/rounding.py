"""Can rounding explain a first difference? Measured on the reference, not assumed.

The same history is computed in several ways that are equally valid:

* in one pass, where every product has many rows; not with images or sound;
* the prompt in one pass and the rest token by token over the cache, as generate does it: one row;
* where activations, keys or values are rounded to integers: with the closest rounding decision of each row reversed. A
  change in the last bit of a float is enough for that, and what it sets off in later layers is far larger than that;
* of an encoder whose quantized layers keep float32 results in bfloat16 (fused/half_buffers.py): with those rounded so;
* of a mixture of experts: with the result of each product moved by up to half a unit in the last place (Monte Carlo
  arithmetic: Parker 1997), several times, and more often if these do not explain the difference. A router chooses
  otherwise where two experts are nearly as good, and a token that another expert computes has other logits by far more
  than a bit: which tokens go where, only some of these passes show;
* in the next wider dtype (float32 for bfloat16), of which the others are roundings. This is the arbiter, whose logits
  margins are taken from. It needs a wide copy of the float weights. Where that is too large, a pass whose products are
  moved so stands in, and margins are taken in the model's own dtype.

Their spread d, at least one unit in the last place of the largest logit, is the error that the reference has. A model
that rounds as well stays within d of the exact logits, and another reference within 2 d; and two tokens can change
places only if the exact logits have them within 2 d. The model is not among the ways: its defects do not widen d.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..cache.group import PageForm
from ..cache.hf.cache_argument import cache_name
from ..cache.quantized import INT4, QUANTIZED, rotate
from ..fused.half_buffers import keeps_halves
from ..hardware import detect
from ..kernels.layouts import KV
from ..linear import QuantModule
from ..linear.backends.reference import Reference
from ..models import experts_per_token
from ..undo.journal import original_class
from .passes import History, last_logits, logits_by_steps, new_cache
from .references import WIDER, widened

LARGEST_ARBITER = 8 * 2**30  # bytes of its float weights
JITTERED_PASSES, MOST_JITTERED_PASSES = 8, 64  # of a mixture of experts
SINGLE_STEPS = 8  # tokens at the end of a history that are computed one by one, at the least

Logits = Callable[[PreTrainedModel, History, Mapping[str, Any]], Tensor]


class ReferenceModel:
    """A model to compare with."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.model, self.name = model, name

    @classmethod
    def loaded(cls, model: PreTrainedModel, path: str | Path) -> ReferenceModel:
        """Load the float model of the same class as `model` from a path."""
        found = original_class(model).from_pretrained(path, dtype=model.dtype).eval()
        return cls(found.to(model.device), str(path))

    @functools.cached_property
    def arbiter(self) -> PreTrainedModel | None:
        """The reference in the next wider dtype, made when it is first needed; None where there is none."""
        return widened(self.model) if _affordable(self.model) else None

    @torch.no_grad()
    def judge(
        self, history: History, settings: Mapping[str, Any], needed: Callable[[Tensor], float] = lambda logits: 0.0
    ) -> tuple[Tensor, float, str]:
        """Compute logits [V] after a history to take margins from, twice their error, and their dtype.

        settings: keywords of generate(). needed: gives, for these logits, what twice their error must be to explain
        what was found; until then a mixture is computed up to MOST_JITTERED_PASSES times.
        """
        logits = logits_by_steps if self._sees(settings) else last_logits
        ways = [logits(self.model, history, settings)]
        largest = float(ways[0].nan_to_num(0, 0, 0).abs().max())
        start = self._start_of_steps(history, settings)
        if logits is last_logits and start < history.ids.shape[1]:
            ways.append(logits_by_steps(self.model, history, settings, start=start))
        flipped = self._flipped(logits, history, settings)
        if flipped is not None:
            ways.append(flipped)
        encodes = self.model.config.is_encoder_decoder or self._sees(settings)
        if encodes and may_keep_halves(self.model):
            with halved_results(self.model):
                ways.append(logits(self.model, history, settings))
        is_mixture = bool(experts_per_token(self.model.config))
        passes = JITTERED_PASSES if is_mixture else 1 if self.arbiter is None else 0
        ways += [self._jittered(logits, history, settings, seed) for seed in range(passes)]
        if self.arbiter is None:
            judged, dtype = ways[0], self.model.dtype
        else:
            own, dtype = self.model.dtype, self.arbiter.dtype
            media = {n: v.to(dtype) for n, v in settings.items() if _is_float(v) and v.dtype is own}
            judged = logits(self.arbiter, history, dict(settings) | media)
            ways.append(judged)
        least = torch.finfo(self.model.dtype).eps * largest

        def explains() -> float:
            return 2 * max(largest_difference(ways), least)

        if is_mixture:
            enough = needed(judged)
            while passes < MOST_JITTERED_PASSES and explains() < enough:
                ways.append(self._jittered(logits, history, settings, passes))
                passes += 1
        return judged, explains(), str(dtype).removeprefix("torch.")

    def _start_of_steps(self, history: History, settings: Mapping[str, Any]) -> int:
        """Return how many ids come in one pass: the prompt; of one that is ids alone, less if little was written."""
        if self.model.config.is_encoder_decoder:
            return history.num_prompt
        return min(history.num_prompt, max(1, history.ids.shape[1] - SINGLE_STEPS))

    def _sees(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a decoder is given images or sound. One pass is then no way to compute a history: PaliGemma
        attends to all of its prompt at each of its tokens, but not to what it writes.
        """
        return not self.model.config.is_encoder_decoder and any(map(_is_float, settings.values()))

    def _flipped(self, logits: Logits, history: History, settings: Mapping[str, Any]) -> Tensor | None:
        """Compute logits with the closest rounding decisions of integer activations, keys and values reversed; None
        without any.
        """
        cache = new_cache(self.model)
        stored = None if cache is None else QUANTIZED.get(cache.settings.dtype)
        if cache is not None and stored is not None and FLIPS.keys() >= set(stored):
            for group in cache.pages.groups:
                group.form = FlippedForm(group.form, FLIPS[stored.keys], FLIPS[stored.values])
        elif not rounds_inputs(self.model):
            return None
        with flipped_inputs(self.model):
            return logits(self.model, history, dict(settings) | {cache_name(self.model): cache})

    def _jittered(self, logits: Logits, history: History, settings: Mapping[str, Any], seed: int) -> Tensor:
        with jittered_products(self.model, seed):
            return logits(self.model, history, settings)


def rounds_inputs(model: nn.Module) -> list[QuantModule]:
    """Return the layers that round their inputs to integers."""
    return [m for m in model.modules() if isinstance(m, QuantModule) and m.activations == "int8"]


@contextmanager
def flipped_inputs(model: nn.Module) -> Iterator[None]:
    """Reverse, inside the block, the closest rounding decision of each row of integer activations."""
    with ExitStack() as hooks:
        for layer in rounds_inputs(model):
            hooks.enter_context(layer.register_forward_pre_hook(_flip_input))
        yield


def may_keep_halves(model: PreTrainedModel) -> bool:
    """Return whether encoder layers of such a model, patched, keep results in bfloat16."""
    return model.device.type == "cpu" and keeps_halves(model.dtype) and bool(rounds_inputs(model))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@contextmanager
def halved_results(model: nn.Module) -> Iterator[None]:
    """Round to bfloat16, inside the block, what layers of integer activations are given and return."""
    with ExitStack() as hooks:
        for layer in rounds_inputs(model):
            hooks.enter_context(layer.register_forward_pre_hook(lambda _, args: (_halved(args[0]), *args[1:])))
            hooks.enter_context(layer.register_forward_hook(lambda _, args, output: _halved(output)))
        yield


def _halved(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


@contextmanager
def jittered_products(model: PreTrainedModel, seed: int = 0) -> Iterator[None]:
    """Move, inside the block, the result of each product of floats by up to half a unit in the last place."""
    jitter = Jitter(model.dtype, seed)
    with ExitStack() as hooks:
        for product in model.modules():
            if isinstance(product, nn.Linear | Conv1D):
                hooks.enter_context(product.register_forward_hook(jitter))
        yield


def flip_nearest(x: Tensor, size: int, *, of_range: bool = False) -> Tensor:
    """Round, in each row [..., n], the number nearest the middle between two levels to the other level.

    size: numbers that share a scale. of_range: whether there are 16 levels from the least of them to the largest, else
    255 between both signs of the largest.
    """
    groups = F.pad(x.float(), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    low = groups.amin(-1, keepdim=True) if of_range else 0.0
    step = (groups.amax(-1, keepdim=True) - low) / 15 if of_range else groups.abs().amax(-1, keepdim=True) / 127
    levels = (groups - low) / step  # NaN in a group of equal numbers, or of zeros
    below = levels.floor()
    distance = (levels - below - 0.5).abs().nan_to_num(nan=torch.inf).flatten(-2)[..., : x.shape[-1]]
    nearest = distance.argmin(-1, keepdim=True)
    other = ((2 * below + 1 - levels.round()) * step + low).flatten(-2).gather(-1, nearest)
    return x.scatter(-1, nearest, torch.where(other.isnan(), x.gather(-1, nearest), other.to(x.dtype)))


def _flip_input(layer: QuantModule, args: tuple[Any, ...]) -> tuple[Any, ...]:
    assert layer.choice is not None and isinstance(layer.choice.backend, Reference)
    stored, x = layer.quantized, args[0]
    size, order = layer.choice.backend.activation_group(stored), stored.input_order
    if order is None:
        return (flip_nearest(x, size), *args[1:])
    flipped = flip_nearest(x[..., order], size)
    return (torch.empty_like(x).index_copy_(-1, order.long(), flipped), *args[1:])


def _flip_head(states: Tensor) -> Tensor:
    return flip_nearest(states, states.shape[-1])


def _flip_rotated_head(states: Tensor) -> Tensor:
    flipped = flip_nearest(rotate(states.float()), states.shape[-1], of_range=True)
    return rotate(flipped).to(states.dtype)


# For each dtype of pages whose levels are integers: the function that reverses a decision of each head of K or V.
FLIPS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {torch.int8: _flip_head, INT4: _flip_rotated_head}


class FlippedForm(PageForm):
    """The form of pages whose keys and values have a rounding decision of each head reversed when they are written."""

    def __init__(self, form: PageForm, *flips: Callable[[Tensor], Tensor]) -> None:
        """flips: of keys, and of values."""
        self.rank, self._form, self._flips = form.rank, form, flips

    def joined(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        flip_keys, flip_values = self._flips
        return self._form.joined(flip_keys(keys), flip_values(values))

    def parted(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._form.parted(keys, values)

    def attended(self, pages: KV) -> KV:
        return self._form.attended(pages)


class Jitter:
    """Forward hook that moves each result by up to half a unit in the last place; by the same numbers for a seed."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.eps = torch.finfo(dtype).eps
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Tensor | None:
        if not isinstance(output, Tensor):  # Llama 4's router is a product, and returns the experts besides
            return None
        noise = torch.rand(output.shape, generator=self.generator, dtype=torch.float64).sub_(0.5).to(output.device)
        return (output * (1 + self.eps * noise)).to(output.dtype)


def largest_difference(ways: list[Tensor]) -> float:
    """Return the largest difference between any two ways, over all logits that are finite in every way."""
    stacked = torch.stack(ways)
    finite = stacked[:, stacked.isfinite().all(0)]
    return float((finite.amax(0) - finite.amin(0)).max()) if finite.numel() else 0.0


def _affordable(model: PreTrainedModel) -> bool:
    dtype = WIDER.get(model.dtype)
    if dtype is None or model.device.type not in ("cpu", "cuda"):
        return False
    needed = sum(p.numel() for p in model.parameters() if p.is_floating_point()) * dtype.itemsize
    free = detect(model.device).free_memory
    return needed <= LARGEST_ARBITER and (free is None or needed <= free // 2)
