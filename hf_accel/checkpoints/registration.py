"""Our names in transformers' registries, from the moment that transformers loads them.

Loading these registries takes seconds, and imports every quantization library that is installed, some of which print.
So `import hf_accel` does not load them. It puts doors into those that are there, and into the others as soon as they
are: a door loads our rooms when somebody goes through it, and what is behind it then stands in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "hf_accel"


def register_when_loaded() -> None:
    """Register with each registry that is loaded, and with the others once they are; harmless when repeated."""
    for name, register in REGISTRIES.items():
        if name in sys.modules:
            register(sys.modules[name])
    if not any(isinstance(finder, RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, RegistryFinder())


class RegistryFinder(MetaPathFinder):
    """Finds transformers' registries as the other finders do, and registers our names when one has been run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in REGISTRIES:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            run, register = spec.loader.exec_module, REGISTRIES[fullname]

            def run_and_register(module: ModuleType) -> None:
                run(module)
                register(module)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


# -- doors ---------------------------------------------------------------------------------------------


def _into_attention(module: Any) -> None:
    def attend(*args: Any, **keywords: Any) -> Any:
        _register_attention()
        return module.AttentionInterface()[NAME](*args, **keywords)

    module.AttentionInterface.register(NAME, attend)


def _into_masks(module: Any) -> None:
    def mask(*args: Any, **keywords: Any) -> Any:
        _register_attention()
        return module.AttentionMaskInterface()[NAME](*args, **keywords)

    module.AttentionMaskInterface.register(NAME, mask)


def _into_quantizers(module: Any) -> None:
    """Transformers makes a config of a dict by its class's from_dict, and a quantizer of a config by a call."""
    configs, quantizers = module.AUTO_QUANTIZATION_CONFIG_MAPPING, module.AUTO_QUANTIZER_MAPPING

    class ConfigDoor:
        @staticmethod
        def from_dict(*args: Any, **keywords: Any) -> Any:
            _register_quantizer()
            return configs[NAME].from_dict(*args, **keywords)

    def quantizer(*args: Any, **keywords: Any) -> Any:
        _register_quantizer()
        return quantizers[NAME](*args, **keywords)

    configs.setdefault(NAME, ConfigDoor)
    quantizers.setdefault(NAME, quantizer)


def _register_attention() -> None:
    from ..attention.hf import register

    register()


def _register_quantizer() -> None:
    from .loading import register_quantization

    register_quantization()


REGISTRIES: dict[str, Callable[[Any], None]] = {
    "transformers.modeling_utils": _into_attention,
    "transformers.masking_utils": _into_masks,
    "transformers.quantizers.auto": _into_quantizers,
}
