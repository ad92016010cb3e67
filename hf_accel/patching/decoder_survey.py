"""Look at a decoder that counts positions by itself: does it compute over pages what it computes with transformers'
cache? Decoders of encoder-decoders do so, and models of such a decoder alone.

Its code is read as that of all models. In addition its first layers are run, on random numbers, once as stock and once
as ragged passes over pages: that shows how it counts positions, whether a mask hides rows of the encoder's output, and
where the tokens behind padding stand.
"""

from __future__ import annotations

import copy
import inspect
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from ..attention.hf.forward import register
from ..cache.hf.kinds import model_kinds
from ..cache.kinds import KeysAndValues
from ..errors import UnsupportedError
from ..fused.hf.operator_models import OperatorModel, decoder_operators, operator_model, with_tried
from ..generation.hf.refusals import OWN_METHODS
from ..models import answer_once, padding_token
from ..recognition.generation_code import only_passes_on
from ..recognition.source import without_renaming
from ..recognition.trial import RandomNumbers, Tolerance, agree
from ..tensors import model_device
from .survey import input_embedding
from .tried_passes import (
    LENGTHS,
    PASSES,
    Passes,
    paged_together,
    small_copy,
    sources_of,
    stock_alone,
    stock_with_source,
)

# Whisper's own prepare_inputs_for_generation makes positions where a decoder_attention_mask is given, which the ragged
# loop makes of its own for all calls that it takes.
WHISPERS_POSITIONS = "decoder_position_ids"
PADDING = 2  # the columns in front of a prompt
BY_TOKEN: Passes = (((0, 1),), *[((0, 1), (1, 1))] * 3)
CAPACITY = "expert_capacity"  # what routers call the number of tokens that an expert takes of a pass
MOST_TOKENS = 4096  # of a trial of experts
CLOSE = Tolerance(of_largest=1e-4)


def generating_part(model: PreTrainedModel) -> tuple[str, PreTrainedModel] | None:
    """Return the part whose generate() that of the model's class calls, and its name; None for none, or several."""
    own = getattr(type(model), "generate", None)
    if own is None or own is GenerationMixin.generate:
        return None
    code = getattr(inspect.unwrap(own), "__code__", None)
    names = () if code is None else code.co_names
    parts = [(n, each) for n, each in model.named_children() if n in names and isinstance(each, GenerationMixin)]
    if len(parts) != 1 or "generate" not in names:
        return None
    name, part = parts[0]
    return (name, part) if isinstance(part, PreTrainedModel) and part.can_generate() else None


def decoder_refusal(model: PreTrainedModel) -> str | None:
    """Return why the decoder cannot read pages, as one clause; None if it can."""
    called = generating_part(model)
    if called is not None and called[1].config.is_encoder_decoder:  # the model itself takes no encoder's output
        return decoder_refusal(called[1])
    name = type(model).__name__
    if model_device(model).type == "meta":
        return None  # nothing can be tried before the weights are there
    if model_device(model).type != "cpu":
        return f"{name} is an encoder-decoder, whose pages are read on a CPU alone"
    if answer_once(most_tokens, model) == 0:
        return f"the experts of {name} leave out tokens by what other tokens a pass has"
    hides = answer_once(mask_hides_rows, model)
    return f"{name} computes something else over pages than stock does" if hides is None else None


def decoder_loop_refusal(model: PreTrainedModel) -> str | None:
    """Return why an encoder-decoder cannot compute tokens of several sequences in one row, as one clause; None if it
    can.
    """
    for method in OWN_METHODS:
        own = getattr(type(model), method)
        known = own is getattr(GenerationMixin, method) or only_passes_on(type(model), method)
        if not known and WHISPERS_POSITIONS not in without_renaming(own).__code__.co_consts:
            return f"{type(model).__name__} has a {method} of its own"
    return None


def tried_operators(model: PreTrainedModel) -> OperatorModel | str | None:
    """Return operator_model of a model without an encoder. Of a decoder with one, return what is known if its modules
    attend by operators; None if a trial gives something else than stock.

    Within a function that is `reading_once`, which keeps what the trial shows.
    """
    if not model.config.is_encoder_decoder:
        return answer_once(operator_model, model, _is_bidirectional(model))
    known = answer_once(decoder_operators, model)
    if known is None or model_device(model).type == "meta":
        return known  # nothing can be tried before the weights are there
    return with_tried(model, known) if decoder_refusal(model) is None else None


def most_tokens(model: PreTrainedModel) -> int | None:
    """Return the most tokens of a pass of which routers treat each as if it were alone; None for any number.

    A trial of as many equal tokens as an expert takes shows it, and one of more.
    """
    limits = [_room(module) for module in model.modules() if isinstance(getattr(module, CAPACITY, None), int)]
    return min((limit for limit in limits if limit is not None), default=None)


def _room(router: Any) -> int | None:
    """Return most_tokens of one router."""
    capacity = getattr(router, CAPACITY)
    if _has_room(router, 2 * capacity + 2):
        return None
    return capacity if _has_room(router, capacity) else 0


def _has_room(router: Any, count: int) -> bool:
    tried = copy.deepcopy(router).float().eval()
    width = next((each.in_features for each in tried.modules() if isinstance(each, nn.Linear)), None)
    if width is None or not 0 < count <= MOST_TOKENS:
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


def leaves_cache_out(model: PreTrainedModel) -> bool:
    """Return whether the model's own settings of generation leave out a cache, with which its decoder computes the
    same, as a trial of stock's passes shows.
    """
    settings = getattr(model, "generation_config", None)
    if getattr(settings, "use_cache", None) is not False or model_device(model).type == "meta":
        return False
    stock = partial(stock_with_source, model, PASSES, hides=False)
    return agree(partial(stock, cached=False), stock, CLOSE)


def _hides_in_prompts(model: PreTrainedModel) -> bool | None:
    return _tried_mask(model, PASSES)


def _hides_by_token(model: PreTrainedModel) -> bool | None:
    return _tried_mask(model, BY_TOKEN)


def _tried_mask(model: PreTrainedModel, passes: Passes) -> bool | None:
    register()
    given = sources_of(model)
    # each trial of copies is made once, and compared with several others
    ours = cache(partial(paged_together, model, passes, given))
    others = partial(paged_together, model, passes, [-each for each in given])
    if agree(ours, others, CLOSE):
        return None  # it does not read the rows that it is given
    stock = partial(stock_with_source, model, passes)
    if agree(partial(stock, hides=True), ours, CLOSE):
        return True
    plain = cache(partial(stock, hides=False))
    if not agree(plain, ours, CLOSE):
        return None
    # an attention_mask of a text may hide rows of the encoder's output in a way that is not known
    masked = partial(stock, hides=False, masked=True)
    return False if model.main_input_name != "input_ids" or agree(masked, plain, CLOSE) else None


def causality_refusal(model: PreTrainedModel) -> str | None:
    """Return a clause if the tokens of a prompt see those behind them; None for any other model, and if it cannot be
    tried."""
    if not _is_bidirectional(model) or sees_whole_prompts(model):
        return None
    reason = f"{type(model).__name__} is not causal: a token changes what is computed for those before it"
    is_encoder = getattr(model.config, "is_decoder", None) is False
    return f"{reason}; with is_decoder=True in its config, it does not" if is_encoder else reason


def sees_whole_prompts(model: PreTrainedModel) -> bool:
    """Return whether the tokens of a prompt see all of that prompt, and those behind it all before them, so that pages
    hold what stock's cache does.
    """
    if not _is_bidirectional(model) or not _keeps_all_keys(model):
        return False
    known = tried_operators(model)
    return isinstance(known, OperatorModel) or (known is None and answer_once(_sees_whole_prompts, model))


def _keeps_all_keys(model: PreTrainedModel) -> bool:
    """Return whether each layer keeps the keys and values of all tokens, and nothing else."""
    try:
        return all(kinds == (KeysAndValues(None),) for kinds in model_kinds(model.config).layers)
    except UnsupportedError:
        return False


def _is_bidirectional(model: PreTrainedModel) -> bool:
    """Return whether a model without an encoder lets tokens see later ones; False if it cannot be tried."""
    is_tried = not model.config.is_encoder_decoder and model_device(model).type != "meta"
    return is_tried and answer_once(_sees_later, model)


def _sees_whole_prompts(model: PreTrainedModel) -> bool:
    register()
    ours = partial(paged_together, model, PASSES, whole=True)
    return all(agree(partial(stock_alone, model, padding=count), ours, CLOSE) for count in (0, PADDING))


@torch.no_grad()
def _sees_later(model: PreTrainedModel) -> bool:
    ids, logits = torch.arange(7, 7 + sum(LENGTHS))[None], []
    table = getattr(input_embedding(model), "weight", None)
    if table is None:  # one for each of several channels, or none in a model of sounds
        return False
    for token in (padding_token(model), len(table) - 1):  # code may embed tokens of its own
        try:
            tried = small_copy(model, None, token=token)
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
    if not _keeps_all_keys(model):
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


def reads_padding(model: PreTrainedModel) -> bool:
    """Return whether padding is tokens like all others to a model without an encoder, which reads no mask."""
    if model_device(model).type == "meta":
        return False
    plain, ids = small_copy(model, None), torch.arange(7, 12)[None]
    mask = torch.ones_like(ids)
    mask[:, :PADDING] = 0

    def logits(**given: Tensor) -> Tensor:
        found: Tensor = plain(input_ids=ids, use_cache=False, return_dict=True, **given).logits
        return found

    return agree(lambda: logits(), lambda: logits(attention_mask=mask))


def _counts_tokens(model: PreTrainedModel) -> bool:
    register()
    return agree(lambda: stock_alone(model, padding=0), lambda: paged_together(model, PASSES), CLOSE)
