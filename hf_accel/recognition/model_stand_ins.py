"""Stand-ins for the config and the cache that the code of a traced layer reads."""

from __future__ import annotations

from typing import Any

from .operation import UntraceableError
from .stand_ins import ATTENTION, ATTENTION_KEPT, Recorder, StandIn
from .symbols import Opaque
from .unchanged import PLAIN_TYPES


class ConfigStandIn:
    """A config of which the code may read plain values."""

    def __init__(self, trace: Recorder, config: Any) -> None:
        vars(self).update(_trace=trace, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name == ATTENTION:
            return self._trace.attention or self._read_attention()
        value = getattr(self._config, name)
        if not isinstance(value, PLAIN_TYPES):
            raise UntraceableError(f"it reads config.{name}")
        self._trace.note(vars(self._config), name, value)
        return value

    def _read_attention(self) -> Any:
        own = vars(self._config)
        if ATTENTION_KEPT not in own:
            raise UntraceableError("it does not say which attention function it takes")
        self._trace.note(own, ATTENTION_KEPT, own[ATTENTION_KEPT])
        name = getattr(self._config, ATTENTION)
        return self._trace.equals.get(name, name)


class CacheStandIn(Opaque):
    """The cache of a pass, which takes K and V of one layer."""

    def __init__(self, trace: Recorder) -> None:
        super().__init__("past_key_values")
        self.trace = trace

    def update(self, key: Any, value: Any, layer_idx: Any, *args: Any, **kwargs: Any) -> tuple[StandIn, StandIn]:
        return self.trace.write(key, value, layer_idx)

    def __bool__(self) -> bool:
        return True
