"""Units: numbers as people read and write them."""

import re
from typing import Any

import numpy as np

UNKNOWN = "unknown"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def size_text(count: float | None) -> str:
    return UNKNOWN if count is None else f"{number_text(count)}B"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def number_text(count: float) -> str:
    """Return a number with an SI prefix: 1500 is "1.5 k"."""
    for prefix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= unit:
            return f"{count / unit:.4g} {prefix}"
    return f"{count:.4g} "


_UNITS = {f"{prefix}{binary}B": (1024 if binary else 1000) ** power
          for power, prefix in enumerate(("", "K", "M", "G", "T")) for binary in ("", "i")}  # fmt: skip


def parse_memory(memory: Any, call: str) -> int | float | None:
    """Parse `memory=`: bytes, text such as "14GB", a fraction of the device's memory as a float, or None."""
    if memory is None:
        return None
    wanted = f'{call}: memory is {memory!r}; give bytes (an integer), text like "14GB", or a fraction of what there is.'
    # np.float64 is a float, but np.float32 and np.int64 are no Python numbers.
    memory = memory.item() if isinstance(memory, np.number) else memory
    if isinstance(memory, bool) or not isinstance(memory, int | float | str):
        raise TypeError(wanted)
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([kKMGT]?i?B)\s*", memory)
        try:
            memory = int(float(match[1]) * _UNITS[match[2].replace("k", "K")]) if match else 0
        except (ValueError, KeyError):
            memory = 0
    if memory <= 0 or (isinstance(memory, float) and not memory <= 1):
        raise ValueError(wanted)
    return memory
