"""Checks that a teacher predicts the same things, in the same order, as a student."""

from __future__ import annotations

import inspect
import os
from typing import Any

from torch import Tensor

from ...errors import UnsupportedError
from ...models import unwrapped
from .labels import CLASSIFYING, loss_of, shifts
from .last_hidden import head_of


def check_pair(student: Any, teacher: Any, tokenizer: Any = None) -> None:
    """Raises UnsupportedError unless `teacher` can teach `student`. tokenizer: the student's, or None if not known."""
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
    """Raises UnsupportedError for a model that cannot tell its loss."""
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
    """Raises UnsupportedError if the student, or a teacher that is a model, has logits that cannot be left out."""
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


_NO_SOFTMAX = ("regression", "multi_label_classification")


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
