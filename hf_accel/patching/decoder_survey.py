"""Look at a decoder that counts positions by itself: does it compute over pages what it computes with transformers'
cache? Decoders of encoder-decoders do so, and models of such a decoder alone.

Its code is read as that of all models. In addition its first layers are run, on random numbers, once as stock and once
as ragged passes over pages: that shows how it counts positions, whether a mask hides rows of the encoder's output, and
where the tokens behind padding stand.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from ..attention.hf import ATTENTION_NAME
from ..attention.hf.forward import register
from ..attention.hf.stock import set_implementation, stock_implementation
from ..cache.hf import page_groups
from ..cache.hf.kinds import model_kinds
from ..cache.kinds import KeysAndValues, SourceRows
from ..cache.pages import Pages
from ..cache.step import TokenRange
from ..config import CacheConfig
from ..fused.hf.operator_models import OperatorModel, decoder_operators, operator_model, read_by_operators, with_tried
from ..generation.hf.decoder_call import UpToDecoder, giving_decoder
from ..generation.hf.encoder_decoder_runner import EncoderDecoderRunner
from ..generation.hf.encoder_source import rows_as_output
from ..generation.hf.model_runner import ModelRunner
from ..generation.hf.refusals import OWN_METHODS
from ..models import encoder_width, layers_config, padding_token
from ..recognition.asked import answer_once
from ..recognition.call_form import parameter_names
from ..recognition.generation_code import only_passes_on
from ..recognition.small_model import ROWS, first_layers_model
from ..recognition.trial import RandomNumbers, Tolerance, agree
from ..tensors import model_device
from ..undo.journal import original_class

# Whisper's own prepare_inputs_for_generation makes positions where a decoder_attention_mask is given, which the ragged
# loop makes of its own for all calls that it takes.
WHISPERS_POSITIONS = "decoder_position_ids"
TRIED_LAYERS = 2  # the first one can differ from all others
PADDING = 2  # the columns in front of a prompt
LENGTHS = (5, 3)  # of the encoder's output of two sequences
Passes = tuple[tuple[tuple[int, int], ...], ...]  # the sequences of each pass, and their tokens in it
PASSES: Passes = (((0, 3),), ((0, 1), (1, 2)), ((0, 1), (1, 1)))
BY_TOKEN: Passes = (((0, 1),), *[((0, 1), (1, 1))] * 3)
CAPACITY = "expert_capacity"  # what routers call the number of tokens that an expert takes of a pass
MOST_TOKENS = 4096  # of a trial of experts
CLOSE = Tolerance(of_largest=1e-4)


def decoder_refusal(model: PreTrainedModel) -> str | None:
    """Return why the decoder cannot read pages, as one clause; None if it can."""
    name = type(model).__name__
    if model_device(model).type == "meta":
        return None  # nothing can be tried before the weights are there
    if model_device(model).type != "cpu":
        return f"{name} is an encoder-decoder, whose pages are read on a CPU alone"
    if not answer_once(_experts_have_room, model):
        return f"the experts of {name} leave out tokens where a pass has many of them"
    hides = answer_once(mask_hides_rows, model)
    return f"{name} computes something else over pages than stock does" if hides is None else None


def decoder_loop_refusal(model: PreTrainedModel) -> str | None:
    """Return why an encoder-decoder cannot compute tokens of several sequences in one row, as one clause; None if it
    can.
    """
    for method in OWN_METHODS:
        own = getattr(type(model), method)
        known = own is getattr(GenerationMixin, method) or only_passes_on(type(model), method)
        if not known and WHISPERS_POSITIONS not in own.__code__.co_consts:
            return f"{type(model).__name__} has a {method} of its own"
    return None


def tried_operators(model: PreTrainedModel) -> OperatorModel | str | None:
    """Return operator_model of a model without an encoder. Of a decoder with one, return what is known if its modules
    attend by operators; None if a trial gives something else than stock.

    Within a function that is `reading_once`, which keeps what the trial shows.
    """
    if not model.config.is_encoder_decoder:
        return answer_once(operator_model, model)
    known = answer_once(decoder_operators, model)
    if known is None or model_device(model).type == "meta":
        return known  # nothing can be tried before the weights are there
    return with_tried(model, known) if decoder_refusal(model) is None else None


def _experts_have_room(model: PreTrainedModel) -> bool:
    """Return whether routers treat each token as if it were alone, by a trial of more equal tokens than an expert may
    take.
    """
    routers = [module for module in model.modules() if isinstance(getattr(module, CAPACITY, None), int)]
    return all(map(_has_room, routers))


def _has_room(router: Any) -> bool:
    tried = copy.deepcopy(router).float().eval()
    width = next((each.in_features for each in tried.modules() if isinstance(each, nn.Linear)), None)
    count = 2 * getattr(router, CAPACITY) + 2
    if width is None or count > MOST_TOKENS:
        return False
    token = RandomNumbers()(1, width)

    def routed(tokens: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.double().expand(count, *each.shape[1:]) for each in tried(tokens))

    return agree(lambda: routed(token), lambda: routed(token.expand(count, width)), CLOSE)


def rows_hidden_in(model: PreTrainedModel) -> bool | None:
    """Return mask_hides_rows of an encoder-decoder; None on the meta device."""
    if model_device(model).type == "meta":
        return None
    return answer_once(mask_hides_rows, model)


def mask_hides_rows(model: PreTrainedModel) -> bool | None:
    """Return whether the decoder takes a mask that hides rows of the encoder's output.

    None if a trial over pages gives something else than stock with or without it.
    """
    hides = answer_once(_hides_in_prompts, model)
    return answer_once(_hides_by_token, model) if hides is None else hides


def reads_ahead(model: PreTrainedModel) -> bool:
    """Return whether stock lets tokens of a decoder's prompt see later ones, so that ragged passes are for prompts of
    one token.
    """
    if not model.config.is_encoder_decoder or model_device(model).type == "meta":
        return False
    return answer_once(_hides_in_prompts, model) is None


def _hides_in_prompts(model: PreTrainedModel) -> bool | None:
    return _tried_mask(model, PASSES)


def _hides_by_token(model: PreTrainedModel) -> bool | None:
    return _tried_mask(model, BY_TOKEN)


def _tried_mask(model: PreTrainedModel, passes: Passes) -> bool | None:
    register()
    given = _sources(model)
    ours, others = (partial(paged_together, model, passes, each) for each in (given, [-each for each in given]))
    if agree(ours, others, CLOSE):
        return None  # it does not read the rows that it is given
    for hides in (True, False):
        if agree(
            lambda: _stock(model, passes, hides=hides),  # noqa: B023
            ours,
            CLOSE,
        ):
            return hides if hides or not _shows_less(model, passes) else None
    return None


def _shows_less(model: PreTrainedModel, passes: Passes) -> bool:
    """Return whether an attention_mask of a text hides rows of the encoder's output in a way that is not known."""
    if model.main_input_name != "input_ids":
        return False
    plain = partial(_stock, model, passes, hides=False)
    return not agree(partial(plain, masked=True), plain, CLOSE)


def causality_refusal(model: PreTrainedModel) -> str | None:
    """Return a clause if the tokens of a prompt see those behind them; None for any other model, and if it cannot be
    tried."""
    if model.config.is_encoder_decoder or model_device(model).type == "meta" or not answer_once(_sees_later, model):
        return None
    reason = f"{type(model).__name__} is not causal: a token changes what is computed for those before it"
    is_encoder = getattr(model.config, "is_decoder", None) is False
    return f"{reason}; with is_decoder=True in its config, it does not" if is_encoder else reason


@torch.no_grad()
def _sees_later(model: PreTrainedModel) -> bool:
    ids, logits = torch.arange(7, 7 + sum(LENGTHS))[None], []
    table = getattr(model.get_input_embeddings(), "weight", None)
    if table is None:  # one for each of several channels
        return False
    for token in (padding_token(model), len(table) - 1):  # code may embed tokens of its own
        try:
            tried = _tried(model, None, token=token)
            logits = [tried(input_ids=each, return_dict=True).logits for each in (ids[:, : LENGTHS[0]], ids)]
            break
        except Exception:  # code that is not known may do anything
            continue
    return bool(logits) and not agree(lambda: logits[1][:, : LENGTHS[0]], lambda: logits[0], CLOSE)


def counting_refusal(model: PreTrainedModel) -> str | None:
    """Return why a model without an encoder that takes no positions cannot run ragged, as one clause; None if it can,
    since it counts the tokens of a sequence as stock does, from the number of tokens before each of them.
    """
    name = type(model).__name__
    if not all(kinds == (KeysAndValues(None),) for kinds in model_kinds(model.config).layers):
        return f"{name} takes no position_ids"
    if model_device(model).type == "meta":
        return None  # nothing can be tried before the weights are there
    if model_device(model).type != "cpu":
        return f"{name} takes no position_ids"
    if answer_once(_counts_tokens, model):
        return None
    return f"{name} takes no position_ids, and computes something else over pages than stock does"


def counts_padding(model: PreTrainedModel) -> bool:
    """Return whether a model without an encoder that counts positions by itself counts the padding in front of tokens
    with them.
    """
    if model_device(model).type == "meta":
        return False
    return agree(
        lambda: stock_alone(model, padding=PADDING), lambda: paged_together(model, PASSES, first=PADDING), CLOSE
    )


def _counts_tokens(model: PreTrainedModel) -> bool:
    register()
    return agree(lambda: stock_alone(model, padding=0), lambda: paged_together(model, PASSES), CLOSE)


def stock_alone(model: PreTrainedModel, *, padding: int, tried: Any = None) -> tuple[Tensor, ...]:
    """Compute the passes of each sequence alone in a model without an encoder, with padding in front of it.

    tried: the small copy that computes them; None for one of its first layers.
    """
    tried = _tried(model, None) if tried is None else tried
    takes_positions = "position_ids" in parameter_names(original_class(tried).forward)
    outputs = []
    for number in range(len(LENGTHS)):
        cache = DynamicCache(config=layers_config(tried.config))
        mask = torch.zeros(1, padding, dtype=torch.int64)
        for ids in _tokens(model, number, PASSES):
            shown = ids if mask.any() else [padding_token(model)] * padding + ids
            mask = torch.nn.functional.pad(mask, (0, len(ids)), value=1)
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -len(shown) :]
            given = {"position_ids": positions} if takes_positions else {}
            output = tried(
                input_ids=torch.tensor([shown]), attention_mask=mask, past_key_values=cache, use_cache=True,
                return_dict=True, **given,
            )  # fmt: skip
            outputs.append(output.logits[0, -len(ids) :])
    return tuple(outputs)


def _hiding(name: str, mask: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    return given | {name: mask}


def _stock(model: PreTrainedModel, passes: Passes, *, hides: bool, masked: bool = False) -> tuple[Tensor, ...]:
    """Compute the passes of each sequence alone. hides: whether its encoder's output has rows that a mask hides.

    masked: whether the model is given an attention_mask that shows all but the last row.
    """
    tried = _tried(model, None)
    outputs = []
    for number, source in enumerate(_sources(model)):
        called = tried
        if hides:
            mask = torch.ones(1, len(source), dtype=torch.int64)
            hiding = partial(_hiding, UpToDecoder(tried).hiding, torch.nn.functional.pad(mask, (0, 2)))
            called = giving_decoder(tried, None, hiding)
            source = torch.cat([source, 10 * torch.ones(2, source.shape[1])])
        more = {"attention_mask": torch.arange(len(source), 0, -1)[None].gt(1).long()} if masked else {}
        cache = EncoderDecoderCache(DynamicCache(config=layers_config(tried.config)), DynamicCache())
        for ids in _tokens(model, number, passes):
            output = called(
                decoder_input_ids=torch.tensor([ids]),
                encoder_outputs=rows_as_output(source[None]),
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                **more,
            )
            outputs.append(output.logits[0])
    return tuple(outputs)


def paged_together(
    model: PreTrainedModel, passes: Passes, sources: Sequence[Tensor | None] = (None, None), *, first: int = 0,
    tried: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the same passes over pages, those of both sequences in one row.

    sources: the encoder's output of each sequence. first: the position of the first token of each. tried: see
    stock_alone.
    """
    operators = answer_once(decoder_operators, model) if model.config.is_encoder_decoder else None
    if tried is None:
        tried = _tried(model, None if operators is not None else ATTENTION_NAME)
    if operators is not None:
        read_by_operators(tried, operators)
    groups, groups_of_layer = page_groups(tried.config, CacheConfig(), capacity=64)
    kind = EncoderDecoderRunner if model.config.is_encoder_decoder else ModelRunner
    pages, runner = Pages(groups), kind(tried, groups, groups_of_layer, operators)
    cached = [pages.begin(source=None if source is None else SourceRows(source)) for source in sources]
    waiting = [list(_tokens(model, number, passes)) for number in range(len(LENGTHS))]
    outputs: list[list[Tensor]] = [[] for _ in LENGTHS]
    for parts in passes:
        ids: list[int] = []
        positions: list[int] = []
        ranges = []
        for number, count in parts:
            start = cached[number].num_tokens
            pages.append(cached[number], count)
            ids += waiting[number].pop(0)
            positions += range(first + start, first + start + count)
            ranges.append(TokenRange(cached[number], start, count))
        logits = runner(ids, positions, pages.step(ranges), list(range(len(ids))))
        for (number, _), part in zip(parts, logits.split([count for _, count in parts]), strict=True):
            outputs[number].append(part)
    return tuple(part for each in outputs for part in each)


def _sources(model: PreTrainedModel) -> list[Tensor]:
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


def _tried(model: PreTrainedModel, implementation: str | None, *, token: int | None = None) -> Any:
    """Make a copy with few layers, in float32.

    implementation: of its attention; None for that of the model. token: one that has an embedding besides the first
    ones; None for that which pads.
    """
    decoder = model.get_decoder()
    lengths = {_name_of(model, decoder): TRIED_LAYERS}
    if model.config.is_encoder_decoder:
        lengths[_name_of(model, model.get_encoder())] = 0
    small = first_layers_model(model, lengths, token=padding_token(model) if token is None else token)
    set_implementation(small, implementation or stock_implementation(model, decoder))
    return small


def _name_of(model: nn.Module, part: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is part)
