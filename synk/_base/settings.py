"""Settings: what the environment asks synk to check."""

import os


def is_checked(check: str) -> bool:
    """Tell whether `SYNK_CHECK`, a list with commas, names a check.

    "law" compares the first call of each kind with the serial one; "calls", or "1", compares the calls of processes.
    """
    text = os.environ.get("SYNK_CHECK", "")
    named = {word.strip().replace("1", "calls") for word in text.split(",")} - {"", "0"}
    if not named <= {"law", "calls"}:
        raise ValueError(f"SYNK_CHECK is {text!r} in the environment; give law, calls, or both with a comma.")
    return check in named
