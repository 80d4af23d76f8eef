"""What the engine's memory is taken by, over time, and which implementations its linear layers really ran."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from ipc.messages import EngineState, ModelInfo, StepRow

_KEPT = 500  # changes of the memory
_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.56}  # of a weight, scales and offsets included
_ROWS = 4096  # pairs of a number of rows and its kernels that are counted for one configuration


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


def has_second_form(state: EngineState, model: ModelInfo | None) -> bool:
    """Whether weights take clearly more than one form of each does, as they may on a CPU.

    The engine tells bytes and the name of the precision; the rest is arithmetic with the model's shape.
    """
    if model is None or not state.weight_dtype:
        return False
    if state.weight_dtype == "model":
        return state.weight_bytes > 1.1 * model.weight_bytes
    wide = model.weight_bytes / max(1, model.num_params)
    low = next((size for kind, size in _BYTES.items() if state.weight_dtype.startswith(kind)), wide)
    table = model.vocab_size * model.hidden_size
    head = wide if "head" in state.weight_dtype else low
    shares = {"ends": 2 / model.num_layers, "sensitive": 1 / 8}  # of the layers that stay as loaded
    kept = max((share for word, share in shares.items() if word in state.weight_dtype), default=0.0)
    layers = max(0, model.num_params - 2 * table)
    one = table * (wide + head) + layers * (kept * wide + (1 - kept) * low)
    return state.weight_bytes > 1.1 * one


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
    """An implementation, as the engine names it, that served steps of ``least`` to ``most`` rows."""

    name: str
    least: int
    most: int
    steps: int


@dataclass(frozen=True, slots=True)
class WhatRan:
    """What multiplied in ``steps`` steps. "|" in a name joins what served different layers.

    ``linear``: by rows (tokens of a step); one that served small and large steps, but not those between, is
    there twice. ``head`` is empty where the output head ran as the other layers did.
    """

    linear: tuple[Ran, ...] = ()
    head: tuple[Ran, ...] = ()
    activations: str = ""
    steps: int = 0


class KernelBook:
    """Counts which kernels steps really ran, since the last change of the configuration."""

    def __init__(self) -> None:
        self._rev: int | None = None
        self._found: dict[tuple[int, str], int] = {}  # (rows, kernels): steps

    def take(self, row: StepRow) -> None:
        if row.cfg_rev != self._rev:
            self._rev = row.cfg_rev
            self._found.clear()
        key = row.prefill_tok + row.decode_tok + row.drafted_tok, row.kernels
        if all(key) and (key in self._found or len(self._found) < _ROWS):
            self._found[key] = self._found.get(key, 0) + 1

    def ran(self, rev: int) -> WhatRan:
        """What ran under configuration ``rev``; nothing while no step has."""
        if rev != self._rev:
            return WhatRan()
        linear: list[Ran] = []
        head: dict[str, Ran] = {}
        activations: dict[str, None] = {}
        for (rows, text), steps in sorted(self._found.items()):
            parts = kernel_parts(text)
            name = parts.get("linear", text)
            last = linear[-1] if linear and linear[-1].name == name else None
            if last is not None:
                linear[-1] = replace(last, most=rows, steps=last.steps + steps)
            else:
                linear.append(Ran(name, rows, rows, steps))
            if "head" in parts:
                known = head.get(parts["head"], Ran(parts["head"], rows, rows, 0))
                head[known.name] = replace(known, most=rows, steps=known.steps + steps)
            if "activations" in parts:
                activations[parts["activations"]] = None
        total = sum(self._found.values())
        return WhatRan(tuple(linear), tuple(head.values()), ", ".join(activations), total)


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
