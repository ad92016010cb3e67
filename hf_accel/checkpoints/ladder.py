"""The ways to hold a model, the best first, each with the bytes that estimate() counts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from ..cache.hf.room import pass_bytes
from ..config import PatchConfig, WeightConfig
from ..config.fit import Fit
from ..errors import UnsupportedError
from ..estimate.estimate import count
from ..estimate.lengths import decoder_positions, source_length
from ..estimate.result import in_units
from ..estimate.shapes import DECODER_TOKENS, decoder_config, has_both, held_specs, is_encoder, unpatched_shapes
from ..estimate.workload import Workload
from ..linear.embedding import QuantEmbedding
from ..patching.check import check_linear_names
from ..patching.weight_plan import weight_plans

LEAST_TOKENS = 512  # of a cache whose tokens nobody has asked for


class Rung(NamedTuple):
    """One way to hold the weights. weights: None leaves them as they are. mixes: some linears may get 8 bits."""

    weights: WeightConfig | None
    mixes: bool = False
    is_stored: bool = False

    @property
    def label(self) -> str:
        if self.weights is None:
            return "as stored" if self.is_stored else "as they are"
        own = "int4 and int8" if self.mixes else self.weights.label
        head = ("head int4",) if self.weights.head == "int4" else ()
        table = () if self.weights.embedding is None else (f"embedding {self.weights.embedding}",)
        return ", ".join((own, *head, *table))


class Sized(NamedTuple):
    """A rung at one dtype of the cache. workload: with the tokens that are wanted. widest: with the most of use.

    pass_bytes: what a pass of so many tokens takes, logits included, which estimate() leaves out.
    """

    rung: Rung
    cache: str | None
    workload: Workload
    widest: Workload
    pass_bytes: Callable[[int], int]

    @property
    def label(self) -> str:
        return self.rung.label if self.cache is None else f"{self.rung.label}, {self.cache} cache"

    @property
    def size(self) -> int:
        """Return the bytes of weights, cache and the largest pass."""
        load = self.workload
        more = max(0, self.pass_bytes(load.context) - load.activation_bytes) if load.decodes else 0
        return load.total_bytes + more

    @property
    def parts(self) -> str:
        """Its bytes, and the bytes of which they are the sum."""
        load, weights = self.workload, sum(self.workload.weights_by_kind.values())
        cached = f", {in_units(load.kv_bytes)} keys and values of {load.context:,} tokens" if load.decodes else ""
        rest = in_units(self.size - weights - load.kv_bytes)
        return f"{in_units(self.size)}: {in_units(weights)} weights{cached}, {rest} a pass"

    def at(self, tokens: int) -> Sized:
        return self._replace(workload=self.widest.at(context=tokens, batch=1))

    def longest(self, room: float, *, block: int) -> Sized:
        """Return it with as many tokens as fit, in whole blocks, or all that are of use."""
        if self._replace(workload=self.widest).size <= room:
            return self._replace(workload=self.widest)
        low, high = min(LEAST_TOKENS, self.widest.context) // block, self.widest.context // block
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.at(middle * block).size <= room else (low, middle - 1)
        return self.at(max(1, low) * block)


class Counter:
    """Counts a model in the ways to hold it.

    tokens: those that have to fit, None for an encoder. most: those that are of use.
    """

    def __init__(self, model: PreTrainedModel, settings: PatchConfig) -> None:
        self.held, self.tables = held_specs(model), _shared_tables(model)
        self.shapes = _tied(unpatched_shapes(model))
        self.settings = settings
        self.asked = None if settings.cache is None else settings.cache.max_tokens
        config = decoder_config(self.shapes)
        positions = decoder_positions(config)
        if positions is not None and has_both(self.shapes.config, self.shapes):  # a source has to fit too
            positions = max(positions, source_length(self.shapes) or 0)
        self.tokens: int | None = self.asked or min(DECODER_TOKENS, positions or DECODER_TOKENS)
        self.most: int | None = self.asked or positions or self.tokens
        if is_encoder(config, self.shapes):
            self.asked = self.tokens = self.most = None

    def count(self, rung: Rung, cache: str | None) -> Sized:
        held, most = {"held": self.held, "tables": self.tables}, self.most
        widest = count(self.shapes, rung.weights, context=most, kv_dtype=cache, **held)  # type: ignore[arg-type]
        load = widest if self.tokens is None else widest.at(context=self.tokens, batch=1)
        return Sized(rung, cache, load, widest, lambda rows: pass_bytes(self.shapes, rows))

    def sizes(self, fit: Fit) -> Iterator[Sized]:
        """Yield the ways to hold the model, the best first. Raises UnsupportedError if none can be counted."""
        cache, refusal, found = self.settings.cache, None, False
        dtypes: list[str | None] = [None]
        if cache is not None and self.tokens is not None:
            dtypes = [None, "int8"] if cache.dtype == "auto" else [cache.dtype]
        for dtype in dtypes:
            for rung in _rungs(self.shapes, self.settings, fit, is_stored=bool(self.held)):
                try:
                    sized = self.count(rung, dtype)
                except UnsupportedError as error:
                    refusal = refusal or error
                    continue
                found = True
                yield sized
        if not found and refusal is not None:
            raise UnsupportedError(f"fit= cannot count this model: {refusal}") from refusal


def _rungs(shapes: Any, settings: PatchConfig, fit: Fit, *, is_stored: bool) -> Iterator[Rung]:
    if is_stored:
        yield Rung(None, is_stored=True)
        return
    if "weights" in settings.explicit:
        yield Rung(settings.weights)
        return
    kept = {name: value for name, value in fit.kept.items() if name != "calibration"}
    eight, four = WeightConfig(8, **kept), WeightConfig(4, **kept)
    check_linear_names(shapes, eight)
    rungs = [
        Rung(None),
        Rung(eight),
        Rung(_with_table(shapes, eight, "int8")),
        Rung(_with_table(shapes, four, "int8"), mixes=True),
        Rung(_with_table(shapes, replace(four, head="int4"), "int4")),
    ]
    yield from dict.fromkeys(rungs)


def _with_table(shapes: Any, config: WeightConfig, word: Any) -> WeightConfig:
    """Return the config with a quantized embedding, or unchanged where this model's has to stay."""
    wanted = replace(config, embedding=word)
    return wanted if weight_plans(shapes, wanted).embedding_stays is None else config


# -- shapes ------------------------------------------------------------------------------------------------


def _tied(shapes: Any) -> Any:
    """Let a model that transformers has not tied yet, as while it loads one, share the weights that it will share."""
    for target, source in dict(shapes.all_tied_weights_keys).items():
        module, _, key = target.rpartition(".")
        holder, _, name = source.rpartition(".")
        shared = shapes.get_submodule(holder)._parameters.get(name)
        if shared is not None and key in shapes.get_submodule(module)._parameters:
            shapes.get_submodule(module)._parameters[key] = shared
    return shapes


def _shared_tables(model: PreTrainedModel) -> frozenset[str]:
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, QuantEmbedding))
    return frozenset(name for name, module in found if module.is_shared)
