"""What became of drafts, by the usual definitions (vLLM's spec_decode counters)."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.speculation.base import MAX_DRAFT


@dataclass(slots=True)
class Acceptance:
    """Sums since it was made. A draft that proposed nothing is not counted.

    ``drafted_at[i]`` drafts had a token in place i, ``accepted_at[i]`` had it accepted.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT)
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT)

    def count(self, drafted: int, accepted: int) -> None:
        """Count one draft of ``drafted`` tokens, of which the first ``accepted`` were accepted."""
        if drafted == 0:
            return
        if not 0 <= accepted <= drafted <= MAX_DRAFT:
            raise ValueError(
                f"{accepted} of {drafted} draft tokens accepted; a draft has at most {MAX_DRAFT}"
            )
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        for i in range(drafted):
            self.drafted_at[i] += 1
        for i in range(accepted):
            self.accepted_at[i] += 1

    @property
    def rate(self) -> float | None:
        """Accepted of drafted tokens, None before the first draft."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_length(self) -> float | None:
        """Tokens that a draft's step brought on average, the target's own included; None before the first."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def by_position(self) -> list[float]:
        """For each place that any draft reached: the share of all drafts that had it accepted."""
        reached = [n for n in self.drafted_at if n]
        return [self.accepted_at[i] / self.drafts for i in range(len(reached))]
