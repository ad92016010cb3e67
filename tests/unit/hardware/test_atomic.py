"""What is replaced whole: a process that ends at any step leaves the old content or the new one, never a mixture."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_accel import HfAccelError, HfAccelWarning, UnsupportedError
from hf_accel.hardware import atomic
from hf_accel.hardware.atomic import locked, replaced_file, replaced_folder

FILES = ("config.json", "model.bin", "inner/tokens.txt")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the test ends child processes")


def fill(folder: Path, version: str) -> None:
    for name in FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(version * 1000)


def write(place: Path, version: str) -> None:
    with replaced_folder(place) as folder:
        fill(folder, version)


def version_at(place: Path) -> str | None:
    """The version that is there complete; None if nothing is there."""
    if not place.exists():
        return None
    found = {str(path.relative_to(place)): path.read_text() for path in place.rglob("*") if path.is_file()}
    versions = {text[:1] for text in found.values()}
    assert found.keys() == set(FILES) and len(versions) == 1, f"a mixture: {found.keys()}, {versions}"
    assert all(len(text) == 1000 for text in found.values())
    return versions.pop()


@pytest.fixture(params=["exchange", "two renames"])
def exchanges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether folders are exchanged in one step."""
    if request.param == "two renames":
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    return request.param == "exchange" and sys.platform in atomic.SYSTEM_CALLS


@pytest.fixture
def place(exchanges: bool, tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def test_it_becomes_the_folder(place: Path) -> None:
    write(place, "a")
    assert version_at(place) == "a"
    (place / "more").write_text("of the old one")
    write(place, "b")
    assert version_at(place) == "b" and list(place.parent.iterdir()) == [place]


def test_folders_above_are_made(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "c", "x")
    assert version_at(tmp_path / "a" / "b" / "c") == "x"


@pytest.mark.skipif(sys.platform != "linux", reason="the system call is Linux's")
def test_linux_exchanges_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "checkpoint", "a")
    monkeypatch.setattr(os, "rename", None)
    write(tmp_path / "checkpoint", "b")
    assert version_at(tmp_path / "checkpoint") == "b"


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")
def test_the_mode_stays(place: Path) -> None:
    write(place, "a")
    place.chmod(0o750)
    write(place, "b")
    assert place.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("error", [ValueError("of the block"), KeyboardInterrupt()])
def test_a_block_that_raises_changes_nothing(place: Path, error: BaseException) -> None:
    write(place, "a")
    with pytest.raises(type(error)), replaced_folder(place) as folder:
        fill(folder, "b")
        raise error
    assert version_at(place) == "a" and list(place.parent.iterdir()) == [place]


def test_what_the_disk_does_not_take_is_told(place: Path) -> None:
    write(place, "a")
    message = r"could not be written: .*the old content is unchanged"
    with pytest.raises(HfAccelError, match=message), replaced_folder(place) as folder:
        raise OSError(28, "No space left on device", str(folder))
    with pytest.raises(HfAccelError, match="could not be written: 5"), replaced_folder(place, errors=(KeyError,)):
        raise KeyError(5)
    assert version_at(place) == "a" and list(place.parent.iterdir()) == [place]


def test_places_that_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("a")
    (tmp_path / "here" / "inside").mkdir(parents=True)
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path / "here" / "inside")
    for place, message in (
        (tmp_path / "file", "is a file; name a folder"),
        (tmp_path / "file" / "below", "could not be written"),
        (Path("."), "holds the working directory"),
        (tmp_path / "here", "holds the working directory"),
        (tmp_path / ("long" * 100), "is no place for a folder: .*File name too long"),
        (tmp_path / ("x" * 250), "could not be written: .*File name too long"),
        (tmp_path / "nul\0", "is no place for a folder: embedded null"),
        (tmp_path / "loop", "is no place for a folder: .*oop|could not be written"),
        (Path("/proc/none/here"), "could not be written"),
    ):
        with pytest.raises(HfAccelError, match=message), replaced_folder(place):
            pytest.fail("it was to be refused before the block")
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(UnsupportedError, match="is a mount point"), replaced_folder(tmp_path / "disk"):
        pytest.fail("it was to be refused before the block")
    assert (tmp_path / "file").read_text() == "a"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    write(tmp_path / "real", "a")
    (tmp_path / "latest").symlink_to("real")
    write(tmp_path / "latest", "b")
    assert (tmp_path / "latest").is_symlink() and version_at(tmp_path / "real") == "b"


def test_an_old_folder_that_cannot_be_deleted_is_told(
    place: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place, "a")
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)
    if exchanges:
        with pytest.warns(HfAccelWarning, match="could not be deleted"):
            write(place, "b")
        assert version_at(place) == "b"


def test_a_file_becomes_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for version in ("a", "b"):
        with replaced_file(file) as unfinished:
            unfinished.write_text(version)
            assert unfinished.name == file.name
        assert file.read_text() == version and list(tmp_path.iterdir()) == [file]
    with pytest.raises(HfAccelError, match="could not be written"), replaced_file(file) as unfinished:
        unfinished.write_text("c")
        raise OSError("the disk is full")
    assert file.read_text() == "b" and list(tmp_path.iterdir()) == [file]


@needs_fork
@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=pytest.mark.long)])
def test_a_process_that_is_killed_while_it_writes_a_file(tmp_path: Path, kills: int) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("a" * 100_000)

    def work() -> None:
        for version in itertools.cycle("ab"):
            with replaced_file(file) as unfinished:
                unfinished.write_text(version * 100_000)

    generator = random.Random(0)
    for _ in range(kills):
        child = in_child(work)
        time.sleep(generator.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert file.read_text() in ("a" * 100_000, "b" * 100_000)
    with replaced_file(file) as unfinished:
        unfinished.write_text("c")
    assert file.read_text() == "c" and list(tmp_path.iterdir()) == [file]


def test_a_folder_that_the_system_does_not_move_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where a file of it is open. Nothing is left of the new one."""
    place = tmp_path / "checkpoint"
    write(place, "a")
    rename = os.rename

    def refuses(old: Path, new: Path) -> None:
        if Path(old) == place:
            raise PermissionError(13, "in use", str(old))
        rename(old, new)

    monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    monkeypatch.setattr(os, "rename", refuses)
    with pytest.raises(HfAccelError, match=r"could not be written: .*in use"):
        write(place, "b")
    assert version_at(place) == "a" and list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("with_lock", [True, False])
def test_what_nobody_holds_is_deleted(tmp_path: Path, with_lock: bool) -> None:
    """With the file of its lock, or without, as earlier versions left it; also a lock that has no folder yet."""
    left = tmp_path / f".checkpoint.0123abcd{atomic.UNFINISHED}"
    left.mkdir()
    (left / "model.bin").write_text("half")
    if with_lock:
        (tmp_path / f"{left.name}{atomic.LOCK}").touch()
        (tmp_path / f".checkpoint.4567cdef{atomic.UNFINISHED}{atomic.LOCK}").touch()
    (tmp_path / f".other.0123abcd{atomic.UNFINISHED}").mkdir()
    write(tmp_path / "checkpoint", "a")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", f".other.0123abcd{atomic.UNFINISHED}"}


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "no locks"), NotImplementedError()])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuses(lock: object, timeout: float) -> None:
        raise error

    monkeypatch.setattr(atomic.FileLock, "acquire", refuses)
    write(tmp_path / "checkpoint", "a")
    assert version_at(tmp_path / "checkpoint") == "a" and len(list(tmp_path.iterdir())) == 1


@needs_fork
def test_what_a_process_in_work_has_not_finished_stays(tmp_path: Path) -> None:
    """Another process that writes to the same place must not lose its unfinished folder."""
    place = tmp_path / "checkpoint"
    with replaced_folder(place) as first:
        fill(first, "a")
        write(place, "b")
        assert first.exists() and version_at(place) == "b"
    assert version_at(place) == "a" and list(tmp_path.iterdir()) == [place]


# -- processes that end in between --------------------------------------------------------------------------


def in_child(work: Callable[[], None]) -> int:
    """A forked process that does the work, and ends."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def ends_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """End the process at the call `number` of those that change the disk, before or after it has done its work."""
    calls = itertools.count(1)

    def counted(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **keywords: object) -> object:
            if next(calls) == number:
                os._exit(9)
            result = original(*args, **keywords)
            if next(calls) == number:
                os._exit(9)
            return result

        return call

    places = [(os, name) for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")]
    for owner, name in [*places, (atomic, "_exchange")]:
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


@needs_fork
def test_a_process_that_ends_at_any_step(place: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step through the whole of it. Where folders are exchanged, there is always one."""
    seen, status, number = set(), 1, 0
    while status:
        shutil.rmtree(place.parent)
        place.parent.mkdir()
        write(place, "a")
        number += 1

        def work(number: int = number) -> None:
            ends_at(monkeypatch, number)
            write(place, "b")

        status = os.waitstatus_to_exitcode(os.waitpid(in_child(work), 0)[1])
        assert status in (0, 9)
        version = version_at(place)
        seen.add(version)
        assert version in ("a", "b") or (version is None and not exchanges)
        if version is None:
            beside = sorted(path.name for path in place.parent.iterdir())
            assert ".checkpoint.hf_accel-new" in beside and ".checkpoint.hf_accel-old" in beside
            assert version_at(place.parent / ".checkpoint.hf_accel-new") == "b"
            with pytest.raises(ValueError, match="stop"), replaced_folder(place):
                assert version_at(place) == "b", "the next write puts the complete one there first"
                raise ValueError("stop")
        write(place, "c")
        assert version_at(place) == "c" and list(place.parent.iterdir()) == [place]
    assert seen >= {"a", "b"} and (None in seen) == (not exchanges) and number > 10


@needs_fork
@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=pytest.mark.long)])
def test_a_process_that_is_killed(tmp_path: Path, kills: int) -> None:
    place = tmp_path / "checkpoint"
    write(place, "a")

    def work() -> None:
        while True:
            write(place, "b")
            write(place, "a")

    generator = random.Random(0)
    for _ in range(kills):
        child = in_child(work)
        time.sleep(generator.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert version_at(place) in ("a", "b")
    write(place, "c")
    assert version_at(place) == "c" and list(tmp_path.iterdir()) == [place]


@needs_fork
def test_a_lock_makes_others_wait_and_dies_with_its_process(tmp_path: Path) -> None:
    file, held, done = tmp_path / "lock", tmp_path / "held", tmp_path / "done"
    child = os.fork()
    if not child:
        with locked(file):
            held.touch()
            time.sleep(0.3)
            done.touch()
            os._exit(0)
    while not held.exists():
        time.sleep(0.01)
    with locked(file):
        assert done.exists()
    os.waitpid(child, 0)
