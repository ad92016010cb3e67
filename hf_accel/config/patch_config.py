"""The keywords of patch: their types, their defaults, and the configs that they are resolved to."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar, Unpack, get_args

from ..errors import UnsupportedError
from ..keywords import (
    MEANT_BY_PATCH,
    Default,
    called,
    check_keywords,
    check_positions,
    checked_keywords,
    one_of,
    positive_int,
    with_call,
)
from .weight_config import WeightConfig, parse_weights

KVDtype = Literal["auto", "int8", "fp8", "int4", "int8-int4"]


@checked_keywords(
    kv_dtype="dtype=", bits="dtype='int8'", page_size="block_size=", max_length="max_tokens=", cache_dir="directory="
)
@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache. CacheConfig("int8") is CacheConfig(dtype="int8").

    dtype: "auto" stores K and V as the model computes them, "int8" or "fp8" (e4m3) with a scale per
        token and head, "int4" rotated, with a scale and a shift, for heads of an even size: it loses little where
        heads are as large as usual (64 numbers, 128), and a lot where they are small. "int8-int4" stores keys as
        "int8" and values as "int4" does: keys need their bits more.
    block_size: tokens in a block.
    max_tokens: a fixed capacity in tokens over all sequences; None grows as needed. On a GPU, None gives an Engine
        and generate_batch() as many as fit into its free memory.
    prefix_sharing: keep one copy of blocks whose tokens and history are equal.
    directory: a folder where what prompts of an Engine and of generate_batch() begin with stays for later processes,
        with at most about directory_bytes; the least recently used goes first.
    """

    dtype: KVDtype = "auto"
    _: KW_ONLY
    block_size: int = 16
    max_tokens: int | None = None
    prefix_sharing: bool = True
    directory: str | None = None
    directory_bytes: int = 16 * 2**30

    def __post_init__(self) -> None:
        positive_int("block_size", self.block_size)
        as_block = f"block_size={self.dtype}" if str(self.dtype).isdigit() else None
        one_of("cache dtype", self.dtype, get_args(KVDtype), instead=as_block)
        if self.max_tokens is not None:
            positive_int("max_tokens", self.max_tokens)
        one_of("prefix_sharing", self.prefix_sharing, (True, False))
        if self.directory == "":
            raise UnsupportedError("directory='' names no folder; give the path of one, or leave it out")
        positive_int("directory_bytes", self.directory_bytes)


MEANT_BY_CACHE = dict.fromkeys(  # transformers' words
    ("dynamic", "dynamic_full", "static", "offloaded", "offloaded_static", "quantized", "none", "stock"),
    "cache=None, and transformers' own cache is made as without hf_accel",
)


def parse_cache(cache: object) -> CacheConfig | None:
    if cache is None or isinstance(cache, CacheConfig):
        return cache
    if isinstance(cache, Mapping):
        return CacheConfig(**cache)
    instead = (
        f"cache=hf_accel.CacheConfig({cache!r})" if cache in get_args(KVDtype) else MEANT_BY_CACHE.get(str(cache))
    )
    one_of("cache", cache, (None, "paged"), instead=instead)
    return CacheConfig()


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


DrafterName = Literal["auto", "ngram", "suffix", "self-int4", "mtp"]
Drafting = DrafterName | str | os.PathLike[str] | DraftModel | Candidates | Proposals
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
        model's own weights in INT4, for a model that is not quantized), "mtp" (layers of its checkpoint that were
        trained to predict several tokens), the folder of a draft head, a draft model with the same tokenizer or one
        for DFlash, a transformers CandidateGenerator, a hf_accel Drafter, or a list of these, of which the first that
        has a proposal is taken.
    num_draft: tokens to draft; "auto" finds out what pays for each sequence, none included.
    max_draft: the most that "auto" takes.
    max_nodes: the most tokens of a draft that is a tree, whose longest branch has num_draft; for drafters of trees.
    verify: "token" (Leviathan et al. 2023, Chen et al. 2023), "block" (Sun et al. 2025), or "seeded" (Daliri et al.
        2024): sampled tokens then depend on the seed and the model alone, not on the drafter.
    ngram: fewest and most tokens that an n-gram lookup matches.
    """

    drafter: Drafters = "auto"
    num_draft: int | Literal["auto"] = "auto"
    max_draft: int = 8
    max_nodes: int = 16
    verify: Literal["token", "block", "seeded"] = "token"
    ngram: tuple[int, int] = (2, 5)

    def __post_init__(self) -> None:
        for name in filter(lambda drafter: isinstance(drafter, str), self.drafters):
            if name not in DRAFTERS and not os.path.isdir(name):
                names = ", ".join(map(repr, DRAFTERS))
                raise UnsupportedError(
                    f"drafter={name!r} is not known, and there is no such folder; choose one of {names}, or give the "
                    "folder of a draft head"
                )
        if self.drafter is None or not self.drafters:
            raise UnsupportedError(f"drafter={self.drafter!r} names none; leave speculative=None for no speculation")
        if self.num_draft != "auto":
            positive_int("num_draft", self.num_draft, way_out="; speculative=None is for no drafts, 'auto' for few")
        positive_int("max_draft", self.max_draft)
        positive_int("max_nodes", self.max_nodes)
        one_of("verify", self.verify, ("token", "block", "seeded"))
        object.__setattr__(self, "ngram", tuple(self.ngram))
        if len(self.ngram) != 2 or not 1 <= self.ngram[0] <= self.ngram[1]:
            raise UnsupportedError(f"ngram={self.ngram!r} must be the fewest and the most tokens, as (2, 5)")

    @property
    def drafters(self) -> list[Any]:
        """All that are given, in order; a folder by its path as text."""
        given: list[Any] = list(self.drafter) if isinstance(self.drafter, list | tuple) else [self.drafter]
        return [os.fspath(drafter) if isinstance(drafter, os.PathLike) else drafter for drafter in given]

    @property
    def is_plain(self) -> bool:
        """True if it can be written as JSON: the drafter is given by its name, and not as an object or a folder."""
        return all(isinstance(drafter, str) and drafter in DRAFTERS for drafter in self.drafters)

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


class ProcessGroup(Protocol):
    """A process group of torch.distributed."""

    def rank(self) -> int: ...
    def size(self) -> int: ...


Weights = Literal["int8", "int4", "fp8", "nf4", "auto"] | WeightConfig | Mapping[str, Any] | None
Attention = Literal["auto", "cpu", "triton", "flash_attn", "varlen", "sdpa", "reference"] | None
Cache = Literal["paged"] | CacheConfig | Mapping[str, Any] | None
Speculative = Drafters | SpeculativeConfig | Mapping[str, Any] | None
KeepOriginal = Literal["auto"] | bool
LEFT_OUT: Any = Default("left out")


class KeywordsWithoutWeights(TypedDict, total=False):
    """The keywords of AccelConfig, which takes weights without a name too."""

    attention: Attention
    cache: Cache
    fuse: bool
    speculative: Speculative
    keep_original: KeepOriginal
    deterministic: bool
    context_parallel: ProcessGroup | None
    config: PatchConfig | Mapping[str, Any] | None


class PatchKeywords(KeywordsWithoutWeights, total=False):
    """All that patch takes."""

    weights: Weights


DEFAULTS: dict[str, Any] = {
    "weights": "int8", "attention": "auto", "cache": "paged", "fuse": True, "speculative": None,
    "keep_original": "auto", "deterministic": False, "context_parallel": None, "config": None,
}  # fmt: skip
Target = TypeVar("Target", bound=Callable[..., Any])


def takes_patch_keywords(target: Target) -> Target:
    """Decorate a class or a function that takes keywords of patch, written out or as ** of PatchKeywords.

    Its signature shows all of them, with their defaults. One that is written out and that the caller left out arrives
    as LEFT_OUT: only what was asked for has to be met.
    """
    call = called(target)
    written = list(inspect.signature(call).parameters.values())
    names = [p.name for p in written]
    shown = [p for p in written if p.kind is not p.VAR_KEYWORD]
    if len(shown) < len(written):
        others = [_parameter(name) for name in DEFAULTS if name not in names]
        shown = [*shown, *others] if others else written

    @functools.wraps(call)
    def marking(*args: Any, **keywords: Any) -> Any:
        check(args, keywords)
        left_out = {name: LEFT_OUT for name in names[len(args) :] if name in DEFAULTS}
        return call(*args, **{**left_out, **keywords})

    marking.__signature__ = inspect.signature(call).replace(parameters=shown)  # type: ignore[attr-defined]
    check = check_positions(marking)
    return with_call(target, marking)


def _parameter(name: str) -> inspect.Parameter:
    annotation = PatchKeywords.__annotations__[name].__forward_arg__
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name], annotation=annotation)


@checked_keywords(**MEANT_BY_PATCH)
@takes_patch_keywords
@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """Every keyword of `patch` as its config object.

    explicit: the keywords that were given, as opposed to left at their default.
    """

    weights: WeightConfig | None = DEFAULTS["weights"]
    attention: Attention = DEFAULTS["attention"]
    cache: CacheConfig | None = DEFAULTS["cache"]
    fuse: bool = DEFAULTS["fuse"]
    speculative: SpeculativeConfig | None = DEFAULTS["speculative"]
    keep_original: KeepOriginal = DEFAULTS["keep_original"]
    deterministic: bool = DEFAULTS["deterministic"]
    context_parallel: ProcessGroup | None = field(default=DEFAULTS["context_parallel"], compare=False, repr=False)
    explicit: frozenset[str] = field(default=LEFT_OUT, compare=False)

    if TYPE_CHECKING:  # words and mappings are resolved where the config is made

        def __init__(self, **keywords: Unpack[PatchKeywords]) -> None: ...

    @classmethod
    def build(cls, config: PatchConfig | Mapping[str, Any] | None = None, **keywords: Any) -> PatchConfig:
        """Parse the user's keywords ("int8", "paged", ...) on top of `config`.

        Raises UnsupportedError for an unknown keyword or value.
        """
        if isinstance(config, PatchConfig):
            base = {name: getattr(config, name) for name in config.explicit}
        elif config is None or isinstance(config, Mapping | Default):
            base = {} if config is None or isinstance(config, Default) else dict(config)
        else:
            raise UnsupportedError(f"config={config!r} must be a hf_accel.PatchConfig or a dict of keywords")
        given = base | {name: value for name, value in keywords.items() if not isinstance(value, Default)}
        check_patch_keywords("patch()", given)
        return cls(**given)

    def __post_init__(self) -> None:
        names = [f.name for f in dataclasses.fields(self) if f.name != "explicit"]
        left_out = {name for name in names if isinstance(getattr(self, name), Default)}
        for name in left_out:
            object.__setattr__(self, name, DEFAULTS[name])
        if isinstance(self.explicit, Default):
            object.__setattr__(self, "explicit", frozenset(names) - left_out)
        object.__setattr__(self, "weights", parse_weights(self.weights))
        object.__setattr__(self, "cache", parse_cache(self.cache))
        object.__setattr__(self, "speculative", parse_speculative(self.speculative))
        one_of("fuse", self.fuse, (True, False))
        one_of("keep_original", self.keep_original, ("auto", True, False))
        one_of("deterministic", self.deterministic, (True, False))
        if self.attention is not None and not isinstance(self.attention, str):
            raise UnsupportedError(f"attention={self.attention!r} must be 'auto', a backend's name or None")

    def without_data(self) -> PatchConfig:
        """Return the config without what is not part of a model: calibration data, and a process group."""
        weights = self.weights
        if weights is not None and weights.calibration is not None:
            weights = dataclasses.replace(weights, calibration=None, resume=None)
        return dataclasses.replace(self, weights=weights, context_parallel=None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able keywords that `build` turns into an equal config."""
        keywords = dataclasses.asdict(dataclasses.replace(self.without_data(), speculative=None))
        del keywords["explicit"], keywords["context_parallel"]
        if keywords["weights"] is not None:
            del keywords["weights"]["calibration"], keywords["weights"]["resume"]
            if keywords["weights"].pop("leaves_groups"):  # to each layer
                del keywords["weights"]["group_size"]
            if not keywords["weights"]["eight_bits"]:  # which versions before it do not know
                del keywords["weights"]["eight_bits"]
        if self.speculative is not None and self.speculative.is_plain:  # a draft model is not part of this one
            keywords["speculative"] = dataclasses.asdict(self.speculative)
        return keywords


def check_patch_keywords(where: str, given: Iterable[str]) -> None:
    known = (f.name for f in dataclasses.fields(PatchConfig) if f.name != "explicit")
    check_keywords(where, given, known, MEANT_BY_PATCH)
