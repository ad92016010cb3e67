"""Apply a Plan to a model, and take it back. Every write goes through a Journal, here, in pack and in ties."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeVar, Unpack

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from ..attention import PlannedAttention
from ..attention.hf import ATTENTION_NAME
from ..attention.hf.stock import implementation_of_config, set_our_attention, stock_implementation
from ..cache.hf.cache_argument import cache_name
from ..config.patch_config import (
    Attention,
    Cache,
    KeepOriginal,
    PatchConfig,
    PatchKeywords,
    ProcessGroup,
    Speculative,
    Weights,
    takes_patch_keywords,
)
from ..distill.model_loss import causal_loss, learns_by_rows
from ..errors import UnsupportedError
from ..fused.hf.sites import ACTIVATION
from ..fused.site import FusedSite
from ..generation.hf import AcceleratedGeneration, GenerationState, prepare_step
from ..kernels import cpu as cpu_kernels
from ..keywords import MEANT_BY_PATCH, checked_keywords
from ..linear import QuantModule
from ..linear.hf import METHOD, AccelConfig, AccelQuantizer, stored_tables
from ..linear.quantized_model import QuantizedModel
from ..models import layers_config, model_of, unwrapped
from ..tensors import model_device, torchs_defaults
from ..undo.journal import Journal, mixed_class
from ..undo.state import (
    BACKEND_ATTRIBUTE,
    FUSED,
    PART_OF,
    STATE,
    STOCK_ATTRIBUTE,
    PatchState,
    find_state,
    state_of,
)
from .attention_survey import attention_modules
from .calibration import Calibrated, calibrate
from .check import is_patched_with, transformers_model
from .nf4_model import label_nf4
from .originals import Originals, break_ties
from .over_pages import InnerGenerator
from .pack import Packed, replace_linears, replace_parameters
from .plan import Plan
from .planning import planned
from .twin import twin
from .unpatch import unpatch

Model = TypeVar("Model")


@checked_keywords(**MEANT_BY_PATCH)
@takes_patch_keywords
def patch(
    model: Model,
    *,
    weights: Weights = "int8",
    attention: Attention = "auto",
    cache: Cache = "paged",
    fuse: bool = True,
    speculative: Speculative = None,
    keep_original: KeepOriginal = "auto",
    deterministic: bool = False,
    context_parallel: ProcessGroup | None = None,
    config: PatchConfig | Mapping[str, Any] | None = None,
) -> Model:
    """Accelerate a transformers model in place and return it; `unpatch` undoes it exactly.

    model: a PreTrainedModel, or what holds one: a SentenceTransformer, a CrossEncoder, a pipeline, a module of yours,
        a PEFT model. All functions of hf_accel take the same.
    weights: "int8" (default), "int4", "fp8", "nf4" (bitsandbytes'), None (as is), "auto", or a WeightConfig.
    attention: "auto" (default), the name of a backend, or None for stock.
    cache: "paged" (default), None for stock, or a CacheConfig.
    keep_original: "auto" (default) frees the replaced weights if the model's own checkpoint holds the very same
        ones, True keeps them in memory, False frees them for good.
    deterministic: a request's tokens then never depend on other requests, nor on how its prompt is cut; refused
        where some part cannot promise that, and slower for many rows of float weights.
    speculative: how generate drafts tokens where a call does not say: None (default), "auto", "ngram", "suffix",
        "self-int4", a draft model, the folder of a draft head, or a SpeculativeConfig.
    context_parallel: a process group of torch.distributed whose ranks share out the KV cache: docs/parallel.md.
    config: a PatchConfig or a dict of these keywords, which the keywords given override.

    A model that is patched already with the same keywords is returned as it is. Raises UnsupportedError, with the
    model as it was, for other keywords then, and for what cannot be done.
    """
    keywords = {
        "weights": weights, "attention": attention, "cache": cache, "fuse": fuse, "speculative": speculative,
        "keep_original": keep_original, "deterministic": deterministic, "context_parallel": context_parallel,
    }  # fmt: skip
    settings = PatchConfig.build(config, **keywords)
    if not is_patched_with(transformers_model(model), settings):
        with torchs_defaults():
            apply_plan(planned(model, settings))
    return model


@takes_patch_keywords
@contextmanager
def patched(model: Model, **keywords: Unpack[PatchKeywords]) -> Iterator[Model]:
    """Patch for the length of a block, `with patched(model, ...):`, also if the block raises.

    What the block has unpatched itself, or unpatched and patched again, stays as it left it. A model that was patched
    before, with the same keywords, stays patched.
    """
    before = find_state(model_of(unwrapped(model)))
    state = state_of(model_of(unwrapped(patch(model, **keywords))))
    try:
        yield model
    finally:
        if state is not before and find_state(model_of(unwrapped(model))) is state:
            unpatch(model)


def is_patched(model: object) -> bool:
    """Return whether patch() was at work on the model, or on the one that PEFT, torch.compile or a pipeline holds."""
    return find_state(model_of(unwrapped(model))) is not None


def stats(model: object) -> dict[str, Any]:
    """Return statistics of the model's last generate(): seconds, tokens per second, blocks, waste, prefix hits."""
    if is_patched(model):
        return dict(state_of(model_of(unwrapped(model))).generation.statistics)
    raise UnsupportedError(f"the model is not patched: {type(transformers_model(model)).__name__} has no statistics")


def stock_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Make an unpatched model over the same Parameters; the given one stays as it is. Raises as `unpatch` does."""
    copied: Any = twin(model)
    stock: PreTrainedModel = unpatch(copied) if is_patched(copied) else copied
    return stock


def make_draft(model: PreTrainedModel, weights: str | None) -> PreTrainedModel:
    """Make a patched model over the same Parameters, with its linears in `weights`; the given one stays as it is."""
    draft: Any = stock_twin(model)
    wanted: Any = weights
    made: PreTrainedModel = patch(draft, weights=wanted, keep_original=True)
    return made


def load_head(folder: str, model: PreTrainedModel) -> Any:
    """Load a draft head for a model from a folder."""
    # By its public name: its module makes drafts by patch(), and cannot be imported here.
    return import_module(__name__.partition(".")[0]).DraftHead.from_pretrained(folder, model)


def with_stock_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Make a patched model over the same numbers with stock's attention; the given one stays as it is."""
    state = state_of(model)
    attending = twin(model)
    before = {id(write.owner): write.old for write in state.journal.writes if write.key == "config"}
    for module, own in zip(model.modules(), attending.modules(), strict=True):
        if id(module) in before:
            config: Any = own.config
            config._attn_implementation_internal = implementation_of_config(model, before[id(module)])
    return attending


# -- writing -------------------------------------------------------------------------------------------


def apply_plan(todo: Plan, loaded: Mapping[str, Packed] | None = None) -> None:
    """Do what the plan says; on any exception the model is as it was before.

    loaded: weights that were packed while they were read, by the name of their module.
    """
    if model_device(todo.model).type == "cpu":
        cpu_kernels.warn_of_refusal()
    calibrated = calibrate(todo) if todo.calibrated else Calibrated({}, {})  # which only reads
    packed = {**calibrated.packed, **(loaded or {})}
    todo = replace(todo, config=todo.config.without_data())
    journal, originals = Journal(), Originals()
    try:
        _replace_config(todo.model, journal)
        _mark_quantized(todo, journal)
        _switch_attention(todo, journal)
        _fuse(todo, journal)
        _enter_generation(todo, journal, originals)
        if todo.config.fuse and learns_by_rows(todo.model):
            journal.attribute(todo.model, "_loss_function", causal_loss)
        replace_parameters(todo.model, calibrated.folded, journal)
        replace_linears(todo, journal, originals, packed)  # when nothing can refuse any more: it frees weights
    except BaseException as error:
        _recover(journal, originals, error)
        raise


def _recover(journal: Journal, originals: Originals, error: BaseException) -> None:
    """Take back what was done until `error`. Another interrupt waits: a model half patched would compute nonsense."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            originals.recover(error)
            journal.undo()
            break
        except KeyboardInterrupt as again:
            interrupt = again
    if interrupt is not None:
        raise interrupt from error


def _replace_config(model: PreTrainedModel, journal: Journal) -> None:
    """Give all modules configs of their own: another model may share them, and we write into ours.

    A model that was put together of others' parts has more than one.
    """
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                journal.attribute(module, name, copy.deepcopy(value, copies))


def _mark_quantized(todo: Plan, journal: Journal) -> None:
    """Tell transformers, so that save_pretrained writes a checkpoint that from_pretrained can read."""
    model = todo.model
    # Layers of a quantized checkpoint are in the model already; the others are still to be put in.
    described: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, QuantModule)}
    if any(linear.config.is_nf4 for linear in todo.quantized):
        return label_nf4(todo, journal)
    described |= {linear.site.name: linear.config for linear in todo.quantized}
    layers = {name: one.layout.module_settings(one.activations) for name, one in described.items()}
    if not layers:
        return
    tables = stored_tables(model) | {name: p.site.name for p in todo.quantized for name in p.site.embeddings}
    settings = AccelConfig(modules=layers, tables=tables)
    settings.patch = todo.config
    journal.attribute(model, "hf_quantizer", AccelQuantizer(settings))
    journal.attribute(model, "is_quantized", True)
    journal.attribute(model, "quantization_method", METHOD)
    # The config is a copy that _replace_config has put in.
    model.config.quantization_config = settings
    model.config._is_quantized = True
    break_ties(model, layers, journal)


def _switch_attention(todo: Plan, journal: Journal) -> None:
    if todo.stock_attention:
        return
    modules = attention_modules(todo.model)
    for module in modules:
        journal.attribute(module, STOCK_ATTRIBUTE, stock_implementation(todo.model, module))
    set_our_attention(todo.model, todo.model.set_attn_implementation)  # writes into our own copies of the configs
    chosen = layers_config(todo.model.config)._attn_implementation
    if chosen != ATTENTION_NAME:
        raise UnsupportedError(f"{todo.title} kept attention {chosen!r}; patch it with attention=None")
    for module in modules:
        config: Any = getattr(module, "config", todo.model.config)
        if config._attn_implementation != ATTENTION_NAME:  # one that transformers does not know of
            config._attn_implementation_internal = ATTENTION_NAME
    for attention in todo.attention:
        module, spec = attention.site.module, attention.site.spec
        planned = PlannedAttention(attention.backend, spec, bool(getattr(module, "is_causal", True)))
        journal.attribute(module, BACKEND_ATTRIBUTE, planned)


def _fuse(todo: Plan, journal: Journal) -> None:
    """Give modules a class of their own."""
    for site in (*todo.fused.sites, *todo.fused.linears):
        if site.kind == ACTIVATION:
            _put_copy(todo.model, site, journal)
            continue
        journal.attribute(site.module, "__class__", mixed_class(site.mixin, type(site.module)))
        journal.attribute(site.module, FUSED, site.state)


def _put_copy(model: nn.Module, site: FusedSite, journal: Journal) -> None:
    """Put a native copy in the places of a module that models may share: some files make one activation for all."""
    made: Any = copy.copy(site.module)  # hooks stay shared
    journal.attribute(made, "__class__", mixed_class(site.mixin, type(made)))
    journal.attribute(made, FUSED, site.state)
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child is site.module:
                journal.item(parent, "_modules", key, made)


def _enter_generation(todo: Plan, journal: Journal, originals: Originals) -> None:
    model = todo.model
    generation = _generation(todo, todo, model)
    journal.attribute(model, STATE, PatchState(todo.config, todo.to_dict(), journal, originals, generation))
    for module in model.modules():
        if module is not model and isinstance(module, PreTrainedModel):
            journal.attribute(module, PART_OF, type(model).__name__)
    if isinstance(model, GenerationMixin) and model.can_generate():  # others have a generate() of their own
        journal.attribute(model, "__class__", mixed_class(AcceleratedGeneration, type(model)))
    elif isinstance(getattr(model, "hf_quantizer", None), AccelQuantizer):
        journal.attribute(model, "__class__", mixed_class(QuantizedModel, type(model)))
    if todo.inner is not None:
        part: Any = model.get_submodule(todo.inner.name)
        generation.inner = _generation(todo, todo.inner, part)
        own = PatchState(todo.config, {}, journal, originals, generation.inner)
        journal.attribute(part, STATE, own)
        if (given := todo.inner.given) is not None:  # which is ours, and holds the part
            generation.inner.given = given
            journal.attribute(given, STATE, own)
        journal.attribute(part, "__class__", mixed_class(AcceleratedGeneration, type(part)))
        _add_hook(part, journal)
    elif not todo.stock_cache:
        _add_hook(model, journal)


def _generation(todo: Plan, chosen: Plan | InnerGenerator, model: PreTrainedModel) -> GenerationState:
    """Make the state for generate() of a model, or of a part of it. chosen: what the plan says of it."""
    return GenerationState(
        None if chosen.stock_cache else todo.config.cache,
        cache_name=cache_name(model),
        speculative=todo.config.speculative if chosen is todo else None,
        ragged_refusal=chosen.stock_loop,
        form=chosen.form,
        invariant_rows=todo.invariant_rows,
        agreement=todo.agreement,
        make_draft=make_draft,
        load_head=load_head,
        make_attending=with_stock_attention,
        context=todo.context,
    )


def _add_hook(model: nn.Module, journal: Journal) -> None:
    # The journal writes the entries itself. The handle is only asked for an id that no other hook has.
    hook_id = RemovableHandle(model._forward_pre_hooks).id
    journal.item(model, "_forward_pre_hooks_with_kwargs", hook_id, True)
    journal.item(model, "_forward_pre_hooks", hook_id, prepare_step)
