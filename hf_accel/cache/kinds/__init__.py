"""The kinds of state that decoder layers keep of their tokens; each file holds all that pages need to know of one."""

from .chunks import Chunks
from .compressed_keys import CompressedKeys
from .inputs import ConvolutionInputs, IndexKeys
from .kind import KeysAndValues, Kind
from .once import OnceGroup, SourceKind, SourceRows
from .states import RecurrentStates

__all__ = [
    "Chunks",
    "CompressedKeys",
    "ConvolutionInputs",
    "IndexKeys",
    "KeysAndValues",
    "Kind",
    "OnceGroup",
    "RecurrentStates",
    "SourceKind",
    "SourceRows",
]
