"""With which attention a draft model runs, whose sizes are not the target's."""

from __future__ import annotations

import logging

import torch

from engine.attention.base import AttentionBackend, get_backend, probe
from engine.models.spec import ModelSpec

log = logging.getLogger(__name__)

PAGED, OTHERWISE = "paged", ("sdpa", "naive")


class DraftAttention:
    """`PAGED` while the target runs with it, or one of `OTHERWISE`: the first that can serve the draft model.

    Others that the target may run with ask something of the pool that the draft model's need not give.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of the draft model's pool."""
        self._device = device
        self._dtype = dtype
        self._reasons = {name: probe(name, spec, device, dtype) for name in (PAGED, *OTHERWISE)}
        self._backends: dict[str, AttentionBackend] = {}
        self._said = ""

    def beside(self, target: str) -> AttentionBackend:
        """The backend for the draft model while the target runs with ``target``. The log tells a change."""
        wanted = (PAGED, *OTHERWISE) if target == PAGED else OTHERWISE
        name = next(name for name in wanted if self._reasons[name] is None)  # naive always can
        if name not in self._backends:
            self._backends[name] = get_backend(name, self._device, self._dtype)
        if self._said != name:
            self._said = name
            why = "".join(
                f", as it cannot with {other}: {self._reasons[other]}"
                for other in wanted[: wanted.index(name)]
            )
            log.info("the draft model runs with attention=%s%s", name, why)
        return self._backends[name]
