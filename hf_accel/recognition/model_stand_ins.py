"""Stand-ins for the config, the cache, and the linear layers and norms that the code of a traced layer reads."""

from __future__ import annotations

from typing import Any

from torch import nn

from .operation import UntraceableError
from .stand_ins import ATTENTION, ATTENTION_KEPT, Recorder, StandIn
from .symbols import TOKENS_BEFORE, Opaque
from .unchanged import PLAIN_TYPES


class ConfigStandIn:
    """A config of which the code may read plain values."""

    def __init__(self, trace: Recorder, config: Any) -> None:
        vars(self).update(_trace=trace, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name == ATTENTION:
            return self._trace.attention or self._read_attention()
        value = getattr(self._config, name)
        if type(value) is dict:
            self._trace.note(vars(self._config), name, value)
            return SettingsStandIn(self._trace, value)
        if not isinstance(value, PLAIN_TYPES):
            raise UntraceableError(f"it reads config.{name}")
        # Where a config has another name for it, the value is kept under that one. A read that is noted under a name
        # that the config does not keep would look changed in each pass, and the layer would be traced again.
        kept = getattr(self._config, "attribute_map", {}).get(name, name)
        self._trace.note(vars(self._config), kept, value)
        return value

    def _read_attention(self) -> Any:
        own = vars(self._config)
        if ATTENTION_KEPT not in own:
            raise UntraceableError("it does not say which attention function it takes")
        self._trace.note(own, ATTENTION_KEPT, own[ATTENTION_KEPT])
        name = getattr(self._config, ATTENTION)
        return self._trace.equals.get(name, name)


class SettingsStandIn:
    """A dictionary of a config of which the code may read plain values."""

    def __init__(self, trace: Recorder, settings: dict[str, Any]) -> None:
        self._trace, self._settings = trace, settings

    def get(self, name: str, default: Any = None) -> Any:
        value = self._settings.get(name)
        if not isinstance(value, PLAIN_TYPES):
            raise UntraceableError(f"it reads {name} of its config")
        self._trace.note(self._settings, name, value)
        return value if name in self._settings else default

    def __getitem__(self, name: str) -> Any:
        if name not in self._settings:
            raise UntraceableError(f"its config has no {name}")
        return self.get(name)


class CacheStandIn(Opaque):
    """The cache of a pass, which takes K and V of one layer."""

    def __init__(self, trace: Recorder) -> None:
        super().__init__("past_key_values")
        self.trace = trace

    def update(self, key: Any, value: Any, layer_idx: Any, *args: Any, **kwargs: Any) -> tuple[StandIn, StandIn]:
        return self.trace.write(key, value, layer_idx)

    def get_seq_length(self, layer_idx: Any = 0) -> Any:
        """Return what stands for the number of tokens before, which code adds to the numbers of its own."""
        return TOKENS_BEFORE

    def __bool__(self) -> bool:
        return True


class LinearStandIn:
    """A linear layer, of which the code may ask whether its weight has the dtype of the numbers."""

    def __init__(self, trace: Any, module: nn.Module) -> None:
        self._trace, self._module = trace, module

    def __call__(self, x: Any) -> StandIn:
        product: StandIn = self._trace.linear(self._module, x)
        return product

    @property
    def weight(self) -> Opaque:
        weight = self._module._parameters.get("weight")
        self._trace.note(self._module._parameters, "weight", weight)
        if weight is not None and weight.dtype is not self._trace.dtype:
            raise UntraceableError("the weight of a module has another dtype than its input")
        return Opaque("weight", dtype=self._trace.dtype)


class NormStandIn(LinearStandIn):
    """An RMSNorm, of which the code may ask the same."""

    def __call__(self, x: Any) -> StandIn:
        normed: StandIn = self._trace.norm(self._module, x)
        return normed
