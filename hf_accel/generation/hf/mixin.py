"""The mixin of a patched model's class: generate() over the paged cache, with ragged passes where possible."""

from __future__ import annotations

import dataclasses
import functools
import time
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from ...attention.hf import ATTENTION_NAME
from ...attention.hf.stock import set_our_attention
from ...cache.hf import PagedCache
from ...config import parse_speculative
from ...errors import NotRaggedError, UnsupportedError
from ...keywords import Default
from ...linear.quantized_model import QuantizedModel
from ...models import learnt_prompt
from ...tensors import made_on_host
from ...undo.journal import original_class
from ...undo.state import state_of
from ..prompt_inputs import other_input
from .batch import generate_batch, with_configs, with_fields, without_own_keywords
from .config_settings import ASKED
from .continuous import destroy_managers, manager_for, refuse_batching
from .drafting import assistant_refusal, assisted
from .encoder_source import give_stock_cache, pages_serve, with_cache, with_encoder
from .generate import RowStreams, run
from .generation_state import CallState, GenerationState, LoopCall
from .given_decoder import as_given, is_given_rows, served_by
from .grammars import apply_constraint
from .kept_runners import cache_for_rows
from .model_runner import adopt_prefix, every_nth, weights_salt
from .part_prompts import OF_PART, batch_of_part
from .processing import way_back
from .refusals import (
    ServesPrompts,
    call_refusal,
    changed_refusal,
    drafts_refusal,
    prompts_refusal,
    ragged_refusal,
    refuse_clocks,
    refuse_speculation,
    report_no_drafts,
    report_stock_loop,
    states_refusal,
)
from .states_drafters import with_stock_classes
from .users_code import code_in_passes

NOT_GIVEN = Default("not given")


class AcceleratedGeneration(QuantizedModel):
    """Is mixed into a patched model's class, before the original class."""

    @made_on_host()
    def generate(self, *args: Any, speculative: Any = NOT_GIVEN, streamer: Any = None, **kwargs: Any) -> Any:
        """Generate as in transformers, with more options.

        speculative: a SpeculativeConfig, or what it can be made of; None for no drafts; left out, that of patch().
        streamer: for any number of rows; also a list with one for each row, or one whose put() takes row=.
        response_format, regex, grammar, choice: as in Engine.submit; they need tokenizer=.
        """
        state = self._generation_state
        state.watch.check_files()
        config = state.speculative if speculative is NOT_GIVEN else parse_speculative(speculative)
        call = CallState(config, requires_speculation=speculative is not NOT_GIVEN and config is not None)
        if call.requires_speculation and state.inner is not None:
            refuse_speculation(OF_PART)
        if call.requires_speculation and state.ragged_refusal is not None:
            refuse_speculation(state.ragged_refusal)
        apply_constraint(self, kwargs, args)
        if streamer is not None:
            kwargs["streamer"] = streamer if isinstance(streamer, RowStreams) else RowStreams(streamer)
        start = time.perf_counter()
        alone = state.agreement.size == 1
        with state.calling(call), nullcontext() if alone else state.agreement.watching("it ran generate()"):
            output = super().generate(*args, **kwargs)  # type: ignore[misc]
        seconds = time.perf_counter() - start
        if state.inner is not None:
            state.statistics = {**state.inner.statistics, "seconds": seconds}
        else:
            state.record_call(call, getattr(output, "sequences", output), seconds)
        return output

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Set the attention as in transformers. If hf_accel's is set, parts that keep their own attention keep it."""

        def set_implementation(name: Any) -> None:
            super(AcceleratedGeneration, self).set_attn_implementation(name, *args, **kwargs)  # type: ignore[misc]

        if attn_implementation == ATTENTION_NAME:
            set_our_attention(self, set_implementation)  # type: ignore[arg-type]
        else:
            set_implementation(attn_implementation)

    @property
    def _generation_state(self) -> GenerationState:
        return state_of(self).generation

    # -- transformers' generation modes ----------------------------------------------------------------

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: Any, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        """Skip transformers' checks of assisted decoding if it runs ragged.

        Ragged passes need neither a batch of one row nor equally padded vocabularies.
        """
        call = self._generation_state.call
        refuse_clocks(self, generation_config)  # type: ignore[arg-type]
        speculates = call is not None and call.requires_speculation
        if speculates and generation_mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise UnsupportedError(
                f"speculative= is for greedy search and sampling, and this call is {generation_mode.value} "
                "(num_beams=, assistant_model=, prompt_lookup_num_tokens=, ...): leave one of them out"
            )
        if generation_mode == GenerationMode.ASSISTED_GENERATION and self._can_use_assistant(generation_mode_kwargs):
            return
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)  # type: ignore[misc]

    def _can_use_assistant(self, arguments: dict[str, Any]) -> bool:
        assistant = arguments.get("assistant_model")
        known = ragged_refusal(self) is None and "assistant_tokenizer" not in arguments  # type: ignore[arg-type]
        return known and (assistant is None or assistant_refusal(self, assistant) is None)

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        state = self._generation_state.call
        prepared = (input_ids, logits_processor, stopping_criteria, generation_config)
        speculative = None if state is None else state.speculative
        call = LoopCall(self, *prepared, model_kwargs, synced_gpus, streamer, speculative)  # type: ignore[arg-type]
        return self._ragged_or(functools.partial(super()._sample, streamer=streamer), call)  # type: ignore[misc]

    def _beam_search(self, input_ids: Tensor, *given: Any, synced_gpus: bool = False, **model_kwargs: Any) -> Any:
        names = ("logits_processor", "stopping_criteria", "generation_config")
        processors, criteria, config = (*given, *(model_kwargs.pop(name) for name in names[len(given) :]))
        prepared = (input_ids, processors, criteria, config)
        call = LoopCall(self, *prepared, model_kwargs, synced_gpus, None, None)  # type: ignore[arg-type]
        return self._ragged_or(super()._beam_search, call)  # type: ignore[misc]

    def _ragged_or(self, stock: Any, call: LoopCall) -> Any:
        """Run a call in ragged passes, or else by this loop of transformers."""
        state, (output, refusal) = self._generation_state, self._ragged(call)
        if refusal is None:
            return output
        if state.call is not None and state.call.requires_speculation:
            refuse_speculation(refusal)
        report_stock_loop(state, refusal)
        give_stock_cache(call)
        # By their names, as transformers gives them: others may have replaced its loop.
        given = {"logits_processor": call.processors, "stopping_criteria": call.criteria, **call.inputs}
        return stock(call.input_ids, generation_config=call.config, synced_gpus=call.synced_gpus, **given)

    def _assisted_decoding(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        inputs_tensor: Any = None,
        assistant_model: Any = None,
        assistant_tokenizer: Any = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Serve assistant_model= and prompt_lookup_num_tokens= by speculation, and others by transformers' loop."""
        prepared = (input_ids, logits_processor, stopping_criteria, generation_config)
        config, refusal = None, ragged_refusal(self)  # type: ignore[arg-type]
        if refusal is None:
            config, refusal = assisted(self, generation_config, assistant_model, assistant_tokenizer)
        call = LoopCall(self, *prepared, model_kwargs, synced_gpus, streamer, config)  # type: ignore[arg-type]
        output, refusal = self._ragged(call, refusal)
        if refusal is None:
            return output
        report_stock_loop(self._generation_state, refusal)
        give_stock_cache(call)
        if len(input_ids) > 1:  # transformers' assisted decoding takes one row
            return super()._sample(*prepared, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs)  # type: ignore[misc]
        return super()._assisted_decoding(  # type: ignore[misc]
            *prepared, synced_gpus=synced_gpus, streamer=streamer, inputs_tensor=inputs_tensor,
            assistant_model=assistant_model, assistant_tokenizer=assistant_tokenizer, tokenizer=tokenizer,
            **model_kwargs,
        )  # fmt: skip

    def _get_candidate_generator(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = with_stock_classes(self) if getattr(generation_config, "use_mtp", None) else self  # type: ignore[arg-type]
        return original_class(self)._get_candidate_generator(model, generation_config, *args, **kwargs)

    def _ragged(self, call: LoopCall, refusal: str | None = None) -> tuple[Any, str | None]:
        """Return the output, or why transformers' loop must make it. In the latter case nothing has changed."""
        state = self._generation_state.call
        if state is None:
            return None, refusal or "it was not called by generate()"
        call = as_given(call)
        refusal = refusal or ragged_refusal(self) or call_refusal(call, own_cache=state.own_cache)  # type: ignore[arg-type]
        if isinstance(call.streams, RowStreams):
            call.streams.expect(call.config)
        if refusal is not None:
            return None, refusal
        without_drafts = drafts_refusal(call)
        if without_drafts is not None:
            call = dataclasses.replace(call, speculative=None)
            report_no_drafts(self._generation_state, without_drafts)
        go_back = way_back(call.processors)
        try:
            output, statistics = run(call)
        except NotRaggedError as error:
            if call.streams is not None and call.streams.has_streamed:
                raise  # tokens that were streamed cannot be taken back
            go_back()
            return None, str(error)
        state.prompt_columns = call.num_columns
        state.statistics |= {"loop": "ragged", **statistics}
        return output, None

    @ServesPrompts
    @made_on_host()
    def generate_batch(
        self,
        inputs: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        speculative: Any = NOT_GIVEN,
        **kwargs: Any,
    ) -> Any:
        """Generate for prompts of any length without padding, as transformers' generate_batch.

        inputs: for each prompt a list of token ids, or the dict that a processor makes for one prompt with images.
        generation_config: may be a list, one for each prompt. kwargs: fields of it or of ContinuousBatchingConfig,
        those of generate(), and adapter: a folder as of Engine.load_adapter, or a list of one or None for each prompt.
        persistent_manager, warmup: have an effect on transformers' manager alone. Returns transformers' dict of
        GenerationOutput. Raises UnsupportedError for unknown keywords, and models that no continuous batching serves.
        """
        state = self._generation_state
        if not len(inputs):
            return {}
        if state.inner is not None and state.inner.ragged_refusal is None:
            given = generation_config, continuous_batching_config, record_timestamps, progress_bar
            return batch_of_part(self, inputs, *given, speculative=speculative, **kwargs)
        continuous_batching_config, kwargs = with_fields(continuous_batching_config, kwargs)
        refusal = ragged_refusal(self) or prompts_refusal(self)  # type: ignore[arg-type]
        if refusal is not None:
            refuse_batching(self)  # type: ignore[arg-type]
            kwargs = without_own_keywords(generation_config, {**kwargs, "speculative": speculative}, refusal)
            return super().generate_batch(  # type: ignore[misc]
                inputs, generation_config, continuous_batching_config, record_timestamps=record_timestamps,
                progress_bar=progress_bar, persistent_manager=persistent_manager, warmup=warmup, **kwargs,
            )  # fmt: skip
        if state.call is not None:  # generate(cache_implementation="paged") passes on all its keywords
            kwargs = {n: value for n, value in kwargs.items() if hasattr(generation_config, n) or n in ASKED}
        start = time.perf_counter()
        outputs, statistics = generate_batch(
            self,  # type: ignore[arg-type]
            with_configs(self, inputs, generation_config, kwargs),
            continuous_batching_config,
            speculative=state.speculative if speculative is NOT_GIVEN else parse_speculative(speculative),
            timestamps=record_timestamps, progress_bar=progress_bar,
        )  # fmt: skip
        new_tokens = sum(len(output.generated_tokens) for output in outputs.values())
        state.record(new_tokens, len(outputs), time.perf_counter() - start, statistics)
        return outputs

    @ServesPrompts
    def init_continuous_batching(
        self, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> Any:
        """Return a ContinuousManager, or transformers' own manager for a model that cannot run ragged."""
        return manager_for(self, generation_config, continuous_batching_config, workload_hints)  # type: ignore[arg-type]

    continuous_batching_context_manager = ServesPrompts(GenerationMixin.continuous_batching_context_manager)

    def destroy_cached_continuous_batching_manager(self) -> None:
        destroy_managers(self)  # type: ignore[arg-type]
        super().destroy_cached_continuous_batching_manager()  # type: ignore[misc]

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        state = self._generation_state
        given = model_kwargs.get(name := state.cache_name)
        served = served_by(self, state, given)
        wanted = state.cache is not None and with_cache(self, generation_config).use_cache is not False  # type: ignore[arg-type]
        # The shape of output_attentions depends on transformers' cache, which drops tokens behind a window.
        wanted = wanted and changed_refusal(self) is None and not generation_config.output_attentions  # type: ignore[arg-type]
        mask, has_beams = model_kwargs.get("attention_mask"), (generation_config.num_beams or 1) > 1
        rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        wanted = wanted and states_refusal(self, mask, rows=rows, has_beams=has_beams) is None  # type: ignore[arg-type]
        wanted = wanted and pages_serve(served.config, generation_mode) and is_given_rows(served, model_kwargs)
        if state.context is not None and (not wanted or generation_config.cache_implementation is not None):
            raise UnsupportedError(
                "ranks share out the context of this model, and this call has no paged cache; leave out use_cache=, "
                "output_attentions= and cache_implementation=, or patch the model without context_parallel="
            )
        if wanted and state.cache is not None and given is None and generation_config.cache_implementation is None:
            kept = cache_for_rows(state, served.config, rows, generation_config.max_length)
            model_kwargs[name] = with_encoder(kept) if served.config.is_encoder_decoder else kept
        else:
            if given is not None:
                model_kwargs[name] = with_encoder(given) if self.config.is_encoder_decoder else given  # type: ignore[attr-defined]
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, *args, **kwargs
            )
        cache = model_kwargs.get(name)
        cache = getattr(cache, "self_attention_cache", cache)
        if isinstance(cache, PagedCache):
            cache.check_config(served.config)
        if state.call is not None:
            state.call.cache = cache if isinstance(cache, PagedCache) else None
            state.call.own_cache = given is None

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Prefill without cached prefixes, and only once for prompts that transformers has repeated."""
        if (call := self._generation_state.call) is not None:
            call.prompt_columns = input_ids.shape[1]
        cache = model_kwargs.get(self._generation_state.cache_name)
        if isinstance(cache, PagedCache) and cache.get_seq_length():
            cache.pages.use_salt(weights_salt(self))  # type: ignore[arg-type]
        text_only = other_input(model_kwargs) is None and not self._generation_state.form.reads_prompts
        text_only = text_only and not (ragged_refusal(self) or learnt_prompt(self) or code_in_passes(self))  # type: ignore[arg-type]
        if not isinstance(cache, PagedCache) or cache.get_seq_length() or not text_only:
            return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        repeats = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if generation_config.output_hidden_states or generation_config.output_attentions:
            repeats = 1
        once = {name: every_nth(value, repeats, len(input_ids)) for name, value in model_kwargs.items()}
        adopt_prefix(self, cache, input_ids[::repeats], once)  # type: ignore[arg-type]
        outputs = super()._prefill(input_ids[::repeats], generation_config, once, *args, **kwargs)  # type: ignore[misc]
        if repeats > 1:
            cache.batch_repeat_interleave(repeats)
            outputs.logits = outputs.logits.repeat_interleave(repeats, dim=0)
        return outputs
