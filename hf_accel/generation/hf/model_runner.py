"""Calls a model on the tokens of many sequences, prepares its PagedCache for padded batches, and sees its changes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...attention.hf import ATTENTION_NAME
from ...cache.group import PageGroup
from ...cache.hf import CacheOverPages, PagedCache, RaggedCache, TokensBefore, keeps_states_alone, model_kinds
from ...cache.hf.cache_argument import CACHE_NAME, cache_given, cache_name
from ...cache.step import PassInputs, Step
from ...errors import NotRaggedError, UnsupportedError
from ...fused.hf.operator_models import OperatorModel, attends_alone
from ...fused.hf.pass_watch import NONE_KNOWN, PassWatch
from ...fused.hf.running_pass import RunningPass
from ...models import layers_config, model_of, modules_of, positions_depend_on_length, reading_once
from ...tensors import autocast_dtype, integers, model_device
from ...undo.journal import original_class
from ...undo.state import PART_OF, find_state, state_of
from ..carried import Carried
from ..prompt_inputs import other_input, positions_count_tokens
from .generation_state import STOCK_FORM
from .mixed_passes import given_in, giving_more
from .pass_states import PassStates, read_outputs
from .users_code import code_in_passes

# PEFT hands these to hooks on its layers during a call.
FOR_EACH_ROW = ("adapter_names", "alora_offsets", "task_ids")


def prepare_step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Prepare the pass on the model's PagedCache, if it has one. This is a forward pre-hook of a patched model.

    Raises UnsupportedError for an empty input, and what PagedCache.prepare raises.
    """
    # A compiled model cannot read pages; without this step, a PagedCache returns K and V of all columns.
    if not torch.compiler.is_compiling() and not is_compiled(model):
        _prepare(model, args, kwargs)


@reading_once
def _prepare(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args:
        kwargs = dict(zip(_parameters(original_class(model)), args, strict=False)) | kwargs
    cache, ids = cache_given(kwargs), kwargs.get("input_ids")
    _check_context(model, cache, kwargs)
    source = kwargs.get("inputs_embeds") if ids is None else ids
    if source is not None and 0 in source.shape[:2]:
        raise UnsupportedError(
            f"the input has {source.shape[0]} rows of {source.shape[1]} tokens; give at least one token in one row"
        )
    mask = kwargs.get("attention_mask")
    if not isinstance(cache, PagedCache) or source is None or not (mask is None or _is_columns(mask)):
        return
    if attention_refusal(model) is not None or operators_of(model) is not None:
        return  # another attention function needs K and V of all columns, which the cache then returns
    cache.check_config(model.config)  # type: ignore[arg-type]
    if keyword_for_each_row(modules_of(model)) is not None:
        ids = None  # rows of equal ids have different keys and values
    mask = None if mask is None else mask.bool()
    if state_of(model).generation.form.reads_padding:
        mask = None
    elif mask is None and keeps_states_alone(model.config):  # type: ignore[arg-type]
        mask = cache.padded.mask_with(source.shape[1])  # transformers leaves it out behind the first pass
    fresh = cache.get_seq_length() == 0
    shareable = cache.settings.prefix_sharing and ids is not None and other_input(kwargs) is None
    # With code that reads rows or columns, keys and values do not follow from ids.
    shareable = shareable and not (fresh and code_in_passes(model) is not None)
    shareable = shareable and not state_of(model).generation.form.whole_prompts  # of which no prefix stands alone
    if fresh and shareable:
        shareable = not positions_depend_on_length(model.config) and positions_count_tokens(
            kwargs.get("position_ids"), mask
        )
    cache.prepare(
        source.shape[0],
        source.shape[1],
        device=source.device,
        mask=mask,
        token_ids=ids if shareable else None,
        salt=weights_salt(model) if shareable and cache.padded.fills_blocks(source.shape[1]) else None,
    )


def _check_context(model: nn.Module, cache: object, inputs: dict[str, Any]) -> None:
    """Raise UnsupportedError if ranks share out the context and the cache does not; LostRankError if inputs differ."""
    context = state_of(model).generation.context
    if context is None or cache is None:
        return
    layers = cache.paged_layers if isinstance(cache, CacheOverPages) else ()
    if not layers or any(layer.group.context is not context for layer in layers):
        raise UnsupportedError(
            "ranks share out the context of this model, and the cache that it was given is whole; leave "
            f"{CACHE_NAME}= out, or give the one that generate() has returned"
        )
    source = inputs.get("inputs_embeds") if inputs.get("input_ids") is None else inputs["input_ids"]
    context.check_same(source, inputs.get("position_ids"), inputs.get("attention_mask"))


@lru_cache(maxsize=256)
def _parameters(kind: type) -> tuple[str, ...]:
    """The names of the parameters of a class's forward()."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]  # type: ignore[attr-defined]


def keyword_for_each_row(modules: Iterable[nn.Module]) -> str | None:
    """Return the keyword of this call that modules use differently for each row of the batch; None without one."""
    for hooks in [hooks for module in modules if (hooks := module.__dict__["_forward_pre_hooks"])]:
        for hook in hooks.values():
            given = {*getattr(hook, "keywords", ()), *getattr(getattr(hook, "__code__", None), "co_freevars", ())}
            for name in FOR_EACH_ROW:
                if name in given:
                    return name
    return None


def is_compiled(module: nn.Module) -> bool:
    """Return whether the module was compiled by module.compile() or by module.forward = torch.compile(...)."""
    own = vars(module)
    return own.get("_compiled_call_impl") is not None or hasattr(own.get("forward"), "_torchdynamo_orig_callable")


def _is_columns(mask: object) -> bool:
    return isinstance(mask, Tensor) and mask.ndim == 2


def weights_salt(model: nn.Module) -> bytes:
    """Return a salt that differs when anything but the tokens that K and V depend on was seen to change: all that a
    ModelWatch reads, and the dtype of autocast. All processes that run the model call this.
    """
    state = state_of(model).generation
    salt = state.watch.look(model)
    if state.agreement.size > 1 and not state.agreement.least(int(salt == state.seen_salt)):
        salt = state.watch.renew() if salt == state.seen_salt else salt  # another process has seen it
    state.seen_salt = salt
    return salt + str(autocast_dtype(model_device(model).type)).encode()


def attention_refusal(model: Any) -> str | None:
    """Return why a patched model cannot read pages, as one clause; None if it can."""
    now = layers_config(model.config)._attn_implementation  # a user may have set another one
    if now == ATTENTION_NAME or keeps_states_alone(model.config) or attends_alone(operators_of(model)):
        return None
    return f"its attention was set to {now!r} after patch() (set_attn_implementation('hf_accel') sets it back)"


def operators_of(model: nn.Module) -> OperatorModel | None:
    """Return what is known of a patched model that attends by torch's operators; None for any other."""
    state = find_state(model)
    known: OperatorModel | None = None if state is None else state.generation.form.operators
    return known


def counts_positions(model: Any) -> bool:
    """Return whether a model without an encoder takes no positions, and counts them by itself."""
    if model.config.is_encoder_decoder or "position_ids" in _parameters(original_class(model)):
        return False
    return operators_of(model) is None and not keeps_states_alone(model.config)


def pass_inputs(ids: list[int] | Tensor, positions: list[int], step: Step, keep: list[int]) -> PassInputs:
    """Return the inputs of a pass on the host; zeros stand for ids that are on a device. See Runner."""
    own = torch.zeros(len(ids), dtype=torch.int64) if isinstance(ids, Tensor) else integers(ids)
    return PassInputs(own, integers(positions), integers(keep or [0]), step)


def begun_pass(model: nn.Module, cache: Any, carried: Carried | None) -> RunningPass:
    """Return the pass that begins. cache: of its tokens."""
    state, known = find_state(model), NONE_KNOWN
    if state is not None:
        if state.generation.passes is None:
            state.generation.passes = PassWatch()
        known = state.generation.passes.begin(model, prepare_step)
    return RunningPass(cache, known, carried)


class ModelRunner:
    """Calls a patched model on the tokens of many sequences, which stand end to end in one row [1, N].

    groups, groups_of_layer: see cache.hf.page_groups. operators: of a model that is tried before it is patched.
    """

    def __init__(
        self, model: PreTrainedModel, groups: list[PageGroup], groups_of_layer: list[tuple[int, ...]],
        operators: OperatorModel | None = None,
    ) -> None:  # fmt: skip
        self.model: Any = model
        self.groups_of_layer = groups_of_layer
        self.operators = operators or operators_of(model)
        self.cache = RaggedCache(groups, groups_of_layer, one_column=attends_alone(self.operators))
        supports: Any = self.model._supports_logits_to_keep
        self.selects = bool(supports())
        self._cache_name = cache_name(model)
        parameters = _parameters(original_class(model))
        self._positions = "position_ids" in parameters
        self._counts = counts_positions(model)
        self._takes_mask = "attention_mask" in parameters
        state = find_state(model)  # None for a model that is tried before it is patched
        self.kept = PassStates()
        self.cache.unmasked = state is None or state.generation.form.whole_prompts
        self._own_masks = state is not None and state.generation.form.makes_masks

    @property
    def device(self) -> torch.device:
        return model_device(self.model)

    def __call__(
        self, ids: list[int] | Tensor, positions: list[int], step: Step, keep: list[int],
        *, carried: Carried | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute N tokens; returns logits [len(keep), V] of the tokens with the indices `keep`. See Runner."""
        inputs = pass_inputs(ids, positions, step, keep).to(self.device)
        inputs = replace(inputs, ids=ids if isinstance(ids, Tensor) else inputs.ids, carried=carried)
        return self.compute(inputs, everything=len(keep) == len(ids))[: len(keep)]

    def compute(self, inputs: PassInputs, *, everything: bool) -> Tensor:
        """Compute a pass whose tensors are on the device. Returns the logits [K, V] of the tokens inputs.keep.

        everything: whether these are all tokens, in order; inputs.keep is then not read. Where nothing is carried,
        nothing here waits for the device.
        """
        try:
            return self._compute(inputs, everything=everything)
        except NotRaggedError:
            raise
        except (IndexError, UnsupportedError) as error:  # of layers that were not there, or do not read pages
            changed = self._changed()
            if changed is None and self.operators is not None and isinstance(error, IndexError):
                # A table of positions that grows with a cache of columns may be too small.
                raise NotRaggedError(
                    f"{type(self.model).__name__} cannot compute the tokens of a pass: {error}"
                ) from error
            if changed is None:
                raise
            raise UnsupportedError(f"the model was changed while it was in use: {changed}") from error

    def _changed(self) -> str | None:
        """Return the change to the model since its pages were made that keeps it from using them, and the way out."""
        refusal, own = attention_refusal(self.model), len(self.groups_of_layer)
        if refusal is None and (layers := len(model_kinds(self.model.config).layers)) != own:
            return f"it has {layers} layers, and its pages were made for {own}; close the Engine, and make another"
        return refusal

    def _compute(self, inputs: PassInputs, *, everything: bool) -> Tensor:
        self.cache.step, self.cache.positions = inputs.step, inputs.positions
        self.cache.unread = None  # a pass that failed may have left a layer unread
        selection: dict[str, Any] = {"logits_to_keep": 0 if everything else inputs.keep} if self.selects else {}
        more = {} if (once := self.cache.once) is None else once.arguments
        called = self._called(inputs, more)
        taps = self.kept.taps(self.model, called, selection)
        begun = begun_pass(self.model, self.cache, inputs.carried)
        if self.operators is None:
            given = self._tokens(inputs)
        else:
            given = self.operators.inputs(self.cache, inputs.ids, self._given(inputs)[1])
            self.cache.bias = self.operators.bias_for(self.model, inputs.step.groups[0].ragged.max_kv)
        reading: Any = read_outputs(taps) if taps else nullcontext([])
        with begun.running(), reading as found:
            output = called(
                **given,
                use_cache=True,
                return_dict=True,
                **{self._cache_name: self.cache},
                **selection,
            )
        self.cache.check_read()
        if not self.cache.is_kept:
            raise NotRaggedError(f"no layer of {type(self.model).__name__} keeps anything in the cache of a pass")
        if self.kept.layers:
            self.kept.keep(output, found)
        logits: Tensor = output.logits[0]
        return logits if self.selects or everything else logits[inputs.keep]

    def _called(self, inputs: PassInputs, more: Mapping[str, Tensor]) -> Any:
        """Return what a pass calls: the model, or a copy that gives its decoder more for some tokens."""
        if inputs.carried is None and not self._own_masks and not more:
            return self.model
        return giving_more(self.model, prepare_step, inputs, more=more, own_masks=self._own_masks)

    def _given(self, inputs: PassInputs) -> tuple[Tensor, Tensor]:
        """Return the ids [N] and the positions of a pass, [N], or [P, N] where tokens were given P coordinates."""
        return (inputs.ids, inputs.positions) if inputs.carried is None else given_in(inputs)

    def _tokens(self, inputs: PassInputs) -> dict[str, Tensor]:
        """Return the ids [1, N] and the positions of a pass, which a model that counts them by itself learns from its
        cache.
        """
        ids, positions = self._given(inputs)
        if self._counts:
            self.cache.before = TokensBefore(positions)
            given = {"input_ids": ids[None]}
            return given | {"attention_mask": torch.ones_like(inputs.ids[None])} if self._takes_mask else given
        if not self._positions:
            return {"input_ids": inputs.ids[None]}
        form = STOCK_FORM if (state := find_state(self.model)) is None else state.generation.form
        if form.planes is not None:
            positions = positions.expand(form.planes, -1)
        positions = positions.view(-1, 1, positions.shape[-1]) if positions.ndim > 1 else positions[None]
        if form.uncounted is not None:
            positions = form.placed(positions, inputs.ids)
        return {"input_ids": ids[None], "position_ids": positions}


def weights_changed(model: Any) -> None:
    """Forget what was computed with the weights that the model had before.

        with torch.no_grad():
            model.get_input_embeddings().weight.data[7] = row
        hf_accel.weights_changed(model)

    From now on no prefix that was cached before is used again, by any Engine, manager or PagedCache, and the drafts of
    "self-int4" are made again. Most changes are seen without this call (docs/serving.md). It is for writes to a few
    rows that torch does not count (through `.data`, numpy or DLPack), and to be certain at once. Requests that run go
    on with the keys and values that they have.

    model: a patched model, or one that holds any number of them, as a PEFT model or a pipeline does; each model
    that shares the weights needs a call of its own. For a model that is not patched there is nothing to do. Any thread
    may call this.

    Raises UnsupportedError for a part of a patched model.
    """
    model = model if isinstance(model, nn.Module) else model_of(model)
    outer = vars(model).get(PART_OF)
    if outer is not None:
        raise UnsupportedError(
            f"this {type(model).__name__} is a part of a patched {outer}; call hf_accel.weights_changed() with the "
            f"{outer}"
        )
    for module in model.modules():
        state = find_state(module)
        if state is not None:
            state.generation.forget_weights()


def adopt_prefix(model: PreTrainedModel, cache: PagedCache, input_ids: Tensor, inputs: Mapping[str, Any]) -> None:
    """Begin a cache of transformers' own loop with the prefixes of these prompts that its pages hold."""
    mask = inputs.get("attention_mask")
    mask = None if mask is None else mask.bool()
    shareable = cache.settings.prefix_sharing and not positions_depend_on_length(model.config)
    # In this loop, a model that attends by operators keeps padding in its pages.
    shareable = shareable and state_of(model).generation.form.operators is None
    if shareable and cache.has_prefixes and positions_count_tokens(inputs.get("position_ids"), mask):
        cache.adopt_prefix(input_ids, mask, weights_salt(model))


def every_nth(value: Any, repeats: int, rows: int) -> Any:
    return value[::repeats] if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value
