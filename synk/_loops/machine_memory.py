"""Machine memory: a folder there that the launcher makes, in which checkpoints outlive a process."""

import os
from hashlib import sha256
from pathlib import Path
from shutil import disk_usage

# The files of version 2 and of version 1 that tell a job's limit of memory, how much is used, and the statistics.
# https://docs.kernel.org/admin-guide/cgroup-v2.html
_LIMITS = [
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
]
_CGROUPS = Path("/sys/fs/cgroup")


def memory_folder(loop: int, place: Path | None, is_shared: bool) -> Path | None:
    """Return the folder for checkpoints of a loop in memory; None without a launcher.

    A program that is started again may leave out its first loop: `place`, where a loop saves beside, tells loops apart
    too. Processes that run alone have a folder each.
    """
    folder = os.environ.get("SYNK_MEMORY_FOLDER")
    if not folder:
        return None
    alone = "." if is_shared else f"process-{os.environ.get('SYNK_PROCESS_ID', 0)}"
    of_place = "" if place is None else f"-{sha256(bytes(place)).hexdigest()[:8]}"
    return Path(folder) / alone / f"loop-{loop}{of_place}"


def free_bytes(folder: Path) -> int:
    """Return how many bytes the folder takes, also by the limit of the job, to which its files count."""
    while not folder.exists():
        folder = folder.parent
    return min([disk_usage(folder).free, *(free for names in _LIMITS if (free := _left(*names)) is not None)])


def _left(most: str, used: str, statistics: str) -> int | None:
    """Return how much memory a limit leaves; None where there is no such limit."""
    try:
        texts = [(_CGROUPS / name).read_text() for name in (most, used, statistics)]
        numbers = dict(line.split() for line in texts[2].splitlines())
        # Pages of files are dropped when memory is needed.
        cached = int(numbers.get("active_file", 0)) + int(numbers.get("inactive_file", 0))
        return int(texts[0]) - int(texts[1]) + cached
    # The file says "max", or there is none.
    except (OSError, ValueError):
        return None
