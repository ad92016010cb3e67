"""Random programmes of requests on one session of a model: every answer must be that of the request alone."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from transformers import ContinuousBatchingConfig

from hf_accel import CacheConfig, Draft, Drafter, SpeculativeConfig, UnsupportedError
from hf_accel.generation.hf.adapter_folder import CONFIG, PREFIX, WEIGHTS
from hf_accel.generation.hf.batch import BatchPrompt, SequenceFactory
from hf_accel.generation.hf.config_settings import complete_config
from hf_accel.generation.hf.request_adapters import _known_layers, read_adapter, refuse_other_rows
from hf_accel.generation.hf.session import Session
from hf_accel.generation.request_settings import StopRules
from hf_accel.generation.sampling.constraint import Constraint
from hf_accel.generation.sequence import Sequence
from hf_accel.generation.speculation.drafters.drafter import copy_from

MOST_ALIVE = 10
BLOCK_SIZES = (1, 4, 8)


class Broken(RuntimeError):
    """What a model or a drafter raises when a programme tells it to."""


class Pattern:
    """A Matcher that allows two of three tokens, other ones after each text, and sometimes one alone."""

    def __init__(self, vocabulary: int, taken: list[int] | None = None) -> None:
        self.vocabulary, self.taken = vocabulary, list(taken or ())

    def _allowed(self, taken: list[int]) -> list[int]:
        total = sum(taken) + 5 * len(taken)
        if total % 4 == 0:
            return [3 + total % (self.vocabulary - 3)]
        return [token for token in range(self.vocabulary) if (token + total) % 3]

    def deep_copy(self) -> Self:
        return type(self)(self.vocabulary, self.taken)

    def validate_tokens(self, tokens: list[int]) -> int:
        fits = (token in self._allowed(self.taken + tokens[:at]) for at, token in enumerate(tokens))
        return next((at for at, each in enumerate(fits) if not each), len(tokens))

    def consume_tokens(self, tokens: list[int]) -> bool:
        self.taken += tokens
        return True

    def rollback(self, num_tokens: int) -> bool:
        del self.taken[len(self.taken) - num_tokens :]
        return True

    def compute_bitmask(self) -> bytes:
        bits = bytearray(-(-self.vocabulary // 8))
        for token in self._allowed(self.taken):
            bits[token // 8] |= 1 << token % 8
        return bytes(bits)

    def compute_ff_tokens(self) -> list[int]:
        found: list[int] = []
        while len(allowed := self._allowed(self.taken + found)) == 1 and len(found) < 3:
            found += allowed
        return found

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""


@dataclass
class Asked:
    """Prompts for one patched model, and what it writes behind each of them.

    stocks: the tokens that stock writes behind the prompt of a number, at most so many. most: tokens that a request
    asks for. needs: the tokens of a cache in which the longest prompt fits with its answer.
    """

    model: Any
    prompts: list[Any]
    stocks: Callable[[int, int], list[int]]
    most: int
    needs: int
    written: dict[tuple[Any, ...], tuple[int, list[int]]] = field(default_factory=dict)

    @cached_property
    def vocabulary(self) -> int:
        size: int = self.model.config.get_text_config(decoder=True).vocab_size
        return size

    @cached_property
    def adapters(self) -> list[Any]:
        """Two adapters of some linear layers, or none where requests of the model can have none."""
        try:
            found = [adapter_of(self.model, seed) for seed in (1, 2)]
            for each in found:
                refuse_other_rows(self.model, each)
            return found
        except UnsupportedError:
            return []

    def greedy(self, number: int, count: int) -> list[int]:
        """Return the first tokens that stock writes behind the prompt of this number."""
        return self._first(count, (number,), lambda count: self.stocks(number, count))

    def alone(self, number: int, sequence: Sequence, count: int, *, drafts: bool) -> list[int]:
        """Return the first tokens that a session gives for what a sequence asks for, where the request is alone.

        drafts: whether the session has a drafter. Its verifier draws by another rule, for which drafts do not matter.
        """
        asked = sequence.settings
        samples = None if asked.sampling.greedy else sequence.seed

        def write(count: int) -> list[int]:
            settings = replace(asked, max_new_tokens=count, stop=StopRules(asked.stop.token_ids), priority=0)
            own = Sequence(list(sequence.tokens), settings, sequence.inputs, sequence.seed)
            speculative = SpeculativeConfig(drafter="ngram", num_draft=2, verify="seeded") if drafts else None
            with Session(self.model, CacheConfig(block_size=4), speculative=speculative) as session:
                session.add(own)
                while session.has_work:
                    session.step()
            return own.tokens[own.num_prompt :]

        return self._first(count, (number, samples, drafts, asked.constraint is not None, asked.adapter), write)

    def _first(self, count: int, key: tuple[Any, ...], write: Callable[[int], list[int]]) -> list[int]:
        """Return the first tokens of an answer, of which no more are written until it is asked for again."""
        known, tokens = self.written.get(key, (0, []))
        if known < count:
            known = self.most if known else count
            tokens = write(known)
            self.written[key] = known, tokens
        return tokens[:count]


def adapter_of(model: Any, seed: int) -> Any:
    """An adapter of about half of a model's linear layers."""
    numbers = random.Random(seed)
    tensors, names = {}, []
    generator = torch.Generator().manual_seed(seed)
    for name, layer in _known_layers(model).items():
        if numbers.random() < 0.5 and isinstance(getattr(layer, "in_features", None), int) and "lm_head" not in name:
            names.append(name)
            for letter, size in (("A", (2, layer.in_features)), ("B", (layer.out_features, 2))):
                tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = 0.5 * torch.randn(size, generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / WEIGHTS)
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": names}
        (Path(folder) / CONFIG).write_text(json.dumps(config))
        return read_adapter(model, str(seed), folder)


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
        self.drafter = Foreseen(self.random, self.expected, asked.vocabulary)
        self.session = self.make_session()
        self.factory = SequenceFactory(asked.model, ContinuousBatchingConfig(seed=self.random.randrange(4)))
        self.runner, self.session.runner = self.session.runner, self.run

    def make_session(self) -> Session:
        draw, needs = self.random.choice, self.asked.needs
        cache = CacheConfig(block_size=draw(BLOCK_SIZES), max_tokens=draw([needs, 2 * needs, 8 * needs]))
        speculative = draw([None, SpeculativeConfig(drafter=self.drafter, num_draft=draw([1, 3, 6]), verify="seeded")])
        self.drafts = speculative is not None
        return Session(
            self.asked.model,
            cache,
            speculative=speculative,
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
        limit = draw.randint(1, self.asked.most)
        settings = {"do_sample": False} | samples | {"max_new_tokens": limit}
        config = complete_config(self.asked.model, None, "a programme", settings)
        asks: dict[str, Any] = {"priority": draw.choice([0, 0, 1])}
        if draw.random() < 0.2:
            asks["constraint"] = Constraint(Pattern(self.asked.vocabulary))
        if draw.random() < 0.2 and self.asked.adapters:
            asks["adapter"] = draw.choice(self.asked.adapters)
        self.happened += Counter({name: name in asks for name in ("constraint", "adapter")})
        prompt = BatchPrompt(self.asked.prompts[number], config, asks)
        replies = self.factory.make("", prompt, timestamps=False, what="a prompt")
        self.session.add(self.leader([reply.sequence for reply in replies]))
        drafts = self.drafts  # not those of constraints, which leave a session's own rule as it is
        for sequence in (reply.sequence for reply in replies):
            is_plain = not samples and len(asks) == 1
            self.streamed[sequence] = []
            self.expected[sequence] = (
                self.asked.greedy(number, limit) if is_plain
                else self.asked.alone(number, sequence, limit, drafts=drafts)
            )  # fmt: skip
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
            self.drafter.fails = self.fails is None and self.drafts
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
