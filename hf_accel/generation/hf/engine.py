"""Engine: continuous batching for a program that serves."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ...cache.hf import page_groups
from ...cache.rows import Pages, num_live_tokens
from ...config import CacheConfig, Default, check_keywords, checked_keywords, parse_speculative
from ...errors import UnsupportedError
from ...models import without_adapters
from ..batcher import Batcher
from ..engine import EngineLoop
from ..purity import refuse_stateful
from ..sampling import SamplingParams
from ..sequence import Sequence
from ..stopping import StopRules
from ..stream import Request, Sample
from .defaults import default_new_tokens, sampling_defaults, stop_token_ids
from .drafting import draft_models, make_speculation
from .refusals import ragged_refusal
from .runner import ModelRunner
from .state import STATE, GenerationState
from .step import weights_salt
from .vocabulary import check_ids, token_ids, vocabulary_size

UNSAID: Any = Default("unsaid")
OWN_KEYWORDS = ("max_new_tokens", "stop", "stop_token_ids", "seed", "priority", "n")  # of submit
TOKEN_BUDGET = 256  # of a pass: what a prompt may delay those who are decoding


class Engine:
    """Serves requests as they come, each at its own pace, in a thread of its own.

        with hf_accel.Engine(model, tokenizer=tokenizer) as engine:
            request = engine.submit(prompt_ids, max_new_tokens=64, temperature=0.8, seed=1)
            for token in request: ...

    model: patched by hf_accel. max_tokens: of K and V over all requests; None grows as needed. When there are no more
    blocks, the request that came last, of the lowest priority, gives up its own and is computed again later.
    token_budget: most tokens of a pass, prompts included: smaller keeps those who are decoding moving, larger is more
    per second. max_running: most requests that are under way at once. speculative: as SpeculativeConfig has it; left
    out, as the model was patched. tokenizer: for prompts and stops that are text.

    Prompts that begin alike are stored and computed once. With seed= a request's tokens do not depend on what runs
    beside it (as far as the plan calls the model row-invariant); where a model drafts, with verify="seeded" alone.
    Leaving the `with` block waits for what is under way.

    Raises UnsupportedError for a model that is not patched, or cannot run ragged.
    """

    @checked_keywords()
    def __init__(
        self,
        model: Any,
        *,
        max_tokens: int | None = None,
        tokenizer: Any = None,
        token_budget: int | None = TOKEN_BUDGET,
        max_running: int | None = None,
        speculative: Any = UNSAID,
    ) -> None:
        self.model = without_adapters(model)
        self.tokenizer = tokenizer
        state = _state(self.model)
        settings = state.cache or CacheConfig()
        if max_tokens is not None:
            settings = dataclasses.replace(settings, max_tokens=max_tokens)
        groups, group_of_layer = page_groups(self.model.config, settings)
        runner, self.pages = ModelRunner(self.model, groups, group_of_layer), Pages(groups)
        config = state.speculative if isinstance(speculative, Default) else parse_speculative(speculative)
        self.speculation = make_speculation(config, runner, self.pages)
        batcher = Batcher(runner, self.pages, self.speculation, token_budget=token_budget, max_running=max_running)
        # nothing that the thread holds may hold the engine, so that one that is forgotten comes to an end
        self.loop = EngineLoop(batcher, before_work=functools.partial(_use_weights, self.pages, self.model))
        weakref.finalize(self, self.loop.retire).atexit = False
        for each in (self.model, *draft_models(self.speculation)):
            vars(each)[STATE].generation.engines.add(self)
        self._seeds = itertools.count(torch.initial_seed() % 2**62)

    def __repr__(self) -> str:
        scheduler = self.loop.batcher.scheduler
        work = f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting" if self.is_live else "closed"
        return f"hf_accel.Engine({type(self.model).__name__}: {work})"

    @property
    def is_live(self) -> bool:
        """Whether it computes, or may be asked to: until close(), or the end of its process or of its last holder."""
        return self.loop.is_live

    # -- requests --------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Iterable[int] | Tensor,
        *,
        max_new_tokens: int | None = None,
        stop: str | Iterable[str] = (),
        stop_token_ids: Iterable[int] | None = None,
        seed: int | None = None,
        priority: int = 0,
        n: int = 1,
        **sampling: Any,
    ) -> Request:
        """Take on a request and return at once; the Request streams, waits and cancels.

        prompt: token ids, or text if the engine has a tokenizer. max_new_tokens: the model's own default if left out.
        stop: strings that end the text; stop_token_ids: instead of the model's end-of-sequence ids. priority: higher
        goes first. n: samples, which share the prompt's pages. sampling: as SamplingParams; what is left out is as in
        model.generation_config. From any thread.

        Raises UnsupportedError for what cannot be met, OutOfBlocksError for a request that max_tokens can never hold,
        HfAccelError for an engine that is closed, broken or another process's. An error that comes later is raised
        where the Request is read, and ends no other request.
        """
        ids = self._ids(prompt)
        limits = self._limit(max_new_tokens, len(ids))
        ends = tuple(self._ends() if stop_token_ids is None else stop_token_ids)
        rules = StopRules(ends, stop, decode=self._decode)
        params = self._sampling(sampling, ends)
        first = next(self._seeds) * 2654435761 % 2**62 if seed is None else _integer("seed", seed)
        rank = _integer("priority", priority)
        sequences = [
            Sequence(list(ids), limits, params, stop=rules, seed=first + number, priority=rank)
            for number in range(_integer("n", n, least=1))
        ]
        sequences[0].followers = sequences[1:]
        self.loop.batcher.scheduler.require_room(sequences[0])
        return self._hand_over(sequences, rules)

    def _hand_over(self, sequences: list[Sequence], rules: StopRules) -> Request:
        # weak: in a cycle a handle that was dropped would live, and its request run, until the garbage collector comes
        of_sample: weakref.WeakKeyDictionary[Sample, Sequence] = weakref.WeakKeyDictionary()
        decode = self._decode
        request = Request(
            num_samples=len(sequences),
            decode=None if decode is None else lambda tokens: rules.cut(decode(tokens)),
            on_cancel=lambda sample: self.loop.cancel(of_sample[sample]),  # who holds a request holds its engine
            on_wait=self.loop.refuse_own_thread,
        )
        of_sample.update(zip(request.samples, sequences, strict=True))
        self.loop.submit(sequences[0], dict(zip(sequences, request.samples, strict=True)))
        return request

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UnsupportedError("prompt is text; give the Engine a tokenizer=, or submit token ids")
            prompt = self.tokenizer(prompt)["input_ids"]
        ids = token_ids(prompt)
        check_ids(self.model, ids, "prompt")
        return ids

    def _limit(self, max_new_tokens: int | None, num_prompt: int) -> int:
        if max_new_tokens is None:
            return default_new_tokens(self.model.generation_config, num_prompt)
        return _integer("max_new_tokens", max_new_tokens, least=1)

    def _ends(self) -> Iterable[int]:
        return stop_token_ids(self.model)

    def _sampling(self, given: dict[str, Any], ends: tuple[int, ...]) -> SamplingParams:
        known = {field.name for field in dataclasses.fields(SamplingParams)}
        check_keywords("submit()", given, known.union(OWN_KEYWORDS))
        params = SamplingParams(**{**sampling_defaults(self.model, given), "stop_token_ids": ends})
        if self.speculation.drafters:
            refuse_stateful(params, vocabulary_size(self.model))
        return params

    @property
    def _decode(self) -> Callable[[list[int]], str] | None:
        return None if self.tokenizer is None else self.tokenizer.decode

    # -- the engine itself -----------------------------------------------------------------------------

    @property
    def stats(self) -> dict[str, Any]:
        """Since the engine began: requests, tokens per second while busy, blocks, prefix hits, preemptions, drafts."""
        totals, batcher = self.loop.totals, self.loop.batcher
        pools = [group.pool for group in self.pages.groups]
        speculation = {} if not self.speculation.drafters else self.speculation.statistics.to_dict()
        return {
            **dataclasses.asdict(totals),
            "tokens_per_second": totals.new_tokens / totals.busy_seconds if totals.busy_seconds else 0.0,
            **batcher.statistics(),
            "running": len(batcher.scheduler.running),
            "waiting": len(batcher.scheduler.waiting),
            "blocks_used": sum(pool.num_used for pool in pools),
            "blocks_allocated": sum(pool.num_blocks for pool in pools),
            "waste": self._waste(),
            "speculation": speculation,
        }

    def _waste(self) -> float:
        """The share of held slots without a token, now."""
        pool = self.pages.groups[0].pool
        held = pool.num_used * pool.block_size
        rows = [sequence.row for sequence in list(self.loop.batcher.scheduler.running)]
        return 1 - num_live_tokens([row for row in rows if row is not None], 0) / held if held else 0.0

    def close(self, *, wait: bool = True) -> None:
        """Take on nothing more, and return when all has ended. wait: let requests finish, else cancel them."""
        self.loop.close(wait=wait)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=kind is None)


def _use_weights(pages: Pages, model: Any) -> None:
    """Prefixes that were computed with other weights or adapters are not found any more."""
    pages.use_salt(weights_salt(model))


def _integer(name: str, value: Any, *, least: int | None = None) -> int:
    """Of any kind that counts as one (numpy's, a tensor's); not a bool."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        raise UnsupportedError(f"{name}={value!r} must be an integer" + (f" of at least {least}" if least else ""))
    return number


def _state(model: Any) -> GenerationState:
    if STATE not in getattr(model, "__dict__", {}):
        raise UnsupportedError("the model is not patched; call hf_accel.patch(model) first")
    state: GenerationState = vars(model)[STATE].generation
    refusal = ragged_refusal(model)
    if refusal is not None:
        raise UnsupportedError(f"an Engine cannot serve this model: {refusal}; use model.generate()")
    return state
