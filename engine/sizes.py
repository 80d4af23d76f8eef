"""How the engine writes amounts of memory for a person. Imports nothing of the engine."""

from __future__ import annotations

UNITS = {"GiB": 30, "MiB": 20, "KiB": 10, "B": 0}


def size(num_bytes: int, least: str = "GiB", digits: str = ".2f") -> str:
    """In the largest unit that it has one of, but in none below ``least``: 3221225472 is ``3.00 GiB``.

    ``digits`` is the format of the number. ``least`` is a key of `UNITS`: what is compared with a card's
    memory reads best in GiB, and little memory must not be rounded to none.
    """
    unit = next((name for name, shift in UNITS.items() if num_bytes >> shift or name == least), least)
    return f"{num_bytes / (1 << UNITS[unit]):{digits}} {unit}"
