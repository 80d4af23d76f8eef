"""Which steps were replayed from CUDA graphs, what they computed for nobody, and why others were not."""

from __future__ import annotations

from PySide6.QtWidgets import QWidget

from app.i18n import N_, tr, tr_later
from app.units import count, data, percent
from app.widgets.basic import column, label, row
from app.widgets.facts import Facts, FactSpec
from ipc.messages import GraphUse

ABOUT = N_(
    "Since CUDA graphs were switched on. A captured graph launches all kernels of a step at once; steps are "
    "padded to the shapes that there are graphs of."
)
REASONS = {
    "prefill": N_("prompts to compute"),
    "large": N_("too many rows or drafted tokens"),
    "long": N_("context longer than the tables"),
    "budget": N_("memory for graphs used up"),
    "memory": N_("no memory to capture them"),
    "failed": N_("could not be captured"),
    "forward_timing": N_("“Split the forward pass” is on"),
    "attention": N_("attention other than paged"),
    "rope_kv": N_("“Fused RoPE and KV write” is off"),
}
OUTSIDE = {
    "fused_sampling": N_("“Fused sampling” is off"),
    "penalties": N_("penalties on long texts"),
    "lists": N_("no memory to count tokens in"),
    "min_tokens": N_("too many ends to hide"),
}
BY_HOST = {
    "penalties": N_("penalties"),
    "min_tokens": N_("answers that must not end yet"),
    "rejection": N_("drafts drawn by chance"),
    **{
        why: REASONS[why]
        for why in ("large", "budget", "memory", "failed", "forward_timing", "attention", "rope_kv")
    },
    "fused_sampling": OUTSIDE["fused_sampling"],
}
WAITS = {
    **BY_HOST,
    "text": N_("drafts read first"),
    "computed": N_("tokens chosen outside"),
    "room": N_("a request could start, or blocks lack"),
}
MISSES, OUTSIDES, BY_HOSTS, LATER = 4, 2, 2, 2  # reasons shown, most frequent first


class GraphFacts(QWidget):
    """Hidden while graphs are switched off."""

    def __init__(self) -> None:
        super().__init__()
        by_itself = tr("Steps that were not replayed, by what stood against it.")
        outside = tr("Replayed steps whose tokens were not chosen inside the graph, by the reason.")
        by_host = tr("Steps whose drafts were read round by round while they were made, by the reason.")
        later = tr(
            "Steps planned when the tokens before were read, as a model drafts for them, by the reason."
        )
        self.facts = Facts([
            FactSpec(
                "replayed", tr("replayed"), tr("Steps replayed from a graph, and their share of all steps.")
            ),
            FactSpec(
                "ahead", tr("launched ahead"),
                tr(
                    "Steps launched before the tokens of the step before were read, which were fed to them "
                    "on the device, and their share of all steps."
                ),
            ),
            *(FactSpec(f"missed {i}", tr("by itself"), by_itself) for i in range(MISSES)),
            *(FactSpec(f"outside {i}", tr("chosen outside"), outside) for i in range(OUTSIDES)),
            FactSpec(
                "drafted", tr("drafted"),
                tr(
                    "Steps whose drafts a model made in replayed rounds that nobody waited for, and their "
                    "share of all steps that a model drafted for."
                ),
            ),
            *(FactSpec(f"by host {i}", tr("drafted with waits"), by_host) for i in range(BY_HOSTS)),
            FactSpec(
                "read", tr("drafts read first"),
                tr(
                    "Of them, steps whose drafts had to be read before they were verified, as these steps "
                    "were not replayed."
                ),
            ),
            *(FactSpec(f"later {i}", tr("drafted later"), later) for i in range(LATER)),
            FactSpec(
                "padding", tr("padding"),
                tr("The share of the tokens of replayed steps that nobody had: they only filled a shape up."),
            ),
            FactSpec(
                "graphs", tr("graphs"),
                tr("Captured graphs, and device memory that they took, of what they may take."),
            ),
        ])  # fmt: skip
        head = label(tr("Steps from CUDA graphs"), "section", tr_later(ABOUT))
        self.setLayout(column(row(head, None), self.facts, spacing=5))
        self.hide()

    def show_use(self, use: GraphUse | None) -> None:
        """Write everything anew; None hides it."""
        self.setVisible(use is not None)
        if use is None:
            return
        steps = use.replayed_n + sum(use.missed_n.values())
        facts = self.facts
        facts.show_fact("replayed", _share(use.replayed_n, steps), str(count(use.replayed_n)))
        facts.show_fact("ahead", _share(use.ahead_n, steps) if use.ahead_n else "", str(count(use.ahead_n)))
        self._show_reasons("missed", MISSES, use.missed_n, REASONS, steps)
        self._show_reasons("outside", OUTSIDES, use.logits_n, OUTSIDE, use.replayed_n)
        drafted = use.drafted_n + sum(use.drafts_missed_n.values())
        there = _share(use.drafted_n, drafted) if use.drafted_n else ""
        facts.show_fact("drafted", there, str(count(use.drafted_n)))
        self._show_reasons("by host", BY_HOSTS, use.drafts_missed_n, BY_HOST, drafted)
        read = _share(use.drafts_read_n, use.drafted_n) if use.drafts_read_n else ""
        facts.show_fact("read", read, str(count(use.drafts_read_n)))
        self._show_reasons("later", LATER, use.drafts_waited_n, WAITS, drafted)
        facts.show_fact("padding", _share(use.padded_tok, use.replayed_tok))
        size = tr("{size} of {whole}").format(size=data(use.graph_bytes), whole=data(use.budget_bytes))
        facts.show_fact("graphs", str(count(use.graphs_n)), size)

    def _show_reasons(
        self, group: str, lines: int, found: dict[str, int], names: dict[str, str], steps: int
    ) -> None:
        most = sorted(found.items(), key=lambda each: -each[1])
        for i in range(lines):
            why, times = most[i] if i < len(most) else ("", 0)
            words = tr_later(names[why]) if why in names else why
            self.facts.show_fact(f"{group} {i}", _share(times, steps) if times else "", words)


def _share(part: int, whole: int) -> str:
    """A percentage, or nothing where there is no whole."""
    return str(percent(part / whole)) if whole else ""
