"""Passes of a decoder's first layers on random numbers: each sequence alone as stock, and together over pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from ..attention.hf import ATTENTION_NAME
from ..attention.hf.stock import set_implementation, stock_implementation
from ..cache.hf import model_kinds, page_groups
from ..cache.hf.cache_argument import cache_name
from ..cache.kinds import SourceRows
from ..cache.pages import Pages
from ..cache.pass_rows import Parts, Passes, rows_of_passes
from ..cache.step import Step
from ..config import CacheConfig
from ..errors import UnsupportedError
from ..fused.hf.mask_readers import give_eager_masks
from ..fused.hf.operator_models import decoder_operators, read_by_operators
from ..generation.hf.decoder_call import UpToDecoder, giving_decoder
from ..generation.hf.encoder_decoder_runner import EncoderDecoderRunner
from ..generation.hf.encoder_source import rows_as_output
from ..generation.hf.model_runner import ModelRunner
from ..models import answer_once, encoder_width, layers_config, padding_token
from ..recognition.call_form import parameter_names
from ..recognition.small_model import ROWS, first_layers_model
from ..recognition.trial import RandomNumbers
from ..undo.journal import original_class

TRIED_LAYERS = 2  # the first one can differ from all others
LENGTHS = (5, 3)  # of the encoder's output of two sequences
PASSES: Passes = (((0, 3),), ((0, 1), (1, 2)), ((0, 1), (1, 1)))
PARTED: Passes = (((0, 2),), ((0, 1),), *PASSES[1:])  # the same tokens, the last one of a prompt by itself


def stock_alone(
    model: PreTrainedModel, passes: Passes = PASSES, *, padding: int, tried: Any = None
) -> tuple[Tensor, ...]:
    """Compute the passes of each sequence alone in a model without an encoder, with padding in front of it.

    tried: the small copy that computes them; None for one of its first layers.
    """
    tried = small_copy(model, None) if tried is None else tried
    takes_positions = "position_ids" in parameter_names(original_class(tried).forward)
    outputs = []
    for number in range(len(LENGTHS)):
        cache = DynamicCache(config=layers_config(tried.config))
        mask = torch.zeros(1, padding, dtype=torch.int64)
        for ids in _tokens(model, number, passes):
            shown = ids if mask.any() else [padding_token(model)] * padding + ids
            mask = torch.nn.functional.pad(mask, (0, len(ids)), value=1)
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -len(shown) :]
            given = {"position_ids": positions} if takes_positions else {}
            output = tried(
                input_ids=torch.tensor([shown]), attention_mask=mask, use_cache=True, return_dict=True,
                **{cache_name(tried): cache}, **given,
            )  # fmt: skip
            outputs.append(output.logits[0, -len(ids) :])
    return tuple(outputs)


def _hiding(name: str, mask: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    return given | {name: mask}


def stock_with_source(
    model: PreTrainedModel, passes: Passes, *, hides: bool, masked: bool = False, cached: bool = True
) -> tuple[Tensor, ...]:
    """Compute the passes of each sequence alone. hides: whether its encoder's output has rows that a mask hides.

    masked: whether the model is given an attention_mask that shows all but the last row. cached: whether it has a
    cache, and so computes each token once.
    """
    tried = small_copy(model, None)
    outputs = []
    for number, source in enumerate(sources_of(model)):
        called = tried
        if hides:
            mask = torch.ones(1, len(source), dtype=torch.int64)
            hiding = partial(_hiding, UpToDecoder(tried).hiding, torch.nn.functional.pad(mask, (0, 2)))
            called = giving_decoder(tried, None, hiding)
            source = torch.cat([source, 10 * torch.ones(2, source.shape[1])])
        more: dict[str, Any] = {}
        if masked:
            more["attention_mask"] = torch.arange(len(source), 0, -1)[None].gt(1).long()
        if cached:
            more[cache_name(tried)] = EncoderDecoderCache(
                DynamicCache(config=layers_config(tried.config)), DynamicCache()
            )
        given: list[int] = []
        for ids in _tokens(model, number, passes):
            given = ids if cached else given + ids
            output = called(
                decoder_input_ids=torch.tensor([given]),
                encoder_outputs=rows_as_output(source[None]),
                use_cache=cached,
                return_dict=True,
                **more,
            )
            outputs.append(output.logits[0, -len(ids) :])
    return tuple(outputs)


def paged_together(
    model: PreTrainedModel, passes: Passes, sources: Sequence[Tensor | None] = (None, None), *, first: int = 0,
    tried: Any = None, whole: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the same passes over pages, those of both sequences in one row.

    sources: the encoder's output of each sequence. first: the position of the first token of each. tried: see
    stock_alone. whole: whether the tokens of a sequence's first pass see each other.
    """
    operators = answer_once(decoder_operators, model) if model.config.is_encoder_decoder else None
    if tried is None:
        tried = small_copy(model, None if operators is not None else ATTENTION_NAME)
    if operators is not None:
        read_by_operators(tried, operators)
    groups, groups_of_layer = page_groups(tried.config, CacheConfig(), capacity=64)
    kind = EncoderDecoderRunner if model.config.is_encoder_decoder else ModelRunner
    pages, runner = Pages(groups), kind(tried, groups, groups_of_layer, operators)
    cached = [pages.begin(source=None if source is None else SourceRows(source)) for source in sources]
    texts = [[*chain.from_iterable(_tokens(model, number, passes))] for number in range(len(LENGTHS))]

    def compute(parts: Parts, step: Step) -> Tensor:
        ids = [texts[number][place] for number, span in parts for place in span]
        positions = [first + place for _, span in parts for place in span]
        return runner(ids, positions, step, list(range(len(ids))))

    return tuple(rows_of_passes(pages, cached, passes, compute, whole=whole))


def sources_of(model: PreTrainedModel) -> list[Tensor]:
    numbers, width = RandomNumbers(), encoder_width(model)
    return [numbers(length, width) for length in LENGTHS]


def _tokens(model: PreTrainedModel, number: int, passes: Passes) -> Iterator[list[int]]:
    """The token ids of each pass of one sequence. Without an encoder, one of them pads."""
    counts = [count for parts in passes for each, count in parts if each == number]
    ids = iter(range(7 + 20 * number, ROWS))
    tokens = [[next(ids) for _ in range(count)] for count in counts]
    if not model.config.is_encoder_decoder:
        tokens[0][1] = padding_token(model)
    yield from tokens


def small_copy(model: PreTrainedModel, implementation: str | None, *, token: int | None = None) -> Any:
    """Make a copy with few layers, in float32.

    implementation: of its attention; None for that of the model. token: one that has an embedding besides the first
    ones; None for that which pads.
    """
    decoder = model.get_decoder()
    lengths = {_name_of(model, decoder): _tried_layers(model)}
    if model.config.is_encoder_decoder:
        lengths[_name_of(model, model.get_encoder())] = 0
    small = first_layers_model(model, lengths, token=padding_token(model) if token is None else token)
    set_implementation(small, implementation or stock_implementation(model, decoder))
    if implementation == ATTENTION_NAME:
        give_eager_masks(model, small)
    return small


def _tried_layers(model: PreTrainedModel) -> int:
    """Return how many layers are tried: as many as have one of each kind."""
    try:
        kinds = model_kinds(model.config).layers
    except UnsupportedError:
        return TRIED_LAYERS
    return max([TRIED_LAYERS, *(kinds.index(own) + 1 for own in kinds)])


def _name_of(model: nn.Module, part: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is part)
