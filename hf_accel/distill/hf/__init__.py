"""Where distillation knows transformers: callback, trainer, the teacher on disk, students and drafts."""

from .callback import DistillationCallback
from .config import DistillationConfig, DistillationSettings
from .draft import DraftResult, distill_draft
from .measure import measure_acceptance
from .mixin import DistillationMixin
from .student import init_student
from .teacher_cache import TeacherCache
from .trainer import DistillationTrainer

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
