"""Layers of RWKV over pages (Peng et al. 2023, arXiv 2305.13048): both halves of a layer mix each token with the one
before it, and the first sums the values of all tokens before, which each channel forgets at a rate of its own.

The state of a channel is the sum of values, that of their weights, and the largest exponent, as in transformers. The
inputs that are kept are those of both halves for the last token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...cache.hf import CacheOverPages, RecurrentPass
from ...cache.kinds.state_sizes import StateSizes
from ...cache.kinds.states import StateStep
from ...recognition.trial import RandomNumbers, Tolerance, agree, unwatched_twin
from ...recognition.trial_modules import draw_weights, trial_linear
from ...recognition.unchanged import is_unobserved
from ...undo.journal import Mixin, original_class
from .selective_scans import GATE_ALONE
from .state_pass import Recurrence, over_pages, passes_agree

MIXES, SUMS = ("time_mix_key", "time_mix_receptance"), ("time_decay", "time_first", "time_mix_value")
LINEARS = {"attention": {"key", "value", "receptance", "output"}, "feed_forward": {"key", "value", "receptance"}}
SHIFT, FIRST_NORM = "time_shift", "pre_ln"  # the shift by one token is torch's padding
LAYER_PARTS = {"ln1", "ln2", *LINEARS}
LEAST_EXPONENT = -1e30  # of a sequence without tokens
STATES = 3  # of a channel


class PagedMixes(Mixin):
    """A mixin for a layer of RWKV."""

    asks_itself = True

    def forward(
        self, hidden: Tensor, state: Any = None, use_cache: bool = False, output_attentions: bool = False
    ) -> Any:
        """[B, Q, H] -> [B, Q, H], the state as it was given, and no weights. Raises what PagedRecurrence raises."""
        if isinstance(state, CacheOverPages):
            return over_pages(self, hidden, state, {}), state, None
        return super().forward(hidden, state, use_cache, output_attentions)  # type: ignore[misc]


class TimeMixes(Recurrence):
    """A layer of RWKV. mixes_rows: see Recurrence; transformers' own code does so up to 5.24 at least."""

    mixin = PagedMixes
    computes_padding = stays_with_row = True

    def __init__(self, *, mixes_rows: bool) -> None:
        super().__init__(GATE_ALONE)
        self.mixes_rows = mixes_rows

    def __reduce__(self) -> Any:
        return partial(type(self), mixes_rows=self.mixes_rows), ()

    def layer_of(self, module: Any) -> int:
        index: int = module.layer_id
        return index

    def asked(self, module: Any) -> str | None:
        halves = [module._modules[name] for name in LINEARS]
        return None if all(map(is_unobserved, halves)) else "a half of it has hooks, or another forward"

    def sizes(self, module: Any) -> StateSizes:
        return StateSizes(STATES * module.attention.attention_hidden_size, 2 * module.ln1.normalized_shape[0])

    def compute(self, module: Any, x: Tensor, found: RecurrentPass) -> Tensor:
        states, inputs = (pages.flatten(1) for pages in found.storage.pages[:2])
        begins = found.states.starts[:-1][found.states.starts.diff() > 0], found.states.before
        own = module._modules
        x = own[FIRST_NORM](x) if FIRST_NORM in own else x
        first, second = inputs.chunk(2, dim=-1)
        normed = own["ln1"](x)
        shifted = _shifted(normed[0], first, begins)[None]
        x = x + _attended(own["attention"], normed, shifted, states=states, places=found.states)
        later = own["ln2"](x)
        x = x + _fed(own["feed_forward"], later, _shifted(later[0], second, begins)[None])
        kept = found.states.slots >= 0
        slots = found.states.slots[kept]
        first[slots], second[slots] = normed[0, kept].float(), later[0, kept].float()
        return x[0]

    def finished(self, module: Any, core: Tensor) -> Tensor:
        return core


def _shifted(x: Tensor, kept: Tensor, begins: tuple[Tensor, Tensor]) -> Tensor:
    """Return for each row of x [N, H] the one before it in its sequence: that which is kept, or zeros, for the first.

    begins: the first rows of the sequences, and the slots of what is kept before them, -1 for nothing.
    """
    rows, before = begins
    shifted = torch.cat([x[:1], x[:-1]])
    given = kept[before.clamp(min=0)].masked_fill((before < 0)[:, None], 0.0)
    shifted[rows] = given.to(x.dtype)
    return shifted


def _mixed(module: Any, name: str, x: Tensor, shifted: Tensor) -> Tensor:
    share = module._parameters[f"time_mix_{name}"]
    mixed: Tensor = module._modules[name](x * share + shifted * (1 - share))
    return mixed


def _fed(module: Any, x: Tensor, shifted: Tensor) -> Tensor:
    value = module._modules["value"](torch.square(torch.relu(_mixed(module, "key", x, shifted))))
    return torch.sigmoid(_mixed(module, "receptance", x, shifted)) * value


def _attended(module: Any, x: Tensor, shifted: Tensor, *, states: Tensor, places: StateStep) -> Tensor:
    key, value = (_mixed(module, name, x, shifted) for name in ("key", "value"))
    sums = _summed(module._parameters, key[0].float(), value[0], states=states, places=places)
    gate = torch.sigmoid(_mixed(module, "receptance", x, shifted))
    out: Tensor = module._modules["output"](gate * sums.to(key.dtype)[None])
    return out


def _summed(weights: Any, key: Tensor, value: Tensor, *, states: Tensor, places: StateStep) -> Tensor:
    """Return the weighted means of values [N, A], and write the states after tokens that have a slot.

    states: [slots, 3 * A]. The first tokens of all sequences are computed at once, then the second ones, and so on.
    """
    decay, bonus = -torch.exp(weights["time_decay"]), weights["time_first"]
    out, counts = torch.empty_like(key), places.starts.diff()
    total = states[places.before.clamp(min=0)].unflatten(-1, (STATES, -1)).clone()
    fresh = (places.before < 0)[:, None]
    for part, begins in enumerate((0.0, 0.0, LEAST_EXPONENT)):
        total[:, part].masked_fill_(fresh, begins)
    for number in range(int(counts.max())):
        longer = (counts > number).nonzero().flatten()
        rows = places.starts[:-1][longer] + number
        top, bottom, most = total[longer].unbind(1)
        own, given = key[rows], value[rows]
        largest = torch.maximum(most, own + bonus)
        old, new = torch.exp(most - largest), torch.exp(own + bonus - largest)
        out[rows] = (old * top + new * given) / (old * bottom + new)
        largest = torch.maximum(most + decay, own)
        old, new = torch.exp(most + decay - largest), torch.exp(own - largest)
        total[longer] = after = torch.stack([old * top + new * given, old * bottom + new, largest], dim=1)
        slots = places.slots[rows]
        states[slots[slots >= 0]] = after[slots >= 0].flatten(1)
    return out


def known_time_mixes(module: nn.Module) -> TimeMixes | None:
    """Return the TimeMixes of a module with the parts of RWKV's layer that gives what ours does on random input."""
    own: Any = module
    parts = module._modules
    if (
        parts.keys() - {FIRST_NORM} != LAYER_PARTS
        or None in parts.values()
        or not isinstance(vars(own).get("layer_id"), int)
    ):
        return None
    if (FIRST_NORM in parts) is not (own.layer_id == 0):
        return None
    for name, linears in LINEARS.items():
        half: Any = parts[name]
        names = {*MIXES, *(SUMS if name == "attention" else ())}
        if half._modules.keys() != {SHIFT, *linears} or half._parameters.keys() != names or half._buffers:
            return None
    if TimeMixes(mixes_rows=True).refusal(module) is not None:
        return None
    return _tried(own)


@torch.no_grad()
def _tried(module: Any) -> TimeMixes | None:
    numbers, width, wider = RandomNumbers(), 8, 12
    halves, own = {}, module._modules
    for name, linears in LINEARS.items():
        sizes = {"output": (wider, width)} if name == "attention" else {"value": (wider, width)}
        sizes["receptance"] = (width, wider if name == "attention" else width)
        made = {each: trial_linear(*sizes.get(each, (width, wider))) for each in sorted(linears)}
        draw_weights(made.values(), numbers)
        names = own[name]._parameters
        drawn = {
            each: nn.Parameter(numbers(1, 1, width) if "mix" in each else numbers(wider)) for each in sorted(names)
        }
        half = unwatched_twin(own[name], _modules=made | {SHIFT: own[name]._modules[SHIFT]}, _parameters=drawn)
        vars(half).update(layer_id=0)
        if name == "attention":
            vars(half).update(attention_hidden_size=wider)
        halves[name] = half
    norms: dict[str, Any] = {name: nn.LayerNorm(width) for name in (FIRST_NORM, *LAYER_PARTS) if name not in LINEARS}
    draw_weights(norms.values(), numbers)
    theirs, ours = (unwatched_twin(module, _modules=norms | halves) for _ in range(2))
    for twin in (theirs, ours):
        vars(twin).update(layer_id=0)
    x = numbers(2, 9, width)
    if not passes_agree(TimeMixes(mixes_rows=True), theirs, ours, x, generated=_alone):
        return None
    near = Tolerance(absolute=1e-4)
    return TimeMixes(mixes_rows=not agree(lambda: _as_generated(theirs, x, 5), lambda: _alone(theirs, x, 5), near))


def _alone(module: Any, x: Tensor, num_prompt: int) -> Tensor:
    """Compute each row of x [B, Q, H] by itself, see _as_generated."""
    return torch.cat([_as_generated(module, row, num_prompt) for row in x.split(1)])


def _as_generated(module: Any, x: Tensor, num_prompt: int) -> Tensor:
    """Compute x [B, Q, H] by the module's own code over a list of states: a prompt, and the others one by one."""
    rows, width, wider = len(x), x.shape[-1], module._modules["attention"].attention_hidden_size
    state = [torch.zeros(rows, width if part < 2 else wider, 1) for part in range(2 + STATES)]
    state[-1] += LEAST_EXPONENT
    results, forward = [], original_class(module).forward
    for part in x.split([num_prompt, *[1] * (x.shape[1] - num_prompt)], dim=1):
        results.append(forward(module, part, state=state, use_cache=True)[0])
    return torch.cat(results, dim=1)
