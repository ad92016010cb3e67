"""What of a model is compared, stock against patched, and the words for how it came out.

fast: hf_accel's own path answers as stock does. exact: what was asked to come back came back bit for bit. stock's
loop, stock: hf_accel left that part to transformers, and the answer is stock's. refused: an explicit request that is
turned down with a clear error. stock cannot: transformers itself raises. wrong, raises: faults.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import hf_accel
from hf_accel.generation.hf.refusals import ids_refusal, ragged_refusal
from hf_accel.linear import QuantLinear

from ..parity.dequantize import dequantized
from ..parity.snapshot import snapshot
from .changes import CHANGES
from .comparison import (
    NEW_TOKENS,
    NotTried,
    StockCannot,
    Text,
    Wrong,
    by_stock,
    close,
    forward,
    generate,
    given,
    same_logits,
    tensors_of,
    told,
)
from .images import IMAGE
from .inputs import SHAPES, decoder_prompts, prompts, shaped, single
from .media import alone_with_medium, media_prompts, one_without
from .models import Family, build
from .sounds import SOUND

FAULTS = ("wrong", "raises")
PARTS = (5, 6, 7, 10)  # where parts of a prompt end
TURNS = 2  # of what is said to a model and what it answers
CACHES = ("past_key_values", "cache_params", "state")
MEDIA = {"vision": IMAGE, "speech": SOUND}  # by the kind of a family


@dataclass(frozen=True)
class Outcome:
    word: str
    reason: str = ""


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
    expected = by_stock(lambda: forward(stock, inputs, **more))
    actual = forward(patched, inputs, **more)
    same_logits(stock, expected, actual, inputs, **more)
    return expected, actual


def _attention_word(case: Case) -> Outcome:
    return Outcome("stock", case.plan.stock_attention) if case.plan.stock_attention else Outcome("fast")


@feature("output_attentions", *ALL)
def _attentions(case: Case) -> Outcome:
    """As stock gives them; where its own attention gives fewer than we do, all is as its eager attention has it."""
    inputs = case.forward_inputs()
    expected = by_stock(lambda: forward(case.stock, inputs, output_attentions=True))
    stock = case.stock
    actual = forward(case.patched, inputs, output_attentions=True)
    if sum(map(len, _weights(actual).values())) > sum(map(len, _weights(expected).values())):
        eager = case.fresh()
        eager.set_attn_implementation("eager")
        with contextlib.suppress(Wrong):  # SeamlessM4T's is another
            same_logits(stock, expected, forward(eager, inputs), inputs, tolerance=1e-3)
            stock = eager
    expected, actual = _same_forward(stock, case.patched, inputs, output_attentions=True)
    found = _weights(actual)
    for name, value in _weights(expected).items():
        if stock is case.stock or name in found:  # what neither gives by default is not missed
            _same_attentions(name, value, found.get(name, []), stock=stock, inputs=inputs)
    return _attention_word(case)


def _weights(output: Any) -> dict[str, list[Tensor]]:
    """Attention weights by the name of the output, of the layers that give some."""
    lists = {name: value for name, value in output.items() if name.endswith("attentions") and value is not None}
    tensors = {name: [w for w in value if isinstance(w, Tensor)] for name, value in lists.items()}
    return {name: value for name, value in tensors.items() if value}


def _same_attentions(
    name: str, expected: list[Tensor], actual: list[Tensor], *, stock: PreTrainedModel, inputs: dict[str, Tensor]
) -> None:
    if len(actual) != len(expected):
        raise Wrong(f"{name}: {len(actual)} layers, not {len(expected)}")
    mask = inputs.get("attention_mask")
    for layer, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if ours.shape != theirs.shape:
            raise Wrong(f"{name} {tuple(ours.shape)}, not {tuple(theirs.shape)}")
        is_masked = mask is not None and theirs.ndim == 4 and (theirs.shape[0], theirs.shape[2]) == tuple(mask.shape)

        def shown(weights: Tensor, is_masked: bool = is_masked) -> Tensor:
            return weights.transpose(1, 2)[mask.bool()] if mask is not None and is_masked else weights

        def ask(model: PreTrainedModel, layer: int = layer, shown: Callable[[Tensor], Tensor] = shown) -> Tensor:
            return shown(_weights(forward(model, inputs, output_attentions=True))[name][layer])

        close(
            name, shown(ours), shown(theirs), tolerance=1e-3, stock=stock, ask=ask
        )  # a layer magnifies what the one before rounds


def _generates(name: str, *, settings: Callable[[Case], dict[str, Any]], shapes: str = "padded") -> None:
    """shapes: "padded", the batch of it; "alone", one row without padding; "all", over_shapes."""

    @feature(name, *GENERATING)
    def compare(case: Case) -> Outcome:
        if shapes == "all":
            return over_shapes(case, lambda inputs: _same_text(case, inputs, settings))
        return _same_text(case, case.prompts(alone=shapes == "alone"), settings)


def _same_text(case: Case, inputs: dict[str, Tensor], settings: Callable[[Case], dict[str, Any]]) -> Outcome:
    text = Text(case.stock, inputs, **settings(case))
    text.same(generate(case.patched, inputs, **settings(case)))
    return _loop_word(case.patched)


def _loop_word(patched: PreTrainedModel) -> Outcome:
    loop = hf_accel.stats(patched).get("loop", "")
    return Outcome("fast") if loop == "ragged" else Outcome("stock's loop", loop.removeprefix("stock: "))


_generates("greedy", settings=lambda case: {}, shapes="all")
_generates("sampling", settings=lambda case: {"do_sample": True, "top_k": 20, "temperature": 1.3})


@feature("beams", *GENERATING)
def _beams(case: Case) -> Outcome:
    return _same_beams(case, case.prompts())


def _same_beams(case: Case, inputs: dict[str, Tensor]) -> Outcome:
    settings = {"num_beams": 3, "num_return_sequences": 2}
    text = Text(case.stock, inputs, **settings)
    actual = generate(case.patched, inputs, **settings)
    result = _loop_word(case.patched)
    if not torch.equal(text.output.sequences, actual):
        text.same_beams(generate(case.patched, inputs, return_dict_in_generate=True, output_scores=True, **settings))
    return result


@feature("Engine", *GENERATING)
def _engine(case: Case) -> Outcome:
    """Requests that an Engine computes together: each as stock answers it alone."""
    asked = case.requests()
    texts = [Text(case.stock, row) for row in asked]
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
    for text, tokens in zip(texts, answers, strict=True):
        text.same(torch.cat([text.output.sequences[:, : text.begun], torch.tensor([tokens])], dim=1))
    return Outcome("fast")


@feature("steps", "causal")
def _steps(case: Case) -> Outcome:
    """A forward with a cache, over a prompt in parts of several tokens and of one: the logits of each part."""
    inputs = case.prompts()["input_ids"][:, -PARTS[-1] :].clamp(min=3)  # without padding

    def ask(model: PreTrainedModel) -> Tensor:
        cache, found = {}, []
        for start, end in zip((0, *PARTS), PARTS, strict=False):
            with torch.no_grad():
                output = model(input_ids=inputs[:, start:end], use_cache=True, **cache)
            cache = {name: output[name] for name in CACHES if output.get(name) is not None}
            if not cache:
                raise ValueError("it returns no cache")
            found.append(output.logits)
        return torch.cat(found, dim=1)

    expected = by_stock(lambda: ask(case.stock))
    close("logits of steps", ask(case.patched), expected, tolerance=1e-4, stock=case.stock, ask=ask)
    return _attention_word(case)


@feature("generate_batch", *GENERATING)
def _batch(case: Case) -> Outcome:
    """Prompts that begin alike, one of them twice, and what is said behind their answers: each as stock alone."""
    if case.needs_media:
        raise NotTried("its prompts need a medium")
    refusal = ragged_refusal(case.patched) or ids_refusal(case.patched)
    if refusal is not None:
        return Outcome("stock", refusal)  # transformers' own manager answers
    first, second = prompts(case.family.kind, seed=3)["input_ids"][:2, :9].clamp(min=3).tolist()
    asked = [first, first + second[:4], first + second[4:], first[:5] + second[:3], first + second[:4]]
    for _ in range(TURNS):
        rows = [{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row)).long()} for row in asked]
        texts = [Text(case.stock, row) for row in rows]
        try:
            answers = _generate_batch(case.patched, asked)
        except hf_accel.UnsupportedError as error:
            return Outcome("refused", str(error))
        for text, tokens in zip(texts, answers, strict=True):
            text.same(torch.cat([text.output.sequences[:, : text.begun], torch.tensor([tokens])], dim=1))
        asked = [row + tokens + [5, 7] for row, tokens in zip(asked, answers, strict=True)]
    return _loop_word(case.patched)


def _generate_batch(model: PreTrainedModel, asked: list[list[int]]) -> list[list[int]]:
    outputs = model.generate_batch(asked, max_new_tokens=NEW_TOKENS, do_sample=False, block_size=4)
    return [output.generated_tokens for output in outputs.values()]


_generates("no cache", settings=lambda case: {"use_cache": False})
_generates("static cache", settings=lambda case: {"cache_implementation": "static"}, shapes="all")
_generates("prompt lookup", settings=lambda case: {"prompt_lookup_num_tokens": 3}, shapes="alone")
_generates("assistant", settings=lambda case: {"assistant_model": case.fresh(seed=1)}, shapes="alone")


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
    text = Text(case.stock, case.media)
    text.same(generate(case.patched, case.media))
    result = _loop_word(case.patched)
    if torch.equal(text.output.logits[0][0], text.output.logits[0][1]):
        raise StockCannot(f"the {MEDIA[case.family.kind].name} does not change the logits")
    if not case.stock.config.is_encoder_decoder:
        _one_cache_for_two_media(case)
    return _some_without_media(case, result)


def _some_without_media(case: Case, result: Outcome) -> Outcome:
    """Row 1 without its image or sound, where stock takes such a batch."""
    mixed = one_without(case.media)
    if mixed is None:
        return result
    try:
        text = Text(case.stock, mixed)
    except StockCannot:
        return result
    text.same(generate(case.patched, mixed))
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
        text = Text(case.stock, alone)
        cache.reset()
        text.same(generate(case.patched, alone, past_key_values=cache))


for _kind, _medium in MEDIA.items():
    _hears_or_sees(_medium.name, _kind)


@feature("checkpointing", *ALL)
def _checkpointing(case: Case) -> Outcome:
    """The gradient under reentrant checkpointing, which copies what it is given, is stock's without any."""
    inputs = case.with_decoder(case.prompts(alone=True))

    def ask(model: PreTrainedModel) -> Tensor:
        return gradient(model, inputs)

    expected = by_stock(lambda: ask(case.fresh()))
    again = by_stock(lambda: gradient(case.fresh(), inputs, use_reentrant=True))
    try:
        close("gradients", again, expected, tolerance=1e-3, stock=case.fresh(), ask=ask)
    except Wrong as reason:
        raise StockCannot(f"checkpointing changes stock's own gradient: {reason}") from None
    actual = gradient(hf_accel.patch(case.fresh(), weights=None), inputs, use_reentrant=True)
    close("gradients", actual, expected, tolerance=1e-3, stock=case.fresh(), ask=ask)
    return _attention_word(case)


def gradient(model: PreTrainedModel, inputs: dict[str, Tensor], **checkpointing: Any) -> Tensor:
    """Of the mean square of what the model answers, by all parameters that have one; with nothing left to chance."""
    model.train()
    model.zero_grad()
    for module in model.modules():
        for rate in [name for name, value in vars(module).items() if isinstance(value, float) and "drop" in name]:
            setattr(module, rate, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(checkpointing)
    torch.manual_seed(0)
    (_, value), *_ = tensors_of(model(**given(model, inputs))).items()
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
        text = Text(stock, inputs)
        try:
            text.same(generate(patched, inputs))
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
    text = Text(case.stock, inputs)
    text.same(generate(model, inputs))
    return Outcome("fast")


@feature("int8 forward", *ALL)
def _int8_forward(case: Case) -> Outcome:
    """With products of floats it is the dequantized weights' answer, and by default it is near to that."""
    inputs = case.forward_inputs()
    by_stock(lambda: forward(case.stock, inputs))
    count = sum(isinstance(module, QuantLinear) for module in case.exact_int8.modules())
    expected = by_stock(lambda: forward(case.dequantized, inputs))
    actual = forward(case.exact_int8, inputs)
    same_logits(case.dequantized, expected, actual, inputs, tolerance=1e-3)
    default = forward(case.int8, inputs)
    for name, value in tensors_of(default).items():
        if not value.isfinite().all() or value.shape != getattr(expected, name).shape:
            raise Wrong(f"{name} of the default are not finite, or {tuple(value.shape)}")
    return Outcome("fast") if count else Outcome("stock", "no linear is quantized")


@feature("int8 greedy", *GENERATING)
def _int8_greedy(case: Case) -> Outcome:
    inputs = case.prompts()
    by_stock(lambda: generate(case.stock, inputs))
    text = Text(case.dequantized, inputs)
    actual = generate(case.exact_int8, inputs)
    result = _loop_word(case.exact_int8)
    text.same(actual)
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
    actual = getattr(forward(loaded, inputs), name)

    def ask(asked: PreTrainedModel) -> Tensor:
        return forward(asked, inputs)[name]

    close(f"{name} after loading", actual, expected, tolerance=tolerance, stock=model, ask=ask)


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
