"""Which precision the weights of a model's linear layers are in, and what that takes of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from engine.layers.precision import Kind
from engine.layers.precision.int4pack import KERNEL_GROUPS, ROWS
from engine.layers.precision.quantize import INT4_GROUP
from engine.models.linears import HEAD, Place
from ipc.messages import KnobValue

High = Literal["", "none", "head", "ends", "sensitive"]
SENSITIVE_SHARE = 8  # one layer of so many, those that err most, keeps the model's precision


@dataclass(frozen=True, slots=True)
class WeightPrecision:
    """``kind`` None: as loaded. ``high``: which layers stay as loaded nevertheless.

    The embedding always does: it is looked up in, not multiplied with.
    """

    kind: Kind | None = None
    method: Literal["", "awq", "rtn"] = ""
    high: High = ""

    @classmethod
    def of(cls, values: Mapping[str, KnobValue]) -> WeightPrecision:
        """What the knobs ask for. Those that have no effect leave no trace in it."""
        if values["weight_dtype"] == "model":
            return cls()
        kind = cast(Kind, values["weight_dtype"])
        method = cast(Literal["awq", "rtn"], values["int4_method"])
        return cls(kind, method if kind == "int4" else "", cast(High, values["high_precision"]))

    @property
    def name(self) -> str:
        """Such as ``int4 awq, head kept``, for identities and the log."""
        if self.kind is None:
            return "model"
        kept = {"none": "", "head": ", head kept", "ends": ", head and ends kept"}
        how = f" {self.method}" if self.method else ""
        return f"{self.kind}{how}{kept.get(self.high, ', head and sensitive layers kept')}"

    def keeps(self, place: Place, num_layers: int, errors: Sequence[float] | None = None) -> bool:
        """Whether a place stays as loaded. ``errors``: of each layer, needed for the sensitive ones."""
        if self.kind is None:
            return True
        if place == HEAD:
            return self.high != "none"
        if self.high == "ends":
            return place.layer in (0, num_layers - 1)
        if self.high != "sensitive" or errors is None:
            return False
        worst = sorted(range(num_layers), key=lambda layer: -errors[layer])
        return place.layer in worst[: max(1, num_layers // SENSITIVE_SHARE)]

    @property
    def label(self) -> str:
        """What a layer in this precision is, whichever others are: equal labels are equal weights."""
        return f"{self.kind} {self.method}".strip()


PLAIN = "model"
"""The label of a layer as it was loaded."""


def quantized_bytes(kind: Kind, rows: int, cols: int) -> int:
    """About the bytes of a weight [rows, cols] with scales and zeros, in the layout that takes most.

    A weight that is held in several layouts takes that much in each.
    """
    if kind != "int4":
        return rows * cols + 4 * rows
    group = next((g for g in KERNEL_GROUPS if cols % g == 0 and INT4_GROUP % g == 0), INT4_GROUP)
    padded = -(-rows // ROWS) * ROWS
    # Of a group and channel: 4 bytes in torch's kernel, whose groups may be smaller, 5 in the native one.
    scales = max(4 * -(-cols // group), 5 * -(-cols // INT4_GROUP))
    return padded * cols // 2 + padded * scales + 4 * cols
