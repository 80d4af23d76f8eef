"""What the engine's memory is taken by, over time, and which implementations its linear layers really ran."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ipc.messages import EngineState, StepRow

_KEPT = 500  # changes of the memory
_KINDS = 32  # of kernels, of one configuration


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by what holds them, at one time. ``originals``: held only to convert weights from."""

    weights: int = 0
    originals: int = 0
    kv_pool: int = 0
    draft_weights: int = 0
    draft_kv: int = 0
    host_kv: int = 0
    swap: int = 0
    results: int = 0

    @classmethod
    def of(cls, state: EngineState) -> Memory:
        return cls(
            weights=state.weight_bytes, originals=state.original_bytes, kv_pool=state.kv_bytes,
            draft_weights=state.draft_weight_bytes, draft_kv=state.draft_kv_bytes,
            host_kv=state.host_kv_bytes, swap=state.swap_bytes, results=state.result_bytes,
        )  # fmt: skip

    @property
    def total(self) -> int:
        """All of it, on the device and on the host."""
        return (
            self.weights + self.originals + self.kv_pool + self.draft_weights + self.draft_kv
            + self.host_kv + self.swap + self.results
        )  # fmt: skip


class MemoryBook:
    """Remembers each change, so that a baseline of the past gets what was held then."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, Memory]] = deque(maxlen=_KEPT)

    def take(self, state: EngineState, t_s: float) -> None:
        """The engine told its state at ``t_s``. While a change is applied nothing is settled yet."""
        found = Memory.of(state)
        if state.phase != "applying" and (not self._changes or self._changes[-1][1] != found):
            self._changes.append((t_s, found))

    def at(self, t_s: float) -> Memory | None:
        """What was held at ``t_s``; None where nothing is known of that time."""
        return next((memory for since_s, memory in reversed(self._changes) if since_s <= t_s), None)


@dataclass(frozen=True, slots=True)
class Ran:
    """What multiplied in ``steps`` steps of ``least`` to ``most`` rows (tokens), as the engine names it.

    ``head`` is "" where the output head ran as the other linear layers did. "|" joins implementations of
    different layers.
    """

    linear: str
    head: str
    activations: str
    least: int
    most: int
    steps: int


class KernelBook:
    """Counts which kernels steps really ran, since the last change of the configuration."""

    def __init__(self) -> None:
        self._rev: int | None = None
        self._found: dict[str, list[int]] = {}  # kernels: least rows, most rows, steps

    def take(self, row: StepRow) -> None:
        rows = row.prefill_tok + row.decode_tok + row.drafted_tok
        if row.cfg_rev != self._rev:
            self._rev = row.cfg_rev
            self._found.clear()
        if not rows or not row.kernels:
            return
        counts = self._found.setdefault(row.kernels, [rows, rows, 0])
        counts[:] = min(counts[0], rows), max(counts[1], rows), counts[2] + 1
        while len(self._found) > _KINDS:
            del self._found[next(iter(self._found))]

    def ran(self, rev: int) -> list[Ran]:
        """What ran under configuration ``rev``, by number of rows; empty while no step has."""
        if rev != self._rev:
            return []
        found = [
            Ran(parts.get("linear", text), parts.get("head", ""), parts.get("activations", ""), *counts)
            for text, counts in self._found.items()
            for parts in [kernel_parts(text)]
        ]
        return sorted(found, key=lambda each: (each.least, each.most))


def kernel_parts(text: str) -> dict[str, str]:
    """``linear=bf16,head=int8:int_mm`` by name; what has no name is left out."""
    named = (part.partition("=") for part in text.split(","))
    return {name: value for name, sep, value in named if sep}


def memory_stats(memory: Memory | None) -> dict[str, float | int | None]:
    """What a baseline keeps of the memory, in bytes. Empty where nothing is known of it."""
    if memory is None:
        return {}
    return {
        "weight_bytes": memory.weights, "original_bytes": memory.originals, "kv_pool_bytes": memory.kv_pool,
        "draft_weight_bytes": memory.draft_weights, "draft_kv_bytes": memory.draft_kv,
    }  # fmt: skip
