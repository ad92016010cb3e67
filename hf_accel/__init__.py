"""hf_accel: one line makes a transformers script run near the machine's limit, one line takes it out.

    import hf_accel
    hf_accel.patch(model)
    model.generate(**inputs)
    hf_accel.unpatch(model)

Importing registers the attention "hf_accel" and the quantization method "hf_accel" with transformers.
"""

from .attention.hf import register as _register_attention
from .cache.hf import PagedCache
from .config import CacheConfig, PatchConfig, SpeculativeConfig, WeightConfig
from .distill.hf import (
    DistillationCallback,
    DistillationConfig,
    DistillationMixin,
    DistillationSettings,
    DistillationTrainer,
    DraftResult,
    TeacherCache,
    distill_draft,
    init_student,
    measure_acceptance,
)
from .distill.losses import distillation_loss
from .distill.measure import AcceptanceReport
from .errors import HfAccelError, HfAccelWarning, OutOfBlocksError, UnsupportedError
from .estimate import Estimate, estimate
from .generation.drafters.base import Draft, Drafter
from .generation.hf import Engine
from .generation.stream import Request
from .linear.hf import AccelConfig
from .loading import register as _register_quantizer
from .patch import is_patched, patch, patched, plan, stats, unpatch
from .plan import Plan
from .verify import Certificate, verify

__version__ = "0.1.0"
__all__ = [
    "AccelConfig",
    "AcceptanceReport",
    "CacheConfig",
    "Certificate",
    "DistillationCallback",
    "DistillationConfig",
    "DistillationMixin",
    "DistillationSettings",
    "DistillationTrainer",
    "Draft",
    "DraftResult",
    "Drafter",
    "Engine",
    "Estimate",
    "HfAccelError",
    "HfAccelWarning",
    "OutOfBlocksError",
    "PagedCache",
    "PatchConfig",
    "Plan",
    "Request",
    "SpeculativeConfig",
    "TeacherCache",
    "UnsupportedError",
    "WeightConfig",
    "distill_draft",
    "distillation_loss",
    "estimate",
    "init_student",
    "is_patched",
    "measure_acceptance",
    "patch",
    "patched",
    "plan",
    "stats",
    "unpatch",
    "verify",
]

_register_attention()
_register_quantizer()
