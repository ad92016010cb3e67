"""The folder of blocks that stay on the disk: how many bytes it has, who writes to it, and what goes first."""

from __future__ import annotations

import os
import queue
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import UnsupportedError
from ..hardware.atomic import is_unfinished

KEY_BYTES = 16
MOST_PENDING = 2**28  # bytes that wait to be written; what comes while there are more is not kept
UNFINISHED_SECONDS = 3600.0  # after which an unfinished file is one of a process that was killed
SHARE_KEPT = 0.9  # of the most bytes, where some were deleted
FIRST_LEAST = 1 / 16  # of the most bytes that are written between two looks at what other processes have written
KEY, TWO_DIGITS = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}"), re.compile("[0-9a-f]{2}")
BLOCK_FILE = re.compile(r"[0-9a-f]{32}\.safetensors")

Write = Callable[[bytes, memoryview], None]
Job = tuple[Write, list[bytes], Tensor]  # blocks to write, by their digests: [n, bytes of a block]


class BlockFolder:
    """A folder of blocks of any models, with at most about `max_bytes` bytes of them.

    Raises UnsupportedError for a folder that other users may write to: what lies there is believed.
    """

    def __init__(self, path: str | Path, max_bytes: int) -> None:
        self.path, self.max_bytes = Path(path).absolute(), max_bytes
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = self.path.stat()
        except (OSError, ValueError) as error:
            raise UnsupportedError(f"{self.path} is no folder for prompts: {error}; name another one") from error
        if os.name == "posix" and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
            raise UnsupportedError(
                f"{self.path} can be written to by other users, and what lies there is believed; name a folder of "
                "your own, or `chmod 700` it"
            )
        if not os.access(self.path, os.W_OK):
            raise UnsupportedError(f"{self.path} cannot be written to; name another folder")
        self.num_read = self.num_written = self.num_refused = self.num_skipped = 0  # blocks
        self._bytes, self._least_free = 0, -1.0  # written since the last look, and how many may be until the next
        self._pending: queue.SimpleQueue[Job | threading.Event] = queue.SimpleQueue()
        self._num_pending = 0  # bytes
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def statistics(self) -> dict[str, int]:
        """Count the blocks that were read, written, refused because of their content, and left out because they could
        not be written, or not in time."""
        return {
            "kept_blocks_read": self.num_read,
            "kept_blocks_written": self.num_written,
            "kept_blocks_refused": self.num_refused,
            "kept_blocks_skipped": self.num_skipped,
        }

    # -- writing ---------------------------------------------------------------------------------------

    def has_time(self, num_bytes: int) -> bool:
        """Return whether so many more bytes may wait to be written."""
        return self._num_pending + num_bytes <= MOST_PENDING

    def count_pending(self, num_bytes: int) -> None:
        """Note that so many more bytes wait to be written."""
        with self._lock:
            self._num_pending += num_bytes

    def write(self, write: Write, digests: list[bytes], content: Tensor) -> None:
        """Write blocks, whose bytes are counted as pending, in a thread of the folder's own.

        write: writes one of them, and may raise OSError. content: [n, bytes of a block] uint8.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hf_accel kept blocks", daemon=True)
                self._thread.start()
        self._pending.put((write, digests, content))

    def flush(self) -> None:
        """Wait until all that was given to `write` is written."""
        if self._thread is not None and self._thread.is_alive():
            done = threading.Event()
            self._pending.put(done)
            done.wait()

    def _run(self) -> None:
        while True:
            job = self._pending.get()
            if isinstance(job, threading.Event):
                job.set()
                continue
            write, digests, content = job
            self._write(write, digests, content.numpy())
            self.count_pending(-content.nbytes)

    def _write(self, write: Write, digests: list[bytes], content: Any) -> None:
        if self._bytes > self._least_free:
            self.make_room(content.nbytes)
        # The last block first: where files must go, those at the beginning of a prompt, without which no other is of
        # use, go last.
        for digest, row in reversed(list(zip(digests, content, strict=True))):
            try:
                write(digest, memoryview(row))
                self.num_written += 1
            except OSError:  # a full disk, say
                self.num_skipped += 1
            self._bytes += row.nbytes

    def make_room(self, num_bytes: int = 0) -> None:
        """Delete the least recently used files if there would be too many bytes with so many more."""
        found = sorted(self._files())
        total, most = sum(size for _, size, _ in found) + num_bytes, self.max_bytes
        if total > most:
            for _, size, path in found:
                if total <= most * SHARE_KEPT:
                    break
                with suppress(OSError):  # another process has deleted it, or opened it on Windows
                    os.unlink(path)
                total -= size
        self._bytes, self._least_free = 0, min(most * FIRST_LEAST, max(0, most - total))

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Yield the time, the size and the path of each file of ours. Unfinished ones of killed processes go."""
        late = time.time() - UNFINISHED_SECONDS
        for folder in _entries(self.path, KEY):
            for part in _entries(folder.path, TWO_DIGITS):
                for entry in _entries(part.path):
                    with suppress(OSError):
                        found = entry.stat(follow_symlinks=False)
                        if BLOCK_FILE.fullmatch(entry.name) and stat.S_ISREG(found.st_mode):
                            yield found.st_mtime_ns, found.st_size, entry.path
                        elif is_unfinished(entry.name) and found.st_mtime < late:
                            os.unlink(entry.path)


def _entries(path: str | Path, name: re.Pattern[str] | None = None) -> list[os.DirEntry[str]]:
    """Return what a folder holds; with `name`, its folders that are called so."""
    try:
        with os.scandir(path) as entries:
            found = list(entries)
    except OSError:
        return []
    return [
        each for each in found if name is None or (name.fullmatch(each.name) and each.is_dir(follow_symlinks=False))
    ]
