"""The state for generate() that patch() stores on a model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ...cache.hf import PagedCache, attends_to_sources, keeps_states_alone
from ...cache.step import SharedContext
from ...config import CacheConfig, SpeculativeConfig
from ...errors import UnsupportedError
from ...models import learnt_prompt
from ..agreement import ALONE, ProcessAgreement
from ..prompt_inputs import other_input, positions_count_tokens
from ..speculation.controller import Controller
from .model_watch import ModelWatch

# Maps (model, weights) to a patched model over the same Parameters. The given model is not changed.
MakeDraft = Callable[[PreTrainedModel, str | None], PreTrainedModel]

# Maps a patched model to another one over the same Parameters, with the model's original attention.
MakeAttending = Callable[[PreTrainedModel], PreTrainedModel]


ENCODER_INPUTS = frozenset({"encoder_outputs", "decoder_attention_mask"})


@dataclass
class CallState:
    """The state of one call of generate().

    requires_speculation: whether the call itself has speculative=; if speculation is then not possible, an error is
    raised.
    cache: the cache of the call, if it is a PagedCache. own_cache: whether the call made it, so that nobody else holds
    it. prompt_columns: the columns of the input.
    """

    speculative: SpeculativeConfig | None = None
    requires_speculation: bool = False
    cache: PagedCache | None = None
    own_cache: bool = False
    prompt_columns: int = 0
    statistics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoopCall:
    """The inputs that transformers' generate() has prepared for its loop.

    input_ids: [B, T], with padding on the left where the mask [B, T] is 0; [B, 0] where the prompts are embeddings
    [B, T, D] alone. inputs: the model's other inputs.
    streams: the user's streamers, or transformers' own streamer. speculative: None for decoding without drafts.
    found: what was found out about the call, by name.
    """

    model: PreTrainedModel
    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: Any
    inputs: dict[str, Any]
    synced_gpus: bool
    streams: Any
    speculative: SpeculativeConfig | None
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> GenerationState:
        model: Any = self.model
        state: GenerationState = model._generation_state
        return state

    @cached_property
    def has_encoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    @property
    def attends_to_sources(self) -> bool:
        """Return whether the decoder attends to more than tokens: to an encoder's output, or to images."""
        return attends_to_sources(self.model.config)

    @property
    def encoder_inputs(self) -> frozenset[str]:
        """The names of the inputs that say what the encoder has computed, and of which rows."""
        return ENCODER_INPUTS if self.has_encoder else frozenset()

    @property
    def has_more_than_ids(self) -> bool:
        """Return whether the decoder may be given more than token ids at the positions that the mask counts."""
        if self.has_encoder:
            return False
        more = other_input(self.inputs) is not None or self.state.form.reads_prompts
        return more or self.moves_tokens or self.num_learnt > 0

    @property
    def moves_tokens(self) -> bool:
        """Return whether the decoder, which reads positions, is to have others than those that count tokens."""
        form, mask = self.state.form, self.mask
        operators = form.operators
        alone = keeps_states_alone(self.model.config)
        if form.counts_padding or (alone if operators is None else not operators.call.takes_positions):
            return False
        return not positions_count_tokens(self.inputs.get("position_ids"), None if mask is None else mask.bool())

    @property
    def mask(self) -> Tensor | None:
        if self.state.form.reads_padding:
            return None
        return self.inputs.get("decoder_attention_mask" if self.has_encoder else "attention_mask")

    @property
    def cache(self) -> Any:
        given = self.inputs.get(self.state.cache_name)
        return getattr(given, "self_attention_cache", given) if self.has_encoder else given

    @property
    def num_columns(self) -> int:
        return self.input_ids.shape[1]

    @property
    def prompt_columns(self) -> int:
        """Return T, the columns of the prompts; these have no ids where the prompts are embeddings."""
        embeddings = None if self.has_encoder else self.inputs.get("inputs_embeds")  # which are the encoder's
        return self.num_columns if embeddings is None else int(embeddings.shape[1])

    @cached_property
    def num_learnt(self) -> int:
        """Return the number of embeddings that an adapter puts in front of each prompt, and of its padding."""
        return learnt_prompt(self.model)

    @property
    def num_read(self) -> int:
        """Return the columns of the prompts that the decoder is given."""
        return self.num_learnt + self.prompt_columns

    def returns(self, name: str) -> bool:
        """Return whether the call returns what a setting of this name asks for."""
        return bool(self.config.return_dict_in_generate and getattr(self.config, name))

    @property
    def has_beams(self) -> bool:
        return (self.config.num_beams or 1) > 1

    @property
    def repeats(self) -> int:
        """The number of consecutive rows that are samples, or beams, of one prompt."""
        return (self.config.num_beams if self.has_beams else self.config.num_return_sequences) or 1

    @property
    def pad_token(self) -> int:
        pad = self.config._pad_token_tensor
        return 0 if pad is None else int(pad)


@dataclass(frozen=True)
class DecoderForm:
    """The form in which ragged passes call a model's decoder. It is planned once, and families differ in it.

    prepares: whether the model's own methods prepare the calls of its decoder. planes: P where these give P
        coordinates for the position of each token; None for one. reads_texts: whether they give more for a text than
        follows from its token ids.
    hides_rows: whether the decoder takes a mask of the rows of an encoder's output; None without an encoder.
    reads_ahead: whether stock lets tokens of the prompt of a decoder with an encoder see later ones of that prompt.
    most_tokens: the most tokens of a pass of which experts leave none out; None for any number.
    needs_no_cache: whether the model's own settings leave out a cache, with which a decoder with an encoder computes
        the same: it is then given one.
    counts_padding: whether the decoder counts positions by itself, and padding in front of a prompt with them.
    operators: the OperatorModel of a model that attends by torch's operators; None for any other model.
    makes_masks: whether the model around the decoder makes masks of texts that our attention does not understand,
        though they say no more than those that the decoder makes by itself, which it then does.
    uncounted: the token that pads, where the decoder counts positions without it if it is given none, so that it
        stands at the position of its own number; None for any other decoder.
    whole_prompts: whether the tokens of a prompt see all of that prompt, and those behind it all before them: what an
        encoder that is used to generate lets them see.
    reads_padding: whether padding is tokens like all others to the model, which reads no mask.
    source: the argument by which a decoder takes the images that some of its layers attend to; None for one that takes
        none, and for an encoder-decoder.
    """

    prepares: bool = False
    planes: int | None = None
    reads_texts: bool = False
    hides_rows: bool | None = None
    reads_ahead: bool = False
    most_tokens: int | None = None
    needs_no_cache: bool = False
    counts_padding: bool = False
    operators: Any = None
    makes_masks: bool = False
    uncounted: int | None = None
    whole_prompts: bool = False
    reads_padding: bool = False
    source: str | None = None

    def placed(self, positions: Tensor, ids: Tensor) -> Tensor:
        """Return the positions of tokens [..., N] with those of tokens that the decoder does not count."""
        assert self.uncounted is not None
        return positions.where(ids != self.uncounted, self.uncounted)

    @property
    def reads_prompts(self) -> bool:
        """Return whether what a prompt is to the decoder does not follow from each of its tokens by itself."""
        return self.prepares or self.whole_prompts


STOCK_FORM = DecoderForm()


@dataclass
class GenerationState:
    """The state for generate() of one patched model.

    cache: how PagedCaches are made; None means transformers' own caches. cache_name: of a cache among the arguments of
        the model.
    watch: sees whether the model has changed. seen_salt: the last one of its salts that all processes have agreed on.
    passes: the PassWatch of the model's passes, made by the first of them.
    speculative: the default of calls without speculative=. ragged_refusal: why the model cannot compute the tokens of
        many sequences in one row; None if it can.
    form: how ragged passes call the decoder. marked_form: in which form it was given features of marked tokens; None
        before the first of them.
    inner: that of the part whose generate() the model's own generate() calls; None if it calls none. given: the
        GivenDecoder around such a part that is given rows to attend to; None for any other.
    invariant_rows: the largest number of rows for which the model's linears round each row as they round a single one;
        None for any number.
    identity: the salt of the model's weights when they were read last, and the digest of all that the model is.
    make_draft: makes patched models that draft. load_head: loads a draft head from a folder. drafts: what these have
        made, by weights= or by the folder.
    controllers: the controllers of earlier sessions that no session uses now.
    calls: the current calls of generate(), by thread.
    make_attending: makes a model with the original attention. attending: the last one that it has made, and the salt
        of its weights. warned: the refusals about which a warning was given.
    engines: the engines and managers of this model. manager: the manager that was kept for the next session.
    agreement: what the processes that run the model decide by.
    runner: a GraphedRunner with its pages that was kept for the next call of generate(), see kept_runners.py.
    context: the ranks that share out the blocks of caches; None if each cache is whole.
    """

    cache: CacheConfig | None
    cache_name: str = "past_key_values"
    speculative: SpeculativeConfig | None = None
    ragged_refusal: str | None = None
    form: DecoderForm = STOCK_FORM
    marked_form: Any = None
    invariant_rows: int | None = None
    inner: GenerationState | None = None
    given: Any = None
    make_draft: MakeDraft | None = None
    load_head: Callable[[str, Any], Any] | None = None
    identity: tuple[bytes, str] | None = None
    watch: ModelWatch = field(default_factory=ModelWatch)
    seen_salt: bytes = b""
    passes: Any = None
    calls: dict[int, CallState] = field(default_factory=dict)
    drafts: dict[Any, Any] = field(default_factory=dict)
    controllers: dict[tuple[Any, ...], Controller] = field(default_factory=dict)
    make_attending: MakeAttending | None = None
    attending: tuple[bytes, PreTrainedModel] | None = None
    statistics: dict[str, Any] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    manager: Any = None
    runner: Any = None
    agreement: ProcessAgreement = ALONE
    context: SharedContext | None = None
    engines: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # an engine that nobody holds may end

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {
            "drafts": {},
            "controllers": {},
            "calls": {},
            "engines": None,
            "attending": None,
            "manager": None,
            "runner": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"engines": weakref.WeakSet()})

    def forget_weights(self) -> None:
        """Note that the weights have changed, though nobody may be able to see it."""
        self.drafts.clear()
        self.watch.declare()

    def require_idle(self, what: str) -> None:
        """Raise UnsupportedError if an Engine or a call of generate() runs the model.

        what: the change of the model, for the message.
        """
        for engine in list(self.engines):
            if engine.is_live:
                raise UnsupportedError(f"{what} while {engine!r} runs the model; call engine.close() first")
        alive = {thread.ident for thread in threading.enumerate()}  # a fork has the calls of its parent's threads too
        states = [self] if self.inner is None else [self, self.inner]
        if any(thread in alive for state in states for thread in list(state.calls)):
            raise UnsupportedError(f"{what} while a call of generate() runs the model; do it when that has returned")

    @property
    def call(self) -> CallState | None:
        """The call of generate() that runs in this thread, or None."""
        return self.calls.get(threading.get_ident())

    @contextmanager
    def calling(self, call: CallState) -> Iterator[None]:
        """Set `call` for this thread within the `with` block. Calls may be nested."""
        thread = threading.get_ident()
        outer, self.calls[thread] = self.calls.get(thread), call
        try:
            yield
        finally:
            if outer is None:
                del self.calls[thread]
            else:
                self.calls[thread] = outer

    def record_call(self, call: CallState, sequences: object, seconds: float) -> None:
        """Store the statistics of a call. Every row counts with as many new tokens as the longest one.

        sequences: token ids [B, T]. It may be anything that a custom_generate returned; then no tokens are counted.
        """
        is_ids = isinstance(sequences, Tensor) and sequences.ndim == 2
        rows, columns = sequences.shape if is_ids else (0, call.prompt_columns)  # type: ignore[attr-defined]
        cache = {} if call.cache is None else call.cache.statistics()
        self.record(rows * (columns - call.prompt_columns), rows, seconds, {**cache, **call.statistics})

    def record(self, new_tokens: int, sequences: int, seconds: float, more: dict[str, Any]) -> None:
        """Store the statistics of a finished run."""
        self.statistics = {
            "seconds": seconds,
            "sequences": sequences,
            "new_tokens": new_tokens,
            "tokens_per_second": new_tokens / seconds,
            **more,
        }

    def head_in(self, folder: str, model: PreTrainedModel) -> Any:
        """Return the draft head of the model in a folder, which is loaded once."""
        assert self.load_head is not None
        key = "folder", folder
        if key not in self.drafts:
            self.drafts[key] = self.load_head(folder, model)
        return self.drafts[key]
