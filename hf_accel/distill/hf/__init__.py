"""Where distillation knows transformers: callback, trainer, the teacher on disk, drafts."""

from .callback import DistillationCallback

__all__ = ["DistillationCallback"]
