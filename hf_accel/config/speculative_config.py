"""The config of speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from ..errors import UnsupportedError
from ..keywords import checked_keywords, one_of, positive_int


class DraftModel(Protocol):
    """A model that drafts, with the tokenizer of the model it drafts for."""

    @property
    def forward(self) -> Any: ...


class Candidates(Protocol):
    """A CandidateGenerator of transformers."""

    def get_candidates(self, *args: Any, **keywords: Any) -> Any: ...


class Proposals(Protocol):
    """A hf_accel.Drafter."""

    def propose(self, *args: Any, **keywords: Any) -> Any: ...


DrafterName = Literal["auto", "ngram", "suffix", "self-int4"]
Drafting = DrafterName | DraftModel | Candidates | Proposals
Drafters = Drafting | Sequence[Drafting]


@checked_keywords(
    assistant_model="drafter=",
    draft_model="drafter=",
    num_assistant_tokens="num_draft=",
    num_speculative_tokens="num_draft=",
    prompt_lookup_num_tokens="drafter='ngram'",
)
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: a drafter proposes tokens, one pass of the model verifies them; the distribution of the
    output stays.

    drafter: "auto" (looked up in the text so far), "ngram", "suffix" (longest repeated ending), "self-int4" (the
        model's own weights in INT4, for a model that is not quantized), a draft model with the same tokenizer, a
        transformers CandidateGenerator, a hf_accel Drafter, or a list of these, of which the first that has a proposal
        is taken.
    num_draft: tokens to draft; "auto" finds out what pays for each sequence, none included.
    max_draft: the most that "auto" takes.
    verify: "token" (Leviathan et al. 2023, Chen et al. 2023), "block" (Sun et al. 2025), or "seeded" (Daliri et al.
        2024): sampled tokens then depend on the seed and the model alone, not on the drafter.
    ngram: fewest and most tokens that an n-gram lookup matches.
    """

    drafter: Drafters = "auto"
    num_draft: int | Literal["auto"] = "auto"
    max_draft: int = 8
    verify: Literal["token", "block", "seeded"] = "token"
    ngram: tuple[int, int] = (2, 5)

    def __post_init__(self) -> None:
        for name in filter(lambda drafter: isinstance(drafter, str), self.drafters):
            one_of("drafter", name, DRAFTERS)
        if self.drafter is None or not self.drafters:
            raise UnsupportedError(f"drafter={self.drafter!r} names none; leave speculative=None for no speculation")
        if self.num_draft != "auto":
            positive_int("num_draft", self.num_draft, way_out="; speculative=None is for no drafts, 'auto' for few")
        positive_int("max_draft", self.max_draft)
        one_of("verify", self.verify, ("token", "block", "seeded"))
        object.__setattr__(self, "ngram", tuple(self.ngram))
        if len(self.ngram) != 2 or not 1 <= self.ngram[0] <= self.ngram[1]:
            raise UnsupportedError(f"ngram={self.ngram!r} must be the fewest and the most tokens, as (2, 5)")

    @property
    def drafters(self) -> list[Any]:
        """All that are given, in order."""
        return list(self.drafter) if isinstance(self.drafter, list | tuple) else [self.drafter]

    @property
    def is_plain(self) -> bool:
        """True if it can be written as JSON: the drafter is given by its name, not as an object."""
        return all(isinstance(drafter, str) for drafter in self.drafters)

    @property
    def split_refusal(self) -> str | None:
        """The reason why a model that is split over ranks cannot draft so, with the way out; None if it can."""
        if "self-int4" in self.drafters:
            return "speculative='self-int4', which needs a second model over the same weights: use 'ngram' or 'suffix'"
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> SpeculativeConfig:
        """Frozen, and a copy of a model can draft with the same draft model."""
        return self


DRAFTERS = get_args(DrafterName)


def parse_speculative(speculative: object) -> SpeculativeConfig | None:
    """None, a name of DRAFTERS, a SpeculativeConfig or a mapping of its keywords, or anything that can draft."""
    if speculative is None or isinstance(speculative, SpeculativeConfig):
        return speculative
    if isinstance(speculative, Mapping):
        return SpeculativeConfig(**speculative)
    drafter: Any = speculative
    return SpeculativeConfig(drafter=drafter)
