"""A model with bitsandbytes' layers: labelled as transformers labels one, and checked before they are taken out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from ..errors import UnsupportedError
from ..linear.nf4 import has_changed, is_nf4, require_bitsandbytes
from ..undo.journal import Journal
from .plan import Plan


def label_nf4(todo: Plan, journal: Journal) -> None:
    """Tell transformers and PEFT, so that save_pretrained writes what a plain from_pretrained loads.

    The model gets the attributes that from_pretrained(quantization_config=BitsAndBytesConfig(...)) leaves on one.
    """
    model, replaced = todo.model, {linear.site.name for linear in todo.quantized}
    left = [name for name, m in model.named_modules() if type(m) is nn.Linear or isinstance(m, Conv1D)]
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=todo.quantized[0].site.weight.dtype,
        llm_int8_skip_modules=_patterns((name for name in left if name not in replaced), replaced),
    )
    journal.attribute(model, "hf_quantizer", Bnb4BitHfQuantizer(settings))
    journal.attribute(model, "is_quantized", True)
    journal.attribute(model, "is_loaded_in_4bit", True)
    journal.attribute(model, "quantization_method", settings.quant_method)
    # The config is a copy that patch() has put in.
    model.config.quantization_config = settings
    model.config._is_quantized = True


def _patterns(names: Iterable[str], replaced: Collection[str]) -> list[str]:
    """Return the names, each as a pattern if transformers would also take it for the end or beginning of others."""
    return [
        f"^{re.escape(name)}$" if any(o.endswith(name) or o.startswith(f"{name}.") for o in replaced) else name
        for name in names
    ]


def check_nf4(model: PreTrainedModel) -> None:
    """Raise UnsupportedError if adapters were put on bitsandbytes' layers, or merged into them, since patch()."""
    for name, module in model.named_modules():
        base = module._modules.get("base_layer")
        if base is not None and is_nf4(base):
            raise UnsupportedError(
                f"cannot unpatch: {name!r} has an adapter that is made for bitsandbytes' layers; take it out with "
                "unload() first"
            )
    changed = [name for name, module in model.named_modules() if is_nf4(module) and has_changed(module)]
    if changed:
        raise UnsupportedError(
            f"cannot unpatch: {len(changed)} NF4 layers, {changed[0]!r} first, have been given other weights since "
            "patch(), as merging a LoRA adapter does, and the originals know nothing of it; load the model again"
        )


def check_takes_nf4(model: PreTrainedModel) -> None:
    """Raise UnsupportedError for a model that cannot have NF4 layers, because bitsandbytes is not there, or because
    PEFT would not see them.
    """
    require_bitsandbytes()
    adapted = next((name for name, module in model.named_modules() if "base_layer" in module._modules), None)
    if adapted is not None:
        raise UnsupportedError(
            f"weights='nf4' was asked for, but {adapted!r} has an adapter, and PEFT makes others for bitsandbytes' "
            "layers; patch the model first and put adapters on it then"
        )
