"""Decides whether one call of generate() needs transformers' own loop, and reports why."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Iterable
from types import MethodType
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ...cache.hf import PagedCache, model_kinds
from ...cache.kinds import KeysAndValues, RecurrentStates
from ...errors import HfAccelWarning, UnsupportedError
from ...fused.hf.counted_positions import moves_with_padding
from ...fused.hf.own_code import OwnCode
from ...fused.kept_states import Recorded
from ...models import LEARNT_KEYS, learnt_kind, learnt_prompt, modules_of, vocabulary_size
from ...undo.journal import original_class
from ...undo.running_code import is_replaced_method, package_of
from ...undo.state import FUSED, state_of
from ..prompt_inputs import is_padded_behind, other_input
from ..sampling.purity import stateful_refusal
from .beams import beams_refusal
from .encoder_source import encoder_refusal, others_refusal
from .generation_state import GenerationState, LoopCall
from .joint_rows import together_refusal, why_together
from .model_runner import (
    attention_refusal,
    is_compiled,
    keyword_for_each_row,
)
from .processing import is_users, limit_refusal, reads_scores_alone
from .users_code import code_in_passes

NO_PAGES = "it has no paged cache"
BEHIND = "padding stands behind or between tokens"
KEPT_WHOLE = (KeysAndValues(None),)  # the kinds of a model whose layers all keep keys and values of all tokens
SWITCHES = "enable_adapters"  # a method that a class's own generate() may call

# Methods that transformers' loop calls between two passes. The ragged loop does not call them.
OWN_METHODS = (
    "prepare_inputs_for_generation", "_prepare_position_ids_for_generation", "_update_model_kwargs_for_generation",
    "_prefill", "_sample",
)  # fmt: skip
CACHE_METHOD = "_prepare_cache_for_generation"


def ragged_refusal(model: nn.Module) -> str | None:
    """Return why a patched model cannot run ragged as it is now, as one clause; None if it can."""
    known, modules = state_of(model).generation.ragged_refusal, modules_of(model)
    return known or changed_refusal(model, modules) or _rows_refusal(modules)


def ids_refusal(model: Any) -> str | None:
    """Return why requests of this model cannot be lists of token ids, as one clause; None if they can."""
    if model.config.is_encoder_decoder and model.main_input_name != "input_ids":
        return f"{type(model).__name__} reads {model.main_input_name}, and no token ids"
    return prompts_refusal(model)


def prompts_refusal(model: Any) -> str | None:
    """Return why requests of this model cannot be served by themselves, as one clause; None if they can."""
    own = getattr(inspect.unwrap(original_class(model).generate), "__code__", None)
    if own is not None and SWITCHES in own.co_names and getattr(model, "_hf_peft_config_loaded", False):
        return f"the generate() of {type(model).__name__} turns its adapters on and off by what a prompt holds"
    return None


def _rows_refusal(modules: Iterable[nn.Module]) -> str | None:
    name = keyword_for_each_row(modules)
    return None if name is None else f"{name}= gives each row of the batch an adapter, or a place where it begins"


def changed_refusal(model: nn.Module, modules: Iterable[nn.Module] | None = None) -> str | None:
    """Return why the model cannot read pages because it was changed after patch(), as one clause; None if it can.

    modules: all of the model's, where they were listed already.
    """
    refusal = attention_refusal(model)
    if refusal is not None:
        return refusal
    if makes_own_cache(original_class(model)):
        return "its class makes a cache of its own"
    for name in OWN_METHODS:
        own = vars(model).get(name)  # PEFT's prompt learning replaces one on the model itself
        if own is None and is_replaced_method(original_class(model), name):
            return f"the {name} of its class was replaced"
        if own is None or getattr(own, "__func__", None) is getattr(type(model), name):
            continue
        if getattr(own, "__func__", None) is not None and learnt_kind(own.__self__) in LEARNT_KEYS:
            return "its adapter puts keys and values in front of each prompt"
        if name != OWN_METHODS[0] or not learnt_prompt(model):
            return f"its {name} was replaced on the model itself"
    modules = modules_of(model) if modules is None else modules
    held = ((each, known) for each in modules if isinstance(known := vars(each).get(FUSED), Recorded))
    if (refusal := next(filter(None, (known.refusal(each) for each, known in held)), None)) is not None:
        return refusal
    # Few modules have either, and this is asked about all of them in each call.
    asked = [each for each in modules if "forward" in each.__dict__ or "_compiled_call_impl" in each.__dict__]
    if any(map(is_compiled, asked)):
        return "torch.compile was applied to it, and compiled code cannot read pages"
    return None


def makes_own_cache(kind: type) -> bool:
    """Return whether code of others makes the cache of a class's generate()."""
    holder = next((base for base in kind.__mro__ if CACHE_METHOD in vars(base)), None)
    return holder is not None and (package_of(holder) != "transformers" or is_replaced_method(kind, CACHE_METHOD))


def refuse_learnt(model: object, what: str) -> None:
    """Raise UnsupportedError for a PEFT model whose adapter generate() alone applies. what: what serves prompts."""
    if (kind := learnt_kind(model)) is not None:
        raise UnsupportedError(
            f"an adapter of PEFT ({kind}) puts what it has learnt in front of each prompt, which {what} does not; use "
            "generate() of the PEFT model"
        )


class ServesPrompts:
    """A method of a patched model that serves prompts, and that a PEFT model hands on as if it were its own.

    The method cannot see by which of the two it is called, so this looks where it is asked for: by PEFT's
    __getattr__, or within PEFT's generate(), which sets a method of its own on the model for that time. One that
    somebody has kept is that of the object's own class after unpatch().
    """

    def __init__(self, function: Any) -> None:
        name = function.__name__

        @functools.wraps(function)
        def while_patched(model: Any, *args: Any, **kwargs: Any) -> Any:
            if inspect.getattr_static(type(model), name, None) is self:
                return function(model, *args, **kwargs)
            return getattr(type(model), name)(model, *args, **kwargs)

        self.function = while_patched

    def __get__(self, model: Any, kind: type | None = None) -> Any:
        if model is None:
            return self.function
        frame, own = sys._getframe(1), vars(model).get(OWN_METHODS[0])
        asked = frame.f_locals.get("self") if frame.f_code.co_name == "__getattr__" else getattr(own, "__self__", None)
        if learnt_kind(asked) is None:
            return MethodType(self.function, model)

        @functools.wraps(self.function)
        def refused(*args: Any, **kwargs: Any) -> None:
            refuse_learnt(asked, f"{self.function.__name__}()")

        return refused


def refuse_speculation(refusal: str) -> NoReturn:
    raise UnsupportedError(f"speculative= cannot be used in this call: {refusal}; leave speculative= out")


def refuse_clocks(model: nn.Module, config: Any) -> None:
    """Raise UnsupportedError for a request that each of the model's processes would end at a time of its own."""
    if config.max_time is not None and state_of(model).generation.agreement.size > 1:
        raise UnsupportedError(
            f"max_time={config.max_time} would end each of the processes that run this model at a time of its own; "
            "limit max_new_tokens= instead"
        )


def call_refusal(call: LoopCall, *, own_cache: bool) -> str | None:
    """Return why this call cannot run ragged, as one clause; None if it can. own_cache: whether the call made its
    cache.
    """
    input_ids, mask, positions = call.input_ids, call.mask, call.inputs.get("position_ids")
    if not isinstance(call.cache, PagedCache) or call.inputs.get("use_cache") is False:
        if call.state.cache is None or call.inputs.get("use_cache") is False:
            return NO_PAGES
        return states_refusal(call.model, mask, rows=len(input_ids), has_beams=call.has_beams) or NO_PAGES
    if call.has_encoder and (refusal := encoder_refusal(call, own_cache=own_cache)) is not None:
        return refusal
    if not own_cache and len(input_ids) > 1:
        return "a cache that is passed along holds columns, padding included"
    if call.synced_gpus:
        return "synced_gpus=True needs the same passes on all ranks"
    if not input_ids.shape[0] or not call.prompt_columns:
        return "it is given no token ids"
    other = other_input({name: value for name, value in call.inputs.items() if name not in call.encoder_inputs})
    if call.has_encoder and (refusal := others_refusal(call)) is not None:
        return refusal
    more = call.has_more_than_ids
    if more and not own_cache and call.cache.get_seq_length():
        behind = "a prompt whose tokens see each other" if call.state.form.whole_prompts else "positions"
        return f"a cache that holds tokens is passed along with {other or behind}"
    asked = [name for name in ("output_attentions", "output_hidden_states") if call.returns(name)]
    if asked:
        return f"{asked[0]}=True collects a tensor of each step"
    shape = (len(input_ids), call.prompt_columns)
    given = [tensor for tensor in (mask, positions) if tensor is not None]
    if input_ids.is_floating_point() or any(tensor.shape[-2:] != shape for tensor in given):
        return "its mask and position_ids are not those of its token ids"
    if input_ids.shape[1] not in (0, shape[1]) or (call.num_learnt and not input_ids.shape[1]):
        return "it is given other token ids than embeddings"
    if mask is not None and not _only_left_padded(mask) and (refusal := _behind_refusal(call, own_cache)) is not None:
        return refusal
    columns = call.num_read + call.config.max_length - call.num_columns
    if mask is not None and not bool(mask.all()) and moves_with_padding(call.model, columns):
        return "its attention counts padding in the positions of tokens"
    if positions is None and call.moves_tokens:
        return "position_ids do not count tokens"
    has_padding = mask is not None and not bool(mask.all())
    if (len(input_ids) > 1 or has_padding) and (code := code_in_passes(call.model)) is not None:
        return f"{code} may read rows and columns, of which ragged passes have none"
    if call.has_beams:
        return beams_refusal(call)
    return limit_refusal(call.criteria, call.config.max_length) or together_refusal(call)


def warn_of_code(model: PreTrainedModel, what: str) -> None:
    """Warn, once, of code of others that passes run over the tokens of all requests. what: serves these."""
    if (code := code_in_passes(model)) is not None:
        text = (
            f"{what} gives {code} the tokens of all requests in one row, so that it has to change each token by "
            "itself; if it reads rows or columns, use generate()"
        )
        warn_once(state_of(model).generation, text, text)


def _behind_refusal(call: LoopCall, own_cache: bool) -> str | None:
    """Return why a call whose mask is not of padding on the left cannot run ragged, as one clause; None if it can.

    In transformers' loop, the last column chooses the first token of a row with padding on the right, and the tokens
    behind it are counted from its position.
    """
    mask, positions, form = call.mask, call.inputs.get("position_ids"), call.state.form
    known = mask is not None and mask.ndim == 2 and is_padded_behind(mask) and positions is not None
    known = known and model_kinds(call.model.config).distinct == KEPT_WHOLE
    known = known and not (call.has_encoder or call.has_more_than_ids or call.num_learnt)
    if not known or form.counts_padding or form.operators is not None:
        return BEHIND
    if not own_cache or call.has_beams or call.config.return_dict_in_generate:
        return "padding stands behind tokens, and it has beams, or returns more than tokens"
    if not reads_scores_alone(call.processors, call.criteria, max_length=call.config.max_length):
        return "padding stands behind tokens, and its processors read it"
    return None


def drafts_refusal(call: LoopCall) -> str | None:
    """Return why a call that can run ragged must do without drafts, as one clause; None if it need not."""
    if call.speculative is None:
        return None
    if (together := why_together(call)) is not None:
        return together
    if (code := code_in_passes(call.model)) is not None:
        return f"{code} may read columns, and drafts add some"
    own = [processor for processor in call.processors if is_users(processor)]
    return stateful_refusal(own, call.input_ids[:1], vocabulary_size(call.model))


def states_refusal(model: PreTrainedModel, mask: object, *, rows: int, has_beams: bool) -> str | None:
    """Return why pages cannot give the tokens that transformers gives with recurrent states, as one clause.

    None if they can. mask: the attention_mask of the call, or None. rows: how many it has.
    In transformers, padding behind a token changes the state of a recurrent layer. Its keys and values, of which pages
    hold none, are all that a query in it sees within a window where no token is, and an indexer or a layer's own code
    may read them. The states that some layers keep also change with padding in front of tokens, or with other rows, or
    stay with their row when its beam goes on in another one.
    """
    mask = None if state_of(model).generation.form.reads_padding else mask
    if isinstance(mask, Tensor) and not _only_left_padded(mask) and _reads(model, mask):
        return BEHIND
    if not model_kinds(model.config).has(RecurrentStates):
        return None
    if isinstance(mask, Tensor) and not mask.all() and _layers_say(model, "computes_padding"):
        return "its recurrent layers compute padding as they compute tokens"
    if has_beams and _layers_say(model, "stays_with_row"):
        return "transformers leaves its recurrent states behind when beams change places"
    if rows > 1 and _layers_say(model, "mixes_rows"):
        return "transformers computes a row of its batch from the states of other rows"
    return None


def _reads(model: PreTrainedModel, mask: Tensor) -> bool:
    """Return whether keys and values of padding behind tokens matter. mask: [B, T], 0 at padding."""
    kinds = model_kinds(model.config).distinct
    if model.config.is_encoder_decoder:  # the mask is the encoder's
        return model_kinds(model.config).has(RecurrentStates)
    if any(type(kind) is not KeysAndValues for kind in kinds) or any(
        isinstance(vars(module).get(FUSED), OwnCode) for module in model.modules()
    ):
        return True
    windows = [kind.window for kind in kinds if isinstance(kind, KeysAndValues) and kind.window is not None]
    if not windows or mask.ndim != 2:
        return False
    count = mask.ne(0).cumsum(1)
    return bool(((count > 0) & (count == pad(count, (min(windows), 0))[:, : count.shape[1]])).any())


def _layers_say(model: PreTrainedModel, name: str) -> bool:
    """Return whether what is known of one of a model's layers is true of it by this name."""
    return any(getattr(vars(module).get(FUSED), name, False) for module in model.modules())


def _only_left_padded(mask: Tensor) -> bool:
    return mask.ndim == 2 and bool((mask[:, -1] != 0).all()) and bool((mask[:, 1:] >= mask[:, :-1]).all())


# -- reports: in the statistics of each call, and as a warning once ------------------------------------------

OURS = ("hf_accel", "transformers", "torch", "contextlib")  # code between a user's line and a warning


def report_stock_loop(state: GenerationState, refusal: str) -> None:
    """Report that transformers' loop is used. Nothing is warned about that the plan says already, and if the user has
    chosen to have no paged cache."""
    _note(state, "loop", f"stock: {refusal}")
    if refusal not in (state.ragged_refusal, NO_PAGES):
        said = "; this is said once, and for each call in hf_accel.stats(model)['loop']"
        text = f"generate() runs transformers' own loop, which is slower, because {refusal}{said}"
        warn_once(state, refusal, text)


def report_no_drafts(state: GenerationState, refusal: str, key: str | None = None) -> None:
    """Report that a call decodes without drafts. key: what the warning is remembered by, if `refusal` has numbers."""
    _note(state, "drafts", f"none: {refusal}")
    said = "; this is said once, and for each call in hf_accel.stats(model)['drafts']"
    text = f"generate() decodes without drafts, because {refusal}{said}"
    warn_once(state, key or refusal, text)


def _note(state: GenerationState, name: str, text: str) -> None:
    if state.call is not None:
        state.call.statistics[name] = text


def warn_once(state: GenerationState, refusal: str, text: str) -> None:
    """Warn with `text` at the user's line, but only once for each reason and model."""
    if refusal not in state.warned:
        state.warned.add(refusal)
        frame, level = sys._getframe(), 1
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in OURS:
            frame, level = frame.f_back, level + 1
        warnings.warn(text, HfAccelWarning, stacklevel=level)
