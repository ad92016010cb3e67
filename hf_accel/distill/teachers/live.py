"""Teachers in memory: a model, or the student of a LoRA training without its adapters, and which students they fit."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...models import evaluating, unwrapped
from ..losses.logit_rows import DenseRows, Head, HeadRows, Rows
from ..losses.objective import Objective
from .labels import CLASSIFYING, loss_of, shifts
from .teacher import LABELS, PACKING, Teacher

# Names of the factor of logits in the configs of Cohere, Muse Glimmer and Falcon-H1.
MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_NO_SOFTMAX = ("regression", "multi_label_classification")


class ModelTeacher(Teacher):
    """A transformers model, patched by hf_accel or not, in any float dtype, on any device: inputs are moved to it.
    It answers in eval mode without gradients; its own flags are as they were between two questions."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def check(self, student: Any, objective: Objective, tokenizer: Any = None) -> None:
        check_pair(student, self.model, tokenizer)

    def rows(self, inputs: Mapping[str, Any], select: Tensor, *, compact: bool = False) -> Rows:
        return output_at(self.model, inputs, select, compact=compact)


class BaseTeacher(Teacher):
    """The student of a LoRA training without its adapters: no second model in memory."""

    def __init__(self) -> None:
        self._student: Any = None

    def check(self, student: Any, objective: Objective, tokenizer: Any = None) -> None:
        if not hasattr(student, "disable_adapter"):
            raise UnsupportedError(
                f"teacher='base' is the student without its adapters, and {type(student).__name__} has none; wrap it "
                "by peft.get_peft_model, or give a model as the teacher"
            )
        self._student = weakref.ref(student)

    def rows(self, inputs: Mapping[str, Any], select: Tensor, *, compact: bool = False) -> Rows:
        with self._bare() as student:
            return output_at(student, inputs, select, compact=compact)

    @contextmanager
    def _bare(self) -> Iterator[Any]:
        student = self._student()
        trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
        frozen = [parameter for parameter in student.parameters() if not parameter.requires_grad]
        try:
            with student.disable_adapter():
                yield student
        finally:
            # PEFT lets every active adapter train again, whether it was frozen before or not.
            for flag, parameters in ((True, trained), (False, frozen)):
                for parameter in parameters:
                    parameter.requires_grad_(flag)


@torch.no_grad()
def output_at(model: Any, inputs: Mapping[str, Any], select: Tensor, *, compact: bool = False) -> Rows:
    """Return the output of `model` at `select`: logits, or, with `compact` and a head that can be left out, hidden
    states.
    """
    # A head computes on its own device, and the rows must be on that of `select`.
    head = head_of(model) if compact and model.device == select.device else None
    given = {key: x.to(model.device) if isinstance(x, Tensor) else x for key, x in taken_by(model, inputs).items()}
    if head is None:
        with evaluating(model):
            logits = model(**given).logits
        _check_positions(logits, select)
        return DenseRows(logits[select.to(logits.device)].to(select.device))
    hidden = LastHidden(model)
    try:
        with evaluating(model):
            last = model(**given, logits_to_keep=1).logits
    finally:
        hidden.remove()
    check_head(model, head, hidden.value, last)
    _check_positions(hidden.value, select)
    return HeadRows(hidden.value[select], head)


def _check_positions(answers: Tensor, select: Tensor) -> None:
    if answers.shape[:-1] != select.shape:
        raise UnsupportedError(
            f"the teacher answers for {tuple(answers.shape[:-1])} and the student's labels are {tuple(select.shape)}: "
            "these are not the same positions; a teacher with virtual tokens (prompt tuning) cannot be used"
        )


def taken_by(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords for a teacher's forward: those of the student's inputs that it takes (BERT's takes token_type_ids,
    DistilBERT's does not)."""
    forward = inspect.signature(unwrapped(model).forward).parameters
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in forward.values())
    rest = PACKING if is_open else ()
    given = {key: value for key, value in inputs.items() if key not in LABELS and (key in forward or key in rest)}
    return {**given, "use_cache": False} if "use_cache" in forward or is_open else given


def with_decoder_inputs(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The teacher's decoder reads what the student's does, which the student's own forward makes of its labels."""
    inner = unwrapped(model)
    if not getattr(inner.config, "is_encoder_decoder", False) or inputs.get("decoder_input_ids") is not None:
        return inputs
    if not hasattr(inner, "prepare_decoder_input_ids_from_labels"):
        raise UnsupportedError(
            f"{type(inner).__name__} does not tell what its decoder reads, and the teacher's must read the same; put "
            "decoder_input_ids into the batch (DataCollatorForSeq2Seq(tokenizer, model=model))"
        )
    return {**inputs, "decoder_input_ids": inner.prepare_decoder_input_ids_from_labels(labels=inputs["labels"])}


def head_of(model: Any) -> Head | None:
    """The head of a model that can leave out logits: its weight if it is a plain linear layer, else (quantized,
    adapted) something to call. None for a model that cannot."""
    inner = unwrapped(model)
    layer = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if layer is None or "logits_to_keep" not in inspect.signature(inner.forward).parameters:
        return None
    config = inner.config.get_text_config()
    finish: dict[str, Any] = {"softcap": getattr(config, "final_logit_softcapping", None), "scale": _scale(config)}
    if type(layer) is torch.nn.Linear:
        return Head(layer.weight, layer.bias, **finish)
    return Head(layer, num_classes=getattr(layer, "out_features", config.vocab_size), **finish)


def _scale(config: Any) -> float:
    for name in MULTIPLIERS:
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    # Granite divides by it.
    return float(scaling) if config.model_type == "hyperclovax" else 1 / scaling


class LastHidden:
    """Keeps what a model's backbone gave last, and the autocast that it ran under, until `remove`."""

    def __init__(self, model: Any) -> None:
        self._value: Tensor | None = None
        self._autocast = (False, torch.float32)
        self._handle = unwrapped(model).base_model.register_forward_hook(self._keep)

    def _keep(self, backbone: Any, args: Any, output: Any) -> None:
        value: Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
        device = value.device.type
        self._value = value
        self._autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    @property
    def value(self) -> Tensor:
        """The last hidden states, [B, T, H]."""
        if self._value is None:
            raise UnsupportedError("the model's forward did not call its base_model: distil it with fused=False")
        return self._value

    def autocast(self) -> AbstractContextManager[Any]:
        enabled, dtype = self._autocast
        return torch.autocast(self.value.device.type, dtype=dtype, enabled=enabled)

    def remove(self) -> None:
        self._handle.remove()


@torch.no_grad()
def check_head(model: Any, head: Head, hidden: Tensor, logits: Tensor) -> None:
    """Raise UnsupportedError if `head` does not make the model's own logits, [B, 1 or T, V], of its hidden states."""
    found = head.prepared(head.vocab_size).logits(hidden[:, -1]).float()
    own = logits[:, -1].float()
    close = 1e-4 if logits.dtype == hidden.dtype == torch.float32 else 5e-2
    if found.shape != own.shape or bool((found - own).abs().max() > close * own.abs().max()):
        raise UnsupportedError(
            f"{type(unwrapped(model)).__name__} does more to its hidden states than its output embeddings and config "
            "tell, so its logits cannot be made of them a few at a time: distil it with fused=False"
        )


def check_pair(student: Any, teacher: Any, tokenizer: Any = None) -> None:
    """Raise UnsupportedError unless `teacher` can teach `student`. tokenizer: the student's, or None if not known."""
    _check_distinct(student, teacher)
    ours, theirs = unwrapped(student), unwrapped(teacher)
    if _is_encoder_decoder(ours) != _is_encoder_decoder(theirs):
        raise UnsupportedError(
            f"{type(theirs).__name__} and {type(ours).__name__}: one is an encoder and a decoder and the other is "
            "not, so they do not see the same text; choose two of a kind"
        )
    classes = loss_of(student) in CLASSIFYING
    if classes != (loss_of(teacher) in CLASSIFYING):
        raise UnsupportedError(
            f"{type(ours).__name__} and its teacher {type(theirs).__name__} do not predict the same things: one "
            "chooses tokens and the other classes; load the teacher with the student's kind of head"
        )
    if classes:
        _check_classes(ours.config, theirs.config)
    _check_vocabularies(ours, theirs, tokenizer)


def check_student(student: Any) -> None:
    """Raise UnsupportedError for a model that cannot tell its loss."""
    inner = unwrapped(student)
    if "labels" not in inspect.signature(inner.forward).parameters:
        raise UnsupportedError(
            f"the forward of {type(inner).__name__} takes no labels, so it has no loss to mix with the teacher's; "
            "give a model with a head (AutoModelForCausalLM, AutoModelForSequenceClassification, ...), or use "
            "hf_accel.distillation_loss in a loop of your own"
        )
    problem = getattr(inner.config, "problem_type", None)
    if loss_of(student) in CLASSIFYING and (problem in _NO_SOFTMAX or inner.config.num_labels < 2):
        raise UnsupportedError(
            f"problem_type={problem!r}, num_labels={inner.config.num_labels}: regression and several labels at once "
            "have no softmax to distil; single_label_classification with 2 or more classes has"
        )


def check_fusible(student: Any, teacher: Any) -> None:
    """Raise UnsupportedError if the student, or a teacher that is a model, has logits that cannot be left out."""
    model = getattr(teacher, "model", None)
    for who, head in (("student", head_of(student)), ("teacher", model is None or head_of(model))):
        if not head:
            raise UnsupportedError(
                f"fused=True: the {who}'s forward takes no logits_to_keep, or it has no output embeddings; "
                "use fused=False"
            )
    own = head_of(student)
    if own is None or not isinstance(own.weight, Tensor):
        raise UnsupportedError(
            "fused=True: the student's head is not a plain linear layer (it is adapted or quantized), and its "
            "gradient is computed from its weight; leave it out of the adapters' target_modules, or use fused=False"
        )
    if not shifts(student):
        raise UnsupportedError("fused=True is for causal language models; a classifier's logits are few: fused=False")


def _is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _check_distinct(student: Any, teacher: Any) -> None:
    if unwrapped(student) is unwrapped(teacher) or any(module is teacher for module in student.modules()):
        adapted = unwrapped(student) is not student
        raise UnsupportedError(
            "the teacher is the student itself"
            + (", below its adapters; give teacher='base' for the student without them" if adapted else "")
            + "; or give another model, or a copy (copy.deepcopy) made before training"
        )


def _check_classes(student: Any, teacher: Any) -> None:
    if student.num_labels != teacher.num_labels:
        raise UnsupportedError(
            f"the student has {student.num_labels} classes and the teacher {teacher.num_labels}; load the "
            f"student with num_labels={teacher.num_labels}"
        )
    ours, theirs = ({i: str(name).lower() for i, name in config.id2label.items()} for config in (student, teacher))
    unnamed = {i: f"label_{i}" for i in ours}
    if ours != theirs and unnamed not in (ours, theirs):
        raise UnsupportedError(
            f"the student's classes are {student.id2label} and the teacher's {teacher.id2label}; if they mean the "
            "same, load the student with the teacher's id2label and label2id, and number its labels so"
        )


def _check_vocabularies(student: Any, teacher: Any, tokenizer: Any) -> None:
    sizes = [getattr(model.config.get_text_config(), "vocab_size", 0) or 0 for model in (student, teacher)]
    if 0 in sizes:
        # The models read images or sounds.
        return
    if hasattr(tokenizer, "tokenizer"):
        # It is a processor, which holds one.
        tokenizer = tokenizer.tokenizer
    ours = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else None
    if sizes[0] != sizes[1] and (ours is None or max(ours.values(), default=0) >= min(sizes)):
        raise UnsupportedError(
            f"the student's vocabulary has {sizes[0]} tokens and the teacher's {sizes[1]}. If both use one tokenizer "
            "and differ only in unused tokens at the end, give it to the Trainer (processing_class=tokenizer); with "
            "two tokenizers, choose another teacher, or train on texts that this one wrote"
        )
    theirs = _local_vocabulary(teacher) if ours else None
    if ours and theirs:
        names = {index: token for token, index in theirs.items()}
        wrong = [token for token, index in ours.items() if names.get(index, token) != token]
        if wrong:
            token = min(wrong, key=ours.__getitem__)
            raise UnsupportedError(
                f"the tokenizers differ in {len(wrong)} tokens: {ours[token]} is {token!r} to the student and "
                f"{names[ours[token]]!r} to the teacher; choose a teacher with the student's tokenizer"
            )


def _local_vocabulary(teacher: Any) -> dict[str, int] | None:
    """The vocabulary of the tokenizer that was saved with the teacher, if it is on this machine."""
    name = getattr(teacher.config, "_name_or_path", "")
    if not name or not os.path.isdir(name):
        return None
    from transformers import AutoTokenizer

    try:
        return dict(AutoTokenizer.from_pretrained(name, local_files_only=True).get_vocab())
    except (OSError, ValueError, ImportError, KeyError, AttributeError):
        # The folder has no tokenizer, or one of another kind: nothing is known.
        return None
