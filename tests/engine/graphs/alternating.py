"""Engines that look for drafts at every other step, whether or not the next one is staged behind these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from engine.speculation.speculator import Speculator
from tests.engine.core_harness import Engine

_DRAFTED: WeakKeyDictionary[Speculator, bool] = WeakKeyDictionary()  # whether the last step had drafts


@contextmanager
def drafts_every_other_step() -> Iterator[None]:
    """After a step with drafts the next one is made without looking for any, in engines that `watch` saw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculator, "would_look", property(lambda speculator: not _DRAFTED[speculator]))
        yield


def watch(engine: Engine) -> list[int]:
    """How many requests each step has that is launched behind drafts nobody has judged."""
    core, behind = engine.core, list[int]()
    pipeline = core.pipeline
    launch, launch_ahead = pipeline.launch, pipeline.launch_ahead
    _DRAFTED[core.speculator] = False

    def launching(step: Any) -> None:
        launch(step)
        _DRAFTED[core.speculator] = step.plan.draft_tokens > 0

    def launching_ahead(step: Any) -> None:
        before = pipeline._flight
        launch_ahead(step)
        if step.flight is not None and before is not None and before.plan.draft_tokens:
            behind.append(len(step.plan.scheduled))
            assert not step.plan.draft_tokens

    pipeline.launch, pipeline.launch_ahead = launching, launching_ahead  # type: ignore[method-assign]
    return behind
