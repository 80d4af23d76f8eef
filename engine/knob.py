"""What one optimization's declaration holds, and the check of a value against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ipc import codec
from ipc.messages import MAX_REASON, ApplyMode, KnobInfo, KnobValue


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """What an attention asks of the KV pool: blocks of a multiple of tokens, and whether 8 bits will do."""

    block_multiple: int = 1
    quantized: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobContext:
    """What availability may depend on: the device in use and what the loaded model can do."""

    device: Literal["cpu", "cuda"] = "cpu"
    attention: Sequence[str] = ("naive", "sdpa", "paged")  # back ends that can run here
    # Why others cannot: of a knob by its id, of a choice by ``id=choice``.
    reasons: Mapping[str, str] = field(default_factory=dict)
    pools: Mapping[str, PoolLimits] = field(default_factory=dict)  # by attention; without an entry: any pool
    # Values to start with that are better here than what is declared for every device.
    preferred: Mapping[str, KnobValue] = field(default_factory=dict)
    draft_model: str = ""  # what --draft-model names
    quantization: str = ""  # how the model's weights are quantized as they were loaded, "" if they are not


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One optimization. ``lossy`` ones may change outputs.

    ``requires`` names the knobs, and the value of each (or several: ``a or b``), without which this one has
    no effect; it is told, not enforced, so that each knob can be flipped alone. ``reasons`` of the context
    under this id say that it is not available here.
    ``choice_reason`` says for each choice why it cannot run here, or "" if it can. ``conflict`` says why its
    value cannot be had together with those of the knobs in ``conflicts_with``, or "" if it can.
    """

    id: str
    group: str
    title: str
    help: str
    type: Literal["bool", "int", "float", "choice"]
    default: KnobValue
    apply: ApplyMode = "step"
    lossy: bool = False
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    requires: Mapping[str, str] = field(default_factory=dict)
    choice_reason: Callable[[str, KnobContext], str] | None = None
    conflict: Callable[[Mapping[str, KnobValue], KnobContext], str] | None = None
    conflicts_with: tuple[str, ...] = ()

    def default_in(self, context: KnobContext) -> KnobValue:
        """The value to start with here."""
        return context.preferred.get(self.id, self.default)

    def unavailable(self, context: KnobContext) -> str:
        """Why the knob can only stay at its default here, or "" if it can be used."""
        return codec.clip(context.reasons.get(self.id, ""))

    def refused_choices(self, context: KnobContext) -> dict[str, str]:
        """Choices that cannot run here and why."""
        if self.choice_reason is None:
            return {}
        reasons = {choice: self.choice_reason(choice, context) for choice in self.choices}
        return {choice: codec.clip(reason, MAX_REASON) for choice, reason in reasons.items() if reason}

    def why_not(self, value: object, context: KnobContext) -> str:
        """Why this value cannot be taken, or "" if it can. Says the value and what is allowed."""
        if reason := self.unavailable(context):
            return f"{self.id} is not available: {reason}"
        if self.type == "bool":
            return "" if isinstance(value, bool) else f"{value!r} is not true or false"
        if self.type == "choice":
            if value not in self.choices:
                return f"{value!r} is not one of {', '.join(self.choices)}"
            refused = self.refused_choices(context).get(str(value))
            return f"{value} is not available: {refused}" if refused else ""
        return self._number_why_not(value)

    def _number_why_not(self, value: object) -> str:
        whole = self.type == "int"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            return f"{value!r} is not a {'whole number' if whole else 'number'}"
        if not math.isfinite(value):
            return f"{value!r} is not a finite number"
        low, high = self.minimum, self.maximum
        if (low is not None and value < low) or (high is not None and value > high):
            return f"{value} lies outside {_plain(low)} to {_plain(high)} {self.unit}".rstrip()
        return ""

    def info(self, context: KnobContext) -> KnobInfo:
        """The knob as the protocol shows it on this device."""
        return KnobInfo(
            id=self.id,
            group=self.group,
            title=self.title,
            help=self.help,
            type=self.type,
            apply=self.apply,
            default=self.default_in(context),
            lossy=self.lossy,
            unit=self.unit,
            choices=list(self.choices),
            minimum=self.minimum,
            maximum=self.maximum,
            requires=dict(self.requires),
            available=not self.unavailable(context),
            reason=self.unavailable(context),
            choice_reasons=self.refused_choices(context),
        )


def _plain(bound: float | None) -> str:
    """A bound without an exponent: 1048576, 0.001, or "any" where there is none."""
    if bound is None:
        return "any"
    return str(int(bound)) if float(bound).is_integer() else str(bound)
