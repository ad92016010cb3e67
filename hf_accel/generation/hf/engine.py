"""Engine: continuous batching for a program that serves requests."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from os import PathLike, fspath
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ...config import CacheConfig, parse_speculative
from ...errors import UnsupportedError
from ...keywords import Default, checked_keywords
from ...models import model_of, vocabulary_size
from ...undo.state import state_of
from ..engine.engine_loop import EngineLoop, make_loop
from ..engine.stream import Request, Sample
from ..prompt_inputs import RequestInputs
from ..request_settings import RequestSettings
from ..sampling.constraint import Constraint
from ..sampling.processors import OneByOne, Processor
from ..sampling.purity import stateful_refusal
from ..sampling.stopping import StopStrings
from ..sequence import Sequence
from .config_settings import ASKED, complete_config, settings_of_config
from .drafting import draft_models, refuse_drafts
from .encoder_source import decoder_prompt
from .generation_state import GenerationState
from .grammars import KEYWORDS, constraint_for
from .part_prompts import prompts_of_part
from .refusals import prompts_refusal, ragged_refusal, refuse_learnt, warn_of_code, warn_once
from .request_adapters import LoadedAdapters
from .request_config import default_new_tokens, request_config
from .session import Session
from .vocabulary import prompt_parts

NOT_GIVEN: Any = Default("not given")
OWN_KEYWORDS = ("max_new_tokens", "stop", "seed", "priority", "n", *ASKED)  # keywords of submit alone
TOKEN_BUDGET = 256  # tokens of a pass; it limits how long a prompt delays sequences in decode


class Engine:
    """Serves requests by continuous batching, in its own thread.

        with hf_accel.Engine(model, tokenizer=tokenizer) as engine:
            request = engine.submit(prompt_ids, max_new_tokens=64, temperature=0.8, seed=1)
            for token in request: ...

        async with hf_accel.Engine(model, tokenizer=tokenizer) as engine:
            result = await engine.submit(prompt_ids, max_new_tokens=64)

    model: a model that was patched by hf_accel. tokenizer: is needed for prompts and stop strings that are text.
    max_tokens: the tokens of all requests that the KV cache holds; None lets it grow as needed, and on a GPU takes as
        many as fit into its free memory. When no block is free, the latest request of the lowest priority is
        preempted: its blocks are released, and it is recomputed later.
    token_budget: the most tokens of a pass, prompts included. A smaller budget gives decoding requests their tokens
        sooner; a larger one gives more tokens per second.
    max_running: the most requests that run at the same time. speculative: a SpeculativeConfig, or what it can be made
        of; left out, the model's own from patch().

    Common prefixes of prompts are stored and computed once. With seed=, the tokens of a request do not depend on other
    requests, if the plan calls the model row-invariant; with a draft model, this needs verify="seeded" too.
    At its end, the `with` block waits until all requests have ended; `async with` lets other coroutines run meanwhile.

    Raises UnsupportedError for a model that is not patched or cannot run ragged.
    """

    @checked_keywords()
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_tokens: int | None = None,
        token_budget: int | None = TOKEN_BUDGET,
        max_running: int | None = None,
        speculative: Any = NOT_GIVEN,
    ) -> None:
        refuse_learnt(model, "an Engine")
        self.model = model_of(model)
        self.tokenizer = tokenizer
        self._reads = prompts_of_part(self.model)
        # Computes the tokens: the model, or the part of it whose generate() that of the model calls.
        self.served = self.model if self._reads is None else self._reads.part
        state = _state(self.served)
        settings = state.cache or CacheConfig()
        if max_tokens is not None:
            settings = dataclasses.replace(settings, max_tokens=max_tokens)
        config = state.speculative if isinstance(speculative, Default) else parse_speculative(speculative)
        if config is not None and self._reads is not None:
            refuse_drafts(self.model, config, f"its generate() calls that of {self._reads.name!r}")
        # The thread must hold no reference to the engine, so that the loop ends when the program drops the engine.
        self.session = Session(
            self.served, settings, speculative=config, token_budget=token_budget, max_running=max_running
        )
        self.loop = make_loop(self.session)
        self.adapters = LoadedAdapters(self.model, partial(_paused, self.loop))
        weakref.finalize(self, self.loop.retire).atexit = False
        speculation = self.session.speculation
        for each in (self.model, self.served, *([] if speculation is None else draft_models(speculation))):
            state_of(each).generation.engines.add(self)
        self._seeds = itertools.count(torch.initial_seed() % 2**62)
        warn_of_code(self.served, "an Engine")

    def __repr__(self) -> str:
        scheduler = self.session.scheduler
        work = f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting" if self.is_live else "closed"
        return f"hf_accel.Engine({type(self.model).__name__}: {work})"

    @property
    def is_live(self) -> bool:
        """True if the engine runs or accepts requests. It is False after close() and in a forked process."""
        return self.loop.is_live

    # -- requests --------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Iterable[int] | Tensor | Mapping[str, Any],
        *,
        max_new_tokens: int | None = None,
        stop: str | Iterable[str] | None = None,
        seed: int | None = None,
        priority: int = 0,
        n: int = 1,
        adapter: str | None = None,
        **sampling: Any,
    ) -> Request:
        """Submit a request and return at once. The Request can be iterated over, waited for and cancelled.

        prompt: token ids, text if the engine has a tokenizer, or all that a processor makes for one prompt with images
        (input_ids, pixel_values, ...). The encoder of an encoder-decoder reads them, or a sound (input_features, ...),
        and decoder_input_ids are what its decoder begins with. Prompts share pages as far as their words and images
        are equal. max_new_tokens, stop: the most new tokens, and the strings that end the text. seed:
        makes the request's tokens reproducible. priority: requests with a higher one go first. n: the number of
        samples, which share the prompt's pages. adapter: the name of an adapter that is loaded; None for the model
        as it is. sampling: what a GenerationConfig says about tokens (top_k, top_p,
        min_p, repetition_penalty, min_new_tokens, bad_words_ids, ...), and these. Left out, settings are those of
        model.generation_config.

        temperature: 0 chooses the most probable token; any other samples.
        presence_penalty, frequency_penalty: are subtracted from the logit of each generated token, the former once,
            the latter for each time that it was generated.
        logit_bias: maps a token id to the number that is added to its logit.
        stop_token_ids: the tokens that end the request. allowed_token_ids: only these tokens are chosen.
        bad_token_ids: these tokens are never chosen.
        processors: functions of (input_ids [1, T] int64, scores [1, V] float32) that return scores, as transformers'
            LogitsProcessor. A request whose processors keep a state is decoded without drafts, because a position is
            processed again if its draft was rejected.
        logprobs: the number of most probable tokens whose log-probabilities are reported next to the chosen token's.
        response_format, regex, grammar, choice: what the text must match, one of them: JSON as in OpenAI's API
            ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}}, or a class of pydantic),
            a regular expression, a grammar (Lark or GBNF), or one of some texts. The text ends where it is complete.
            The engine needs a tokenizer. It is compiled in the calling thread; a large one takes up to two seconds.

        Any thread may call this. Raises UnsupportedError for settings that are not supported, OutOfBlocksError for a
        request that is too long for max_tokens, and HfAccelError if the engine is closed, has broken, or belongs to
        another process. A later error is raised where the Request is read, and ends no other request.
        """
        prompt, sampling = self._read(prompt, sampling)
        ids, inputs = self._begin(*self._prompt(prompt))
        limit = self._limit(max_new_tokens, len(ids))
        ends = (self.served.generation_config.stop_strings or ()) if stop is None else stop
        strings = StopStrings(ends, self._decode)
        constraint = self.constraint(**{name: sampling.pop(name) for name in KEYWORDS if name in sampling})
        asked: dict[str, Any] = {"constraint": constraint, "priority": _integer("priority", priority)}
        asked["adapter"] = None if adapter is None else self.adapters.named(adapter)
        settings = self._settings(sampling, ids, limit, asked, read=inputs.encoder_ids if inputs else ())
        if strings.strings:
            stops = dataclasses.replace(settings.stop, others=(*settings.stop.others, strings))
            settings = dataclasses.replace(settings, stop=stops)
        first = next(self._seeds) * 2654435761 % 2**62 if seed is None else _integer("seed", seed)
        seeds = range(first, first + _integer("n", n, least=1))
        sequences = Sequence.samples(ids, settings, seeds, inputs=inputs)
        self.session.scheduler.require_room(sequences[0])
        return self._hand_over(sequences, strings)

    def constraint(self, **asked: Any) -> Constraint | None:
        """Return what a text must match by these keywords of submit(), compiled; None if it may be any text.

        What was compiled is kept, so that a program can call this ahead of submit(), in another thread. Raises
        UnsupportedError with what is wrong.
        """
        return constraint_for(self.tokenizer, self.served.generation_config, asked)

    def _hand_over(self, sequences: list[Sequence], strings: StopStrings) -> Request:
        # The dict is weak to avoid a cycle. In a cycle, a Request that the program has dropped would live, and be
        # computed, until the garbage collector runs.
        of_sample: weakref.WeakKeyDictionary[Sample, Sequence] = weakref.WeakKeyDictionary()
        text = partial(strings.text_of, sequences[0], self.tokenizer)
        request = Request(
            num_samples=len(sequences),
            decode=None if self.tokenizer is None else text,
            on_cancel=lambda sample: self.loop.cancel(of_sample[sample]),  # keeps the engine alive with the request
            on_wait=self.loop.refuse_own_thread,
        )
        of_sample.update(zip(request.samples, sequences, strict=True))
        self.loop.submit(sequences[0], dict(zip(sequences, request.samples, strict=True)))
        return request

    def _read(self, prompt: Any, asked: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return a prompt as `served` takes it, and what is asked, with the settings that go with the prompt."""
        if self._reads is None:
            return prompt, asked
        with _paused(self.loop):  # so that no tower runs during a pass
            prompt, given = self._reads.read(prompt)
        return prompt, asked if "stop_token_ids" in asked else {**given, **asked}

    def _prompt(self, prompt: Any) -> tuple[list[int], RequestInputs | None]:
        """Return the token ids of a prompt, and what else it brings."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UnsupportedError("prompt is text; give the Engine a tokenizer=, or submit token ids")
            prompt = self.tokenizer(prompt)["input_ids"]
        return prompt_parts(self.served, prompt)

    def _begin(self, ids: list[int], inputs: RequestInputs | None) -> tuple[list[int], RequestInputs | None]:
        """Return the tokens with which the sequences of a prompt begin, and what else it brings."""
        if not self.served.config.is_encoder_decoder:
            return ids, inputs
        config = complete_config(self.served, None, "Engine.submit()", {})
        return decoder_prompt(self.served, config, ids, inputs)

    def _limit(self, max_new_tokens: int | None, num_prompt: int) -> int:
        if max_new_tokens is None:
            return default_new_tokens(self.served.generation_config, num_prompt)
        return _integer("max_new_tokens", max_new_tokens, least=1)

    def _settings(
        self, given: dict[str, Any], ids: list[int], max_new_tokens: int, asked: dict[str, Any], *, read: Iterable[int]
    ) -> RequestSettings:
        """Make the settings of a request. given: what a config says. asked, read: see settings_of_config."""
        config, processors = request_config(self.served, given, OWN_KEYWORDS)
        config.max_new_tokens, config.stop_strings = max_new_tokens, None
        self.served._prepare_special_tokens(config, device=self.served.device)
        sampling = {"num_logprobs": given.get("logprobs"), "takes_drafts": self._takes_drafts(processors, ids)}
        return settings_of_config(self.served, config, ids, asked, processors=processors, encoder_ids=read, **sampling)

    def _takes_drafts(self, processors: Iterable[Processor], ids: list[int]) -> bool:
        functions = [each for step in processors if isinstance(step, OneByOne) for each in step.functions]
        if not functions or self.session.speculation is None:
            return True
        prompt = torch.tensor([ids], device=self.served.device)
        refusal = stateful_refusal(functions, prompt, vocabulary_size(self.served))
        if refusal is not None:
            text = f"requests with this processor are decoded without drafts, because {refusal}; this is said once"
            warn_once(state_of(self.model).generation, refusal, text)
        return refusal is None

    @property
    def _decode(self) -> Callable[[list[int]], str] | None:
        return None if self.tokenizer is None else self.tokenizer.decode

    # -- adapters --------------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str | PathLike[str]) -> None:
        """Load a LoRA adapter that PEFT has saved, for requests that ask for it by submit(adapter=name).

            engine.load_adapter("support", "adapters/support")
            request = engine.submit(prompt_ids, adapter="support")

        Requests with any adapters, and with none, run in the same passes, and those of other adapters share no
        prefixes. The weights of the model stay as they are. Any thread may call this while requests run.

        path: a folder with adapter_config.json and adapter_model.safetensors. Raises UnsupportedError for a name that
        is taken, an adapter that is no LoRA of linear layers alone or does not fit the model, and a model whose
        requests can have none.
        """
        self.adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Requests that run or wait keep it, and its memory is freed when the last one has ended.

        Raises UnsupportedError if none of this name is loaded.
        """
        self.adapters.unload(name)

    # -- the engine itself -----------------------------------------------------------------------------

    @property
    def stats(self) -> dict[str, Any]:
        """Counts since the engine was made: requests, tokens per second of busy time, blocks, prefix hits,
        preemptions, and speculation."""
        totals, scheduler = self.loop.totals, self.session.scheduler
        return {
            **dataclasses.asdict(totals),
            "tokens_per_second": totals.new_tokens / totals.busy_seconds if totals.busy_seconds else 0.0,
            **self.session.statistics(),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "waste": self._waste(),
        }

    def _waste(self) -> float:
        """The share of allocated slots that hold no token now."""
        cached = [sequence.cached for sequence in list(self.session.scheduler.running)]
        return self.session.pages.waste([each for each in cached if each is not None])

    def close(self, *, wait: bool = True) -> None:
        """Accept no more requests, and return when all have ended. wait: False cancels the requests."""
        self.loop.close(wait=wait)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=kind is None)

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await asyncio.to_thread(self.close, wait=kind is None)
        except asyncio.CancelledError:  # nobody waits here any more
            self.loop.retire(cancel=True)
            raise


def _integer(name: str, value: Any, *, least: int | None = None) -> int:
    """Return `value` as an int. It may be any integer type (such as numpy's, or a tensor), but not a bool.

    Raises UnsupportedError for other values, and for an integer below `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        raise UnsupportedError(f"{name}={value!r} must be an integer" + (f" of at least {least}" if least else ""))
    return number


def _paused(loop: EngineLoop) -> AbstractContextManager[None]:
    """Return a block within which the loop computes no pass."""
    return loop.pause() if loop.is_running else nullcontext()


def _state(model: Any) -> GenerationState:
    if isinstance(model, str | PathLike):
        raise UnsupportedError(f"an Engine takes a patched model, not a path; pass hf_accel.load({fspath(model)!r})")
    state = state_of(model).generation
    refusal = ragged_refusal(model) or prompts_refusal(model)
    if refusal is not None:
        way_out = "use model.generate()" if model.can_generate() else "call the model itself"
        raise UnsupportedError(f"an Engine cannot serve this model: {refusal}; {way_out}")
    return state
