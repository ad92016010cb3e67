"""Files and folders that are replaced as a whole: a reader finds the complete old one or the complete new one.

The new one is written into an unfinished folder next to its place, flushed to the disk, and only then put there by one
system call, so that a process may be killed, and the machine may lose its power, at any moment:

* A file: rename(2) everywhere, which replaces what was there.
* A folder that was not there: rename(2) everywhere.
* A folder that replaces another: on Linux renameat2(2) with RENAME_EXCHANGE, on macOS renameatx_np(2) with
  RENAME_SWAP; the old one then lies in the unfinished folder and is deleted. Where the system or the file system
  cannot exchange (Windows, some network file systems) it takes two renames: the complete new folder is first named
  `.NAME.hf_accel-new`, the old one moves to `.NAME.hf_accel-old`, then the new one moves to its place. Killed in
  between, the place is empty, both complete folders stand next to it, and the next write to the place, or a rename by
  hand, puts the new one there.

An unfinished folder has a file next to it, which the process that writes holds locked. One that nobody holds any more
was left by a process that was killed; the next write to the same place deletes it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from ..errors import HfAccelError, HfAccelWarning, UnsupportedError

UNFINISHED, NEW, OLD = ".hf_accel-unfinished", ".hf_accel-new", ".hf_accel-old"
LOCK = ".lock"  # behind the name of an unfinished folder
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system without locks answers
# The system calls that exchange folders, with what they take for the working directory (AT_FDCWD).
SYSTEM_CALLS = {"linux": ("renameat2", -100), "darwin": ("renameatx_np", -2)}
EXCHANGE = 2  # RENAME_EXCHANGE on Linux, RENAME_SWAP on macOS


@contextmanager
def replaced_file(file: Path, *, errors: tuple[type[Exception], ...] = ()) -> Iterator[Path]:
    """Give a path to write to, which becomes `file` when the block has ended; nothing is left of a block that raises.

    errors: the errors besides OSError that a writer raises when the disk does not take its bytes. Raises HfAccelError
    for these.
    """
    with _errors_of_the_disk(file, errors), _unfinished(file) as folder:
        yield folder / file.name
        _to_disk(folder / file.name)
        os.replace(folder / file.name, file)
        _to_disk(file.parent)


def put_file(file: Path, *parts: bytes | memoryview) -> None:
    """Write a file of these bytes under another name, and rename it; do not wait for the disk.

    After a loss of power such a file may be torn, so that who reads it must check its content. One that a killed
    process has left is called as `is_unfinished` says. Raises OSError.
    """
    unfinished = file.with_name(f".{secrets.token_hex(8)}{UNFINISHED}")
    try:
        with open(unfinished, "xb") as opened:
            for part in parts:
                opened.write(part)
        os.replace(unfinished, file)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def is_unfinished(name: str) -> bool:
    """Return whether `put_file` writes to files of this name."""
    return name.startswith(".") and name.endswith(UNFINISHED)


@contextmanager
def replaced_folder(folder: Path, *, errors: tuple[type[Exception], ...] = ()) -> Iterator[Path]:
    """Give an empty folder to fill, which becomes `folder` when the block has ended, as in `replaced_file`.

    The former content of `folder` is deleted, except for what the block copies. Raises UnsupportedError, before
    anything is written, for a place that cannot be replaced whole.
    """
    with _errors_of_the_disk(folder, errors):
        check_replaceable(folder)
        place = folder.resolve()
        place.parent.mkdir(parents=True, exist_ok=True)
        _recover(place)
        with _unfinished(place) as unfinished:
            if place.exists():
                shutil.copymode(place, unfinished)
            yield unfinished
            for path in unfinished.rglob("*"):
                if not path.is_symlink() and (path.is_file() or path.is_dir()):  # opening a pipe waits for a writer
                    _to_disk(path)
            _to_disk(unfinished)
            _put(unfinished, place)
            _to_disk(place.parent)


def check_replaceable(folder: Path) -> None:
    """Raise UnsupportedError for a place that no folder can be put to in one step."""
    try:
        place = folder.resolve()
        place.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long, no path at all, a loop of links
        raise UnsupportedError(f"{folder} is no place for a folder: {error}; name another one") from error
    if place.exists() and not place.is_dir():
        raise UnsupportedError(f"{folder} is a file; name a folder, or delete it first")
    if place.is_dir() and Path.cwd().is_relative_to(place):
        raise UnsupportedError(
            f"{folder} is or holds the working directory, and is replaced whole; name a folder inside it"
        )
    if os.path.ismount(place):
        raise UnsupportedError(f"{folder} is a mount point, which cannot be replaced; name a folder inside it")


@contextmanager
def _errors_of_the_disk(path: Path, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    failures: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        yield
    except failures as error:
        raise HfAccelError(f"{path} could not be written: {error}; the old content is unchanged") from error


@contextmanager
def _unfinished(place: Path) -> Iterator[Path]:
    """Make a locked folder next to `place`, which is deleted at the end with all that it holds."""
    prefix = f".{place.name}."
    for name in {path.name.removesuffix(LOCK) for path in place.parent.iterdir()}:
        if name.startswith(prefix) and name.endswith(UNFINISHED):
            _delete_abandoned(place.with_name(name))
    folder = place.with_name(f"{prefix}{secrets.token_hex(4)}{UNFINISHED}")
    with _lock_of(folder):  # there is no moment at which others find the folder without it
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if folder.exists():
                warnings.warn(f"{folder} could not be deleted; it is of no use", HfAccelWarning, stacklevel=2)


@contextmanager
def locked(file: Path, *, timeout: float = -1) -> Iterator[None]:
    """Let one process at a time into the block; others on this machine wait. A lock dies with its process.

    file: made for the lock if it is not there. timeout: seconds after which it raises Timeout; -1 waits for ever.
    """
    lock = FileLock(file)
    try:
        lock.acquire(timeout=timeout)
    except NotImplementedError:  # how some versions of filelock say so
        pass
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _lock_of(folder: Path, *, timeout: float = -1) -> Iterator[None]:
    """Hold the lock of an unfinished folder, and leave no file of it."""
    file = folder.with_name(folder.name + LOCK)
    with locked(file, timeout=timeout):
        try:
            yield
        finally:
            with suppress(OSError):  # on Windows the lock deletes its file itself
                file.unlink()


def _delete_abandoned(folder: Path) -> None:
    """Delete an unfinished folder, unless the process that writes it still runs."""
    with suppress(OSError), _lock_of(folder, timeout=0):  # Timeout is an OSError
        shutil.rmtree(folder, ignore_errors=True)


def _to_disk(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a folder, is on the disk."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put(new: Path, place: Path) -> None:
    """Move the folder `new` to `place`; the former content of `place` is then at `new`, or deleted."""
    if not place.exists():
        os.rename(new, place)
        return
    if _exchange(new, place):
        return
    complete, old = _aside(place, NEW), _aside(place, OLD)
    os.rename(new, complete)
    try:
        os.rename(place, old)
    except OSError:  # Windows moves no folder of which a file is open, as that of a model which is in use
        shutil.rmtree(complete)
        raise
    os.rename(complete, place)
    shutil.rmtree(old, ignore_errors=True)


def _aside(place: Path, suffix: str) -> Path:
    return place.with_name(f".{place.name}{suffix}")


def _recover(place: Path) -> None:
    """Finish the work of a process that was killed between the renames of `_put`."""
    complete, old = _aside(place, NEW), _aside(place, OLD)
    for left in (complete, old):
        if left.is_dir() and not place.exists():
            os.rename(left, place)
        if left.is_dir():
            shutil.rmtree(left)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step; False where the system or the file system cannot."""
    name, here = SYSTEM_CALLS.get(sys.platform, ("", 0))
    rename = getattr(ctypes.CDLL(None), name, None) if name else None
    return rename is not None and rename(here, os.fsencode(first), here, os.fsencode(second), EXCHANGE) == 0
