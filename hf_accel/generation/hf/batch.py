"""generate_batch: prompts of any length, each to its own end."""

from __future__ import annotations

import dataclasses
import time
from collections import abc
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.utils import logging

from ...cache.hf import page_groups
from ...cache.rows import Pages
from ...config import CacheConfig, SpeculativeConfig, check_keywords
from ...errors import UnsupportedError
from ...state import state_of
from ..batcher import Batcher, Progress
from ..sequence import Sequence
from .defaults import default_new_tokens
from .drafting import keep_learnt, make_speculation
from .processing import StockSampling, StockStop, processors_refusal
from .runner import ModelRunner
from .step import weights_salt
from .vocabulary import check_ids, token_ids

TOKEN_BUDGET = 2048  # of a pass: throughput is all that counts here


@dataclass
class Wanted:
    """One prompt's samples, under stock's names, and when they were asked for."""

    names: list[str]
    sequences: list[Sequence]
    created: float


def generate_batch(
    model: PreTrainedModel,
    inputs: abc.Sequence[abc.Sequence[int]],
    configs: list[GenerationConfig],
    *,
    settings: ContinuousBatchingConfig | None,
    speculative: SpeculativeConfig | None,
    timestamps: bool,
    progress_bar: bool,
) -> tuple[dict[str, GenerationOutput], dict[str, Any]]:
    """Stock's outputs by request, and statistics. configs: one for each prompt, already complete."""
    if isinstance(inputs, abc.Mapping):
        raise UnsupportedError("inputs is a dict, as a tokenizer returns it; give lists of token ids without padding")
    batch = _Batch(model, settings, speculative, timestamps)
    wanted = [batch.wanted(i, ids, config) for i, (ids, config) in enumerate(zip(inputs, configs, strict=True))]
    batch.run([sequence for one in wanted for sequence in one.sequences], progress_bar)
    keep_learnt(speculative, batch.speculation, model)
    outputs = [pair for one in wanted for pair in batch.outputs(one)]
    return dict(outputs), batch.statistics()


def complete_configs(model: Any, given: Any, count: int, keywords: dict[str, Any]) -> list[GenerationConfig]:
    """A GenerationConfig for each prompt, with the model's own defaults and `keywords` over them.

    Raises UnsupportedError for as many configs as there are no prompts, and for keywords that a config does not have.
    """
    many = list(given) if isinstance(given, list | tuple) else [given]
    if isinstance(given, list | tuple) and len(many) != count:
        raise UnsupportedError(f"generation_config has {len(many)} configs for {count} prompts; give one, or one each")
    complete: dict[int, GenerationConfig] = {}
    for config in many:
        if id(config) not in complete:
            complete[id(config)], unknown = model._prepare_generation_config(config, **keywords)
            check_keywords("generate_batch()", unknown, GenerationConfig().to_dict())
            model._prepare_special_tokens(complete[id(config)], device=model.device)
    configs = [complete[id(config)] for config in many]
    return configs * count if len(configs) == 1 else configs


class _Batch:
    """The sequences of one call over pages of its own."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: ContinuousBatchingConfig | None,
        speculative: SpeculativeConfig | None,
        timestamps: bool,
    ) -> None:
        self.model: Any = model
        cache = state_of(model).generation.cache or CacheConfig()
        honoured = _honoured(settings)
        if honoured.get("tokens") is not None:
            cache = dataclasses.replace(cache, max_tokens=honoured["tokens"])
        self.groups, group_of_layer = page_groups(model.config, cache)
        runner, pages = ModelRunner(model, self.groups, group_of_layer), Pages(self.groups)
        pages.use_salt(weights_salt(model))
        self.speculation = make_speculation(speculative, runner, pages)
        self.batcher = Batcher(runner, pages, self.speculation, token_budget=honoured.get("budget") or TOKEN_BUDGET)
        self.logprobs = bool(honoured.get("logprobs"))
        self.times: dict[Sequence, list[float]] = {}
        self.chances: dict[Sequence, list[float]] = {}
        self.timestamps = timestamps
        self.peak_blocks = 0
        self._shared: dict[tuple[int, int], tuple[StockSampling, StockStop]] = {}

    # -- what is asked ---------------------------------------------------------------------------------

    def wanted(self, number: int, prompt: abc.Sequence[int], config: GenerationConfig) -> Wanted:
        ids = token_ids(prompt, f"prompt {number}")
        check_ids(self.model, ids, f"prompt {number}")
        count = config.num_return_sequences or 1
        if (config.num_beams or 1) > 1:
            raise UnsupportedError("generate_batch cannot search with beams; use generate(num_beams=...)")
        sampling, stop = self._rules(config, len(ids))
        seeds = torch.randint(2**62, (count,)).tolist() if config.do_sample else [0] * count
        limit = max(1, default_new_tokens(config, len(ids)))
        sequences = [Sequence(list(ids), limit, sampling, stop=stop, seed=seed) for seed in seeds]
        sequences[0].followers = sequences[1:]
        # stock calls the samples of a prompt its children, and lists them before it
        names = [*(f"req_{number}__child#{i}" for i in range(count - 1)), f"req_{number}"]
        return Wanted(names, sequences, time.perf_counter())

    def _rules(self, config: GenerationConfig, length: int) -> tuple[StockSampling, StockStop]:
        """Shared by all prompts of one config, unless its processors look at the prompt."""
        known = self._shared.get((id(config), 0)) or self._shared.get((id(config), length))
        if known is None:
            processors = self.model._get_logits_processor(
                generation_config=config, input_ids_seq_length=length, device=self.model.device
            )
            criteria = self.model._get_stopping_criteria(generation_config=config, stopping_criteria=[])
            refusal = processors_refusal(processors, criteria, batch_size=1)
            if refusal is not None:
                raise UnsupportedError(
                    f"generate_batch cannot serve this generation_config: {refusal}; use generate()"
                )
            logprobs = 0 if self.logprobs else None
            sampling = StockSampling(processors, greedy=not config.do_sample, num_logprobs=logprobs)
            known = sampling, StockStop.of(criteria, {})
            self._shared[id(config), length if sampling.uses_prefix else 0] = known
        return known

    # -- the run ---------------------------------------------------------------------------------------

    def run(self, sequences: list[Sequence], progress_bar: bool) -> None:
        followers = {follower for sequence in sequences for follower in sequence.followers}
        for sequence in sequences:
            if sequence not in followers:
                self._add(sequence)
        try:
            self._passes(len(sequences), progress_bar)
        except BaseException:
            for sequence in sequences:
                self.batcher.remove(sequence, "cancelled")  # a drafter may be another call's next
            raise

    def _passes(self, total: int, progress_bar: bool) -> None:
        with logging.tqdm(total=total, disable=not progress_bar, desc="generate_batch", unit="request") as bar:
            while self.batcher.has_work:
                for progress in self.batcher.step():
                    self._note(progress)
                    bar.update(progress.sequence.is_finished)
                self.peak_blocks = max(self.peak_blocks, sum(group.pool.num_used for group in self.groups))

    def _add(self, sequence: Sequence) -> None:
        try:
            self.batcher.add(sequence)
        except Exception as error:  # too long for the pages: it alone
            for one in (sequence, *sequence.followers):
                one.error = error

    def _note(self, progress: Progress) -> None:
        if progress.error is not None and not isinstance(progress.error, Exception):
            raise progress.error  # an interrupt is the caller's
        if self.timestamps:
            self.times.setdefault(progress.sequence, []).extend([time.perf_counter()] * len(progress.tokens))
        if progress.logprobs:
            self.chances.setdefault(progress.sequence, []).extend(one.logprob for one in progress.logprobs)

    # -- what came out ---------------------------------------------------------------------------------

    def outputs(self, wanted: Wanted) -> abc.Iterator[tuple[str, GenerationOutput]]:
        for name, sequence in zip(wanted.names, [*wanted.sequences[1:], wanted.sequences[0]], strict=True):
            failed = sequence.error is not None
            yield (
                name,
                GenerationOutput(
                    request_id=name,
                    prompt_ids=sequence.tokens[: sequence.num_prompt],
                    generated_tokens=sequence.tokens[sequence.num_prompt :],
                    logprobs=self.chances.get(sequence, []),
                    error=str(sequence.error) if failed else None,
                    status=RequestStatus.FAILED if failed else RequestStatus.FINISHED,
                    created_time=wanted.created,
                    timestamps=self.times.get(sequence) if self.timestamps else None,
                ),
            )

    def statistics(self) -> dict[str, Any]:
        speculation = {} if not self.speculation.drafters else self.speculation.statistics.to_dict()
        return {"loop": "ragged", **self.batcher.statistics(), "blocks_used": self.peak_blocks, **speculation}


HONOURED = ("page_size", "num_blocks", "max_batch_tokens", "return_logprobs")


def _honoured(settings: ContinuousBatchingConfig | None) -> dict[str, Any]:
    """What of stock's config has a meaning here. Raises UnsupportedError for the rest, where it is not the default."""
    if settings is None:
        return {}
    plain = type(settings)()
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name not in HONOURED and value != getattr(plain, field.name):
            raise UnsupportedError(
                f"continuous_batching_config.{field.name}={value!r} has no meaning in hf_accel's generate_batch; "
                f"leave it at its default ({', '.join(HONOURED)} are honoured)"
            )
    tokens = None if settings.num_blocks is None else settings.num_blocks * (settings.page_size or 1)
    return {"tokens": tokens, "budget": settings.max_batch_tokens, "logprobs": settings.return_logprobs}
