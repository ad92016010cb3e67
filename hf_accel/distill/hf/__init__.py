"""Where distillation knows transformers: callback, trainer, the teacher on disk, students and drafts."""

from .callback import DistillationCallback
from .drafts.draft import DraftResult, distill_draft
from .drafts.measure import measure_acceptance
from .drafts.student import init_student
from .stored.teacher_cache import TeacherCache
from .training.config import DistillationConfig, DistillationSettings
from .training.mixin import DistillationMixin
from .training.trainer import DistillationTrainer

__all__ = [
    "DistillationCallback",
    "DistillationConfig",
    "DistillationMixin",
    "DistillationSettings",
    "DistillationTrainer",
    "DraftResult",
    "TeacherCache",
    "distill_draft",
    "init_student",
    "measure_acceptance",
]
