"""Numbers as the console writes them: one formatter for each kind of quantity, no Qt.

Every function takes a value in its base unit (seconds, bytes, tokens, a fraction) or None and gives a
`Quantity`. None and non-finite values give a dash, never 0 or NaN. Figures keep three significant digits.
Memory is binary (GiB), traffic decimal (GB/s), as the makers of both write them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

NONE = "–"
NBSP = "\u00a0"
MINUS = "\u2212"


class Quantity(NamedTuple):
    """A figure and its unit, apart so that a tile can set the unit smaller."""

    value: str
    unit: str

    def __str__(self) -> str:
        return f"{self.value}{NBSP}{self.unit}" if self.unit else self.value


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def significant(value: float, digits: int = 3) -> str:
    """``value`` with ``digits`` significant figures and grouped thousands: 1234.5 gives 1,234."""
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    decimals = max(0, digits - 1 - magnitude)
    rounded = round(value, decimals)
    if rounded and math.floor(math.log10(abs(rounded))) > magnitude:
        decimals = max(0, decimals - 1)
    return f"{rounded:,.{decimals}f}".replace("-", MINUS)


def seconds(value: float | None) -> Quantity:
    """A duration: µs below 1 ms, ms below 10 s (what latency is read in), then s, min, h."""
    if value is None or not math.isfinite(value):
        return Quantity(NONE, "")
    size = abs(value)
    if size == 0:
        return Quantity("0", "ms")
    if size < 0.9995e-3:
        return Quantity(significant(value * 1e6), "µs")
    if size < 9.9995:
        return Quantity(significant(value * 1e3), "ms")
    if size < 120:
        return Quantity(significant(value), "s")
    if size < 7200:
        return Quantity(significant(value / 60), "min")
    return Quantity(significant(value / 3600), "h")


def milliseconds(value_s: float | None) -> Quantity:
    """A duration in seconds, always written in ms, for columns that are read downwards."""
    if value_s is None or not math.isfinite(value_s):
        return Quantity(NONE, "ms")
    return Quantity(significant(value_s * 1e3), "ms")


def rate(value: float | None, unit: str = "tok/s") -> Quantity:
    """Something per second, plain."""
    if value is None or not math.isfinite(value):
        return Quantity(NONE, unit)
    return Quantity(significant(value), unit)


def count(value: float | None, unit: str = "") -> Quantity:
    """A whole number of things, grouped; from ten million on in M."""
    if value is None or not math.isfinite(value):
        return Quantity(NONE, unit)
    if abs(value) >= 10_000_000:
        return Quantity(f"{significant(value / 1e6)}{NBSP}M", unit)
    return Quantity(f"{round(value):,}".replace("-", MINUS), unit)


def percent(fraction: float | None, digits: int = 3) -> Quantity:
    """A fraction as percent: 0.714 gives 71.4 %. Tiny fractions that are not zero are not written as 0."""
    if fraction is None or not math.isfinite(fraction):
        return Quantity(NONE, "%")
    value = fraction * 100
    if value != 0 and abs(value) < 0.1:
        return Quantity("<0.1" if value > 0 else f">{MINUS}0.1", "%")
    if abs(value) >= 10:
        return Quantity(f"{value:.0f}".replace("-", MINUS), "%")
    return Quantity(f"{value:.1f}".replace("-", MINUS), "%")


def data(value_bytes: float | None) -> Quantity:
    """An amount of memory in binary units: 98,362,432 gives 93.8 MiB."""
    return _scaled(value_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def traffic(value_bytes: float | None) -> Quantity:
    """Bytes moved, in decimal units: 3.4e9 gives 3.40 GB."""
    return _scaled(value_bytes, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))


def bandwidth(bytes_per_s: float | None) -> Quantity:
    """Bytes per second, in decimal units."""
    scaled = traffic(bytes_per_s)
    return Quantity(scaled.value, f"{scaled.unit or 'GB'}/s")


def flops(per_s: float | None) -> Quantity:
    """Floating point operations per second."""
    return _scaled(per_s, 1000, ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"))


def _scaled(value: float | None, base: int, names: tuple[str, ...]) -> Quantity:
    if value is None or not math.isfinite(value):
        return Quantity(NONE, "")
    size, index = abs(value), 0
    while size >= base * 0.9995 and index < len(names) - 1:
        size /= base
        index += 1
    text = f"{round(size)}" if index == 0 else significant(size)
    return Quantity(MINUS + text if value < 0 else text, names[index])


def change(now: float | None, before: float | None) -> str:
    """The relative change from ``before`` to ``now`` with its sign: ``−23 %``, or a dash where undefined."""
    if now is None or before is None or not _known(now) or not _known(before) or before == 0:
        return NONE
    value = (now / before - 1) * 100
    text = f"{abs(value):.0f}" if abs(value) >= 10 else f"{abs(value):.1f}"
    if float(text) == 0:
        return f"±0{NBSP}%"
    return f"{'+' if value > 0 else MINUS}{text}{NBSP}%"


def clock(value_s: float | None) -> str:
    """Elapsed time as m:ss or h:mm:ss."""
    if value_s is None or not math.isfinite(value_s):
        return NONE
    whole = max(0, int(value_s))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def span(value_s: float) -> str:
    """A length of time that was chosen, not measured: ``30 s``, ``5 min``, ``1 h``."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if value_s >= size and value_s % size == 0:
            return f"{value_s / size:g}{NBSP}{unit}"
    return f"{value_s:g}{NBSP}s"


def pause(value_s: float) -> str:
    """How long a person waited, short: ``120 ms``, ``9.7 s``, ``22 s``, ``2:14``."""
    if value_s >= 60.0:
        return clock(value_s)
    return span(round(value_s, 1 if value_s < 10.0 else None)) if value_s >= 1.0 else str(seconds(value_s))


def tick(value: float) -> str:
    """A round number at an axis, without needless zeros."""
    if value == 0:
        return "0"
    text = f"{value:,.0f}" if abs(value) >= 10 else f"{value:.6g}"
    return text.replace("-", MINUS)


def axis_step(span: float, ticks: int = 4) -> float:
    """A round step (1, 2 or 5 times a power of ten) that cuts ``span`` into about ``ticks`` parts."""
    if not math.isfinite(span) or span <= 0:
        return 1.0
    raw = span / max(1, ticks)
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1, 2, 5):
        if raw <= factor * power:
            return factor * power
    return 10 * power
