"""Prompts of a PagedCache that stay in a folder on the disk."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any, ClassVar

import torch

from ...config import CacheConfig
from ...errors import UnsupportedError
from ...tensors import model_device
from ..block_folder import BlockFolder
from ..kept_blocks import group_folders
from ..pages import Pages
from .cache_argument import cache_name

DIRECTORY_BYTES = CacheConfig.directory_bytes


class KeptOnDisk:
    """The methods of a PagedCache that keep prompts for later processes."""

    pages: Pages
    identify: ClassVar[Any] = None  # the salt and the digest of a model; given by generation/hf, which knows models

    def save(self, folder: str | PathLike[str], model: Any, *, max_bytes: int = DIRECTORY_BYTES) -> int:
        """Keep what prompts begin with in a folder, and return the number of blocks that were written.

        model: the patched model that has computed them. Files are safetensors, and each is known by a hash of its
        tokens, the model's weights and code, and the form of the pages; any number of caches and processes may share
        the folder. max_bytes: beyond which the least recently used files are deleted. Raises UnsupportedError for a
        folder that others may write to, and for a model of which no hash can tell everything.
        """
        place, identity = BlockFolder(fspath(folder), max_bytes), self._identify(model)
        for files in group_folders(self.pages, place, identity):
            assert files.group.index is not None
            files.keep(list(files.group.index.items()), waits=True)
            files.confirm()
        place.flush()
        return place.num_written

    def load(self, folder: str | PathLike[str], model: Any) -> None:
        """Let prompts begin with what a folder holds for this model; files are read when prompts need them.

        Nothing is found once the model has changed. Raises UnsupportedError as `save` does.
        """
        place, identity = BlockFolder(fspath(folder), DIRECTORY_BYTES), self._identify(model)
        if not all(group.storages for group in self.pages.groups):
            first = torch.zeros(1, 1, dtype=torch.long, device=model_device(model))
            with torch.no_grad():
                model(input_ids=first, **{cache_name(model): self}, use_cache=True)
            self.reset()  # type: ignore[attr-defined]
        for files in group_folders(self.pages, place, identity, writes=False):
            files.join()

    def _identify(self, model: Any) -> str:
        """Return the digest of a patched model, whose salt the pages have from now on."""
        if self.identify is None or self.pages.prefixes is None:
            raise UnsupportedError(
                "prompts stay on the disk for patched models whose caches share beginnings; leave prefix_sharing= of "
                "the cache True"
            )
        salt, identity = self.identify(model)
        self.pages.use_salt(salt)
        return str(identity)
