"""hf_accel: one line makes a transformers script run near the machine's limit, one line takes it out.

    import hf_accel
    hf_accel.patch(model)
    model.generate(**inputs)
    hf_accel.unpatch(model)

Importing loads neither torch nor transformers, and prints nothing: each name is loaded when it is first asked for.
"hf_accel" becomes an attention implementation and a quantization method of transformers as soon as transformers has
loaded its registries of them.
"""

from importlib import import_module
from sys import modules
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .checkpoints.registration import register_when_loaded as _register_when_loaded

if TYPE_CHECKING:
    from .cache.hf import PagedCache
    from .checkpoints.load import load
    from .checkpoints.outline import plan
    from .checkpoints.writers.save_compressed import save_compressed
    from .checkpoints.writers.save_gguf import save_gguf
    from .config import CacheConfig, PatchConfig, SpeculativeConfig, WeightConfig
    from .distill.drafts.draft import distill_draft
    from .distill.drafts.heads import DraftHead
    from .distill.drafts.measuring import measure_acceptance
    from .distill.drafts.student import init_student
    from .distill.losses.distillation_loss import distillation_loss
    from .distill.teachers.teacher_cache import TeacherCache
    from .distill.trainer.callback import DistillationCallback
    from .distill.trainer.distillation_trainer import DistillationMixin, DistillationTrainer
    from .distill.trainer.settings import DistillationConfig, DistillationSettings
    from .errors import HfAccelError, HfAccelWarning, OutOfBlocksError, UnsupportedError
    from .estimate import Estimate, estimate
    from .generation.hf import Engine
    from .generation.hf.model_runner import weights_changed
    from .generation.sequence import Draft
    from .generation.speculation.drafters.drafter import Drafter
    from .linear.hf import AccelConfig
    from .patching.patch import is_patched, patch, patched, stats, unpatch
    from .patching.plan import Plan
    from .verify.certificate import Certificate
    from .verify.quantization_report import quantization_report
    from .verify.verify import verify

__version__ = "0.2.0"
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
    "DraftHead",
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

# The module of each name, which is loaded when it is first used; the imports for type checkers above say the same.
_LAZY = {
    "AccelConfig": "linear.hf",
    "CacheConfig": "config",
    "Certificate": "verify.certificate",
    "DistillationCallback": "distill.trainer.callback",
    "DistillationConfig": "distill.trainer.settings",
    "DistillationMixin": "distill.trainer.distillation_trainer",
    "DistillationSettings": "distill.trainer.settings",
    "DistillationTrainer": "distill.trainer.distillation_trainer",
    "Draft": "generation.sequence",
    "DraftHead": "distill.drafts.heads",
    "Drafter": "generation.speculation.drafters.drafter",
    "Engine": "generation.hf",
    "Estimate": "estimate",
    "HfAccelError": "errors",
    "HfAccelWarning": "errors",
    "OutOfBlocksError": "errors",
    "PagedCache": "cache.hf",
    "PatchConfig": "config",
    "Plan": "patching.plan",
    "SpeculativeConfig": "config",
    "TeacherCache": "distill.teachers.teacher_cache",
    "UnsupportedError": "errors",
    "WeightConfig": "config",
    "distill_draft": "distill.drafts.draft",
    "distillation_loss": "distill.losses.distillation_loss",
    "estimate": "estimate",
    "init_student": "distill.drafts.student",
    "is_patched": "patching.patch",
    "load": "checkpoints.load",
    "measure_acceptance": "distill.drafts.measuring",
    "patch": "patching.patch",
    "patched": "patching.patch",
    "plan": "checkpoints.outline",
    "quantization_report": "verify.quantization_report",
    "save_compressed": "checkpoints.writers.save_compressed",
    "save_gguf": "checkpoints.writers.save_gguf",
    "stats": "patching.patch",
    "unpatch": "patching.patch",
    "verify": "verify.verify",
    "weights_changed": "generation.hf.model_runner",
}


class _Surface(ModuleType):
    """This module. Its folders `verify` and `estimate` do not take the place of the functions of these names."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(  # with both, Python can suggest the right name
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=modules[__name__]
        )
    value = globals()[name] = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])  # without the package's files, which nobody means


modules[__name__].__class__ = _Surface
_register_when_loaded()
