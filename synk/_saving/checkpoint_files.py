"""Checkpoint files: folders on disk, whole or absent whatever dies when, and what is wrong with a damaged folder."""

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
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from .._base.errors import CheckpointError
from .._runtime.dispatch import call_in_helpers, uninterrupted

FORMAT = 2
# How often a folder is read anew in which another program saves meanwhile.
ATTEMPTS = 10
_ABOUT, _ARRAYS = "about.json", "arrays.npz"
# A checkpoint; with ~, one that was to be replaced by a second save of its step.
_STEP = re.compile(r"step-(\d{8,})(~?)")
# A checkpoint that is being written: by which machine, by which process, and its number there.
_SAVING = re.compile(r"\.saving-step-\d{8,}-(.*)-(\d+)-\d+")
_DAY = 24 * 60 * 60
# Names of the folders that this process is writing.
_UNDER_WAY: set[str] = set()
# Tells folders that are being written apart, of threads too.
_COUNT = itertools.count()


class Checkpoint(NamedTuple):
    """A whole checkpoint.

    Attributes:
      path: its folder.
      about: what was written beside the arrays.
      file: the open file of the arrays.
      damaged: of newer checkpoints that are not whole, which they are and why.
    """

    path: Path
    about: dict[str, Any]
    file: BinaryIO
    damaged: list[str]

    def arrays(self) -> Any:
        return np.load(self.file)


def write(
    folder: Path, step: int, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray], keep: int | None
) -> None:
    """Write a checkpoint and delete all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in [*filter(_is_abandoned, folder.glob(".saving-*")), *folder.glob(".gone-*")]:
        _delete(left)
    # A later step that a handler of a signal saves meanwhile is not among them.
    later = [path for number, path in _checkpoints(folder) if number > step]
    # Written under another name, the folder takes its own by one rename: what has the name of a checkpoint is whole.
    new = folder / f".saving-step-{step:08d}-{socket.gethostname()}-{os.getpid()}-{next(_COUNT)}"
    _UNDER_WAY.add(new.name)
    try:
        new.mkdir()
        digest = _write_arrays(new / _ARRAYS, arrays)
        whole = {"format": FORMAT, "step": step, **about, _ARRAYS: digest}
        (new / _ABOUT).write_text(json.dumps({"checksum": _digest(whole), **whole}, indent=1))
        # Before the rename: after a power cut a name on the disk must not stand for data that is not.
        for written in (new / _ARRAYS, new / _ABOUT, new):
            _to_disk(written)
        # A handler of a signal that saves, too, comes before or after.
        with uninterrupted():
            _put(new, folder / f"step-{step:08d}")
            # Checkpoints of later steps are those of a run that has gone back. Under another name they are neither
            # loaded nor counted nor deleted.
            for path in later:
                _rename(path, f"left-{path.name}")
            _remove_old(folder, keep)
    except BaseException as error:
        # A write to a full disk does not say where.
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(folder)
        _delete(new)
        raise
    finally:
        _UNDER_WAY.discard(new.name)


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Write arrays as `np.savez` does, without its copies, and return the checksum of the file."""
    checksum = hashlib.sha256()
    with open(path, "wb") as file:

        def write_on(data: Any) -> int:
            checksum.update(data)
            # After an error an archive still ends itself, when it is collected.
            return len(data) if file.closed else file.write(data)

        # An archive never goes back in a file that cannot tell its position.
        archive = zipfile.ZipFile(cast(Any, SimpleNamespace(write=write_on, flush=lambda: None)), "w")
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, np.lib.format.header_data_from_array_1_0(array))
                member.write(array.reshape(-1, order="A").view(np.uint8).data)
        archive.close()
    return checksum.hexdigest()


def _put(new: Path, final: Path) -> None:
    """Give a new checkpoint its name, and remove the one that it replaces."""
    old = final.with_name(f"{final.name}~")
    # The old checkpoint counts until the new one has its name.
    if final.exists():
        _rename(final, old.name)
    os.rename(new, final)
    _to_disk(final.parent)
    _remove(old)


def _rename(path: Path, name: str) -> None:
    """Give a checkpoint a name that another may have, which goes."""
    _remove(path.with_name(name))
    # Another program may have removed the checkpoint.
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, path.with_name(name))


def _remove_old(folder: Path, keep: int | None) -> None:
    paths = _checkpoints(folder)
    gone = sorted({number for number, _ in paths})[:-keep] if keep is not None else []
    for number, path in paths:
        if number in gone:
            _remove(path)


def _is_abandoned(saving: Path) -> bool:
    """Check whether the process that was writing a folder is dead. On another machine a day tells."""
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
        # Signal 0 is delivered to nobody: the system only checks that the process is there.
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # The process is another user's.
    except PermissionError:
        return True
    return True


def read(folder: Path, step: int | None, attempts: int = ATTEMPTS) -> Checkpoint:
    """Return the checkpoint of a step, or the newest that is whole; raise what `synk.load` documents."""
    # The highest step first; a checkpoint that was to be replaced, whose name ends in ~, after its successor.
    paths = sorted(_checkpoints(folder), key=lambda found: (-found[0], found[1].name))
    if not paths:
        is_checkpoint = (folder / _ABOUT).exists() or (folder / _ARRAYS).exists()
        # A mistaken folder is not taken for a run that has yet to begin.
        if is_checkpoint or folder.is_file():
            what = "is a checkpoint itself" if is_checkpoint else "is a file"
            raise ValueError(f"synk.load: {folder} {what}. Give the folder in which checkpoints lie, as to synk.save.")
        raise FileNotFoundError(f"synk.load: {folder} has no checkpoint; synk.save makes one.")
    wanted = [path for number, path in paths if step in (None, number)]
    if not wanted:
        steps = ", ".join(map(str, sorted({number for number, _ in paths})))
        raise FileNotFoundError(f"synk.load: {folder} has no step {step}; it has {steps}.")
    damaged: list[str] = []
    for path in wanted:
        before = _identity(path)
        try:
            about, file = _read_whole(path)
        except CheckpointError as error:
            now = _identity(path)
            # Another program has removed or replaced the checkpoint meanwhile.
            if attempts > 1 and (now is None or now != before):
                return read(folder, step, attempts - 1)
            damaged.append(f"{path}: {error}")
        else:
            return Checkpoint(path, about, file, damaged)
    which = "no checkpoint that was asked for is whole" if len(damaged) > 1 else "the checkpoint is not whole"
    raise CheckpointError(f"synk.load: {which}. {' '.join(damaged)} Load another step, or start anew elsewhere.")


def _identity(path: Path) -> tuple[int, int] | None:
    """Return numbers that tell a checkpoint from another in its place; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    # A new folder may get the number of the deleted one, but not its time of change.
    return status.st_ino, status.st_ctime_ns


def _read_whole(path: Path) -> tuple[dict[str, Any], BinaryIO]:
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
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # a file
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


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    paths = folder.iterdir() if folder.is_dir() else []
    return [(int(match[1]), path) for path in paths if (match := _STEP.fullmatch(path.name))]


def _remove(path: Path) -> None:
    """Remove a checkpoint: out of sight first, so that no half of it is ever seen."""
    gone = path.with_name(f".gone-{path.name}")
    # Another program may have removed it.
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, gone)
    _delete(gone)


def _delete(path: Path) -> None:
    # An interrupted rmtree closes a descriptor twice, and the OSError, which older versions of Python do not ignore,
    # would hide the Ctrl-C (https://github.com/python/cpython/issues/79513).
    with uninterrupted():
        shutil.rmtree(path, ignore_errors=True)


def _to_disk(path: Path) -> None:
    # A folder is synced too: its entry for a new file is data of its own.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _in_background(what: str, error: Exception) -> OSError:
    """Return the error of a write that has failed, without the traceback, which would hold arrays."""
    text = f"synk.save: {what} was not written in the background ({type(error).__name__}: "
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, f"{text}{error.strerror})", error.filename)
    return OSError(f"{text}{error}).")


class Writer:
    """Writer of checkpoints, one at a time."""

    def __init__(self) -> None:
        # Not Thread.join: if Ctrl-C interrupts it, Python 3.11 takes a running thread for ended
        # (https://github.com/python/cpython/issues/90882).
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._failure: OSError | None = None

    @property
    def is_idle(self) -> bool:
        return self._is_idle.is_set()

    def wait(self) -> str:
        """Wait until nothing is being written; raise what went wrong."""
        self.wait_quietly()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return ""

    def wait_quietly(self) -> str:
        while True:
            # A handler of a signal that saves, too, would wait for the lock of this wait.
            with uninterrupted():
                if self._is_idle.wait(0.05):
                    return ""

    def run(self, act: Callable[[], None], what: str, is_background: bool) -> str:
        """Write now, or begin to in a thread, for which Python waits at its end."""
        if not is_background:
            act()
            return ""

        def try_to() -> None:
            nonlocal act
            try:
                # Where all cores compute, steps come first. Elsewhere the threads of a process share one priority.
                if sys.platform == "linux":
                    os.nice(19)
                act()
            except Exception as error:
                self._failure = _in_background(what, error)
            finally:
                # Whoever waits may copy values into the memory of those that were written.
                del act
                self._is_idle.set()

        while True:
            self.wait_quietly()
            # Between clear and start nothing may come: who waits would wait for no thread.
            with uninterrupted():
                # A handler of a signal has begun to save.
                if not self._is_idle.is_set():
                    continue
                self._is_idle.clear()
                try:
                    threading.Thread(target=try_to, name="synk-save").start()
                # There are too many threads.
                except RuntimeError:
                    self._is_idle.set()
                    raise
                return ""

    def report(self) -> None:
        """Print at the end of the program what no other save will raise."""
        self.wait_quietly()
        if self._failure is not None:
            print(self._failure, file=sys.stderr)


# One thread writes, so that saves of a process end in their order.
WRITER = Writer()
atexit.register(WRITER.report)
# A forked helper has no thread that writes: it would wait for ever, at its end too.
call_in_helpers(lambda: Writer.__init__(WRITER))
