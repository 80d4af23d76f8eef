"""How drafts did in a stretch of time: how many tokens held, place by place, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass

from app.model.series import Ring
from app.model.steps import StepWindow
from ipc.messages import StepRow

PLACES = 16  # of a draft, at most
CAPACITY = 16_384
_DRAFTED = tuple(f"drafted_{place}" for place in range(PLACES))
_ACCEPTED = tuple(f"accepted_{place}" for place in range(PLACES))


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """What became of ``drafts`` drafts in ``steps`` steps: ``drafted`` tokens, of which ``accepted`` held.

    ``acceptance``: of the drafted tokens, those that were accepted. ``length``: tokens that a draft's step
    brought its request, the model's own included. ``by_place[i]``: of the drafts that had a token in place i,
    those that had it accepted. ``draft_s`` and ``verify_s``: what looking for drafts and verifying them took
    of a step with drafts, the mean.
    """

    steps: int
    drafts: int
    drafted: int
    accepted: int
    acceptance: float
    length: float
    by_place: tuple[float, ...]
    draft_s: float
    verify_s: float


class DraftBook:
    """Remembers the newest steps with drafts."""

    def __init__(self) -> None:
        self._ring = Ring(("t_s", "drafts", "draft_s", "verify_s", *_DRAFTED, *_ACCEPTED), CAPACITY)

    def take(self, row: StepRow, t_s: float) -> None:
        """A step began at ``t_s``."""
        if not row.draft_reqs:
            return
        drafted, accepted = (
            [*places, *[0] * (PLACES - len(places))] for places in (row.drafted_at, row.accepted_at)
        )
        self._ring.append(
            (t_s, row.draft_reqs, row.draft_us * 1e-6, row.verify_us * 1e-6, *drafted, *accepted)
        )

    def figures(self, t0_s: float, t1_s: float | None = None) -> DraftFigures | None:
        """Of the steps from ``t0_s`` to ``t1_s`` (None: now); None if none of them had a draft."""
        window = StepWindow(self._ring, t0_s, t1_s)
        if window.n == 0:
            return None
        drafts = window.total("drafts")
        drafted, accepted = ([window.total(name) for name in names] for names in (_DRAFTED, _ACCEPTED))
        return DraftFigures(
            steps=window.n,
            drafts=int(drafts),
            drafted=int(sum(drafted)),
            accepted=int(sum(accepted)),
            acceptance=sum(accepted) / sum(drafted),
            length=1.0 + sum(accepted) / drafts,
            by_place=tuple(held / made for made, held in zip(drafted, accepted, strict=True) if made),
            draft_s=window.total("draft_s") / window.n,
            verify_s=window.total("verify_s") / window.n,
        )


def draft_stats(found: DraftFigures | None) -> dict[str, float | int | None]:
    """What a baseline keeps of drafts; keys carry units. Empty where nothing was drafted."""
    if found is None:
        return {}
    stats: dict[str, float | int | None] = {
        f"draft_acceptance_place_{place}": share for place, share in enumerate(found.by_place, 1)
    }
    return stats | {"draft_mean_s": found.draft_s, "verify_mean_s": found.verify_s}
