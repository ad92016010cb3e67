"""Drafters of every kind, and requests whose stock answers are known, for the tests of the whole engine."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections import abc
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator

import hf_accel
from hf_accel import Draft, Drafter, SpeculativeConfig
from hf_accel.distill.drafts.heads import DraftHead
from hf_accel.generation.sequence import Shape

from .families import VOCABULARY, build

SMALL_BLOCKS = hf_accel.CacheConfig(block_size=4)


def requests(count: int, *, longest: int = 24, seed: int = 0, shared: int = 0) -> list[list[int]]:
    """Prompts of different lengths, of which the first `shared` tokens are one text; half of them repeat."""
    draw = random.Random(seed)
    common = [draw.randrange(1, VOCABULARY) for _ in range(shared)]
    prompts = []
    for number in range(count):
        own = [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(1, longest))]
        prompts.append(common + (own + own if number % 2 else own))
    return prompts


@functools.cache
def stock(family: str) -> PreTrainedModel:
    return build(family)


_answers: dict[tuple[str, tuple[int, ...], int], list[int]] = {}


def answers(family: str, prompts: abc.Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    """Stock's greedy tokens, each prompt alone."""
    return [_answer(family, tuple(prompt), new_tokens) for prompt in prompts]


def _answer(family: str, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    key = (family, prompt, new_tokens)
    if key not in _answers:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = stock(family).generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens)
        _answers[key] = out[0, len(prompt) :].tolist()
    return _answers[key]


# -- drafters ------------------------------------------------------------------------------------------------


class RandomDrafter(Drafter):
    """Nearly always wrong."""

    name = "random"
    is_free = True

    def __init__(self) -> None:
        self.random = random.Random(0)

    def propose(self, sequences: Any, lengths: Any) -> list[Draft]:
        return [Draft([self.random.randrange(VOCABULARY) for _ in range(length)]) for length in lengths]


class OracleDrafter(Drafter):
    """Replays known answers, as far as it was told to, with a wrong token after every `right` ones."""

    name = "oracle"
    is_free = True

    def __init__(self, prompts: abc.Sequence[list[int]], known: abc.Sequence[list[int]], right: int = 10**9) -> None:
        self.texts = [(prompt, prompt + answer) for prompt, answer in zip(prompts, known, strict=True)]
        self.right = right

    def propose(self, sequences: Any, lengths: Any) -> list[Draft]:
        return [self._one(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]

    def _one(self, sequence: Any, length: int) -> Draft:
        start = len(sequence.tokens)
        prompt = sequence.tokens[: sequence.num_prompt]
        text = next(text for known, text in self.texts if known == prompt)
        drafted = text[start : start + length]
        return Draft([t if (start + i) % (self.right + 1) else (t + 1) % VOCABULARY for i, t in enumerate(drafted)])


class OracleTree(Drafter):
    """Proposes trees around known texts, with wrong tokens beside the right ones and behind them.

    known: the text of each (prompt, seed). first, any: how often the right token is the first of its siblings, and how
    often it is among them.
    """

    name = "oracle tree"
    is_free = True
    trees = True

    def __init__(
        self, known: dict[tuple[tuple[int, ...], int], list[int]], first: float = 0.7, anywhere: float = 0.9
    ) -> None:
        self.known, self.first, self.anywhere = known, first, anywhere
        self.random = random.Random(0)

    def propose(self, sequences: Any, lengths: Any) -> list[Draft]:
        drafts = self.propose_trees(sequences, [Shape(length, length) for length in lengths])
        return [Draft(draft.prefix(draft.depths.index(draft.num_levels))) for draft in drafts]

    def propose_trees(self, sequences: Any, shapes: Any) -> list[Draft]:
        return [self._tree(sequence, shape) for sequence, shape in zip(sequences, shapes, strict=True)]

    def _tree(self, sequence: Any, shape: Shape) -> Draft:
        key = tuple(sequence.tokens[: sequence.num_prompt]), sequence.seed
        rest = self.known[key][sequence.num_new :]
        tokens: list[int] = []
        parents: list[int] = []
        level = [(-1, True)]  # the tokens of a depth, and whether all up to them are right
        for depth in range(shape.depth):
            behind, level = level, []
            for parent, is_right in behind:
                own = self._siblings(rest[depth] if is_right and depth < len(rest) else None)
                for token in own[: shape.nodes - len(tokens)]:
                    tokens.append(token)
                    parents.append(parent)
                    level.append((len(tokens) - 1, is_right and depth < len(rest) and token == rest[depth]))
        return Draft(tokens, parents=tuple(parents))

    def _siblings(self, right: int | None) -> list[int]:
        """Return one to three tokens, which differ."""
        wrong = [token for token in self.random.sample(range(VOCABULARY), 4) if token != right]
        found = wrong[: self.random.choice([1, 1, 2, 3])]
        draw = self.random.random()
        if right is None or draw > self.anywhere:
            return found[:1] if self.random.random() < 0.5 else []
        return [right, *found[1:]] if draw < self.first else [*found, right]


def near(family: str, vocabulary: int = VOCABULARY, noise: float = 0.02, seed: int = 5) -> PreTrainedModel:
    """The target with some noise: drafts that are partly right. vocabulary: padded otherwise than the target's."""
    model = copy.deepcopy(stock(family))
    if vocabulary != VOCABULARY:
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter += noise * torch.randn_like(parameter)
        if vocabulary > VOCABULARY:  # it likes what the target does not know
            model.get_output_embeddings().weight[VOCABULARY:] *= 2
    return model.eval()


def head(family: str, tokens: abc.Sequence[int] | None = None) -> DraftHead:
    """A head that is right now and then: the target's last layer behind its last state, with some noise.

    tokens: those that it drafts.
    """
    made = DraftHead.of(stock(family), tokens=tokens)
    last = max(made.target_layers) - 1
    made.decoder.load_state_dict(hf_accel.init_student(stock(family), layers=[last]).state_dict())
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(7)
        for layer in (made.narrow, made.fuse):
            size = layer.out_features
            layer.weight.zero_()
            layer.weight[:, -size:] = torch.eye(size)
        for parameter in made.own_parameters().values():
            parameter += 0.02 * torch.randn_like(parameter)
    return made


def assisted(family: str) -> AssistedCandidateGenerator:
    config = GenerationConfig(max_length=200, min_length=0, do_sample=False)
    assistant = near(family)
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    assistant.generation_config.num_assistant_tokens = 3
    ids = torch.tensor([[1]])
    return AssistedCandidateGenerator(ids, assistant, config, {})


def lookup() -> PromptLookupCandidateGenerator:
    return PromptLookupCandidateGenerator(num_output_tokens=4, max_matching_ngram_size=2, max_length=500)


MAKERS: dict[str, abc.Callable[[str], Any]] = {
    "ngram": lambda family: "ngram",
    "suffix": lambda family: "suffix",
    "self-int4": lambda family: "self-int4",
    "far model": lambda family: build(family, seed=1),
    "near model": near,
    "draft head": head,
    "larger vocabulary": lambda family: near(family, VOCABULARY + 9),
    "smaller vocabulary": lambda family: near(family, VOCABULARY - 9),
    "random": lambda family: RandomDrafter(),
    "prompt lookup": lambda family: lookup(),
    "assisted candidates": assisted,
    "cascade": lambda family: ["ngram", lookup(), near(family)],
    "free cascade": lambda family: ["suffix", RandomDrafter()],
}


@functools.cache
def target(family: str, block_size: int = 4, dtype: str = "auto", weights: str | None = None) -> PreTrainedModel:
    """Patched; never changed.

    A key in four bits turns a sum that rounds otherwise into another number, and which requests share a pass depends
    on the moment they come: with quantized keys, no row depends on others where kernels can keep that.
    """
    cache = hf_accel.CacheConfig(block_size=block_size, dtype=dtype)  # type: ignore[arg-type]
    settings = {"weights": weights, "cache": cache}
    if dtype != "auto":
        with contextlib.suppress(hf_accel.UnsupportedError):
            return hf_accel.patch(build(family), **settings, deterministic=True)
    return hf_accel.patch(build(family), **settings)


@functools.cache
def drafter(name: str, family: str) -> Any:
    return MAKERS[name](family)


def speculative(name: str, family: str, num_draft: Any = 4, **more: Any) -> SpeculativeConfig:
    return SpeculativeConfig(drafter=drafter(name, family), num_draft=num_draft, **more)


# -- the ways in -----------------------------------------------------------------------------------------------


def by_engine(
    model: PreTrainedModel, prompts: abc.Sequence[list[int]], new_tokens: int, *, spread: bool = True, **settings: Any
) -> tuple[list[list[int]], dict[str, Any]]:
    """Through an Engine, with arrivals while others run; what it says of itself when all blocks are free again."""
    options = settings.pop("options", {})
    with hf_accel.Engine(model, **settings) as engine:
        handles = []
        for number, prompt in enumerate(prompts):
            handles.append(engine.submit(prompt, max_new_tokens=new_tokens, **options))
            if spread and number % 3 == 2:
                next(iter(handles[number // 2]))  # somebody is under way by now
        tokens = [handle.result(60).tokens for handle in handles]
        stats = engine.stats
    assert engine.stats["blocks_used"] == 0
    return tokens, stats


def by_generate_batch(
    model: PreTrainedModel, prompts: abc.Sequence[list[int]], new_tokens: int, **settings: Any
) -> list[list[int]]:
    outputs = model.generate_batch(list(prompts), max_new_tokens=new_tokens, do_sample=False, **settings)
    return [output.generated_tokens for output in outputs.values()]


def by_generate(
    model: PreTrainedModel, prompts: abc.Sequence[list[int]], new_tokens: int, **settings: Any
) -> list[list[int]]:
    """Left-padded."""
    columns = max(map(len, prompts))
    ids = torch.tensor([[0] * (columns - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (columns - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"do_sample": False, **settings}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **settings)
    return out[:, columns:].tolist()
