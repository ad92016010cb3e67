"""generate_batch: generates for prompts of any length without padding."""

from __future__ import annotations

from collections import abc
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.utils import logging

from ...config import SpeculativeConfig
from ...errors import UnsupportedError
from .factory import Reply, SequenceFactory, complete_config, session_settings
from .session import Session


def generate_batch(
    model: PreTrainedModel,
    prompts: abc.Sequence[tuple[abc.Sequence[int], GenerationConfig]],
    settings: ContinuousBatchingConfig | None,
    *,
    speculative: SpeculativeConfig | None,
    timestamps: bool,
    progress_bar: bool,
) -> tuple[dict[str, GenerationOutput], dict[str, Any]]:
    """Generate for all prompts. prompts: see with_configs.

    Returns transformers' outputs by the name of their request, and statistics.
    """
    factory = SequenceFactory(model, settings)
    with Session(model, **session_settings(model, settings, speculative)) as session:
        replies = [
            reply
            for number, (ids, config) in enumerate(prompts)
            for reply in factory.make(f"req_{number}", ids, config, timestamps=timestamps, what=f"prompt {number}")
        ]
        _run(session, replies, progress_bar)
        statistics = session.statistics()
        used = {"blocks_used": session.peak_blocks, **statistics.pop("speculation")}
        return {reply.name: reply.output() for reply in replies}, {"loop": "ragged", **statistics, **used}


def with_configs(
    model: Any, inputs: abc.Sequence[abc.Sequence[int]], given: Any, keywords: dict[str, Any]
) -> list[tuple[abc.Sequence[int], GenerationConfig]]:
    """Pair each prompt with a complete GenerationConfig: the model's defaults, overridden by `given` and `keywords`.

    given: a config, a list with a config for each prompt, or None. Raises UnsupportedError for a list of another
    length, for keywords that a GenerationConfig does not have, and for a dict of prompts.
    """
    if isinstance(inputs, abc.Mapping):
        raise UnsupportedError("inputs is a dict, as a tokenizer returns it; give lists of token ids without padding")
    count = len(inputs)
    many = list(given) if isinstance(given, list | tuple) else [given]
    if isinstance(given, list | tuple) and len(many) != count:
        raise UnsupportedError(f"generation_config has {len(many)} configs for {count} prompts; give one, or one each")
    complete: dict[int, GenerationConfig] = {}
    for config in many:
        if id(config) not in complete:
            complete[id(config)] = complete_config(model, config, "generate_batch()", keywords)
    configs = [complete[id(config)] for config in many]
    return list(zip(inputs, configs * count if len(configs) == 1 else configs, strict=True))


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
