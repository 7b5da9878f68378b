"""Units: numbers as people read them."""

UNKNOWN = "unknown"


def size_text(count: float | None) -> str:
    """Bytes; None is unknown."""
    return UNKNOWN if count is None else f"{number_text(count)}B"


def number_text(count: float) -> str:
    """A number, a space, and a prefix of the SI."""
    for prefix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= unit:
            return f"{count / unit:.4g} {prefix}"
    return f"{count:.4g} "
