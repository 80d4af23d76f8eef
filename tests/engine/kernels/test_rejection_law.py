"""Rejection sampling by the kernel gives the target's distribution, whatever the drafts are drawn from.

What is counted is finer than that: token x stays with probability min(p, q)(x), and a refused one is replaced
by x with probability max(p - q, 0)(x) (arXiv 2211.17192, appendix A.1). Both add up to p; a kernel that
refused too often and made up for it would have p too, and not these.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.draw import inverse_cdf, uniform
from engine.kernels import rejection_sample as real
from engine.kernels.sample import reference_probabilities
from engine.speculation.base import ACCEPT, PROPOSE, RESIDUAL
from tests.engine.kernels.support import DEVICE, poisoned
from tests.engine.speculation.helpers import chi_square

REQUESTS, DRAFTED = 60, 3  # each takes the interpreter some 20 ms
P = torch.tensor([0.2, 0.3, 0.0, 0.3, 0.2])
Q = torch.tensor([0.4, 0.1, 0.0, 0.1, 0.4])
LOGITS = torch.tensor([1.0, 1.6, 0.0, 1.4, 0.2])
VOCAB = len(P)
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def cut(top_k: int, top_p: float) -> Tensor:
    """The distribution of the logits, cut."""
    return reference_probabilities(LOGITS, 1.0, top_k, top_p, 0.0).float()


@dataclass(frozen=True)
class Judged:
    """Of all requests: their drafts [requests, drafted], how many tokens stayed, and what came after them."""

    drafts: Ints
    stayed: Ints
    own: Ints

    def counts(self) -> Floats:
        """How often each token stayed, and then how often each came for a refused one, [2 * VOCAB]."""
        stayed, came = np.zeros(VOCAB), np.zeros(VOCAB)
        for place in range(self.drafts.shape[1]):
            np.add.at(stayed, self.drafts[self.stayed > place, place], 1)
            np.add.at(came, self.own[self.stayed == place], 1)
        return np.concatenate((stayed, came))


def judge(p: Tensor, q: Tensor, count: int, drafted: int = DRAFTED, module: ModuleType = real) -> Judged:
    """Requests with seeds of their own, whose drafts are drawn from q as drafters draw, judged against p."""
    seeds = np.arange(count, dtype=np.uint64)
    first = seeds * np.uint64(5) % np.uint64(7)  # they are at different places of their texts
    at = first[:, None] + np.arange(drafted, dtype=np.uint64)
    numbers = torch.from_numpy(uniform(seeds.repeat(drafted), at.ravel(), PROPOSE))
    proposal = q.expand(count * drafted, VOCAB).contiguous()
    drafts = inverse_cdf(proposal, numbers)
    target = p.expand(count * (drafted + 1), VOCAB).contiguous()
    cu = drafted * torch.arange(count + 1, dtype=torch.int32)
    finite = torch.ones(len(target), dtype=torch.int8)
    pairs = (torch.from_numpy(words.view(np.int64)) for words in (seeds, first))
    inputs = [each.to(DEVICE) for each in (target, proposal, drafts, cu, finite, *pairs)]
    stayed, own = poisoned(count, dtype=torch.int32), poisoned(count, dtype=torch.int64)
    sums = poisoned(*module.sums_for(count, VOCAB, DEVICE).shape, dtype=torch.int64)
    for launch in module.rejection_sample(*inputs, stayed, own, sums, accept=ACCEPT, residual=RESIDUAL):
        launch.run()
    return Judged(drafts.view(count, drafted).numpy(), stayed.long().cpu().numpy(), own.cpu().numpy())


def distance(judged: Judged, p: Tensor, q: Tensor) -> float:
    """The chi-square statistic of all judgements by its limit at one in 10,000; infinite if one cannot be."""
    law = torch.cat((torch.minimum(p, q), (p - q).clamp(min=0.0))).double().numpy()
    counts = judged.counts()
    if counts[law == 0].any():
        return float("inf")
    statistic, limit = chi_square(counts, law)
    return statistic / limit


@pytest.mark.parametrize(
    ("p", "q"), [(P, Q), (cut(4, 0.75), Q)], ids=["whole", "the target cut by top-k and top-p"]
)
def test_each_judgement_is_as_the_target_and_the_drafts_say(p: Tensor, q: Tensor) -> None:
    """Each place of a draft that is reached is a judgement of its own, for its random numbers are."""
    judged = judge(p, q, REQUESTS)
    assert set(judged.stayed.tolist()) == set(range(DRAFTED + 1))
    assert distance(judged, p, q) <= 1.0


@pytest.mark.parametrize(
    ("p", "q", "stay"),
    [(P, P, 1), (cut(2, 1.0), torch.tensor([0.5, 0.0, 0.2, 0.0, 0.3]), 0)],
    ids=["equal", "apart"],
)
def test_what_comes_after_drafts_that_all_stay_or_all_go_is_the_targets_own(
    p: Tensor, q: Tensor, stay: int
) -> None:
    """Where both say the same all stay, and where the target never goes none; then one is drawn from p."""
    judged = judge(p, q, 40, drafted=1)
    assert set(judged.stayed.tolist()) == {stay}
    own = np.bincount(judged.own, minlength=VOCAB).astype(float)
    statistic, limit = chi_square(own, p.double().numpy())
    assert statistic <= limit


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("u * q.to(tl.float64) < p.to(tl.float64)", "u < p.to(tl.float64)"),
        ("tl.where(p > q, p - q, 0.0)", "p"),
        ('"RESIDUAL": residual', '"RESIDUAL": accept'),
    ],
    ids=["drafts not weighed", "drawn from all of the target", "one number for both"],
)
def test_a_kernel_with_another_rule_is_far_from_it(right: str, wrong: str, tmp_path: Path) -> None:
    """The law tells the kernel from copies of it, each with one rule that is wrong."""
    source = Path(real.__file__).read_text("utf-8")
    assert source.count(right) == 1
    path = tmp_path / "wrong_rejection_sample.py"
    path.write_text(source.replace(right, wrong), "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert distance(judge(P, Q, REQUESTS, module=module), P, Q) > 1.5
