"""Random programmes of requests on one session of a model: every answer must be that of the request alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import ContinuousBatchingConfig

from hf_accel import CacheConfig, Draft, Drafter, SpeculativeConfig
from hf_accel.generation.hf.batch import BatchPrompt, SequenceFactory
from hf_accel.generation.hf.config_settings import complete_config
from hf_accel.generation.hf.session import Session
from hf_accel.generation.request_settings import RequestSettings, StopRules
from hf_accel.generation.sequence import Sequence
from hf_accel.generation.speculation.drafters.drafter import copy_from

MOST_ALIVE = 10
BLOCK_SIZES = (1, 4, 8)


class Broken(RuntimeError):
    """What a model or a drafter raises when a programme tells it to."""


@dataclass
class Asked:
    """Prompts for one patched model, and what it writes behind each of them.

    greedy: the tokens that stock writes behind the prompt of this number. needs: the tokens of a cache in which the
    longest prompt fits with its answer.
    """

    model: Any
    prompts: list[Any]
    greedy: Callable[[int], list[int]]
    needs: int
    drawn: dict[tuple[int, int, bool], list[int]] = field(default_factory=dict)

    def sampled(self, number: int, sequence: Sequence, *, drafts: bool) -> list[int]:
        """Return the tokens that a session draws with the seed of a sequence, where the request is alone.

        drafts: whether the session has a drafter. Its verifier draws by another rule, for which drafts do not matter.
        """
        key = number, sequence.seed, drafts
        if key not in self.drawn:
            ends, sampling = StopRules(sequence.settings.stop.token_ids), sequence.settings.sampling
            settings = RequestSettings(len(self.greedy(number)), sampling, ends)
            own = Sequence(list(sequence.tokens), settings, sequence.inputs, sequence.seed)
            speculative = SpeculativeConfig(drafter="ngram", num_draft=2, verify="seeded") if drafts else None
            with Session(self.model, CacheConfig(block_size=4), speculative=speculative) as session:
                session.add(own)
                while session.has_work:
                    session.step()
            self.drawn[key] = own.tokens[own.num_prompt :]
        return self.drawn[key]


class Foreseen(Drafter):
    """Drafts what will be written, with wrong tokens among it; raises once when it is told to."""

    name = "foreseen"
    is_free = True

    def __init__(self, numbers: random.Random, expected: dict[Sequence, list[int]], vocabulary: int) -> None:
        self.numbers, self.expected, self.vocabulary = numbers, expected, vocabulary
        self.right, self.fails = numbers.choice([0.3, 0.8, 1.0]), False

    def propose(self, sequences: Any, lengths: Any) -> list[Draft]:
        if self.fails:
            self.fails = False
            raise Broken("the drafter")
        return [Draft(self._draft(*pair)) for pair in zip(sequences, lengths, strict=True)]

    def _draft(self, sequence: Sequence, length: int) -> list[int]:
        known = sequence.tokens[: sequence.num_prompt] + self.expected[sequence]
        start, draw = len(sequence.tokens), self.numbers
        text = known[start : start + length] or copy_from(sequence.tokens, 0, length)
        return [token if draw.random() < self.right else draw.randrange(self.vocabulary) for token in text]


class Programme:
    """Draws what happens next: a request arrives, one is cancelled, or a pass runs, which may fail.

    happened: counts what has happened, by its name.
    """

    def __init__(self, asked: Asked, seed: int) -> None:
        self.random, self.asked = random.Random(seed), asked
        self.expected: dict[Sequence, list[int]] = {}  # of all that are alive
        self.streamed: dict[Sequence, list[int]] = {}
        self.happened: Counter[str] = Counter()
        self.fails: str | None = None
        vocabulary = asked.model.config.get_text_config(decoder=True).vocab_size
        self.drafter = Foreseen(self.random, self.expected, vocabulary)
        self.session = self.make_session()
        self.factory = SequenceFactory(asked.model, ContinuousBatchingConfig(seed=self.random.randrange(4)))
        self.runner, self.session.runner = self.session.runner, self.run

    def make_session(self) -> Session:
        draw, needs = self.random.choice, self.asked.needs
        cache = CacheConfig(block_size=draw(BLOCK_SIZES), max_tokens=draw([needs, 2 * needs, 8 * needs]))
        drafts = SpeculativeConfig(drafter=self.drafter, num_draft=draw([1, 3, 6]), verify="seeded")
        return Session(
            self.asked.model,
            cache,
            speculative=draw([None, drafts]),
            token_budget=draw([None, 5, 16, 64]),
            max_running=draw([None, None, 3]),
        )

    def run(self, *args: Any, **keywords: Any) -> Any:
        """Call the model, or fail before or after it."""
        if self.fails == "before":
            raise Broken("before the model")
        logits = self.runner(*args, **keywords)
        if self.fails == "after":
            raise Broken("after the model")
        return logits

    # -- what happens ----------------------------------------------------------------------------------

    def play(self, arrivals: int) -> None:
        """Let so many requests arrive, and go on until none is left."""
        while arrivals or self.expected:
            draw = self.random.random()
            if arrivals and (draw < 0.4 or not self.expected) and len(self.expected) < MOST_ALIVE:
                self.arrive()
                arrivals -= 1
            elif 0.4 <= draw < 0.43 and self.expected:
                self.cancel()
            else:
                self.run_pass(fails=draw > 0.98)
        assert all(group.pool.num_used == 0 for group in self.session.pages.groups)
        counts = self.session.statistics()
        self.happened += Counter(preempted=counts["preemptions"], shared=counts["prefix_hits"])
        self.happened["accepted"] += counts["speculation"].get("accepted", 0)
        self.session.close()

    def arrive(self) -> None:
        draw, number = self.random, self.random.randrange(len(self.asked.prompts))
        samples = draw.choice([{}, {}, {}, {"do_sample": True}, {"do_sample": True, "num_return_sequences": 3}])
        limit = draw.randint(1, len(self.asked.greedy(number)))
        settings = {"do_sample": False} | samples | {"max_new_tokens": limit}
        config = complete_config(self.asked.model, None, "a programme", settings)
        prompt = BatchPrompt(self.asked.prompts[number], config, {"priority": draw.choice([0, 0, 1])})
        replies = self.factory.make("", prompt, timestamps=False, what="a prompt")
        self.session.add(self.leader([reply.sequence for reply in replies]))
        drafts = self.session.speculation is not None
        for sequence in (reply.sequence for reply in replies):
            whole = self.asked.sampled(number, sequence, drafts=drafts) if samples else self.asked.greedy(number)
            self.expected[sequence], self.streamed[sequence] = whole[:limit], []
        self.happened["samples" if len(replies) > 1 else "arrived"] += 1

    @staticmethod
    def leader(family: list[Sequence]) -> Sequence:
        return next(sequence for sequence in family if len(sequence.followers) == len(family) - 1)

    def cancel(self) -> None:
        sequence = self.random.choice(list(self.expected))
        self.session.remove(sequence, "cancelled")
        del self.expected[sequence]
        self.happened["cancelled"] += 1

    def run_pass(self, *, fails: bool) -> None:
        if fails:
            self.fails = self.random.choice(["before", "after", None])
            self.drafter.fails = self.fails is None and self.session.speculation is not None
        try:
            progress = self.session.step()
        except Broken:
            self.happened["failed"] += 1
            return
        finally:
            self.fails, self.drafter.fails = None, False
        for each in progress:
            self.check(each.sequence, each.tokens, each.error)

    def check(self, sequence: Sequence, tokens: list[int], error: BaseException | None) -> None:
        assert error is None
        self.streamed[sequence] += tokens
        wanted, found = self.expected[sequence], self.streamed[sequence]
        assert found == wanted[: len(found)] and sequence.tokens[sequence.num_prompt :] == found
        if sequence.is_finished:
            assert found == wanted
            del self.expected[sequence]
            self.happened["finished"] += 1
