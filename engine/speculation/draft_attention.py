"""With which attention a draft model runs, whose sizes are not the target's."""

from __future__ import annotations

import logging

import torch

from engine.attention.base import AttentionBackend, get_backend, probe
from engine.models.spec import ModelSpec

log = logging.getLogger(__name__)

PAGED, OTHERWISE = "paged", "sdpa"


class DraftAttention:
    """`PAGED` while the target runs with it and it can serve the draft model's sizes, `OTHERWISE` else.

    Others that the target may run with ask something of the pool that the draft model's need not give.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of the draft model's pool."""
        self._spec = spec
        self._device = device
        self.reason = probe(PAGED, spec, device, dtype)
        """Why the draft model cannot run with `PAGED`, None if it can."""
        self._backends: dict[str, AttentionBackend] = {}
        self._said = ""

    def beside(self, target: str) -> AttentionBackend:
        """The backend for the draft model while the target runs with ``target``. The log tells a change."""
        name = PAGED if target == PAGED and self.reason is None else OTHERWISE
        if name not in self._backends:
            self._backends[name] = get_backend(name, self._device)
        if self._said != name:
            self._said = name
            why = f", as it cannot with {target}: {self.reason}" if target == PAGED and self.reason else ""
            log.info("the draft model runs with attention=%s%s", name, why)
        return self._backends[name]
