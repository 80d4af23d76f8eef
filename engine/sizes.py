"""How the engine writes amounts of memory and numbers of things for a person. Imports nothing of it."""

from __future__ import annotations

UNITS = {"GiB": 30, "MiB": 20, "KiB": 10, "B": 0}


def size(num_bytes: int, least: str = "GiB", digits: str = ".2f") -> str:
    """In the largest unit that it has one of, but in none below ``least``: 3221225472 is ``3.00 GiB``.

    ``digits`` is the format of the number. ``least`` is a key of `UNITS`: what is compared with a card's
    memory reads best in GiB, and little memory must not be rounded to none.
    """
    unit = next((name for name, shift in UNITS.items() if num_bytes >> shift or name == least), least)
    return f"{num_bytes / (1 << UNITS[unit]):{digits}} {unit}"


def counted(number: int, noun: str) -> str:
    """``1 block`` and ``2 blocks``: a number of what ``noun`` names, whose plural ends in s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
