"""The paged cache as transformers sees it: a Cache for its own loops, and one for ragged passes."""

from .handle import PAGED_HANDLE, PagedKV
from .layers import NOT_PAGED, layer_windows, page_groups
from .paged import PagedCache
from .ragged import RaggedCache

__all__ = ["NOT_PAGED", "PAGED_HANDLE", "PagedCache", "PagedKV", "RaggedCache", "layer_windows", "page_groups"]
