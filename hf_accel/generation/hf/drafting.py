"""Makes the drafters, the controller and the verifier of a SpeculativeConfig, and one from transformers' keywords."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import abc
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ...cache.hf import attends_to_sources, page_groups
from ...cache.pages import Pages
from ...config import DRAFTERS, CacheConfig, SpeculativeConfig
from ...errors import UnsupportedError
from ...fused.hf.own_code import PagedSequences
from ...models import vocabulary_size, without_adapters
from ...undo.state import find_state, state_of
from ..sequence import Draft, Sequence
from ..speculation.controller import Controller
from ..speculation.drafters.drafter import Drafter
from ..speculation.drafters.model import ModelDrafter
from ..speculation.drafters.ngram import NgramDrafter
from ..speculation.drafters.suffix import SuffixDrafter
from ..speculation.drafters.target_states import HeadDrafter
from ..speculation.speculation import Speculation
from ..speculation.verifiers import verifier
from ..speculation.verifiers.verifier import Verifier
from .generation_state import GenerationState
from .graphed_runner import make_runner
from .head_module import HeadModule, check_draft_head
from .head_runner import HeadRunner, native_drafts
from .model_runner import ModelRunner
from .prompts import assisted_refusal
from .refusals import ragged_refusal, report_no_drafts
from .states_drafters import (
    MOST_OF_A_BLOCK,
    block_drafter,
    heads_drafter,
    heads_refusal,
    is_block_drafter,
    watching_refusal,
)
from .vocabulary import vocabulary_refusal

NO_MODEL_DRAFTS = "no model drafts for an encoder-decoder, or where layers attend to images ('ngram' and 'suffix' do)"


def make_speculation(
    config: SpeculativeConfig, runner: ModelRunner, pages: Pages, controller: Controller | None = None
) -> Speculation:
    """Make the Speculation of a config. runner, pages: those of the target. controller: None for the kept one.

    Raises UnsupportedError for a drafter that cannot draft for this model.
    """
    rule = verifier(config.verify)
    drafters = _Drafters(config, rule, runner, pages)
    made = [drafters.make(drafter) for drafter in config.drafters]
    state = drafters.state
    controller = _controller(config, state) if controller is None else controller
    speculation = Speculation(
        rule, made, controller, invariant_rows=state.invariant_rows, agreement=state.agreement,
        num_tokens=vocabulary_size(drafters.target),
    )  # fmt: skip
    speculation.leave_trees(trees_refusal(drafters.target, pages))
    layers = {drafter.layers for drafter in made if drafter.layers}
    if len(layers) > 1:
        raise UnsupportedError(
            f"drafters read hidden states of other layers each ({sorted(layers)}); give one of them"
        )
    for own in layers:
        speculation.states = lambda: runner.kept.rows
        speculation.keep_states = functools.partial(runner.kept.keep_layers, own)
    return speculation


def trees_refusal(model: Any, pages: Pages) -> str | None:
    """Return why a model cannot verify trees of drafted tokens, as one clause; None if it can."""
    if not all(group.branches for group in pages.groups):
        return "its states cannot be shared by the branches of a tree"
    if any(isinstance(module, PagedSequences) for module in model.modules()):
        return "code of its own computes each sequence"
    if any(group.context is not None for group in pages.groups):
        return "ranks share out the context"
    return None


def _controller(config: SpeculativeConfig, state: GenerationState) -> Controller:
    """Return the controller that an earlier session with this config has kept, or a new one.

    A controller that another session uses now is not found.
    """
    kept = state.controllers.pop(_controller_key(config), None)
    return Controller(config.num_draft, config.max_draft, config.max_nodes) if kept is None else kept


def keep_controller(config: SpeculativeConfig, speculation: Speculation, model: Any) -> None:
    """Keep the controller at the end of a session for the next one, unless the model was unpatched meanwhile.

    A drafter that was asked for, and whose drafts cost more than they bring, is reported.
    """
    state = find_state(model)
    if state is None:
        return
    state.generation.controllers[_controller_key(config)] = speculation.controller
    for drafter in speculation.drafters:
        verdict = None if drafter.is_free else speculation.controller.verdict(drafter.name)
        if verdict is not None:
            report_no_drafts(state.generation, verdict, f"verdict of {drafter.name}")


def _controller_key(config: SpeculativeConfig) -> tuple[Any, ...]:
    """The key under which a controller is kept. A drafter that is an object is identified by its id()."""
    wanted = config.drafters
    names = tuple(drafter if isinstance(drafter, str) else id(drafter) for drafter in wanted)
    return names, config.num_draft, config.max_draft, config.max_nodes, config.verify


def draft_models(speculation: Speculation) -> list[Any]:
    """The patched models of model drafters."""
    runners = [drafter.runner for drafter in speculation.drafters if isinstance(drafter, ModelDrafter)]
    return [runner.model for runner in runners if isinstance(runner, ModelRunner)]


def remake_drafts(speculation: Speculation, target: PreTrainedModel) -> None:
    """Make drafts that are a quantized form of the target again. Nothing may be in the middle of a pass."""
    for drafter in speculation.drafters:
        if isinstance(drafter, ModelDrafter) and drafter.is_shared and isinstance(drafter.runner, ModelRunner):
            drafter.runner.model = _twin(state_of(target).generation, target, "int4")


class _Drafters:
    """Makes the drafters for one target model. rule: the verifier."""

    def __init__(self, config: SpeculativeConfig, rule: Verifier, runner: ModelRunner, pages: Pages) -> None:
        self.config, self.rule, self.runner, self.pages = config, rule, runner, pages
        self.target: Any = runner.model
        self.state = state_of(self.target).generation

    def make(self, wanted: Any) -> Drafter:
        if isinstance(wanted, str):
            return self._named(wanted) if wanted in DRAFTERS else self._head(self.state.head_in(wanted, self.target))
        if isinstance(wanted, Drafter):
            return wanted
        if isinstance(wanted, HeadModule):
            return self._head(wanted)
        if isinstance(wanted, CandidateGenerator) or (callable(wanted) and not isinstance(wanted, PreTrainedModel)):
            return CandidateDrafter(wanted, vocabulary_size(self.target))
        model = without_adapters(wanted)
        if is_block_drafter(model):
            return block_drafter(self.target, model)
        if isinstance(model, PreTrainedModel):
            return self._model(model)
        raise UnsupportedError(
            f"speculative drafter {wanted!r} is not known; give a name ('ngram', 'suffix', 'self-int4'), the folder "
            "of a draft head, a draft model, a CandidateGenerator, a hf_accel.Drafter, or a list of these"
        )

    def _named(self, name: str) -> Drafter:
        fewest, most = self.config.ngram
        makers: dict[str, Callable[[], Drafter]] = {
            "auto": SuffixDrafter,
            "suffix": SuffixDrafter,
            "ngram": lambda: NgramDrafter(fewest, most),
            "self-int4": self._self_int4,
            "mtp": lambda: heads_drafter(self.target),
        }
        return makers[name]()

    # -- models ----------------------------------------------------------------------------------------

    def _model(self, model: PreTrainedModel) -> ModelDrafter:
        refusal = draft_refusal(self.target, model)
        if refusal is not None:
            raise UnsupportedError(refusal)
        draft = _twin(self.state, model, None)
        # As many tokens as the target has pages for, where that is known; they grow if shared prefixes need more.
        capacity: dict[str, Any] = {} if self.pages.capacity is None else {"capacity": self.pages.capacity}
        groups, groups_of_layer = page_groups(draft.config, CacheConfig(prefix_sharing=False), **capacity)
        return self._drafter(make_runner(draft, groups, groups_of_layer), Pages(groups))

    def _head(self, head: HeadModule) -> HeadDrafter:
        """Make a drafter from a head of the target, which then keeps the states of its passes."""
        if (refusal := watching_refusal(self.target)) is not None:
            raise UnsupportedError(f"a draft head cannot be used: {refusal}; use 'suffix', 'ngram' or a draft model")
        check_draft_head(head, self.target)
        native = native_drafts(self.state, head)
        groups, groups_of_layer = page_groups(native.decoder.config, CacheConfig(prefix_sharing=False))
        return HeadDrafter(
            HeadRunner(native, groups, groups_of_layer),
            head.target_layers,
            Pages(groups),
            self.rule,
            target_pages=self.pages,
            num_tokens=vocabulary_size(native.decoder),
            target_tokens=vocabulary_size(self.target),
        )

    def _self_int4(self) -> ModelDrafter:
        """Make a drafter from the target with its linears in INT4. It shares the target's pages."""
        if getattr(self.target, "is_quantized", False):
            raise UnsupportedError(
                "drafter='self-int4' needs a model that is not quantized, and this one is quantized; patch it with "
                "weights=None, or use 'suffix', 'ngram' or a draft model"
            )
        draft = _twin(self.state, self.target, "int4")
        return self._drafter(make_runner(draft, self.pages.groups, self.runner.groups_of_layer), None)

    def _drafter(self, runner: ModelRunner, pages: Pages | None) -> ModelDrafter:
        return ModelDrafter(
            runner,
            pages,
            self.rule,
            target_pages=self.pages,
            num_tokens=vocabulary_size(runner.model),
            target_tokens=vocabulary_size(self.target),
        )


def draft_refusal(target: PreTrainedModel, draft: PreTrainedModel) -> str | None:
    """Return why a model cannot draft for the target over pages, and what to do; None if it can."""
    if draft is target:
        return "the draft model is the model itself; use drafter='self-int4' for its quantized form"
    refusal = vocabulary_refusal(target, draft)
    if refusal is not None:
        return (
            f"{refusal}; use a draft model with the same one, or pass tokenizer= and assistant_tokenizer= for "
            "transformers' own loop"
        )
    patched = _twin(state_of(target).generation, draft, None)
    refusal = ragged_refusal(patched)
    if refusal is None:
        return None
    return (
        f"the draft model {type(draft).__name__} cannot run on pages: {refusal}; use another draft model, or 'suffix' "
        "or 'ngram', which need none"
    )


def _twin(state: GenerationState, model: PreTrainedModel, weights: str | None) -> PreTrainedModel:
    """Return a patched model over the same Parameters. A model that is already patched is returned as it is."""
    if weights is None and find_state(model) is not None:
        return model
    assert state.make_draft is not None
    kept = state.drafts.get(weights)
    if kept is None or kept[0] is not model:
        kept = state.drafts[weights] = (model, state.make_draft(model, weights))
    draft: PreTrainedModel = kept[1]
    return draft


def refuse_drafts(model: PreTrainedModel, wanted: SpeculativeConfig, refusal: str | None = None) -> None:
    """Raise UnsupportedError if `wanted` cannot draft for a model. refusal: why nothing can, as one clause, if that is
    known.
    """
    if refusal is None and attends_to_sources(model.config) and any(map(_is_model, wanted.drafters)):
        refusal = NO_MODEL_DRAFTS
    if refusal is not None:
        raise UnsupportedError(f"speculative= was asked for, but {refusal}; leave speculative= out")


def _is_model(drafter: Any) -> bool:
    return (
        drafter == "self-int4" or drafter not in DRAFTERS
        if isinstance(drafter, str)
        else isinstance(without_adapters(drafter), PreTrainedModel | HeadModule)
    )


def assisted(
    model: Any, generation_config: Any, assistant_model: Any, assistant_tokenizer: Any
) -> tuple[SpeculativeConfig, str | None]:
    """Return the SpeculativeConfig of a call, and why transformers' own loop must serve it (None if it need not)."""
    if model.config.is_encoder_decoder:
        return SpeculativeConfig(), "transformers' assisted decoding drafts for an encoder-decoder in its own way"
    if (refusal := assisted_refusal(model)) is not None:
        return SpeculativeConfig(), refusal
    if assistant_tokenizer is not None:
        return SpeculativeConfig(), "the draft model has another tokenizer"
    if getattr(generation_config, "use_mtp", None):
        return SpeculativeConfig(drafter="mtp"), heads_refusal(model)
    if getattr(generation_config, "speculation_type", None) == "dflash":
        drafts = SpeculativeConfig(drafter=assistant_model, max_draft=MOST_OF_A_BLOCK)
        return drafts, assistant_refusal(model, assistant_model)
    lookup = generation_config.prompt_lookup_num_tokens
    if lookup is not None:
        most = generation_config.max_matching_ngram_size or 2
        return SpeculativeConfig(drafter="ngram", max_draft=lookup, ngram=(1, max(1, most))), None
    if assistant_model is None:
        return SpeculativeConfig(), "it asks for a drafter that only transformers has"
    return SpeculativeConfig(drafter=assistant_model), assistant_refusal(model, assistant_model)


def assistant_refusal(model: Any, assistant: Any) -> str | None:
    """Return why transformers' own loop must use this assistant_model=, as one clause; None if it can draft over
    pages.
    """
    if attends_to_sources(model.config):
        return NO_MODEL_DRAFTS
    draft = without_adapters(assistant)
    if is_block_drafter(draft):
        return watching_refusal(model)
    return draft_refusal(model, draft) if isinstance(draft, PreTrainedModel) else "the assistant is no model"


class CandidateDrafter(Drafter):
    """Drafts with a CandidateGenerator for each sequence.

    generator: a CandidateGenerator, which is copied for each sequence without copying its models; or a function
    without arguments that makes one. num_tokens: the size of the target's vocabulary; a candidate beyond it ends the
    draft.

    The scores that a generator returns are not used, and the candidates count as not drawn. Each is then accepted with
    the probability that the model gives it, which is exact for any candidate. The scores would not be safe to use:
    some generators return the scores of a distribution from which they did not draw.
    """

    name = "candidates"

    def __init__(self, generator: Any, num_tokens: int) -> None:
        self.make = (lambda: _copied(generator)) if hasattr(generator, "get_candidates") else generator
        self.num_tokens = num_tokens
        self._generators: dict[Sequence, Any] = {}
        self._proposed: dict[Sequence, tuple[int, int]] = {}

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        return [self._draft(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]

    def _draft(self, sequence: Sequence, length: int) -> Draft:
        if not length:
            return Draft()
        generator = self._generators.get(sequence)
        if generator is None:
            generator = self._generators[sequence] = self.make()
        ids = torch.tensor([sequence.tokens], dtype=torch.int64)
        self._report_acceptance(generator, sequence, ids)
        candidates = generator.get_candidates(ids)[0][0, len(sequence.tokens) :].tolist()[:length]
        candidates = list(itertools.takewhile(lambda token: 0 <= token < self.num_tokens, candidates))
        self._proposed[sequence] = len(sequence.tokens), len(candidates)
        return Draft(candidates)

    def _report_acceptance(self, generator: Any, sequence: Sequence, ids: torch.Tensor) -> None:
        """Tell the generator how many of its last candidates were accepted. Some generators adapt to that."""
        start, count = self._proposed.pop(sequence, (0, 0))
        if count:
            matches = min(count, len(sequence.tokens) - start - 1)
            scores = torch.empty(1, count + 1, 1)  # generators use only its length
            generator.update_candidate_strategy(ids, scores, matches)

    def forget(self, sequence: Sequence) -> None:
        self._generators.pop(sequence, None)
        self._proposed.pop(sequence, None)


def _copied(generator: Any) -> Any:
    return copy.deepcopy(generator, {id(m): m for m in vars(generator).values() if isinstance(m, torch.nn.Module)})
