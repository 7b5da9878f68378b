"""Folder lock: one run saves in a folder at a time, by whatever path it comes to it."""

import fcntl
import os
import socket
import tempfile
from errno import EACCES, EAGAIN, ENOTDIR
from pathlib import Path
from time import ctime, monotonic, sleep
from typing import ClassVar

from .._base.errors import SynkError

PATIENCE = 5.0  # seconds to wait for a run that ends, as one that is started again does
_NAME = ".lock"

Key = tuple[int, int]


def made(folder: Path) -> Key:
    """Make a folder, check that it can be written to, and return what is the same by each path to it."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(ENOTDIR, "synk.resume: give a folder for checkpoints", str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            status = folder.stat()
    except OSError as error:
        why = f"synk.resume: nothing can be written to its folder ({error.strerror})"
        raise OSError(error.errno, why, str(folder)) from error
    # Links and mounts give a folder several paths. Device and inode are one.
    return status.st_dev, status.st_ino


class FolderLock:
    """A lock on a folder, which goes with this process. Forked helpers do not inherit it, as they would one by `flock`.

    Attributes:
      key: what `made` returned for the folder.
      is_held: whether it is this object's still.
      lacks: why the file system locks nothing; "" if it does.
    """

    # A process is not kept out by its own locks, and loses them when it closes any file of theirs.
    _held: ClassVar[dict[Key, "FolderLock"]] = {}

    def __init__(self, folder: Path, key: Key) -> None:
        """Lock a folder that was made; take it from a loop of this process that has it."""
        self.key, self.is_held, self.lacks = key, False, ""
        # The loop that has the folder may have been left by `break` and live on under a name, as in a notebook.
        if key in self._held:
            self._held[key].free()
        self._file = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._lock(folder)
        except BaseException:
            os.close(self._file)
            raise
        self._held[key], self.is_held = self, True

    def _lock(self, folder: Path) -> None:
        until = monotonic() + PATIENCE
        while not self._try_to_lock():
            if monotonic() > until:
                who = os.pread(self._file, 300, 0).decode(errors="replace") or "a process that has just begun"
                raise SynkError(
                    f"synk.resume: another run saves in {folder}: {who}. Give each run a folder of its own, or end "
                    f"the other one."
                )
            sleep(0.1)
        # For the message of a run that waits: the system does not tell across machines who holds a lock.
        who = f"process {os.getpid()} on {socket.gethostname()}, since {ctime()}".encode()
        os.ftruncate(self._file, os.pwrite(self._file, who, 0))

    def _try_to_lock(self) -> bool:
        """Return whether no other process has the lock."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (EACCES, EAGAIN):
                return False
            self.lacks = error.strerror or "none"
        return True

    def free(self) -> None:
        if self.is_held:
            self.is_held = False
            del self._held[self.key]
            # The file stays: a process that waits has opened it.
            os.close(self._file)
