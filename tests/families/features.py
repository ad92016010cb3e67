"""What of a model is compared, stock against patched, and the words for how it came out.

fast: hf_accel's own path answers as stock does. exact: what was asked to come back came back bit for bit. stock's
loop, stock: hf_accel left that part to transformers, and the answer is stock's. refused: an explicit request that is
turned down with a clear error. stock cannot: transformers itself raises. wrong, raises: faults.
"""

from __future__ import annotations

import copy
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import hf_accel
from hf_accel.linear import QuantLinear

from ..parity.dequantize import dequantized
from ..parity.snapshot import snapshot
from .changes import CHANGES
from .images import IMAGE
from .inputs import SHAPES, decoder_prompts, prompts, shaped, single
from .media import alone_with_medium, largest, media_prompts, one_without
from .models import Family, build
from .sounds import SOUND

NEW_TOKENS = 10
FAULTS = ("wrong", "raises")
MEDIA = {"vision": IMAGE, "speech": SOUND}  # by the kind of a family


@dataclass(frozen=True)
class Outcome:
    word: str
    reason: str = ""


class Wrong(Exception):
    """Patched does not answer as stock does."""


class StockCannot(Exception):
    """transformers itself raises, or does not answer twice alike."""


class NotTried(Exception):
    """There are no inputs for it here."""


@dataclass
class Case:
    """One model: stock, and patched in the ways that features ask for, each made once."""

    family: Family
    gain: float = 1.0

    @cached_property
    def stock(self) -> PreTrainedModel:
        return self.fresh()

    @cached_property
    def patched(self) -> PreTrainedModel:
        return hf_accel.patch(self.fresh(), weights=None)

    @cached_property
    def plan(self) -> Any:
        return hf_accel.plan(self.stock, weights=None)

    @cached_property
    def int8(self) -> PreTrainedModel:
        """As by default; what INT8 multiplies may be rounded too."""
        return hf_accel.patch(self.fresh())

    @cached_property
    def exact_int8(self) -> PreTrainedModel:
        """Weights in INT8, products of floats."""
        return hf_accel.patch(self.fresh(), weights=hf_accel.WeightConfig(bits=8, activations=None))

    @cached_property
    def dequantized(self) -> PreTrainedModel:
        """Stock's modules, with the values that the INT8 weights stand for."""
        return dequantized(
            self.fresh(), self.exact_int8
        )  # of which neither has run: RWKV changes weights when it does

    def fresh(self, *, seed: int = 0) -> PreTrainedModel:
        return build(self.family, seed=seed, gain=self.gain)

    @cached_property
    def media(self) -> dict[str, Tensor]:
        """Prompts with images, or with sounds."""
        try:
            return media_prompts(self.stock, MEDIA[self.family.kind])
        except ValueError as error:
            raise NotTried(str(error)) from error

    @cached_property
    def needs_media(self) -> bool:
        """Whether stock raises without an image, or a sound."""
        if self.family.kind not in MEDIA:
            return False
        try:
            generate(self.stock, prompts(self.family.kind), max_new_tokens=1)
            return False
        except Exception:
            return True

    def prompts(self, *, alone: bool = False) -> dict[str, Tensor]:
        """What generate is asked; alone: one row without padding."""
        if self.needs_media:
            return alone_with_medium(self.media, 0) if alone else self.media
        return single(self.family.kind) if alone else prompts(self.family.kind)

    def requests(self) -> list[dict[str, Tensor]]:
        """Prompts of one row each, of different lengths where they need no medium."""
        if self.needs_media:
            return [alone_with_medium(self.media, row) for row in range(2)]
        batch = prompts(self.family.kind)
        kept = batch["attention_mask"].bool()
        return [{"input_ids": ids[mask][None]} for ids, mask in zip(batch["input_ids"], kept, strict=True)]

    def shapes(self) -> dict[str, dict[str, Tensor]]:
        """The padded batch, and prompts of other shapes, by what they are called in a fault."""
        if self.needs_media:
            return {f"with {MEDIA[self.family.kind].name}s": self.media}
        kind = self.family.kind
        other = {shape: shaped(kind, rows=shape[0], columns=shape[1], padded=shape[2]) for shape in SHAPES}
        return {"padded": prompts(kind)} | {
            f"{rows} x {columns}": other[rows, columns, p] for rows, columns, p in other
        }

    def forward_inputs(self) -> dict[str, Tensor]:
        return self.with_decoder(self.prompts())

    def with_decoder(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """An encoder-decoder's forward gets a decoder's tokens too."""
        if not self.stock.config.is_encoder_decoder:
            return inputs
        return inputs | {"decoder_input_ids": decoder_prompts(len(next(iter(inputs.values()))))}


# -- comparing -----------------------------------------------------------------------------------------


def tensors_of(output: Any) -> dict[str, Tensor]:
    """The logits, or else the hidden states, of a model's output."""
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return {name: value}
    raise StockCannot(f"no logits in {type(output).__name__}")


@torch.no_grad()
def forward(model: PreTrainedModel, inputs: dict[str, Any], **more: Any) -> Any:
    torch.manual_seed(0)
    return model(**copy.deepcopy(inputs), **more)


@torch.no_grad()
def generate(model: PreTrainedModel, inputs: dict[str, Any], **settings: Any) -> Any:
    """Tokens, or with return_dict_in_generate what goes with them; a few models give that always."""
    torch.manual_seed(0)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | settings
    output = model.generate(**copy.deepcopy(inputs), **settings)
    return output if "return_dict_in_generate" in settings or isinstance(output, Tensor) else output.sequences


@torch.no_grad()
def exactly(model: PreTrainedModel, inputs: dict[str, Any], **more: Any) -> Any:
    """What the model answers in float64."""
    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("eager")  # other experts know no float64
    return forward(wide, inputs, **more)


def same_logits(stock: Any, patched: Any, mask: Tensor | None, *, tolerance: float = 1e-4) -> None:
    """At tokens, not at padding; relative to the largest logit."""
    for name, expected in tensors_of(stock).items():
        actual = getattr(patched, name)
        if actual is None or actual.shape != expected.shape:
            raise Wrong(f"{name} {None if actual is None else tuple(actual.shape)}, not {tuple(expected.shape)}")
        if actual.dtype != expected.dtype:
            raise Wrong(f"{name} are {actual.dtype}, not {expected.dtype}")
        rows = expected.shape[:2]
        if mask is not None and mask.shape == rows:
            actual, expected = actual[mask.bool()], expected[mask.bool()]
        close(name, actual, expected, tolerance)


def close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    if not expected.isfinite().all():
        raise StockCannot(f"{name} of stock are not finite")
    error = float((actual.float() - expected.float()).abs().max() / largest(expected.float()).clamp(min=1e-6))
    if not error <= max(tolerance, rounding(expected)):
        raise Wrong(f"{name} differ by {error:.1e} of the largest")


def rounding(values: Tensor) -> float:
    """What numbers of 16 bits, also where generate() made floats of them, may differ by, of the largest."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(values.to(dtype).to(values.dtype), values):
            return 16 * torch.finfo(dtype).eps
    return 0.0


def needs_float32(case: Case) -> None:
    if case.stock.dtype != torch.float32:
        raise NotTried("where 16 bits are rounded otherwise, other tokens are drawn and other experts or units chosen")


def same_tokens(stock: Any, patched: Tensor, prompt_columns: int) -> None:
    """stock: with logits of each step. A first difference between two tokens that are as good as equal is rounding."""
    expected = stock.sequences
    rows = min(len(expected), len(patched))
    if len(expected) != len(patched):
        raise Wrong(f"{len(patched)} rows, not {len(expected)}")
    if expected.shape[1] - patched.shape[1] == prompt_columns:  # Whisper leaves the prompt out, but not of a dict
        expected, prompt_columns = expected[:, prompt_columns:], 0
    columns = min(expected.shape[1], patched.shape[1])
    for row in range(rows):
        for column in range(columns):
            ours, theirs = int(patched[row, column]), int(expected[row, column])
            if ours != theirs:
                _near_tie(stock, row, column - prompt_columns, tokens=(ours, theirs))
                break
        else:
            if expected.shape != patched.shape:
                raise Wrong(f"tokens {tuple(patched.shape)}, not {tuple(expected.shape)}")


def _near_tie(stock: Any, row: int, step: int, *, tokens: tuple[int, int]) -> None:
    """tokens: ours, and stock's."""
    ours, theirs = tokens
    where = f"row {row}, new token {step}: {ours}, not {theirs}"
    logits = getattr(stock, "logits", None)
    if step < 0 or logits is None or step >= len(logits):
        raise Wrong(where)
    scores = logits[step][row]
    margin = float((scores[theirs] - scores[ours]).abs() / largest(scores))
    if margin > max(1e-5, rounding(scores)):
        raise Wrong(f"{where}, by {margin:.1e} of the largest logit")


# -- features ------------------------------------------------------------------------------------------

Feature = Callable[[Case], Outcome]
FEATURES: dict[str, Feature] = {}
KINDS: dict[str, tuple[str, ...]] = {}
ALL = ("causal", "seq2seq", "speech", "vision", "encoder")
GENERATING = ("causal", "seq2seq", "speech", "vision")


def feature(name: str, *kinds: str) -> Callable[[Feature], Feature]:
    def register(function: Feature) -> Feature:
        FEATURES[name], KINDS[name] = function, kinds
        return function

    return register


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


def outcome(name: str, case: Case) -> Outcome:
    try:
        return FEATURES[name](case)
    except StockCannot as reason:
        return Outcome("stock cannot", str(reason))
    except NotTried as reason:
        return Outcome("not tried", str(reason))
    except Wrong as reason:
        return Outcome("wrong", str(reason))
    except Exception as error:
        return Outcome("raises", told(error))


def outcomes(family: Family, names: list[str] | None = None) -> Iterator[tuple[str, Outcome]]:
    """Every feature of one family, one after the other; "build" alone where there is no model."""
    try:
        case = lively(family)
    except Exception as error:
        yield "build", Outcome("stock cannot", told(error))
        return
    for name in FEATURES:
        if family.kind in KINDS[name] and (names is None or name in names):
            yield name, outcome(name, case)


def lively(family: Family) -> Case:
    """The case with the first gain at which stock's greedy text is not one token again and again."""
    first = None
    for gain in (1.0, 2.0, 4.0):
        case = Case(family, gain)
        first = first or case
        if not case.stock.can_generate():
            return case
        try:
            text = generate(case.stock, case.prompts())[:, -NEW_TOKENS:]
        except Exception:
            return case
        if all(len(set(row)) > NEW_TOKENS // 3 for row in text.tolist()):
            return case
    assert first is not None
    return first


def over_shapes(case: Case, compare: Callable[[dict[str, Tensor]], Outcome]) -> Outcome:
    """The slowest word of all shapes that stock can answer; a fault names its shape."""
    found, reasons = [], []
    for name, inputs in case.shapes().items():
        try:
            found.append(compare(inputs))
        except StockCannot as reason:
            reasons.append(reason)
        except Wrong as reason:
            raise Wrong(f"{name}: {reason}") from None
    if not found:
        raise reasons[0]
    return next((outcome for outcome in found if outcome.word != "fast"), found[0])


@feature("forward", *ALL)
def _forward(case: Case) -> Outcome:
    def compare(inputs: dict[str, Tensor]) -> Outcome:
        _same_forward(case.stock, case.patched, case.with_decoder(inputs))
        return _attention_word(case)

    return over_shapes(case, compare)


def _same_forward(
    stock: PreTrainedModel, patched: PreTrainedModel, inputs: dict[str, Tensor], **more: Any
) -> tuple[Any, Any]:
    """Within 1e-4 of the largest logit, or as near to what float64 says as stock is, where a model magnifies."""
    mask = inputs.get("attention_mask")
    expected = by_stock(lambda: forward(stock, inputs, **more))
    actual = forward(patched, inputs, **more)
    try:
        same_logits(expected, actual, mask)
    except Wrong:
        (name, value), *_ = tensors_of(by_stock(lambda: exactly(stock, inputs))).items()
        tokens = mask.bool() if mask is not None and mask.shape == value.shape[:2] else ...
        ours, theirs = (float((getattr(o, name) - value).abs()[tokens].max()) for o in (actual, expected))
        if not ours <= 4 * theirs:
            raise
    return expected, actual


def _attention_word(case: Case) -> Outcome:
    return Outcome("stock", case.plan.stock_attention) if case.plan.stock_attention else Outcome("fast")


@feature("output_attentions", *ALL)
def _attentions(case: Case) -> Outcome:
    """As stock gives them; where its own attention gives fewer than we do, all is as its eager attention has it."""
    inputs = case.forward_inputs()
    expected = by_stock(lambda: forward(case.stock, inputs, output_attentions=True))
    mask, stock = inputs.get("attention_mask"), case.stock
    actual = forward(case.patched, inputs, output_attentions=True)
    if sum(map(len, _weights(actual).values())) > sum(map(len, _weights(expected).values())):
        eager = case.fresh()
        eager.set_attn_implementation("eager")
        apart = forward(eager, inputs).logits - expected.logits
        if mask is not None and mask.shape == apart.shape[:2]:
            apart = apart[mask.bool()]  # at padding neither means anything
        if float(apart.abs().max()) < 1e-3 * float(expected.logits.abs().max()):  # SeamlessM4T's is another
            stock = eager
    expected, actual = _same_forward(stock, case.patched, inputs, output_attentions=True)
    given = _weights(actual)
    for name, value in _weights(expected).items():
        if stock is case.stock or name in given:  # what neither gives by default is not missed
            _same_attentions(name, value, given.get(name, []), mask)
    return _attention_word(case)


def _weights(output: Any) -> dict[str, list[Tensor]]:
    """Attention weights by the name of the output, of the layers that give some."""
    lists = {name: value for name, value in output.items() if name.endswith("attentions") and value is not None}
    tensors = {name: [w for w in value if isinstance(w, Tensor)] for name, value in lists.items()}
    return {name: value for name, value in tensors.items() if value}


def _same_attentions(name: str, expected: list[Tensor], actual: list[Tensor], mask: Tensor | None) -> None:
    if len(actual) != len(expected):
        raise Wrong(f"{name}: {len(actual)} layers, not {len(expected)}")
    for ours, theirs in zip(actual, expected, strict=True):
        if ours.shape != theirs.shape:
            raise Wrong(f"{name} {tuple(ours.shape)}, not {tuple(theirs.shape)}")
        is_masked = mask is not None and theirs.ndim == 4 and (theirs.shape[0], theirs.shape[2]) == tuple(mask.shape)
        if mask is not None and is_masked:
            ours, theirs = (each.transpose(1, 2)[mask.bool()] for each in (ours, theirs))
        close(name, ours, theirs, 1e-3)  # a layer magnifies what the one before rounds


def _generates(name: str, *, settings: Callable[[Case], dict[str, Any]], shapes: str = "padded") -> None:
    """shapes: "padded", the batch of it; "all", over_shapes."""

    @feature(name, *GENERATING)
    def compare(case: Case) -> Outcome:
        if shapes == "all":
            return over_shapes(case, lambda inputs: _same_text(case, inputs, settings))
        return _same_text(case, case.prompts(), settings)


def _drafts(name: str, settings: Callable[[Case], dict[str, Any]]) -> None:
    """settings: with which transformers drafts, which should change no token of greedy search."""

    @feature(name, *GENERATING)
    def compare(case: Case) -> Outcome:
        inputs = case.prompts(alone=True)
        try:
            return _same_text(case, inputs, settings)
        except Wrong:
            greedy = by_stock(lambda: generate(case.stock, inputs, return_dict_in_generate=True, output_logits=True))
            same_tokens(greedy, generate(case.patched, inputs, **settings(case)), _prompt_columns(case, inputs))
            raise StockCannot("its drafts change its own greedy tokens") from None


def _same_text(case: Case, inputs: dict[str, Tensor], settings: Callable[[Case], dict[str, Any]]) -> Outcome:
    wanted = settings(case)
    if wanted.get("do_sample"):
        needs_float32(case)
    expected = by_stock(
        lambda: generate(case.stock, inputs, return_dict_in_generate=True, output_logits=True, **wanted)
    )
    actual = generate(case.patched, inputs, **settings(case))
    same_tokens(expected, actual, _prompt_columns(case, inputs))
    return _loop_word(case.patched)


def _prompt_columns(case: Case, inputs: dict[str, Tensor]) -> int:
    return 1 if case.stock.config.is_encoder_decoder else inputs["input_ids"].shape[1]


def _loop_word(patched: PreTrainedModel) -> Outcome:
    loop = hf_accel.stats(patched).get("loop", "")
    return Outcome("fast") if loop == "ragged" else Outcome("stock's loop", loop.removeprefix("stock: "))


_generates("greedy", settings=lambda case: {}, shapes="all")
_generates("sampling", settings=lambda case: {"do_sample": True, "top_k": 20, "temperature": 1.3})


@feature("beams", *GENERATING)
def _beams(case: Case) -> Outcome:
    return _same_beams(case, case.prompts())


def _same_beams(case: Case, inputs: dict[str, Tensor]) -> Outcome:
    """Sequences whose scores are equal are as good as each other."""
    needs_float32(case)
    settings = {"num_beams": 3, "num_return_sequences": 2}
    scored = {"return_dict_in_generate": True, "output_scores": True}
    expected = by_stock(lambda: generate(case.stock, inputs, **settings, **scored))
    actual = generate(case.patched, inputs, **settings)
    result = _loop_word(case.patched)
    if torch.equal(expected.sequences, actual):
        return result
    again = generate(case.patched, inputs, **settings, **scored)
    error = float((expected.sequences_scores - again.sequences_scores).abs().max())
    if error > 1e-5:
        raise Wrong(f"beams differ, scores by {error:.1e}")
    return result


@feature("Engine", *GENERATING)
def _engine(case: Case) -> Outcome:
    """Requests that an Engine computes together: each as stock answers it alone."""
    asked = case.requests()
    scored = {"return_dict_in_generate": True, "output_logits": True}
    expected = [by_stock(lambda row=row: generate(case.stock, row, **scored)) for row in asked]
    try:
        engine = hf_accel.Engine(hf_accel.patch(case.fresh(), weights=None))
    except hf_accel.HfAccelError as error:
        return Outcome("refused", str(error))
    with engine:
        try:
            requests = [engine.submit(row, max_new_tokens=NEW_TOKENS, temperature=0) for row in asked]
            answers = [request.result(60).tokens for request in requests]
        except hf_accel.UnsupportedError as error:
            return Outcome("refused", str(error))
    for theirs, tokens in zip(expected, answers, strict=True):
        begun = theirs.sequences[:, : theirs.sequences.shape[1] - len(theirs.logits)]
        same_tokens(theirs, torch.cat([begun, torch.tensor([tokens])], dim=1), begun.shape[1])
    return Outcome("fast")


_generates("no cache", settings=lambda case: {"use_cache": False})
_generates("static cache", settings=lambda case: {"cache_implementation": "static"}, shapes="all")
_drafts("prompt lookup", lambda case: {"prompt_lookup_num_tokens": 3})
_drafts("assistant", lambda case: {"assistant_model": case.fresh(seed=1)})


def _hears_or_sees(name: str, kind: str) -> None:
    """Make the features of prompts with an image, or with a sound."""

    @feature(f"{name}: forward", kind)
    def compare_forward(case: Case) -> Outcome:
        _same_forward(case.stock, case.patched, case.with_decoder(case.media))
        return _attention_word(case)

    @feature(f"{name}: greedy", kind)
    def compare_greedy(case: Case) -> Outcome:
        return _same_text_of_media(case)

    @feature(f"{name}: beams", kind)
    def compare_beams(case: Case) -> Outcome:
        return _same_beams(case, case.media)


def _same_text_of_media(case: Case) -> Outcome:
    """Rows 0 and 1 say the same about different media; one by one over one cache, and both at once."""
    inputs = case.media
    scored = {"return_dict_in_generate": True, "output_logits": True}
    expected = by_stock(lambda: generate(case.stock, inputs, **scored))
    columns = _prompt_columns(case, inputs)
    same_tokens(expected, generate(case.patched, inputs), columns)
    result = _loop_word(case.patched)
    if torch.equal(expected.logits[0][0], expected.logits[0][1]):
        raise StockCannot(f"the {MEDIA[case.family.kind].name} does not change the logits")
    if not case.stock.config.is_encoder_decoder:
        _one_cache_for_two_media(case)
    return _some_without_media(case, result)


def _some_without_media(case: Case, result: Outcome) -> Outcome:
    """Row 1 without its image or sound, where stock takes such a batch."""
    mixed = one_without(case.media)
    if mixed is None:
        return result
    scored = {"return_dict_in_generate": True, "output_logits": True}
    try:
        expected = by_stock(lambda: generate(case.stock, mixed, **scored))
    except StockCannot:
        return result
    same_tokens(expected, generate(case.patched, mixed), _prompt_columns(case, mixed))
    return _loop_word(case.patched) if result.word == "fast" else result


def _one_cache_for_two_media(case: Case) -> None:
    """What a cache holds of the prompt of one image or sound must not be taken for that of another."""
    if case.plan.stock_cache:
        return
    try:
        cache = hf_accel.PagedCache(case.patched.config)
    except hf_accel.UnsupportedError:  # its pages hold more than tokens, and cannot be passed along
        return
    for row in (0, 1, 0):
        alone = alone_with_medium(case.media, row)
        expected = by_stock(
            lambda given=alone: generate(case.stock, given, return_dict_in_generate=True, output_logits=True)
        )
        cache.reset()
        same_tokens(expected, generate(case.patched, alone, past_key_values=cache), _prompt_columns(case, alone))


for _kind, _medium in MEDIA.items():
    _hears_or_sees(_medium.name, _kind)


@feature("checkpointing", *ALL)
def _checkpointing(case: Case) -> Outcome:
    """The gradient under reentrant checkpointing, which copies what it is given, is stock's without any."""
    needs_float32(case)
    inputs = case.with_decoder(case.prompts(alone=True))
    stock, patched = case.fresh(), hf_accel.patch(case.fresh(), weights=None)
    expected = by_stock(lambda: gradient(stock, inputs))
    again = by_stock(lambda: gradient(case.fresh(), inputs, use_reentrant=True))
    if not torch.allclose(again, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
        raise StockCannot("checkpointing changes stock's own gradient")
    actual = gradient(patched, inputs, use_reentrant=True)
    try:
        close("gradients", actual, expected, 1e-3)
    except Wrong:  # a model that magnifies: as near to what float64 says as stock is
        wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        exact = by_stock(lambda: gradient(case.fresh().double(), wide)).float()
        if not (actual - exact).abs().max() <= 4 * (expected - exact).abs().max():
            raise
    return _attention_word(case)


def gradient(model: PreTrainedModel, inputs: dict[str, Tensor], **checkpointing: Any) -> Tensor:
    """Of the mean square of what the model answers, by all parameters that have one; with nothing left to chance."""
    model.train()
    for module in model.modules():
        for rate in [name for name, value in vars(module).items() if isinstance(value, float) and "drop" in name]:
            setattr(module, rate, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(checkpointing)
    torch.manual_seed(0)
    (_, value), *_ = tensors_of(model(**copy.deepcopy(inputs))).items()
    value.float().square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@feature("changed in use", *GENERATING)
def _changed(case: Case) -> Outcome:
    """A model that was used and is changed then, in each of the ways of changes.py, answers as stock so changed."""
    inputs, outcome, found = case.prompts(alone=True), Outcome("fast"), 0
    by_stock(lambda: generate(case.stock, inputs))
    for name, change in CHANGES.items():
        stock, patched = case.fresh(), hf_accel.patch(case.fresh(), weights=None)
        generate(patched, inputs)
        if not (change(stock) and change(patched)):
            continue
        expected = by_stock(lambda m=stock: generate(m, inputs, return_dict_in_generate=True, output_logits=True))
        try:
            same_tokens(expected, generate(patched, inputs), _prompt_columns(case, inputs))
        except Wrong as reason:
            raise Wrong(f"{name}: {reason}") from None
        outcome, found = _loop_word(patched) if outcome.word == "fast" else outcome, found + 1
    if not found:
        raise NotTried("no change of changes.py fits the model")
    return outcome


@feature("cache asked for", *GENERATING)
def _explicit_cache(case: Case) -> Outcome:
    """cache="paged" by name: it does, or a clear error."""
    try:
        model = hf_accel.patch(case.fresh(), weights=None, cache="paged")
    except hf_accel.UnsupportedError as error:
        return Outcome("refused", str(error))
    inputs = case.prompts()
    expected = by_stock(lambda: generate(case.stock, inputs, return_dict_in_generate=True, output_logits=True))
    same_tokens(expected, generate(model, inputs), _prompt_columns(case, inputs))
    return Outcome("fast")


@feature("int8 forward", *ALL)
def _int8_forward(case: Case) -> Outcome:
    """With products of floats it is the dequantized weights' answer, and by default it is near to that."""
    inputs = case.forward_inputs()
    by_stock(lambda: forward(case.stock, inputs))
    mask = inputs.get("attention_mask")
    count = sum(isinstance(module, QuantLinear) for module in case.exact_int8.modules())
    expected = by_stock(lambda: forward(case.dequantized, inputs))
    if case.stock.dtype == torch.float32:
        same_logits(expected, forward(case.exact_int8, inputs), mask, tolerance=1e-3)
    default = forward(case.int8, inputs)
    for name, value in tensors_of(default).items():
        if not value.isfinite().all() or value.shape != getattr(expected, name).shape:
            raise Wrong(f"{name} of the default are not finite, or {tuple(value.shape)}")
    return Outcome("fast") if count else Outcome("stock", "no linear is quantized")


@feature("int8 greedy", *GENERATING)
def _int8_greedy(case: Case) -> Outcome:
    needs_float32(case)
    inputs = case.prompts()
    by_stock(lambda: generate(case.stock, inputs))
    expected = by_stock(lambda: generate(case.dequantized, inputs, return_dict_in_generate=True, output_logits=True))
    actual = generate(case.exact_int8, inputs)
    result = _loop_word(case.exact_int8)
    same_tokens(expected, actual, _prompt_columns(case, inputs))
    if generate(case.int8, inputs).shape != actual.shape:
        raise Wrong("the default's tokens have another shape")
    return result


@feature("int8 save, load", *ALL)
def _save_load(case: Case) -> Outcome:
    """What was saved is loaded bit for bit, ties included, and answers so.

    But for a rounding: tensors that were read lie elsewhere in memory, which torch's sums of floats may show.
    """
    inputs = case.forward_inputs()
    with tempfile.TemporaryDirectory() as folder:
        by_stock(lambda: _reload(case.stock, folder, inputs, 1e-4))
    with tempfile.TemporaryDirectory() as folder:
        _reload(case.int8, folder, inputs, 1e-6)
    return Outcome("exact")


def _reload(model: PreTrainedModel, folder: str, inputs: dict[str, Tensor], tolerance: float) -> None:
    """Save, load and compare; tolerance: of the logits, relative to the largest."""
    model.save_pretrained(folder)
    kind = getattr(transformers, type(model).__name__)
    loaded = kind.from_pretrained(folder).eval()
    _same_state(model, loaded)
    (name, expected), *_ = tensors_of(forward(model, inputs)).items()
    close(f"{name} after loading", getattr(forward(loaded, inputs), name), expected, tolerance)


def _same_state(model: PreTrainedModel, loaded: PreTrainedModel) -> None:
    expected, actual = model.state_dict(), loaded.state_dict()
    if expected.keys() != actual.keys():
        raise Wrong(f"other names after loading: {sorted(expected.keys() ^ actual.keys())[:4]}")
    different = [name for name, value in expected.items() if not torch.equal(value, actual[name])]
    if different:
        raise Wrong(f"{len(different)} tensors changed by saving and loading, {different[:3]} among them")


@feature("unpatch", *ALL)
def _unpatch(case: Case) -> Outcome:
    """Class, configs, hooks, identities and bits are what they were."""
    model, inputs = case.fresh(), case.forward_inputs()

    def use() -> None:
        forward(model, inputs)
        if model.can_generate() and case.family.kind in GENERATING:
            generate(model, case.prompts(), max_new_tokens=2)

    by_stock(use)
    before = _flat(snapshot(model, inputs))
    by_stock(use)
    moving = {key for key, value in _flat(snapshot(model, inputs)).items() if before.get(key) != value}
    hf_accel.patch(model)
    use()
    hf_accel.unpatch(model)
    after = _flat(snapshot(model, inputs))
    changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key) and key not in moving]
    if changed:
        raise Wrong(f"changed: {sorted(changed)[:4]}")
    return Outcome("exact")


def _flat(taken: dict[str, Any]) -> dict[str, Any]:
    """One entry for each attribute of each module: a model may keep what it was asked last (positions of an image)."""
    flat = {key: value for key, value in taken.items() if key not in ("vars", "dicts")}
    for kind in ("vars", "dicts"):
        for name, entries in taken[kind].items():
            flat |= {f"{kind}: {name}.{key}": value for key, value in entries}
            flat[f"{kind}: {name}"] = [key for key, _ in entries]
    return flat
