"""How a knob's value reads. No widgets."""

from __future__ import annotations

from app.i18n import tr, tr_engine
from ipc.messages import KnobValue


def value_text(value: KnobValue) -> str:
    """A knob's value for a person."""
    if value is None:
        return tr("not set")
    if isinstance(value, bool):
        return tr("on") if value else tr("off")
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else tr_engine(value)
