"""What a change of knobs costs, as far as that is known before it is made, and how long it has yet to go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ipc.messages import EngineState, KnobValue

Values = Mapping[str, KnobValue]
_WIDTH = {"none": 0, "head": 1, "ends": 2, "sensitive": 2}  # the less is kept, the more codes were searched
_LEAST_S, _LEAST_SHARE = 3.0, 0.02  # before there is anything to reckon from


def first_awq_search(now: Values, patch: Values, earlier: Iterable[Values]) -> bool:
    """Whether a patch makes the engine search 4-bit codes that it does not have yet: minutes.

    ``now`` and ``earlier`` are the values that this engine process has and had: codes stay once they are
    found, so what kept as few layers precise before needs none.
    """
    wanted = {**now, **patch}
    if not _is_awq(wanted) or wanted.get("high_precision") not in _WIDTH:
        return False
    return not any(_is_awq(had) and _covers(had, wanted) for had in (now, *earlier))


def _is_awq(values: Values) -> bool:
    return values.get("weight_dtype") == "int4" and values.get("int4_method") == "awq"


def _covers(had: Values, wanted: Values) -> bool:
    one, other = (str(values.get("high_precision")) for values in (had, wanted))
    return one == other or _WIDTH.get(one, 9) < _WIDTH[other]


class StageClock:
    """When the present stage of a change began, as far as this console saw it."""

    def __init__(self) -> None:
        self._stage: tuple[str, str] = ("", "")  # phase and stage
        self._begun_s = 0.0
        self._begun_share = 0.0

    def take(self, state: EngineState, now_s: float) -> None:
        """A new state of the engine."""
        if (state.phase, state.stage) != self._stage:
            self._stage = (state.phase, state.stage)
            self._begun_s, self._begun_share = now_s, _share(state)

    def left_s(self, state: EngineState, now_s: float) -> float | None:
        """The time that the stage has yet to go if it goes on as until now; None where that is not known."""
        took_s, done = now_s - self._begun_s, _share(state) - self._begun_share
        if (state.phase, state.stage) != self._stage or took_s < _LEAST_S or done < _LEAST_SHARE:
            return None
        if _share(state) >= 1.0:
            return None  # what follows does not tell how far it is
        return took_s * max(0.0, 1.0 - _share(state)) / done


def _share(state: EngineState) -> float:
    return state.done_bytes / state.total_bytes if state.total_bytes else 0.0
