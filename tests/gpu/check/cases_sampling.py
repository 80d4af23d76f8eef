"""Cases of the kernels that choose tokens: the draw, its law, penalties, and the judgement of drafts."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from engine.draw import uniform
from engine.kernels.penalties import penalize, reference_penalize
from engine.kernels.rejection_sample import match_drafts, rejection_sample, sums_for
from engine.kernels.sample import probabilities, reference_probabilities, sample
from engine.kernels.vocabulary import Found
from engine.speculation.base import ACCEPT, RESIDUAL
from engine.speculation.rejection import reject
from tests.engine.kernels.support import DEVICE, poisoned, randn
from tests.gpu.check.case import Case, Outputs, Sizes, close, off_by


@dataclass(frozen=True)
class Draws:
    """Logits with settings of every kind, a row each."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    def only(self, rows: slice) -> Draws:
        """Some of the rows."""
        return Draws(*(getattr(self, field.name)[rows].contiguous() for field in fields(self)))

    @property
    def settings(self) -> tuple[Tensor, ...]:
        return self.temperature, self.top_k, self.top_p, self.min_p


PLAIN = ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 40, 1.0, 0.0))
NUCLEUS = (*PLAIN, (1.3, 0, 0.9, 0.0), (0.9, 50, 0.8, 0.05))
"""Temperature, top-k, top-p and min-p of each row."""


def draws(vocab: int, rows: tuple[tuple[float, int, float, float], ...] = NUCLEUS) -> Draws:
    columns = list(zip(*rows, strict=True))

    def floats(i: int) -> Tensor:
        return torch.tensor(columns[i], dtype=torch.float32, device=DEVICE)

    seeds = torch.tensor([1, 42, 7, 1 << 40, 5], device=DEVICE)[: len(rows)]
    return Draws(
        randn(len(rows), vocab, scale=3.0),
        floats(0),
        floats(1).int(),
        floats(2),
        floats(3),
        seeds,
        seeds % 11,
    )


def run_sample(d: Draws, ids: Tensor) -> None:
    """Choose a token for each row."""
    found = Found.allocate(*d.logits.shape, DEVICE)
    for launch in sample(d.logits, *d.settings, d.seeds, d.positions, ids, found, greedy_below=1e-5):
        launch.run()


def sample_case(d: Draws) -> Case:

    def run() -> Outputs:
        ids = poisoned(len(d.logits), dtype=torch.int64)
        run_sample(d, ids)
        return (ids,)

    def check(out: Outputs) -> float:
        assert int(out[0][0]) == int(d.logits[0].argmax()), "the greedy token is another"
        numbers = uniform(
            d.seeds.cpu().numpy().astype(np.uint64), d.positions.cpu().numpy().astype(np.uint64)
        )
        for row in range(1, len(d.logits)):
            exact = _distribution(d, row)
            running, token = exact.cumsum(0), int(out[0][row])
            low = float(running[token] - exact[token])
            assert low - 1e-5 <= numbers[row] <= float(running[token]) + 1e-5, f"row {row}: token {token}"
        return 0.0

    return Case(run, check)


def _distribution(d: Draws, row: int) -> Tensor:
    """Of one row, in float64."""
    t, k, p, m = (float(column[row]) for column in d.settings)
    return reference_probabilities(d.logits[row], t, int(k), p, m)


def probabilities_case(d: Draws) -> Case:
    settings = tuple(column[1:] for column in d.settings)

    def run() -> Outputs:
        out = poisoned(*d.logits[1:].shape, dtype=torch.float32)
        found = Found.allocate(*out.shape, DEVICE)
        for launch in probabilities(d.logits[1:], *settings, out, found):
            launch.run()
        return (out,)

    def check(out: Outputs) -> float:
        exact = torch.stack([_distribution(d, row) for row in range(1, len(d.logits))])
        torch.testing.assert_close(out[0].double(), exact, rtol=1e-4, atol=1e-7)
        return off_by(out[0], exact)

    return Case(run, check)


def penalize_case(s: Sizes) -> Case:
    scores = randn(2, s.vocab)
    prompts, outputs = [[3, 5, 9], [4]], [[5, 5, 7], [4, 4, 4]]
    tokens = [sorted({*a, *b}) for a, b in zip(prompts, outputs, strict=True)]
    settings = [(1.3, 0.5, 0.25), (0.8, -0.5, 1.0)]
    cu = torch.tensor([0, len(tokens[0]), len(tokens[0]) + len(tokens[1])], dtype=torch.int32, device=DEVICE)
    ids = torch.tensor(tokens[0] + tokens[1], device=DEVICE)
    counts = [float(made.count(token)) for each, made in zip(tokens, outputs, strict=True) for token in each]
    times = torch.tensor(counts, device=DEVICE).int()
    columns = [
        torch.tensor(column, dtype=torch.float32, device=DEVICE) for column in zip(*settings, strict=True)
    ]

    def run() -> Outputs:
        out = scores.clone()
        penalize(out, cu, ids, times, *columns, max_tokens=8).run()
        return (out,)

    def check(out: Outputs) -> float:
        each = zip(scores, prompts, outputs, settings, strict=True)
        return close(out[0], torch.stack([reference_penalize(row, a, b, *how) for row, a, b, how in each]))

    return Case(run, check)


def judging_case(s: Sizes) -> Case:
    """Rejection sampling against the engine's own rule, and the comparison of drafts with what was chosen."""
    lengths, tokens = [2, 3], [1, 5, 2, 3, 4]
    target, proposal = (randn(n, s.vocab, seed=n).softmax(-1) for n in (7, 5))
    cu = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE)
    ids, chosen = torch.tensor(tokens, device=DEVICE), torch.tensor([1, 6, 9, 2, 3, 4, 8], device=DEVICE)
    finite = torch.ones(7, dtype=torch.int8, device=DEVICE)
    seeds, positions = torch.tensor([3, 9], device=DEVICE), torch.tensor([20, 31], device=DEVICE)

    def run() -> Outputs:
        counts, own = (poisoned(2, dtype=d) for d in (torch.int32, torch.int64))
        sums = poisoned(*sums_for(2, s.vocab, DEVICE).shape, dtype=torch.int64)
        for launch in rejection_sample(
            target, proposal, ids, cu, finite, seeds, positions, counts, own, sums,
            accept=ACCEPT, residual=RESIDUAL,
        ):  # fmt: skip
            launch.run()
        kept, after = (poisoned(2, dtype=d) for d in (torch.int32, torch.int64))
        match_drafts(chosen, ids, cu, kept, after, max_drafted=3).run()
        return counts, own, kept, after

    def check(out: Outputs) -> float:
        at = np.concatenate([p + np.arange(k + 1) for p, k in zip((20, 31), lengths, strict=True)]).astype(
            np.uint64
        )
        of = np.repeat(np.array([3, 9], dtype=np.uint64), [k + 1 for k in lengths])
        u = [torch.from_numpy(uniform(of, at, draw)).to(DEVICE) for draw in (ACCEPT, RESIDUAL)]
        want = reject(target, proposal, tokens, lengths, finite.bool(), *u)
        assert (out[0].tolist(), out[1].tolist()) == want, f"{out[0].tolist()}, {out[1].tolist()} for {want}"
        assert (out[2].tolist(), out[3].tolist()) == ([1, 3], [6, 8]), "drafts were matched wrongly"
        return 0.0

    return Case(run, check)
