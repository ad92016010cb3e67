"""Blocks that stay on the disk: what prompts begin with, for later processes.

A file holds one block of one group of layers: keys and values of some tokens, or a state. Its name is the digest of
the tokens up to the block's end; its folder is named after the digest of all else that the numbers depend on: the
model, and how pages hold them. It is a safetensors file whose header holds a hash of the whole. So a file is either
what it says, to the last bit, or it is refused: one that is torn, was changed, or belongs to something else.

    FOLDER/<digest of the model and of the group's pages>/<two digits>/<digest of the tokens>.safetensors

Any number of processes may share a folder. Files are written under other names and then renamed. They are never
changed: a process deletes the least recently used ones of all if there are too many bytes of them. The time of a file
is that of its last use.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hardware.atomic import put_file
from .block_folder import KEY_BYTES, BlockFolder
from .group import PageGroup
from .pages import Pages

BLOCK_FORMAT = "hf_accel block 1"
ALIGNED = 16  # bytes at which each tensor begins in a file
READ_AT_ONCE = 64  # blocks
TOUCHED_SECONDS = 60.0  # for which a use of a file is not noted again
MOST_NOTED = 2**20  # uses that are remembered for this
NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class FilePart(NamedTuple):
    """The place of one tensor of pages in a file. layer: the key of its storage. number: of the tensor there."""

    layer: Any
    number: int
    dtype: torch.dtype
    shape: torch.Size
    start: int
    stop: int


class GroupFolder:
    """The files of one group of pages, whose layers have pages already.

    identity: the digest of all that the numbers depend on besides the tokens. sharing_size: the tokens from a digest
    to the next one. writes: whether blocks are kept, and not read alone.

    What is kept is written when `confirm` says that the model was still the one of `identity` when it was computed.
    """

    def __init__(
        self, folder: BlockFolder, group: PageGroup, identity: str, sharing_size: int, *, writes: bool = True
    ) -> None:
        self.folder, self.group, self.writes = folder, group, writes
        self._unsure: list[tuple[list[bytes], Tensor]] = []
        self.parts, self.nbytes = _parts(group)
        described: list[Any] = [
            identity,
            type(group).__name__,
            group.window,
            group.chunk,
            group.pool.block_size,
            sharing_size,
        ]
        described += [str(group.quantized), type(group.form).__name__, group.form.rank]
        described += [[repr(each.layer), each.number, str(each.dtype), list(each.shape)] for each in self.parts]
        self.key = hashlib.sha256(json.dumps(described).encode()).digest()[:KEY_BYTES].hex()
        self._used: dict[bytes, float] = {}  # when the use of a file was noted last
        self._header_bytes = len(self._header(bytes(KEY_BYTES), ""))

    def __contains__(self, digest: bytes) -> bool:
        return os.path.exists(self._path(digest))

    def _path(self, digest: bytes) -> str:
        name = digest.hex()
        return os.path.join(self.folder.path, self.key, name[:2], f"{name}.safetensors")

    def _header(self, digest: bytes, check: str) -> bytes:
        """Return the beginning of a file, which follows from its name and the hash of its content alone."""
        metadata = {"format": BLOCK_FORMAT, "key": self.key, "digest": digest.hex(), "sha256": check.zfill(64)}
        block = {"dtype": "U8", "shape": [self.nbytes], "data_offsets": [0, self.nbytes]}
        text = json.dumps({"__metadata__": metadata, "block": block}).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def _check(self, digest: bytes, content: memoryview) -> str:
        return hashlib.sha256(b"".join((self.key.encode(), digest)) + hashlib.sha256(content).digest()).hexdigest()

    # -- writing ---------------------------------------------------------------------------------------

    def keep(self, pairs: Sequence[tuple[bytes, int]], *, waits: bool = False) -> None:
        """Keep blocks, given as (digest, block), of which each is written completely. Those kept already are used.

        waits: whether to wait until there is room for them in memory, and not to leave them out.
        """
        if not self.writes:
            return
        now, missing = time.monotonic(), []
        for number, (digest, block) in enumerate(pairs):
            if now - self._used.get(digest, -TOUCHED_SECONDS) < TOUCHED_SECONDS:
                continue
            if not self._touch(digest, number):
                missing.append((digest, block))
            self._used[digest] = now
        if len(self._used) > MOST_NOTED:
            self._used.clear()
        if not missing or not self._is_same:
            return
        for first in range(0, len(missing), READ_AT_ONCE):
            some = missing[first : first + READ_AT_ONCE]
            if waits and not self.folder.has_time(len(some) * self.nbytes):
                self.confirm()
                self.folder.flush()
            if not self.folder.has_time(len(some) * self.nbytes):
                self.folder.num_skipped += len(missing) - first
                for digest, _ in missing[first:]:
                    self._used.pop(digest, None)
                return
            content = self._gathered([block for _, block in some])
            self.folder.count_pending(content.nbytes)
            self._unsure.append(([digest for digest, _ in some], content))

    def join(self) -> None:
        """Let prompts begin with these blocks, until the salt of the pages changes."""
        self.group.kept = self

    def confirm(self) -> None:
        """Write what was kept so far."""
        unsure, self._unsure = self._unsure, []
        for digests, content in unsure:
            self.folder.write(self.write, digests, content)

    def drop(self) -> None:
        """Forget what was kept and is not confirmed."""
        self.folder.count_pending(-sum(content.nbytes for _, content in self._unsure))
        self._unsure = []

    def _touch(self, digest: bytes, number: int) -> bool:
        """Note a use of a block's file; returns whether there is one. Blocks in front seem to be used a bit later."""
        when = time.time_ns() - number * 1000
        try:
            os.utime(self._path(digest), ns=(when, when))
        except OSError:
            return False
        return True

    def _gathered(self, blocks: list[int]) -> Tensor:
        """Return the bytes of blocks [n, nbytes] uint8 on the host."""
        found = torch.zeros(len(blocks), self.nbytes, dtype=torch.uint8)
        for part in self.parts:
            pages = self.group.storages[part.layer].pages[part.number]
            assert pages is not None
            rows = pages[torch.tensor(blocks, device=pages.device)].flatten(1).view(torch.uint8)
            found[:, part.start : part.stop] = rows
        return found

    def write(self, digest: bytes, content: memoryview) -> None:
        """Write a block's file. Raises OSError."""
        path = Path(self._path(digest))
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(exist_ok=True, mode=0o700)
        put_file(path, self._header(digest, self._check(digest, content)), content)

    # -- reading ---------------------------------------------------------------------------------------

    @property
    def _is_same(self) -> bool:
        """Return whether the pages are still those that the files are for: pages may take a wider dtype."""
        tensors = [self.group.storages[each.layer].pages[each.number] for each in self.parts]
        pairs = zip(tensors, self.parts, strict=True)
        return all(t is not None and t.dtype is each.dtype and t.shape[1:] == each.shape for t, each in pairs)

    def read(self, digests: Sequence[bytes]) -> bool:
        """Read blocks into pages and the prefix index; returns whether all of them are there now, or only the first.

        A file that is refused is deleted. The caller must have room for all blocks.
        """
        index, pool = self.group.index, self.group.pool
        assert index is not None
        done: list[tuple[bytes, int]] = []
        while self._is_same and len(done) < len(digests):
            some = digests[len(done) : len(done) + READ_AT_ONCE]
            contents = torch.zeros(len(some), self.nbytes, dtype=torch.uint8)
            count = 0
            while count < len(some) and self._read(some[count], contents[count]):
                count += 1
            blocks = self.group.allocate(count)
            self._put(blocks, contents[:count])
            done += zip(some, blocks, strict=False)
            if count < len(some):
                break
        for digest, block in done:
            index.insert([digest], [block])
        for number, (digest, block) in reversed(list(enumerate(done))):
            pool.release(block)
            self._touch(digest, number)
        self.folder.num_read += len(done)
        return len(done) == len(digests)

    def _read(self, digest: bytes, content: Tensor) -> bool:
        """Read one file into content [nbytes] uint8; returns whether it is what it must be."""
        path = self._path(digest)
        try:
            descriptor = os.open(path, os.O_RDONLY | NO_LINKS)
            with open(descriptor, "rb", buffering=0) as opened:
                found = os.fstat(descriptor)
                header, view = bytearray(self._header_bytes), memoryview(content.numpy().data)
                is_right = (
                    stat.S_ISREG(found.st_mode)
                    and found.st_size == len(header) + len(view)
                    and opened.readinto(header) == len(header)
                    and _fill(opened, view)
                    and header == self._header(digest, self._check(digest, view))
                )
        except OSError:  # another process has deleted it, or it is a link
            is_right = not os.path.lexists(path)
            self.folder.num_refused += not is_right
            return False
        if not is_right:
            self.folder.num_refused += 1
            with suppress(OSError):
                os.unlink(path)
        return is_right

    def _put(self, blocks: list[int], contents: Tensor) -> None:
        """Write the bytes of blocks [n, nbytes] uint8 into their pages."""
        if not blocks:
            return
        for part in self.parts:
            pages = self.group.storages[part.layer].pages[part.number]
            assert pages is not None
            rows = contents[:, part.start : part.stop].view(part.dtype).reshape(len(blocks), *part.shape)
            pages[torch.tensor(blocks, device=pages.device)] = rows.to(pages.device)


def _fill(opened: Any, view: memoryview) -> bool:
    """Read as many bytes as a view has; returns whether there were as many."""
    place = 0
    while place < len(view):
        count = opened.readinto(view[place:])
        if not count:
            return False
        place += count
    return True


def _parts(group: PageGroup) -> tuple[list[FilePart], int]:
    """Return the places of a group's tensors in a file, and the bytes of all."""
    parts: list[FilePart] = []
    place = 0
    for layer in sorted(group.storages, key=repr):
        for number, tensor in enumerate(group.storages[layer].pages):
            if tensor is not None and (size := tensor[0].nbytes):
                parts.append(FilePart(layer, number, tensor.dtype, tensor.shape[1:], place, place + size))
                place += -(-size // ALIGNED) * ALIGNED
    return parts, place


def group_folders(pages: Pages, folder: BlockFolder, identity: str, *, writes: bool = True) -> list[GroupFolder]:
    """Return the files of each group of pages that a model has made."""
    return [GroupFolder(folder, group, identity, pages.sharing_size, writes=writes) for group in pages.groups]
