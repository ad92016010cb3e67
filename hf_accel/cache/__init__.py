"""A KV cache in blocks. hf.py, which makes it a transformers Cache, is not imported here."""

from .group import PageGroup
from .pool import BlockPool
from .prefix import PrefixIndex
from .sequences import Sequences
from .step import GroupStep, Step
from .storage import KVStorage
from .table import BlockTable

__all__ = ["BlockPool", "BlockTable", "GroupStep", "KVStorage", "PageGroup", "PrefixIndex", "Sequences", "Step"]
