"""The paged cache as transformers sees it: a Cache for its own loops, and one for ragged passes."""

from .handle import PAGED_HANDLE, PagedKV
from .paged import PagedCache, layer_windows, page_groups
from .ragged import RaggedCache

__all__ = ["PAGED_HANDLE", "PagedCache", "PagedKV", "RaggedCache", "layer_windows", "page_groups"]
