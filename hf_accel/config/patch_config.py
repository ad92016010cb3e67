"""The keywords of patch: their types, their defaults, and what they are resolved to."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar, Unpack

from ..errors import UnsupportedError
from ..keywords import (
    MEANT_BY_PATCH,
    Default,
    called,
    check_keywords,
    check_positions,
    checked_keywords,
    one_of,
    with_call,
)
from .cache_config import CacheConfig, parse_cache
from .speculative_config import Drafters, SpeculativeConfig, parse_speculative
from .weight_config import WeightConfig, parse_weights


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
        if self.speculative is not None and self.speculative.is_plain:  # a draft model is not part of this one
            keywords["speculative"] = dataclasses.asdict(self.speculative)
        return keywords


def check_patch_keywords(where: str, given: Iterable[str]) -> None:
    known = (f.name for f in dataclasses.fields(PatchConfig) if f.name != "explicit")
    check_keywords(where, given, known, MEANT_BY_PATCH)
