"""generate_batch, which needs no padding; sequences from prompts and configs, and transformers' outputs from them."""

from __future__ import annotations

import dataclasses
import time
from collections import abc
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.utils import logging

from ...cache.hf import share_settings
from ...config import CacheConfig, SpeculativeConfig
from ...errors import UnsupportedError
from ...keywords import Default
from ...tensors import model_device
from ...undo.state import state_of
from ..sampling.choice import TokenLogprobs
from ..sequence import Sequence
from .config_settings import ASKED, complete_config, settings_of_config
from .encoder_source import decoder_prompt
from .generation_state import CallState
from .grammars import KEYWORDS, take_constraint
from .kept_runners import keep_runner, take_kept
from .refusals import warn_of_code
from .request_adapters import adapters_of_prompts
from .session import Session, with_pages_for
from .vocabulary import prompt_parts


class BatchPrompt(NamedTuple):
    """A prompt of a batch, with a complete config, and the fields of its RequestSettings that no config has."""

    ids: Any
    config: GenerationConfig
    asked: abc.Mapping[str, Any] = MappingProxyType({})


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
    warn_of_code(model, "generate_batch()")
    factory = SequenceFactory(model, settings)
    replies = [
        reply
        for number, prompt in enumerate(prompts)
        for reply in factory.make(f"req_{number}", prompt, timestamps=timestamps, what=f"prompt {number}")
    ]
    keywords, state = session_settings(model, settings, speculative), state_of(model).generation
    asked = keywords["cache"]
    most = _most_tokens(replies, asked.block_size)
    kept = take_kept(state, model.config, asked, most) if asked.directory is None else None
    drafted = {"speculative": speculative, "token_budget": keywords["token_budget"]}
    keywords["cache"] = kept or with_pages_for(model, asked, most_tokens=most, **drafted)
    with state.calling(state.call or CallState()), Session(model, **keywords) as session:
        _run(session, replies, progress_bar)
        statistics = session.statistics()
    if asked.directory is None:
        keep_runner(state, session.runner, asked)
    used = {"blocks_used": session.peak_blocks, **statistics.pop("speculation")}
    return {reply.name: reply.output() for reply in replies}, {"loop": "ragged", **statistics, **used}


def _most_tokens(replies: abc.Sequence[Reply], block_size: int) -> int:
    """Return the most tokens in the pages at once, with room for drafts; a power of 2, which many calls share."""
    held = sum(len(each.sequence.tokens) + each.sequence.num_left + 2 * block_size for each in replies)
    return max(block_size, 1 << (held - 1).bit_length())


def without_own_keywords(generation_config: Any, given: dict[str, Any], refusal: str) -> dict[str, Any]:
    """Return the keywords that transformers' own generate_batch takes. Raises UnsupportedError if others are given.

    given: those of ours, generation_config aside. refusal: why it must run.
    """
    own = {name: given.pop(name) for name in ("speculative", *ASKED) if name in given}
    others = any(value is not None and not isinstance(value, Default) for value in own.values())
    if isinstance(generation_config, list | tuple) or others:
        raise UnsupportedError(
            "only hf_accel's own generate_batch takes speculative=, adapter=, response_format= or a list of configs, "
            f"and it cannot serve this model: {refusal}; give one generation_config, and none of the others"
        )
    return given


def with_configs(model: Any, inputs: abc.Sequence[Any], given: Any, keywords: dict[str, Any]) -> list[BatchPrompt]:
    """Give each prompt a complete GenerationConfig: the model's defaults, overridden by `given` and `keywords`.

    keywords: may also have those of ASKED: adapter=, the folder of one, or a list with one or None for each prompt,
    and, with tokenizer=, one that says what the answers must match. given: a config, a list with a config for each
    prompt, or None.
    Raises UnsupportedError for a list of another length, for keywords that a GenerationConfig does not have, for a
    dict of prompts, and what adapters_of_prompts raises.
    """
    if isinstance(inputs, abc.Mapping):
        raise UnsupportedError("inputs is a dict, as a tokenizer returns it; give lists of token ids without padding")
    count, keywords = len(inputs), dict(keywords)
    folders = keywords.pop("adapter", None)
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
    adapters = adapters_of_prompts(model, folders, count)
    asked = [{"adapter": adapter, "constraint": constraint} for adapter in adapters]
    configs = configs * count if len(configs) == 1 else configs
    return list(map(BatchPrompt, inputs, configs, asked))


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

    def make(self, name: str, prompt: BatchPrompt, *, timestamps: bool, what: str) -> list[Reply]:
        """Make the sequences of one prompt's samples, in the order of transformers: the leader comes last.

        what: the name of the prompt for error messages.
        Raises UnsupportedError for ids or a config that are not supported.
        """
        config = prompt.config
        ids, inputs = prompt_parts(self.model, prompt.ids, what)
        count = config.num_return_sequences or 1
        if self.model.config.is_encoder_decoder:
            ids, inputs = decoder_prompt(self.model, config, ids, inputs)
        read = () if inputs is None else inputs.encoder_ids
        settings = settings_of_config(
            self.model, config, ids, prompt.asked, encoder_ids=read, num_logprobs=self.num_logprobs
        )
        seeds = torch.randint(2**62, (count,), generator=self._generator).tolist() if config.do_sample else [0] * count
        sequences = Sequence.samples(ids, settings, seeds, inputs=inputs)
        names = [*(f"{name}__child#{i}" for i in range(count - 1)), name]
        return [
            Reply(own, sequence, [] if timestamps else None)
            for own, sequence in zip(names, [*sequences[1:], sequences[0]], strict=True)
        ]


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
