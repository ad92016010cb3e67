"""Answers that hold while a model is only read: layers of equal code and settings are asked once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast

# The answers, by the question and what it is about, while nobody changes the model; None: somebody may change it.
_answered: ContextVar[dict[tuple[Hashable, ...], tuple[Any, Any]] | None] = ContextVar("answered", default=None)
Asking = TypeVar("Asking", bound=Callable[..., Any])
Answer = TypeVar("Answer")


def reading_once(function: Asking) -> Asking:
    """Decorate a function that only reads a model, and within which nobody else changes it: code is asked once."""

    @wraps(function)
    def reading(*args: Any, **keywords: Any) -> Any:
        token = _answered.set({})
        try:
            return function(*args, **keywords)
        finally:
            _answered.reset(token)

    return cast(Asking, reading)


def answer_once(question: Callable[..., Answer], subject: Any, *others: Any, equal: Hashable = None) -> Answer:
    """Return question(subject, *others), which is asked once within a function that is `reading_once`.

    equal: the same for all subjects of which the answer is the same; None: an answer is of one object alone. The
    others are kept apart as objects.
    """
    answered = _answered.get()
    if answered is None:
        return question(subject, *others)
    key = (question, id(subject) if equal is None else equal, *map(id, others))
    if key not in answered:
        # What an id stands for is kept, or another object could get the same one.
        answered[key] = (question(subject, *others), (subject, others))
    answer: Answer = answered[key][0]
    return answer
