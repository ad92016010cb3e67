"""hf_accel: one line makes a transformers script run near the machine's limit, one line takes it out.

    import hf_accel
    hf_accel.patch(model)
    model.generate(**inputs)
    hf_accel.unpatch(model)

Importing registers the attention "hf_accel" and the quantization method "hf_accel" with transformers. The names of
distillation, which need transformers' Trainer, and of saving for other programs are loaded when they are first asked
for.
"""

from importlib import import_module
from sys import modules
from typing import TYPE_CHECKING, Any

from .attention.hf import register as _register_attention
from .cache.hf import PagedCache
from .checkpoints.load import load
from .checkpoints.loading import register as _register_quantizer
from .checkpoints.outline import plan
from .config import CacheConfig, PatchConfig, SpeculativeConfig, WeightConfig
from .errors import HfAccelError, HfAccelWarning, OutOfBlocksError, UnsupportedError
from .estimate import Estimate, estimate
from .generation.hf import Engine
from .generation.sequence import Draft
from .generation.speculation.drafters.drafter import Drafter
from .linear.hf import AccelConfig
from .patching.patch import is_patched, patch, patched, stats, unpatch
from .patching.plan import Plan
from .verify import Certificate, verify

if TYPE_CHECKING:
    from .checkpoints.writers.save_compressed import save_compressed
    from .checkpoints.writers.save_gguf import save_gguf
    from .distill.drafts.draft import distill_draft
    from .distill.drafts.measuring import measure_acceptance
    from .distill.drafts.student import init_student
    from .distill.losses.distillation_loss import distillation_loss
    from .distill.teachers.teacher_cache import TeacherCache
    from .distill.trainer.callback import DistillationCallback
    from .distill.trainer.distillation_trainer import DistillationMixin, DistillationTrainer
    from .distill.trainer.settings import DistillationConfig, DistillationSettings
    from .generation.hf.weights_changed import weights_changed
    from .verify.quantization_report import quantization_report

__version__ = "0.1.0"
__all__ = [
    "AccelConfig",
    "CacheConfig",
    "Certificate",
    "DistillationCallback",
    "DistillationConfig",
    "DistillationMixin",
    "DistillationSettings",
    "DistillationTrainer",
    "Draft",
    "Drafter",
    "Engine",
    "Estimate",
    "HfAccelError",
    "HfAccelWarning",
    "OutOfBlocksError",
    "PagedCache",
    "PatchConfig",
    "Plan",
    "SpeculativeConfig",
    "TeacherCache",
    "UnsupportedError",
    "WeightConfig",
    "distill_draft",
    "distillation_loss",
    "estimate",
    "init_student",
    "is_patched",
    "load",
    "measure_acceptance",
    "patch",
    "patched",
    "plan",
    "quantization_report",
    "save_compressed",
    "save_gguf",
    "stats",
    "unpatch",
    "verify",
    "weights_changed",
]

# The module of each name that is loaded when it is first used; the imports for type checkers above say the same.
_LAZY = {
    "DistillationCallback": "distill.trainer.callback",
    "DistillationConfig": "distill.trainer.settings",
    "DistillationMixin": "distill.trainer.distillation_trainer",
    "DistillationSettings": "distill.trainer.settings",
    "DistillationTrainer": "distill.trainer.distillation_trainer",
    "TeacherCache": "distill.teachers.teacher_cache",
    "distill_draft": "distill.drafts.draft",
    "distillation_loss": "distill.losses.distillation_loss",
    "init_student": "distill.drafts.student",
    "measure_acceptance": "distill.drafts.measuring",
    "quantization_report": "verify.quantization_report",
    "save_compressed": "checkpoints.writers.save_compressed",
    "save_gguf": "checkpoints.writers.save_gguf",
    "weights_changed": "generation.hf.weights_changed",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(  # with both, Python can suggest the right name
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=modules[__name__]
        )
    value = globals()[name] = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])  # without the package's files, which nobody means


_register_attention()
_register_quantizer()
