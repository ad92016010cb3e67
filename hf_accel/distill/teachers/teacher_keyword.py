"""The keyword of a teacher: teacher_model=, and teacher=, which it was called in some places."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from ...errors import HfAccelWarning, UnsupportedError

Target = TypeVar("Target", bound=Callable[..., Any])


def takes_teacher_model(target: Target) -> Target:
    """Decorate a function with teacher_model=: teacher= means the same, and warns. UnsupportedError for both."""

    @functools.wraps(target)
    def call(*args: Any, **keywords: Any) -> Any:
        if "teacher" in keywords:
            if "teacher_model" in keywords:
                raise UnsupportedError("teacher= and teacher_model= say the same; give teacher_model= alone")
            warnings.warn("teacher= is called teacher_model= now", HfAccelWarning, stacklevel=2)
            keywords["teacher_model"] = keywords.pop("teacher")
        return target(*args, **keywords)

    return call  # type: ignore[return-value]
