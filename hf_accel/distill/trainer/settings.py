"""The settings of a distillation, besides those of its training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import TrainingArguments

from ...errors import UnsupportedError
from ...keywords import checked_keywords
from ..losses.inside import HIDDEN_LOSSES
from ..losses.objective import LOSSES, Objective


@checked_keywords()
@dataclass
class DistillationSettings:
    """Settings that are added to training arguments of any kind: mix it into a config of another trainer.

        @dataclass
        class KDConfig(DistillationSettings, SFTConfig): ...

    L = alpha * CE + (1 - alpha) * T^2 * D + hidden_weight * H + attention_weight * R, each a mean over the tokens that
    have a label, of a whole accumulation window and of all processes.
    """

    alpha: float = field(default=0.5, metadata={"help": "Share of the labels' cross-entropy; 1 is plain training."})
    temperature: float = field(default=2.0, metadata={"help": "Softens both distributions in the loss (T)."})
    loss: str = field(default="fkl", metadata={"help": f"Distance from the teacher: {', '.join(LOSSES)}."})
    beta: float = field(default=0.5, metadata={"help": "Weight of the teacher in loss='jsd'; above 0 and below 1."})
    eta: float = field(default=3.0, metadata={"help": "How soon loss='lk' turns from KL to total variation."})
    fused: bool = field(
        default=False, metadata={"help": "Never hold all logits: loss from hidden states, by pieces; causal LMs."}
    )
    shift: bool | None = field(
        default=None, metadata={"help": "Whether position i learns label i + 1; read from the model if not given."}
    )
    teacher_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "For from_pretrained, where the teacher is given by its name or path (JSON)."}
    )

    hidden_weight: float = field(default=0.0, metadata={"help": "Weight of learning hidden states; 0 is off."})
    hidden_loss: str = field(default="mse", metadata={"help": "'mse', relative to the teacher's length, or 'cosine'."})
    hidden_layer_map: list[str] | None = field(
        default=None,
        metadata={"help": "student:teacher, from 1, as 1:2 2:4; all layers, evenly, if not given."},
    )
    attention_weight: float = field(
        default=0.0,
        metadata={"help": "Weight of learning relations of queries, keys, values (MiniLM-v2); 0 is off."},
    )
    attention_layer_map: list[str] | None = field(
        default=None, metadata={"help": "student:teacher, from 1; the last layer of both if not given."}
    )
    relation_heads: int | None = field(
        default=None, metadata={"help": "Into how many heads relations are cut; chosen if not given."}
    )

    lmbda: float = field(
        default=0.0, metadata={"help": "Share of optimizer steps on the student's own samples (on-policy)."}
    )
    max_new_tokens: int = field(default=128, metadata={"help": "Longest sample of the student."})
    sampling_temperature: float = field(default=1.0, metadata={"help": "Of the student's samples."})
    sampling_top_k: int = field(default=0, metadata={"help": "Of the student's samples; 0 is off."})
    sampling_top_p: float = field(default=1.0, metadata={"help": "Of the student's samples; 1 is off."})
    prompt_tokens: int | None = field(
        default=None,
        metadata={"help": "Prompt of a sample: a row's first so many tokens; if not given, those before its labels."},
    )
    eval_kd: bool | None = field(
        default=None,
        metadata={"help": "Report kd_loss and acceptance in evaluation. If not given: where the teacher is a model."},
    )

    _VALID_DICT_FIELDS: ClassVar[list[str]] = ["teacher_init_kwargs"]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        found = [name for base in cls.__mro__ for name in vars(base).get("_VALID_DICT_FIELDS", ())]
        cls._VALID_DICT_FIELDS = list(dict.fromkeys(found))

    def __post_init__(self) -> None:
        self.objective()
        for name in ("hidden_weight", "attention_weight"):
            _check(self, name, getattr(self, name) >= 0, "a weight is 0 (off) or more")
        _check(self, "hidden_loss", self.hidden_loss in HIDDEN_LOSSES, f"there are {', '.join(HIDDEN_LOSSES)}")
        self.layer_map("hidden_layer_map")
        self.layer_map("attention_layer_map")
        _check(self, "relation_heads", self.relation_heads is None or self.relation_heads >= 1, "1 or more, or None")
        _check(self, "lmbda", 0 <= self.lmbda <= 1, "the share of on-policy steps is from 0 to 1")
        _check(self, "max_new_tokens", self.max_new_tokens >= 1, "1 or more")
        _check(self, "sampling_temperature", 0 < self.sampling_temperature < float("inf"), "finite and above 0")
        _check(self, "sampling_top_k", self.sampling_top_k >= 0, "0 (off) or more")
        _check(self, "sampling_top_p", 0 < self.sampling_top_p <= 1, "above 0, at most 1 (off)")
        _check(self, "prompt_tokens", self.prompt_tokens is None or self.prompt_tokens >= 1, "1 or more, or None")
        rest: Any = super()
        if hasattr(rest, "__post_init__"):
            rest.__post_init__()

    def objective(self) -> Objective:
        return Objective(self.alpha, self.temperature, self.loss, self.beta, self.eta)

    def layer_map(self, name: str) -> dict[int, int] | None:
        """The setting `name` as {student layer: teacher layer}, both from 1; None where all is left to us."""
        pairs: list[str] | None = getattr(self, name)
        if pairs is None:
            return None
        found: dict[int, int] = {}
        for pair in pairs:
            left, _, right = str(pair).partition(":")
            valid = left.isdigit() and right.isdigit() and int(left) >= 1 and int(right) >= 1
            if not valid or int(left) in found:
                raise UnsupportedError(f"{name}={pairs!r}: {pair!r} is not student:teacher, as 2:4, each layer once")
            found[int(left)] = int(right)
        if not found:
            raise UnsupportedError(f"{name}=[] names no layer; give some, or None for all of them")
        return found


@checked_keywords()
@dataclass
class DistillationConfig(DistillationSettings, TrainingArguments):
    """TrainingArguments with the settings of a distillation; see DistillationSettings for their meaning.

    Raises UnsupportedError for a value that cannot be, before anything is loaded.
    """


def _check(settings: Any, name: str, valid: bool, wanted: str) -> None:
    if not valid:
        raise UnsupportedError(f"{name}={getattr(settings, name)!r}: {wanted}")
