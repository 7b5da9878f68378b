"""Checkpoint files: folders on disk, each whole or absent, whatever dies when; and what is wrong with a damaged one."""

import atexit
import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .._base.errors import CheckpointError
from .._runtime.dispatch import uninterrupted

FORMAT = 2
LOOKS = 10  # at a folder in which another program saves
_ABOUT, _ARRAYS, _LEFT = "about.json", "arrays.npz", "left-behind"  # the last is in those that a run has left behind
_STEP = re.compile(r"step-(\d{8,})(~?)")
_SAVING = re.compile(r"\.saving-step-\d{8,}-(.*)-(\d+)-\d+")  # which machine, which process, its how many-th
_DAY = 24 * 60 * 60
_LOADED: dict[Path, int] = {}  # the step that this program has loaded from a folder, until it saves there
_UNDER_WAY: set[str] = set()  # folders that this process is writing, by name
_COUNT = itertools.count()


class Checkpoint(NamedTuple):
    """One that is whole."""

    path: Path
    about: dict[str, Any]  # what was written beside the arrays
    file: BinaryIO  # which holds these
    damaged: list[str]  # of newer ones that are not whole: which, and why

    def arrays(self) -> Any:
        """The arrays by name, read as they are asked for; to be closed."""
        return np.load(self.file)


def write(
    folder: Path, step: int, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray], keep: int | None
) -> None:
    """Into a folder of another name, which takes its own in one rename; then delete all but the newest `keep`.

    Those later than what the run has loaded, or saves, are of one that it has left behind: marked, they are neither
    counted nor deleted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in [*filter(_is_abandoned, folder.glob(".saving-*")), *folder.glob(".gone-*")]:
        _delete(left)
    before = sorted(_found(folder))  # what a handler of a signal saves meanwhile is none of those left behind
    new = folder / f".saving-step-{step:08d}-{socket.gethostname()}-{os.getpid()}-{next(_COUNT)}"
    _UNDER_WAY.add(new.name)
    try:
        new.mkdir()
        _write_arrays(new / _ARRAYS, arrays)
        with open(new / _ARRAYS, "rb") as file:
            digest = _digest_of_file(file)
        whole = {"format": FORMAT, "step": step, **about, _ARRAYS: digest}
        (new / _ABOUT).write_text(json.dumps({"checksum": _digest(whole), **whole}, indent=1))
        for written in (new / _ARRAYS, new / _ABOUT, new):
            _to_disk(written)
        with uninterrupted():  # a handler that saves, too, comes before or after
            _leave_behind(before, _LOADED.get(folder.resolve(), step), step)
            _put(new, folder / f"step-{step:08d}", keep)
    except BaseException:
        _delete(new)
        raise
    finally:
        _UNDER_WAY.discard(new.name)


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    try:
        np.savez(path, **arrays)  # type: ignore[arg-type]  # names and arrays
    except ValueError as error:  # of zipfile, which hides what has come while it wrote, a Ctrl-C perhaps
        if error.__context__ is not None and "writing handle" in str(error):
            raise error.__context__ from None
        raise


def _leave_behind(before: list[tuple[int, Path]], loaded: int, step: int) -> None:
    """Mark what is later than the step that was loaded, the newest last; that one counts, whether it was marked or not.

    Whenever this ends, `load` takes what it took before, or what the run has loaded.
    """
    for number, path in before:
        mark = path / _LEFT
        with contextlib.suppress(FileNotFoundError):  # another program has removed it
            if number == loaded < step and mark.exists():
                mark.unlink()
                _to_disk(path)
            elif number > min(loaded, step) and not mark.exists():
                mark.touch()
                _to_disk(path)


def _put(new: Path, final: Path, keep: int | None) -> None:
    """What is written in its place, and what it makes obsolete away."""
    folder, old = final.parent, final.with_name(f"{final.name}~")
    if final.exists():  # saved again: until the new one is there, the old one counts
        if old.exists():
            _remove(old)
        os.rename(final, old)
    os.rename(new, final)
    note_saved(folder)
    _to_disk(folder)
    found = _found(folder)
    steps = sorted({number for number, path in found if not (path / _LEFT).exists()})
    gone = set(steps[:-keep]) if keep is not None else set[int]()
    for number, path in found:
        if number in gone or path == old:
            _remove(path)


def note_loaded(folder: Path, step: int) -> None:
    """What is later is left behind from the next `write` into the folder on."""
    _LOADED[folder.resolve()] = step


def note_saved(folder: Path) -> None:
    """What this program has loaded from the folder counts no more."""
    _LOADED.pop(folder.resolve(), None)


def last_loaded(folder: Path) -> int | None:
    """The step that this program has loaded from the folder, and has not saved there since."""
    return _LOADED.get(folder.resolve())


def _is_abandoned(saving: Path) -> bool:
    """Has who was writing it died? A day tells where it is on another machine, or another process has its number."""
    if saving.name in _UNDER_WAY:
        return False
    match = _SAVING.fullmatch(saving.name)
    if match and match[1] == socket.gethostname() and (int(match[2]) == os.getpid() or not _is_alive(int(match[2]))):
        return True
    try:
        return time.time() - saving.stat().st_mtime > _DAY
    except FileNotFoundError:
        return False


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def read(folder: Path, step: int | None, looks: int = LOOKS) -> Checkpoint:
    """The one of a step, or the newest that is whole: of those that a run has left behind, if there are no others.

    FileNotFoundError where there is none; CheckpointError where there are, but none is whole; ValueError where the
    folder is a checkpoint itself, or a file.
    """
    found = sorted(_found(folder), key=lambda each: ((each[1] / _LEFT).exists(), -each[0], each[1].name))  # ~ is last
    if not found:
        is_checkpoint = (folder / _ABOUT).exists() or (folder / _ARRAYS).exists()
        if is_checkpoint or folder.is_file():  # which is not taken for a run that has yet to begin
            what = "is a checkpoint itself" if is_checkpoint else "is a file"
            raise ValueError(f"synk.load: {folder} {what}. Give the folder in which checkpoints lie, as to synk.save.")
        raise FileNotFoundError(f"synk.load: {folder} has no checkpoint; synk.save makes one.")
    wanted = [path for number, path in found if step in (None, number)]
    if not wanted:
        steps = ", ".join(map(str, sorted({number for number, _ in found})))
        raise FileNotFoundError(f"synk.load: {folder} has no step {step}; it has {steps}.")
    damaged: list[str] = []
    for path in wanted:
        before = _identity(path)
        try:
            about, file = _read_whole(path)
        except CheckpointError as error:
            now = _identity(path)
            if looks > 1 and (now is None or now != before):  # another program has removed or replaced it meanwhile
                return read(folder, step, looks - 1)
            damaged.append(f"{path}: {error}")
        else:
            return Checkpoint(path, about, file, damaged)
    which = "no checkpoint that was asked for is whole" if len(damaged) > 1 else "the checkpoint is not whole"
    raise CheckpointError(f"synk.load: {which}. {' '.join(damaged)} Load another step, or start anew elsewhere.")


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a checkpoint from one that has taken its place; None where there is none any more."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _read_whole(path: Path) -> tuple[dict[str, Any], BinaryIO]:
    """What a checkpoint says of itself, and the file of its arrays; CheckpointError with what is wrong with it."""
    try:
        about = json.loads((path / _ABOUT).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{_ABOUT} {_why(error)}.") from error
    if not isinstance(about, dict):
        raise CheckpointError(f"{_ABOUT} holds no description.")
    checksum = about.pop("checksum", None)
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{_ABOUT} has format {about.get('format')}, and this synk reads {FORMAT}.")
    if checksum != _digest(about):
        raise CheckpointError(f"{_ABOUT} is not what was written (its checksum differs).")
    if path.name.rstrip("~") != f"step-{about['step']:08d}":
        raise CheckpointError(f"{_ABOUT} is that of step {about['step']}.")
    try:
        file = open(path / _ARRAYS, "rb")
        digest = _digest_of_file(file)
    except OSError as error:
        raise CheckpointError(f"{_ARRAYS} {_why(error)}.") from error
    if digest != about[_ARRAYS]:
        file.close()
        raise CheckpointError(f"{_ARRAYS} is not what was written with {_ABOUT} (its checksum differs).")
    file.seek(0)
    return about, file


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    return f"cannot be read ({error.strerror if isinstance(error, OSError) else error})"


def _digest(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _digest_of_file(file: BinaryIO) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # a file


def _found(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints by step; one that was being replaced, beside its successor if that did come, has ~ after its name."""
    paths = folder.iterdir() if folder.is_dir() else []
    return [(int(match[1]), path) for path in paths if (match := _STEP.fullmatch(path.name))]


def _remove(path: Path) -> None:
    """Out of sight first: no half of a checkpoint is ever found."""
    gone = path.with_name(f".gone-{path.name}")
    with contextlib.suppress(FileNotFoundError):  # another program has removed it
        os.rename(path, gone)
    _delete(gone)


def _delete(path: Path) -> None:
    with uninterrupted():  # rmtree that is interrupted closes a descriptor twice: an OSError hides the Ctrl-C
        shutil.rmtree(path, ignore_errors=True)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Writer:
    """Writes checkpoints, one at a time."""

    def __init__(self) -> None:
        self._is_idle = threading.Event()  # a join that Ctrl-C ends takes a thread for ended in Python 3.11
        self._is_idle.set()
        self._failure: tuple[str, Exception] | None = None

    def wait(self) -> str:
        """Wait for what is being written; raise what went wrong."""
        self.wait_quietly()
        failure, self._failure = self._failure, None
        if failure is not None:
            what, error = failure
            raise OSError(f"synk.save: {what} was not written in the background ({type(error).__name__}: {error}).")
        return ""

    def wait_quietly(self) -> None:
        """Wait for what is being written."""
        while True:
            with uninterrupted():  # a handler that saves, too, would wait for the lock of this wait
                if self._is_idle.wait(0.05):
                    return

    def run(self, act: Callable[[], None], what: str, is_background: bool) -> str:
        """Write now, or begin to; in a thread of its own, for which Python waits at its end."""
        if not is_background:
            act()
            return ""

        def try_to() -> None:
            try:
                act()
            except Exception as error:
                self._failure = what, error
            finally:
                self._is_idle.set()

        while True:
            self.wait_quietly()
            with uninterrupted():  # so that there is a thread, or none is waited for
                if not self._is_idle.is_set():  # a handler has begun to save
                    continue
                self._is_idle.clear()
                try:
                    threading.Thread(target=try_to, name="synk-save").start()
                except RuntimeError:  # there are too many
                    self._is_idle.set()
                    raise
                return ""

    def report(self) -> None:
        """At the end of the program, when no other save will raise it."""
        try:
            self.wait()
        except OSError as error:
            print(error, file=sys.stderr)


WRITER = Writer()
atexit.register(WRITER.report)
