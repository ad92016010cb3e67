"""When two answers are the same, stock's and the patched model's.

Numbers are the same within a tolerance of the largest, and tokens if they are equal. Else the model itself is asked in
the next wider dtype, of which the others are roundings: float32 of half precision, float64 of float32. Numbers may be
FACTOR times as far from its answer as stock's are. Tokens are judged over their own history, all of a text and not
only the first that is another: by what the wider model says there, none may be farther behind the token that it would
choose than two logits can be that are FACTOR times as far off as stock's.

How far stock's are is measured in several passes, in all but one of which products are moved by half a unit in the
last place. Where a model of half precision chooses among experts or keys, its rounding can give a token to another,
and numbers change by as much as they are large: SHARE of its tokens are left out. In float32 none is.
"""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, PreTrainedModel

from hf_accel.verify.references import WIDER
from hf_accel.verify.rounding import jittered_products

from .media import MASKED, largest

NEW_TOKENS = 10
FACTOR = 2
WAYS = 3  # of moving products
SHARE = 0.1
ULPS = 2  # of the largest number: what a last rounding to the dtype of the answer may leave between two
# Keywords of generate() that say how a text is found, not what a model says.
SEARCHES = ("num_beams", "num_return_sequences", "prompt_lookup_num_tokens", "assistant_model")


class Wrong(Exception):
    """Patched does not answer as stock does."""


class StockCannot(Exception):
    """transformers itself raises, or does not answer twice alike."""


class NotTried(Exception):
    """There are no inputs for it here."""


def by_stock(function: Callable[[], Any]) -> Any:
    """What stock answers; where it raises there is nothing to compare with."""
    try:
        return function()
    except NotTried:
        raise
    except Exception as error:
        raise StockCannot(told(error)) from error


def told(error: BaseException) -> str:
    """One line: the error, and the innermost line of code that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "hf_accel/" in f.filename or "transformers/" in f.filename] or frames
    file = re.sub(".*(hf_accel|transformers)/", r"\1/", ours[-1].filename) if ours else ""
    place = f" ({file}:{ours[-1].lineno})" if ours else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:240]}{place}"


# -- asking --------------------------------------------------------------------------------------------


def given(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """A copy of the inputs, numbers in the dtype of the model."""
    return {
        name: x.to(model.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in copy.deepcopy(inputs).items()
    }


@torch.no_grad()
def forward(model: PreTrainedModel, inputs: dict[str, Any], **more: Any) -> Any:
    torch.manual_seed(0)
    return model(**given(model, inputs), **more)


@torch.no_grad()
def generate(model: PreTrainedModel, inputs: dict[str, Any], **settings: Any) -> Any:
    """Tokens, or with return_dict_in_generate what goes with them; a few models give that always."""
    torch.manual_seed(0)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | settings
    output = model.generate(**given(model, inputs), **settings)
    return output if "return_dict_in_generate" in settings or isinstance(output, Tensor) else output.sequences


Ask = Callable[[PreTrainedModel], Tensor]


def wider(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights, in the next wider dtype."""
    wide: PreTrainedModel = copy.deepcopy(model).to(WIDER[model.dtype])
    wide.set_experts_implementation("eager")  # other experts know no float64
    return wide


def rounding(what: str, stock: PreTrainedModel, ask: Ask) -> tuple[Tensor, float]:
    """What the wider model answers, and how far an answer may be from it.

    what: differs; where stock cannot run so, nothing shows that this is rounding.
    """
    try:
        exact = ask(wider(stock))
        answers = [ask(stock)]
        with jittered_products(stock):
            answers += [ask(stock) for _ in range(WAYS)]
        return exact, FACTOR * max(float(_distances(answer, exact).max()) for answer in answers)
    except Exception as reason:
        raise Wrong(f"{what}, and stock in a wider dtype raises {told(reason)}") from reason


def _distances(answer: Tensor, exact: Tensor) -> Tensor:
    """The largest of each token, but for numbers that stand for minus infinity."""
    kept = exact.isfinite() & (exact > MASKED)
    apart = (answer.double() - exact.double()).masked_fill(~kept, 0.0).abs()
    return apart.amax(-1).flatten() if apart.ndim > 1 else apart.max()[None]


class _Choices(TorchDispatchMode):
    """Whether a model chooses the best of something."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func is torch.ops.aten.topk.default
        return func(*args, **(kwargs or {}))


# -- numbers -------------------------------------------------------------------------------------------


def tensors_of(output: Any) -> dict[str, Tensor]:
    """The logits, or else the hidden states, of a model's output."""
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return {name: value}
    raise StockCannot(f"no logits in {type(output).__name__}")


def same_logits(
    stock: PreTrainedModel,
    expected: Any,
    actual: Any,
    inputs: dict[str, Any],
    *,
    tolerance: float = 1e-4,
    **more: Any,
) -> None:
    """Of outputs for inputs, at tokens and not at padding; more: with which they were asked."""
    mask = inputs.get("attention_mask")
    for name, theirs in tensors_of(expected).items():
        ours = getattr(actual, name)
        if ours is None or ours.shape != theirs.shape:
            raise Wrong(f"{name} {None if ours is None else tuple(ours.shape)}, not {tuple(theirs.shape)}")
        if ours.dtype != theirs.dtype:
            raise Wrong(f"{name} are {ours.dtype}, not {theirs.dtype}")
        shown = mask.bool() if mask is not None and mask.shape == theirs.shape[:2] else ...

        def ask(model: PreTrainedModel, name: str = name, shown: Any = shown) -> Tensor:
            return getattr(forward(model, inputs, **more), name)[shown]

        close(name, ours[shown], theirs[shown], tolerance=tolerance, stock=stock, ask=ask)


def close(name: str, actual: Tensor, expected: Tensor, *, tolerance: float, stock: PreTrainedModel, ask: Ask) -> None:
    """tolerance: relative to the largest number. ask: how stock was."""
    if not expected.isfinite().all():
        raise StockCannot(f"{name} of stock are not finite")
    error = float((actual.double() - expected.double()).abs().max() / largest(expected.double()).clamp(min=1e-6))
    if error <= max(tolerance, ULPS * torch.finfo(expected.dtype).eps):
        return
    what = f"{name} differ by {error:.1e} of the largest"
    exact, most = rounding(what, stock, ask)
    apart = _distances(actual, exact).sort().values
    if stock.dtype != torch.float32 and len(apart) > 1 and actual.isfinite().all():
        with _Choices() as choices:
            ask(stock)
        apart = apart[: -max(1, int(SHARE * len(apart)))] if choices.found else apart
    if not apart[-1] <= most:
        raise Wrong(f"{what}, and by {apart[-1]:.1e} from those of a wider dtype, not by {most:.1e}")


# -- texts ---------------------------------------------------------------------------------------------


class Text:
    """What stock writes behind some inputs, and whether other tokens are as right; settings: of generate()."""

    def __init__(self, stock: PreTrainedModel, inputs: dict[str, Any], **settings: Any) -> None:
        self.stock, self.inputs, self.settings = stock, inputs, settings
        scored = dict.fromkeys(("return_dict_in_generate", "output_logits", "output_scores"), True)
        self.output = by_stock(lambda: generate(stock, inputs, **scored, **settings))
        self.new = len(self.output.logits or ())
        self.begun = self.output.sequences.shape[1] - self.new  # columns of the prompt

    def same(self, tokens: Tensor) -> None:
        """Raise Wrong where tokens are others for no rounding."""
        expected, begun = self.output.sequences, self.begun
        if tokens.shape[1] == expected.shape[1] - begun:  # Whisper leaves the prompt out, but not of a dict
            expected, begun = expected[:, begun:], 0
        if tokens.shape != expected.shape:
            raise Wrong(f"tokens {tuple(tokens.shape)}, not {tuple(expected.shape)}")
        different = (tokens != expected).nonzero().tolist()
        if not different:
            return
        row, column = different[0]
        ours, theirs = int(tokens[row, column]), int(expected[row, column])
        where = f"row {row}, new token {column - begun}: {ours}, not {theirs}"
        if column < begun or not self.new:
            raise Wrong(where)
        behind, most = self._behind(where, tokens[:, -self.new :])
        if not behind <= most:
            self._answers_alike(tokens)
            raise Wrong(f"{where}; a token is {behind:.1e} behind the best of a wider dtype, not {most:.1e}")

    def _answers_alike(self, tokens: Tensor) -> None:
        """Raise StockCannot where tokens are those of stock without its cache, with which stock writes others.

        MiniMax's cache loses what is padding where its first layer keeps a state, and knows no window.
        """
        if self.settings.get("use_cache") is False or self.settings.get("do_sample"):
            return
        try:
            plain = generate(self.stock, self.inputs, **self.settings | {"use_cache": False})
        except Exception:  # it has no other way
            return
        if tokens.shape == plain.shape and torch.equal(tokens, plain):
            raise StockCannot("its own cache changes what it writes")

    def same_beams(self, output: Any) -> None:
        """Where scores are rounded, other beams go on: ours must have the scores of their tokens, as stock computes.

        output: with sequences_scores.
        """
        error = float((self.output.sequences_scores - output.sequences_scores).abs().max())
        if error <= 1e-5:  # as good as each other
            return
        if self.stock.dtype == torch.float32:
            raise Wrong(f"beams differ, scores by {error:.1e}")
        ours, theirs = (each.sequences[:, -self.new :] for each in (output, self.output))
        _, most = rounding("beams differ", self.stock, lambda model: self._logarithms(model, theirs))
        scores = self._logarithms(wider(self.stock), ours).mean(0)  # as no text ends early
        off = float(_distances(output.sequences_scores, scores).max())
        if not off <= most:
            raise Wrong(f"scores of beams are {off:.1e} from those of a wider dtype, not {most:.1e}")

    def _behind(self, what: str, tokens: Tensor) -> tuple[float, float]:
        """How far the worst token is behind what the wider model chooses, and how far it may be.

        Greedy search is a draw from the best token alone. A draw is a race of logits over the temperature, each less
        the logarithm of its own number from torch's generator, as torch.multinomial draws.
        """
        theirs, wide = self.output.sequences[:, -self.new :], wider(self.stock)
        most = 2 * rounding(what, self.stock, lambda model: self._forced(model, theirs).seen)[1]
        forced, chosen = self._forced(wide, tokens), tokens.T[..., None]
        best, heat = (
            self.settings[name] if self.settings.get("do_sample") else 1 for name in ("top_k", "temperature")
        )
        last = forced.seen.topk(best).values[..., -1:]
        race = forced.seen - heat * forced.noise.log()
        surely = race.masked_fill(forced.seen < last + most, -torch.inf).amax(-1, keepdim=True)
        behind = torch.maximum(last - forced.seen.gather(-1, chosen), surely - race.gather(-1, chosen))
        return float(behind.max()), most

    def _logarithms(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        """Of the probabilities of the tokens of all beams."""
        count = self.settings["num_return_sequences"]
        seen = self._forced(model, tokens, do_sample=True, top_k=0, num_return_sequences=count).seen
        return seen.log_softmax(-1).gather(-1, tokens.T[..., None])[..., 0]

    def _forced(self, model: PreTrainedModel, tokens: Tensor, **settings: Any) -> _Forced:
        """What a model says at each step of a text that it does not choose."""
        forced = _Forced(torch.cat([self.output.sequences[:, : self.begun], tokens], dim=1))
        kept = {name: value for name, value in self.settings.items() if name not in SEARCHES}
        generate(model, self.inputs, logits_processor=[forced], **kept | {"max_new_tokens": self.new} | settings)
        return forced


class _Forced(LogitsProcessor):
    """Choose the given tokens, and keep the logits [steps, rows, V] and what a draw among them is decided by."""

    def __init__(self, sequences: Tensor) -> None:
        self.sequences = sequences
        self.steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            self.steps.append((scores.clone(), torch.empty_like(scores).exponential_()))
        chosen = self.sequences[:, input_ids.shape[1], None]
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)

    @property
    def seen(self) -> Tensor:
        return torch.stack([scores for scores, _ in self.steps])

    @property
    def noise(self) -> Tensor:
        return torch.stack([noise for _, noise in self.steps])
