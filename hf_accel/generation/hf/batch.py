"""generate_batch, which needs no padding; sequences from prompts and configs, and transformers' outputs from them."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import abc
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.utils import logging

from ...cache.hf import share_settings
from ...config import CacheConfig, SpeculativeConfig
from ...errors import UnsupportedError
from ...keywords import Default, check_keywords
from ...linear.adapters import Adapter
from ...tensors import model_device
from ...undo.state import state_of
from ..sampling.choice import TokenLogprobs
from ..sampling.constraint import Constrained, Constraint, answers
from ..sampling.processors import Processor
from ..sampling.sampling import Sampling
from ..sequence import Sequence, StopRules
from .encoder_source import decoder_prompt
from .grammars import KEYWORDS, take_constraint
from .processing import processors_refusal, stock_sampling, stop_rules
from .refusals import refuse_clocks
from .request_adapters import read_adapter, refuse_other_rows
from .request_config import default_new_tokens
from .session import Session
from .vocabulary import prompt_parts


class BatchPrompt(NamedTuple):
    """A prompt of a batch, with a complete config, the adapter that it asks for, and what its answers must match."""

    ids: Any
    config: GenerationConfig
    adapter: Adapter | None = None
    constraint: Constraint | None = None


def generate_batch(
    model: PreTrainedModel,
    prompts: abc.Sequence[BatchPrompt],
    settings: ContinuousBatchingConfig | None,
    *,
    speculative: SpeculativeConfig | None,
    timestamps: bool,
    progress_bar: bool,
) -> tuple[dict[str, GenerationOutput], dict[str, Any]]:
    """Generate for all prompts.

    Returns transformers' outputs by the name of their request, and statistics.
    """
    factory = SequenceFactory(model, settings)
    with Session(model, **session_settings(model, settings, speculative)) as session:
        replies = [
            reply
            for number, prompt in enumerate(prompts)
            for reply in factory.make(f"req_{number}", prompt, timestamps=timestamps, what=f"prompt {number}")
        ]
        _run(session, replies, progress_bar)
        statistics = session.statistics()
        used = {"blocks_used": session.peak_blocks, **statistics.pop("speculation")}
        return {reply.name: reply.output() for reply in replies}, {"loop": "ragged", **statistics, **used}


def refuse_own_keywords(generation_config: Any, given: dict[str, Any], refusal: str) -> None:
    """Raise UnsupportedError for what transformers' own generate_batch does not take.

    given: its other keywords. refusal: why it must run.
    """
    values = [given.get(name) for name in ("speculative", "adapter", *KEYWORDS)]
    others = any(value is not None and not isinstance(value, Default) for value in values)
    if isinstance(generation_config, list | tuple) or others:
        raise UnsupportedError(
            "only hf_accel's own generate_batch takes speculative=, adapter=, response_format= or a list of configs, "
            f"and it cannot serve this model: {refusal}; give one generation_config, and none of the others"
        )


def with_configs(
    model: Any, inputs: abc.Sequence[Any], given: Any, keywords: dict[str, Any], *, adapter: Any
) -> list[BatchPrompt]:
    """Give each prompt a complete GenerationConfig: the model's defaults, overridden by `given` and `keywords`.

    keywords: may also have tokenizer=, with one that says what the answers must match. given: a config, a list with a
    config for each prompt, or None. adapter: the folder of one, a list with one or None for each prompt, or None.
    Raises UnsupportedError for a list of another length, for keywords that a GenerationConfig does not have, for a
    dict of prompts, and what read_adapter raises.
    """
    if isinstance(inputs, abc.Mapping):
        raise UnsupportedError("inputs is a dict, as a tokenizer returns it; give lists of token ids without padding")
    count, keywords = len(inputs), dict(keywords)
    is_matched = not set(KEYWORDS).isdisjoint(keywords)
    constraint = take_constraint(model, keywords, given)
    if is_matched:
        keywords.pop("tokenizer", None)
    many = list(given) if isinstance(given, list | tuple) else [given]
    if isinstance(given, list | tuple) and len(many) != count:
        raise UnsupportedError(f"generation_config has {len(many)} configs for {count} prompts; give one, or one each")
    complete: dict[int, GenerationConfig] = {}
    for config in many:
        if id(config) not in complete:
            complete[id(config)] = complete_config(model, config, "generate_batch()", keywords)
    configs = [complete[id(config)] for config in many]
    paths = list(adapter) if isinstance(adapter, list | tuple) else [adapter] * count
    if len(paths) != count:
        raise UnsupportedError(f"adapter has {len(paths)} folders for {count} prompts; give one, or one each")
    read = {path: read_adapter(model, str(path), path) for path in {*paths} - {None}}
    for each in read.values():
        if each.outside:
            refuse_other_rows(model, each)
    adapters = [None if path is None else read[path] for path in paths]
    configs = configs * count if len(configs) == 1 else configs
    return list(map(BatchPrompt, inputs, configs, adapters, [constraint] * count))


def _run(session: Session, replies: list[Reply], progress_bar: bool) -> None:
    of_sequence = {reply.sequence: reply for reply in replies}
    followers = {follower for sequence in of_sequence for follower in sequence.followers}
    for sequence in of_sequence:
        if sequence not in followers:
            try:
                session.add(sequence)
            except Exception as error:  # it is too long for the pages; the other prompts can go on
                for sample in (sequence, *sequence.followers):
                    sample.error = error
    with logging.tqdm(total=len(replies), disable=not progress_bar, desc="generate_batch", unit="request") as bar:
        while session.has_work:
            for progress in session.step():
                if progress.error is not None and not isinstance(progress.error, Exception):
                    raise progress.error  # for example, a KeyboardInterrupt
                of_sequence[progress.sequence].record(progress.tokens, progress.logprobs)
                bar.update(progress.sequence.is_finished)


# -- sequences and outputs -----------------------------------------------------------------------------------

# Keywords of generate() that are no fields of a config, and what serves instead.
MEANT = {
    "prefix_allowed_tokens_fn": "generate(), or Engine.submit(processors=)",
    "logits_processor": "generate(logits_processor=), or Engine.submit(processors=)",
    "stopping_criteria": "generate(stopping_criteria=), or Engine.submit(stop=)",
    "streamer": "generate(streamer=), or Engine.submit(), whose requests stream",
    "assistant_model": "speculative=",
    "input_ids": "inputs=, a list of token ids for each prompt",
    "attention_mask": "lists of token ids without padding",
    "tokenizer": "response_format=, ..., or stop strings in generate(), or Engine(tokenizer=)",
}
TOKEN_BUDGET = 2048  # tokens of a pass; it is large because only throughput counts here


@dataclass(eq=False)
class Reply:
    """The results of one sequence so far, from which transformers' GenerationOutput is made.

    timestamps: the time of each new token, or None if they are not recorded. created, started: the times at which the
    request was made and got its first tokens; started is -1 before that. Times are those of time.perf_counter.
    """

    name: str
    sequence: Sequence
    timestamps: list[float] | None = None
    created: float = field(default_factory=time.perf_counter)
    started: float = -1
    logprobs: list[float] = field(default_factory=list)
    error: BaseException | None = None

    def record(self, tokens: abc.Sequence[int], logprobs: abc.Sequence[TokenLogprobs] | None) -> None:
        now = time.perf_counter()
        self.started = now if self.started < 0 else self.started
        if self.timestamps is not None:
            self.timestamps += [now] * len(tokens)
        self.logprobs += [one.logprob for one in logprobs or ()]

    def output(self) -> GenerationOutput:
        sequence, error = self.sequence, self.error or self.sequence.error
        encoder_ids = () if sequence.inputs is None else sequence.inputs.encoder_ids
        ended = RequestStatus.FINISHED if sequence.is_finished else RequestStatus.DECODING
        return GenerationOutput(
            request_id=self.name,
            prompt_ids=list(encoder_ids) or sequence.tokens[: sequence.num_prompt],
            generated_tokens=sequence.tokens[sequence.num_prompt :],
            logprobs=list(self.logprobs),
            error=None if error is None else str(error),
            status=ended if error is None else RequestStatus.FAILED,
            created_time=self.created,
            lifespan=(self.started, time.perf_counter() if sequence.is_finished else -1),
            timestamps=None if self.timestamps is None else list(self.timestamps),
        )


class SequenceFactory:
    """Makes the sequences of one model."""

    def __init__(self, model: PreTrainedModel, settings: ContinuousBatchingConfig | None) -> None:
        self.model: Any = model
        self.num_logprobs = 0 if settings is not None and settings.return_logprobs else None
        seed = getattr(settings, "seed", None)
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def make(self, name: str, asked: BatchPrompt, *, timestamps: bool, what: str) -> list[Reply]:
        """Make the sequences of one prompt's samples, in the order of transformers: the leader comes last.

        what: the name of the prompt for error messages.
        Raises UnsupportedError for ids or a config that are not supported.
        """
        config, constraint = asked.config, asked.constraint
        ids, inputs = prompt_parts(self.model, asked.ids, what)
        count = config.num_return_sequences or 1
        if self.model.config.is_encoder_decoder:
            ids, inputs = decoder_prompt(self.model, config, ids, inputs)
        steps = [] if constraint is None else [Constrained()]
        sampling, stop = request_rules(self.model, config, len(ids), processors=steps, num_logprobs=self.num_logprobs)
        seeds = torch.randint(2**62, (count,), generator=self._generator).tolist() if config.do_sample else [0] * count
        limit = max(1, default_new_tokens(config, len(ids)))
        sequences = [Sequence(list(ids), limit, sampling, stop=stop, seed=seed, inputs=inputs) for seed in seeds]
        sequences[0].followers = sequences[1:]
        for sequence in sequences:
            sequence.constraint = None if constraint is None else constraint.fork()
            sequence.adapter = asked.adapter
        names = [*(f"{name}__child#{i}" for i in range(count - 1)), name]
        return [
            Reply(own, sequence, [] if timestamps else None)
            for own, sequence in zip(names, [*sequences[1:], sequences[0]], strict=True)
        ]


def request_rules(
    model: Any,
    config: GenerationConfig,
    num_prompt: int,
    *,
    processors: abc.Iterable[Processor] = (),
    num_logprobs: int | None = None,
    takes_drafts: bool = True,
) -> tuple[Sampling, StopRules]:
    """Make the Sampling and StopRules of a request from a GenerationConfig whose special tokens are prepared.

    processors: what is applied after the config's own processors, and before its warpers. takes_drafts: see Sampling.
    Raises UnsupportedError for settings that continuous batching cannot serve, and for values that have no meaning.
    """
    if (config.num_beams or 1) > 1:
        raise UnsupportedError(
            f"continuous batching cannot search with num_beams={config.num_beams}; set it to 1, or use generate()"
        )
    refuse_clocks(model, config)
    config, added = copy.copy(config), list(processors)
    config.max_length = num_prompt + default_new_tokens(config, num_prompt)
    try:
        all_processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=num_prompt,
            logits_processor=added,
            device=model.device,
        )
        criteria = model._get_stopping_criteria(generation_config=config, stopping_criteria=[])
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"the settings of this request have no meaning: {error}") from error
    refusal = processors_refusal(all_processors)
    if refusal is not None:
        raise UnsupportedError(f"continuous batching cannot serve this generation_config: {refusal}; use generate()")
    sampling = stock_sampling(
        all_processors, greedy=not config.do_sample, num_logprobs=num_logprobs, takes_drafts=takes_drafts
    )
    rules = stop_rules(criteria)
    if Constrained() in added:
        rules = dataclasses.replace(rules, others=(answers, *rules.others))
    return sampling, rules


def complete_config(model: Any, config: GenerationConfig | None, what: str, keywords: dict[str, Any]) -> Any:
    """Return a copy of a config, or of the model's own, updated with `keywords`, with its special tokens as tensors.

    what: the name of the call for error messages. Raises UnsupportedError for keywords that a GenerationConfig does
    not have.
    """
    complete, _ = model._prepare_generation_config(config)
    fields = [name for name in GenerationConfig().to_dict() if not name.startswith("_")]
    known_as = "it takes the fields of a GenerationConfig"
    check_keywords(what, complete.update(**keywords), fields, MEANT, known_as=known_as)
    model._prepare_special_tokens(complete, device=model.device)
    return complete


# -- transformers' ContinuousBatchingConfig ----------------------------------------------------------------


def with_fields(
    given: ContinuousBatchingConfig | None, keywords: dict[str, Any]
) -> tuple[ContinuousBatchingConfig | None, dict[str, Any]]:
    """Return a config that has those of the keywords that are its fields, and the other keywords."""
    names = {field_.name for field_ in dataclasses.fields(ContinuousBatchingConfig)}
    own = {name: value for name, value in keywords.items() if name in names}
    if not own:
        return given, keywords
    config = dataclasses.replace(given or ContinuousBatchingConfig(), **own)
    return config, {name: value for name, value in keywords.items() if name not in own}


HONOURED = (
    "page_size", "num_blocks", "max_batch_tokens", "return_logprobs", "max_requests_per_batch", "allow_block_sharing",
    "max_queue_size", "per_request_processors", "seed", "block_size", "max_memory_percent",
)  # fmt: skip
# These settings choose details of transformers' own loop. They have no effect here, and need none.
WITHOUT_EFFECT = (
    "drop_unsupported_processors", "auto_switch_to_flash", "disable_nccl_graph_mixing", "cpu_group_timeout",
    "cpu_offload_space_safety_threshold",
)  # fmt: skip


def session_settings(
    model: Any, given: ContinuousBatchingConfig | None, speculative: SpeculativeConfig | None
) -> dict[str, Any]:
    """Return the keywords for a Session of the model that a ContinuousBatchingConfig asks for.

    Raises UnsupportedError for fields that are set and have no meaning here.
    """
    cache = state_of(model).generation.cache or CacheConfig()
    if given is None:
        return {"cache": cache, "speculative": speculative, "token_budget": TOKEN_BUDGET}
    plain = type(given)()
    for field_ in dataclasses.fields(given):
        name, value = field_.name, getattr(given, field_.name)
        is_set = value != getattr(plain, name) and not (value is False and getattr(plain, name) is None)
        if is_set and name not in HONOURED + WITHOUT_EFFECT:
            raise UnsupportedError(
                f"continuous_batching_config.{name}={value!r} has no meaning in hf_accel's continuous batching; "
                f"leave it at its default ({', '.join(HONOURED)} are honoured)"
            )
    asked = {name: getattr(given, name, None) for name in HONOURED}  # older transformers have fewer fields
    if asked["num_blocks"] is not None:
        size = asked["page_size"] or asked["block_size"] or 1
        cache = dataclasses.replace(cache, max_tokens=asked["num_blocks"] * size)
    if asked["allow_block_sharing"] is False:
        cache = dataclasses.replace(cache, prefix_sharing=False)
    budget, share = asked["max_batch_tokens"] or TOKEN_BUDGET, asked["max_memory_percent"]
    if share is not None:
        if not 0 < share <= 1:
            raise UnsupportedError(
                f"max_memory_percent={share!r} is a share of the free memory, above 0 and at most 1"
            )
        cache = share_settings(model, cache, model_device(model), rows=budget, share=share)
    return {
        "cache": cache,
        "speculative": speculative,
        "token_budget": budget,
        "max_running": asked["max_requests_per_batch"],
    }
