"""The config by which users choose how the weights of linear layers are stored."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from os import PathLike
from typing import Any, Literal, get_args

from ..errors import UnsupportedError
from ..keywords import Default, checked_keywords, named, one_of
from .layout import Activations, Format, Layout

Method = Literal["rtn", "gptq", "awq"]
Bits = Literal[8, 4, 3, 2]
GroupSize = Literal[32, 64, 128]
Head = Literal["int8", "int4"]
Table = Literal["auto", "int8", "int4"]
WeightFormat = Literal["int", "fp8", "nf4"]
GROUP_SIZES = get_args(GroupSize)
METHODS = get_args(Method)
NAMED_DATA = ("wikitext2", "c4", "c4-new")  # names of calibration data, as optimum's get_dataset has them
WITHDRAWN_DATA = ("ptb", "ptb-new")  # names that it once had
NF4_BLOCK = 64  # weights that share a scale
NF4: dict[str, tuple[object, ...]] = {  # the only values that bitsandbytes, and transformers' checkpoints of it, know
    "bits": (4,), "group_size": (NF4_BLOCK,), "symmetric": (True,), "activations": ("auto", None), "method": ("rtn",),
    "average_bits": (None,), "head": (None,), "embedding": ("auto", None), "only_if_faster": (False,),
}  # fmt: skip
FP8: dict[str, tuple[object, ...]] = {
    "average_bits": (None,), "bits": (8,), "group_size": (None,), "activations": ("auto", None, "fp8"),
    "method": ("rtn",),
}  # fmt: skip
BY_FORMAT: Any = Default("by format=")
LLM_INT8 = (
    "patch() makes no layers of bitsandbytes' LLM.int8(); choose weights='int8', or load the model with "
    "BitsAndBytesConfig(load_in_8bit=True) and patch it without weights=: it keeps those layers"
)
NOT_MADE = {  # formats that users know, and what to do
    "nvfp4": "nothing but the tensor cores of a Blackwell GPU multiplies by it fast, and INT4 in groups of 32 takes "
    "as many bytes; choose weights={'bits': 4, 'group_size': 32}, or hf_accel.load(path) for a checkpoint of it",
    **dict.fromkeys(("llm.int8", "llm_int8"), LLM_INT8),
}
BY_DATA = (
    "weights=hf_accel.WeightConfig(4, method={!r}, calibration=texts), or hf_accel.load(path) for a checkpoint of it"
)
OF_GGUF = "weights={!r}, or hf_accel.load('model.gguf') for a file of it"
MEANT_BY_WEIGHTS = {  # words of other libraries, as patterns, and what to write instead
    "awq": BY_DATA.format("awq"), "gptq": BY_DATA.format("gptq"),
    r"i?q4(_.*)?": OF_GGUF.format("int4"), r"i?q[568](_.*)?": OF_GGUF.format("int8"),
    r"i?q[23](_.*)?": "weights=hf_accel.WeightConfig(3), or hf_accel.load('model.gguf') for a file of it",
    r"(nf4|fp4|bnb|bitsandbytes).*": "weights='nf4'", r"(fp8|float8|e4m3|f8).*": "weights='fp8'",
    r"(u?int|w)?4(\D.*)?|.*[-_]4-?bit": "weights='int4'", r"(u?int|w)?8(\D.*)?|.*[-_]8-?bit": "weights='int8'",
    r"gguf|mxfp4|compressed[-_]tensors": "hf_accel.load(path) for a checkpoint of it",
    r"(int)?3([-_]?bit)?": "weights=hf_accel.WeightConfig(3)",
    r"(int)?2([-_]?bit)?": "weights=hf_accel.WeightConfig(2)",
    r"none|no|off|false|float|(b?float|b?f|fp)(16|32)|half": "weights=None",
}  # fmt: skip


class UsualSize(int):
    """A group_size that nobody has named, which a layer need not take. dataclasses.replace keeps it so."""


def check_format(keyword: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise UnsupportedError unless `value` is among `allowed`; for what is known elsewhere, with the way out."""
    if isinstance(value, str) and value in NOT_MADE:
        raise UnsupportedError(f"{keyword}={value!r} is not made here: {NOT_MADE[value]}")
    one_of(keyword, value, allowed, instead=_meant(value) if keyword == "weights" else None)


def _meant(value: object) -> str | None:
    """Return what to write instead of a word, or a number of bits, that other libraries use."""
    word = str(value).lower() if isinstance(value, str | int) else ""
    return next((use for pattern, use in MEANT_BY_WEIGHTS.items() if re.fullmatch(pattern, word)), None)


@checked_keywords(
    load_in_4bit="bits=4",
    load_in_8bit="bits=8",
    dtype="bits=",
    modules_to_not_convert="skip=",
    block_size="group_size=",
    zero_point="symmetric=False",
)
@dataclass(frozen=True)
class WeightConfig:
    """The format in which Linear weights are stored and multiplied. WeightConfig(4) is WeightConfig(bits=4).

    bits: 8, 4, 3 or 2. On a GPU no kernel multiplies by 3 or 2 bits: plain torch does, slowly, to see what they lose.
    format: "int", or "fp8" with bits=8: float8_e4m3fn, one scale per output channel, or "nf4" with bits=4:
        bitsandbytes' own layers instead of ours, see `weights="nf4"`.
    group_size: inputs that share a scale: 32, 64 or 128. None, the default for 8 bits and for no others, gives each
        output channel one scale. With INT8 activations, inputs of a group share theirs too, of 128 inputs where it is
        None: groups of 32 lose least, and take longer. 4 bits or fewer: 128 (default). NF4: 64. FP8: None. Where it is
        not given, linears of an encoder with more than 12 layers, each of which ends in a norm, get groups of 64 on a
        CPU, since errors add up over the layers (XLM-R large). Of 4 bits or fewer, a layer whose inputs 128 does not
        divide gets groups of 64 or 32, or has 8 bits if neither divides them.
    symmetric: False, for 4 bits or fewer, gives each group a zero point too, so that no level is lost on a lopsided
        range.
    activations: "int8", or "fp8" with FP8 weights, quantizes each row of the input on the fly, None keeps it in
        floating point, "auto" takes what the chosen backend is both accurate and fast at (the plan says which).
    method: "rtn" rounds to nearest; "gptq" and "awq" lose much less at 4 bits, and need calibration=.
    calibration: what the model will work on, some 10,000 tokens of it: token ids [n, length], a list of texts (the
        tokenizer is the checkpoint's) or of token ids, a dataset with "input_ids" or "text", or (texts, tokenizer);
        or the name of general text that optimum downloads: "wikitext2", "c4", "c4-new".
    average_bits: between 4 and 8, as 4.5: 8 bits for the layers that 4 bits hurt most, as measured on calibration=,
        and 4 for the others. Scales count, the head does not.
    eight_bits: names, or ends of names, of Linear modules that get 8 bits where the others get 4.
    resume: a folder that finished layers are stored in, so that a run that was killed goes on from there.
    skip: names, or ends of names, of Linear modules that stay as they are.
    head: "int8" (default) quantizes the output head too (it is read for every token), "int4" in groups of inputs
        (group_size, or 128), None leaves it. With NF4 it is left, as a checkpoint of bitsandbytes' holds no INT8 head.
    embedding: the input embedding. "int8" or "int4" quantizes it: that of a tied model looks its rows up in the head,
        one table in memory and not two, so that the head has to have as many bits. "auto" is "int8" for tied
        models that generate text and have an INT8 head, and leaves others alone. None (default) keeps it in floating
        point.
    only_if_faster: leave a layer alone where its quantized form was measured to be slower than stock.
    """

    bits: Bits = 8
    _: KW_ONLY
    format: WeightFormat = "int"
    group_size: GroupSize | None = BY_FORMAT
    symmetric: bool = True
    activations: Activations = "auto"
    method: Method = "rtn"
    calibration: Any = field(default=None, compare=False, repr=False)
    resume: str | PathLike[str] | None = field(default=None, compare=False, repr=False)
    average_bits: float | None = None
    eight_bits: Sequence[str] = ()
    skip: Sequence[str] = ()
    head: Head | None = BY_FORMAT
    embedding: Table | None = None
    only_if_faster: bool = False
    leaves_groups: bool = field(default=False, init=False, compare=False, repr=False)  # to the model

    def __post_init__(self) -> None:
        for field_name in ("skip", "eight_bits"):
            self._parse_names(field_name)
        if self.average_bits is not None:
            self._check_average_bits()
        if isinstance(self.bits, str) and self.bits in WEIGHTS:
            raise UnsupportedError(f"bits={self.bits!r} is a word of weights=; pass weights={self.bits!r} to patch()")
        one_of("bits", self.bits, get_args(Bits))
        check_format("format", self.format, get_args(WeightFormat))
        is_left = isinstance(self.group_size, Default | UsualSize)
        if is_left:
            usual = NF4_BLOCK if self.is_nf4 else None if self.bits == 8 else UsualSize(max(GROUP_SIZES))
            object.__setattr__(self, "group_size", usual)
        else:
            one_of("group_size", self.group_size, (*GROUP_SIZES, None) if self.bits == 8 else GROUP_SIZES)
        object.__setattr__(self, "leaves_groups", is_left and self.format == "int")
        if isinstance(self.head, Default):
            object.__setattr__(self, "head", None if self.is_nf4 else "int8")
        one_of("symmetric", self.symmetric, (True, False))
        if self.activations == "fp8" and self.format != "fp8":
            raise UnsupportedError("activations='fp8' is for FP8 weights; choose weights='fp8', or activations='int8'")
        one_of("activations", self.activations, ("auto", None, "int8", "fp8"))
        one_of("head", self.head, (*get_args(Head), None))
        one_of("embedding", self.embedding, (*get_args(Table), None))
        one_of("only_if_faster", self.only_if_faster, (True, False))
        if self.bits == 8 and not self.symmetric:
            raise UnsupportedError(
                "symmetric=False is for 4 bits or fewer, INT8 and FP8 weights have no zero points; leave it True"
            )
        one_of("method", self.method, METHODS)
        if self.calibration is not None and not self.needs_data:
            raise UnsupportedError(
                "calibration= is not read by method='rtn'; leave it out, or choose method='gptq' or method='awq'"
            )
        if self.resume is not None:
            self._check_resume()
        for name, allowed in {"int": {}, "fp8": FP8, "nf4": NF4}[self.format].items():
            one_of(f"with format={self.format!r}, {name}", getattr(self, name), allowed)
        if self.eight_bits and (self.bits != 4 or self.format != "int" or self.average_bits is not None):
            raise UnsupportedError(
                f"eight_bits={self.eight_bits!r} names layers among others of 4 bits; choose bits=4 without "
                "average_bits=, or leave eight_bits= out"
            )

    def _parse_names(self, field_name: str) -> None:
        """Make a tuple of a name or of names of modules."""
        given = getattr(self, field_name)
        names = (given,) if isinstance(given, str) else tuple(given)
        if not all(isinstance(name, str) and name for name in names):
            raise UnsupportedError(f"{field_name}={names!r} must hold module names")
        object.__setattr__(self, field_name, names)

    def _check_resume(self) -> None:
        if not isinstance(self.resume, str | PathLike) or not os.fspath(self.resume):
            raise UnsupportedError(f"resume={self.resume!r} must be the path of a folder")
        if self.method == "rtn":
            raise UnsupportedError("resume= is not read by method='rtn', which takes seconds; leave it out")
        object.__setattr__(self, "resume", os.fspath(self.resume))

    def _check_average_bits(self) -> None:
        number = self.average_bits
        if not isinstance(number, int | float) or isinstance(number, bool) or not 4 < number < 8:
            raise UnsupportedError(
                f"average_bits={number!r} must be a number between 4 and 8, as 4.5; "
                "bits= is for one number of bits for all weights"
            )
        object.__setattr__(self, "bits", 4)  # the layers that do not get 8 bits

    @property
    def layout(self) -> Layout:
        """The layout of such a weight; for NF4, that of integers of as many bytes, except for the scales' dtype."""
        format: Format = "fp8" if self.format == "fp8" else "int"
        size = self.group_size and int(self.group_size)
        return Layout(bits=self.bits, format=format, group_size=size, symmetric=self.symmetric)

    @property
    def is_nf4(self) -> bool:
        """True if the layers are bitsandbytes' own."""
        return self.format == "nf4"

    @property
    def is_calibrated(self) -> bool:
        """True if rounding needs to know the inputs of each layer."""
        return self.method != "rtn"

    @property
    def needs_data(self) -> bool:
        """True if calibration data is read."""
        return self.is_calibrated or self.average_bits is not None

    @property
    def split_refusal(self) -> str | None:
        """The reason why weights cannot be split over ranks and quantized so, and the way out; None if they can."""
        if self.is_nf4:
            return "weights='nf4': bitsandbytes' layers do not know of ranks; use 'int8' or 'int4'"
        if self.layout.format == "fp8":
            return "weights='fp8', whose parts nobody has compared with the whole: use 'int8' or 'int4'"
        if self.needs_data:
            return "calibration, which needs all of a layer in one process: use method='rtn', without average_bits="
        if self.only_if_faster:
            return "weights='auto', which each rank would measure for itself: say 'int8', 'int4' or None"
        return None

    def with_eight_bits(self) -> WeightConfig:
        """Return the config of a layer that average_bits gives 8 bits."""
        return dataclasses.replace(
            self, bits=8, group_size=None, symmetric=True, average_bits=None, eight_bits=(), calibration=None
        )

    def for_linear(self, name: str, *, also: Collection[str] = ()) -> WeightConfig:
        """Return the config of the Linear of this name: with 8 bits if it is one of `eight_bits`, or of `also`."""
        has_eight = name in also or any(named(name, wanted) for wanted in self.eight_bits)
        return self.with_eight_bits() if has_eight else self

    @property
    def for_head(self) -> WeightConfig | None:
        """The config of the output head, rounded to nearest: INT8 with a scale for each token, since it decides which
        one wins, unless 4 bits are asked for. None leaves it alone.
        """
        if self.head is None:
            return None
        activations: Activations = "int8" if self.activations == "fp8" else self.activations
        return self._table(self.head, activations=activations, only_if_faster=self.only_if_faster)

    @property
    def for_embedding(self) -> WeightConfig | None:
        """The config of an input embedding with a table of its own; None leaves it alone."""
        if self.embedding is None or self.embedding == "auto":
            return None
        return self._table(self.embedding, activations=None)

    def _table(self, label: Head, **others: Any) -> WeightConfig:
        """Return the config of a weight with a row for each token."""
        if label == "int8":
            return WeightConfig(bits=8, **others)
        size = BY_FORMAT if self.leaves_groups or self.group_size is None else self.group_size
        return WeightConfig(bits=4, group_size=size, symmetric=self.symmetric, **others)

    @property
    def label(self) -> str:
        if self.format != "int":
            return self.format
        return f"int{self.bits}" if self.symmetric else f"int{self.bits} asymmetric"


WEIGHTS: dict[str, dict[str, Any]] = {  # the fields of a WeightConfig that a word stands for
    "int8": {"bits": 8}, "int4": {"bits": 4}, "fp8": {"bits": 8, "format": "fp8"},
    "nf4": {"bits": 4, "format": "nf4"}, "auto": {"bits": 8, "only_if_faster": True},
}  # fmt: skip


def parse_weights(weights: object) -> WeightConfig | None:
    if weights is None or isinstance(weights, WeightConfig):
        return weights
    if isinstance(weights, Mapping):
        return WeightConfig(**weights)
    check_format("weights", weights, (None, *WEIGHTS))
    return WeightConfig(**WEIGHTS[str(weights)])
