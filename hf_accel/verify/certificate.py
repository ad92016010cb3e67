"""The result of verify(), in numbers and in words."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..patching.printed import Printed

COLUMNS = 100
LARGEST_LOSS = 700.0  # nats whose exponential is a number


@dataclass(frozen=True)
class Verdict:
    """One prompt: the same tokens, or the first difference and whether rounding explains it.

    position counts generated tokens. Logits are those after the generation config's processors; pairs of them are of
    the reference's token and of the model's.
    margin: between the reference's pair, in `arbiter`, a dtype. distance: the largest between the model's logits and
    the reference's, over the vocabulary. rounding: what both can be by rounding alone, as measured on the reference.
    """

    identical: bool
    tokens: int
    position: int | None = None
    reference_token: int | None = None
    model_token: int | None = None
    reference_logits: tuple[float, float] | None = None
    model_logits: tuple[float, float] | None = None
    margin: float | None = None
    distance: float | None = None
    rounding: float | None = None
    arbiter: str | None = None

    @property
    def explained(self) -> bool:
        """True if rounding accounts for a difference: a near-tie, between logits that differ no more than it allows.

        A defect that is first seen at a near-tie shows in the distance.
        """
        if self.identical:
            return True
        if self.margin is None or self.distance is None or self.rounding is None:
            return False
        return self.margin <= self.rounding and self.distance <= self.rounding

    def __str__(self) -> str:
        if self.identical:
            return f"identical, {self.tokens} tokens"
        if self.reference_logits is None or self.model_logits is None:
            return f"identical for {self.tokens} tokens, where one of the two ends"
        theirs, ours = (
            f"{first:.5g} and {second:.5g}" for first, second in (self.reference_logits, self.model_logits)
        )
        return (
            f"token {self.position} is {self.model_token} instead of {self.reference_token}, "
            f"{'inside' if self.explained else 'beyond'} rounding\n"
            f"{self.arbiter} logits {theirs}, the model's {ours}\n"
            f"{self.margin:.3g} apart, the model's off by up to {self.distance:.3g}; rounding accounts for "
            f"{self.rounding:.3g}"
        )


@dataclass(frozen=True)
class Agreement:
    """One output of two encoders, compared.

    output: its name. rows: its vectors that were compared, without those at padding. cosine: the lowest between two
    vectors; mean_cosine: their mean. difference: the largest, relative to the largest number of the reference.
    """

    output: str
    rows: int
    cosine: float
    mean_cosine: float
    difference: float


@dataclass(frozen=True)
class PassVerdict:
    """One batch of an encoder: its outputs and the reference's, and whether rounding explains the differences.

    batch: how the inputs are laid out. rounding: for each output, what differences can be by rounding alone, relative
    as they are; measured on the reference. arbiter: the dtype of its closest look. refused: why the reference itself
    does not take such a batch, which then is not compared.
    """

    batch: str
    agreements: tuple[Agreement, ...] = ()
    rounding: tuple[float, ...] = ()
    arbiter: str | None = None
    refused: str | None = None

    @property
    def identical(self) -> bool:
        return self.refused is None and all(one.difference == 0 for one in self.agreements)

    @property
    def explained(self) -> bool:
        """True if no difference is larger than rounding makes it; numbers that are not finite never are."""
        if self.refused is not None:
            return True
        return all(one.difference <= most for one, most in zip(self.agreements, self.rounding, strict=True))

    def __str__(self) -> str:
        if self.refused is not None:
            return f"{self.batch}: not compared, the reference refuses it: {self.refused}"
        found = [
            f"{one.output} {one.difference:.1e} (rounding {most:.1e})"
            for one, most in zip(self.agreements, self.rounding, strict=True)
        ]
        how = "within" if self.explained else "beyond"
        return f"{self.batch}: {how} rounding\nlargest differences, relative: {', '.join(found)}"


@dataclass(frozen=True, repr=False)
class EncoderCost(Printed):
    """The loss of quality by quantization of an encoder: its vectors and the float model's, over all batches."""

    reference: str
    agreements: tuple[Agreement, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"  {one.output}: cosine {one.cosine:.6f} at least, {one.mean_cosine:.6f} in the mean of {one.rows} "
            "vectors"
            for one in self.agreements
        ]
        return "\n".join(["against float:", *lines, f"  float: {self.reference}"])


@dataclass(frozen=True, repr=False)
class Cost(Printed):
    """The loss of quality by quantization, teacher-forced: losses and divergences are means over the tokens, in nats.

    error: standard error of loss - reference_loss over the tokens. kl: KL(reference || model).
    same_top: share of tokens where both find the same one likeliest. text: the text that it was measured on.
    """

    reference: str
    text: str
    tokens: int
    reference_loss: float
    loss: float
    error: float
    kl: float
    same_top: float

    @property
    def reference_perplexity(self) -> float:
        return math.exp(min(self.reference_loss, LARGEST_LOSS))

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, LARGEST_LOSS))

    @property
    def change(self) -> float:
        """The change of the perplexity, relative to the reference's."""
        return math.expm1(min(self.loss - self.reference_loss, LARGEST_LOSS))

    def to_dict(self) -> dict[str, Any]:
        perplexities = {"reference_perplexity": self.reference_perplexity, "perplexity": self.perplexity}
        return asdict(self) | perplexities | {"change": self.change}

    def __str__(self) -> str:
        before, after = self.reference_perplexity, self.perplexity
        return (
            f"against float: perplexity {before:.2f} -> {after:.2f} ({100 * self.change:+.2f} %), "
            f"KL {self.kl:.2g} nats a token, same top token {100 * self.same_top:.1f} %\n"
            f"  standard error {100 * self.error:.2g} %, on {self.tokens:,} tokens: {self.text}\n"
            f"  float: {self.reference}"
        )


@dataclass(frozen=True, repr=False)
class Certificate(Printed):
    """The verdict for every prompt, against which reference, and what quantization costs against float.

    reference: where weights or the KV cache are quantized, the same quantized weights in plain torch; else the
        float model. exact: all prompts identical to it. explained: every difference is a near-tie of its own logits.
    cost: None for a model that is not quantized, and where it could not be measured, for the reason `no_cost`.

    An encoder has a PassVerdict for every batch, and an EncoderCost. inputs: what its batches are made of. undo: how
    an unpatched copy compares with the float model that was given, bit for bit; None for a model that generates.
    """

    reference: str
    verdicts: tuple[Verdict, ...] | tuple[PassVerdict, ...]
    cost: Cost | EncoderCost | None = None
    no_cost: str | None = None
    inputs: str | None = None
    undo: str | None = None

    @property
    def exact(self) -> bool:
        return all(v.identical for v in self.verdicts)

    @property
    def explained(self) -> bool:
        return all(v.explained for v in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        verdicts = [asdict(v) | {"explained": v.explained} for v in self.verdicts]
        cost = None if self.cost is None else self.cost.to_dict()
        return vars(self) | {"exact": self.exact, "explained": self.explained, "verdicts": verdicts, "cost": cost}

    def __str__(self) -> str:
        lines = list(self._verdict_lines())
        if self.cost is not None:
            lines += str(self.cost).splitlines()
        elif self.no_cost is not None:
            lines.append(f"against float: not measured, {self.no_cost}")
        if self.undo is not None:
            lines.append(f"undo: {self.undo}")
        return "\n".join(wrapped for line in lines for wrapped in _wrapped(line))

    def _verdict_lines(self) -> Iterator[str]:
        passes = [v for v in self.verdicts if isinstance(v, PassVerdict)]
        if passes:
            compared = [v for v in passes if v.refused is None]
            close = sum(v.explained for v in compared)
            yield f"certificate: {close} of {len(compared)} batches as {self.reference} within rounding, {self.inputs}"
        else:
            same = sum(v.identical for v in self.verdicts)
            yield f"certificate: {same} of {len(self.verdicts)} prompts identical to {self.reference}, greedy"
        for number, verdict in enumerate(self.verdicts):
            first, *rest = str(verdict).splitlines()
            yield f"  {first}" if passes else f"  prompt {number}: {first}"
            yield from (f"    {line}" for line in rest)


def _wrapped(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, COLUMNS, subsequent_indent=indent, break_on_hyphens=False)
