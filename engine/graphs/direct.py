"""Steps that are not replayed, their tokens chosen on the device all the same: launched first, read later.

Prompts have too many lengths to capture a graph of each, so the host launches each operation of such a step.
The choice of its tokens follows on the device as in a graph, and is fed to the next step there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.batch import Batch
from engine.graphs import counting
from engine.graphs.choosing import GraphChooser, Needs
from engine.graphs.driver import Driver
from engine.graphs.memory import Chosen, Result
from engine.graphs.newest import awaited
from engine.graphs.shapes import GraphShape
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.native import forward_pass

if TYPE_CHECKING:
    from engine.step import Inputs


def choice_bytes(rows: int, vocab_size: int) -> int:
    """Bytes of device memory that choosing the tokens of ``rows`` requests takes for a while, at most, beside
    their logits and what log-probabilities take, which choosing them without kernels takes too.

    That is where all are penalized for the first time. Asked only where there is triton.
    """
    from engine.kernels.vocabulary import Found

    return counting.most_bytes(rows, vocab_size) + Found.bytes_for(rows, vocab_size)


class DirectForward:
    """Launches steps with the choice of their tokens, as long as its `GraphedForward` holds."""

    def __init__(self, decoder: Decoder, kv: KVCache, driver: Driver, chooser: GraphChooser) -> None:
        self._decoder = decoder
        self._kv = kv
        self._driver = driver
        self._chooser = chooser

    @property
    def chooser(self) -> GraphChooser:
        """What chooses the tokens."""
        return self._chooser

    def step_for(self, batch: Batch, needs: Needs) -> DirectStep | None:
        """How a step's tokens are chosen on the device, None if that takes the host.

        Nor are drafts judged here, or rows moved behind them; for other reasons see `Needs.in_shape`.
        """
        if any(batch.drafts) or batch.may_move:
            return None
        choice, _ = needs.in_shape(GraphShape(len(batch.sampled), 1))
        return None if choice.kind == "logits" else DirectStep(self, choice)

    def launch(self, batch: Batch, choice: GraphShape, inputs: Inputs, begins: Callable[[], None]) -> Chosen:
        """Compute a step and choose its tokens; the host waits for nothing.

        Tokens that it lacks are those that the step launched before it chooses. ``begins`` is called when it
        is ready to be sent.
        """
        tokens, count = len(batch.ids), choice.tokens
        host, result = (
            self._driver.host(n)
            for n in (tokens + self._chooser.num_words(choice), Result.num_words(choice, tokens))
        )
        words = host.numpy()
        words[:tokens] = batch.ids
        for at, request, _ in batch.pending:
            words[at] = awaited(batch.source_of(request))
        self._chooser.fill(words[tokens:], choice, batch)
        device, chosen = (torch.empty_like(each, device=self._kv.device) for each in (host, result))
        chooser, decoder, out = self._chooser, self._decoder, Result.of(chosen, choice, tokens)

        def body() -> None:
            known = chooser.feed(device[:tokens], choice).clamp(min=0)
            with forward_pass():
                logits = decoder.forward(
                    known, inputs.positions, inputs.slots, inputs.attention, self._kv, inputs.wanted
                )
            assert decoder.finite is not None
            out.finite.copy_(decoder.finite)
            if count:
                chooser.choose(logits, device[tokens:], choice, out, known)

        begins()
        chooser.send(self._driver)
        self._driver.send(host, device)
        self._driver.run(body)
        chooser.launched()
        arrival = self._driver.fetch(chosen, result)
        return Chosen(arrival, Result.of(result, choice, tokens), count, tokens)


@dataclass(frozen=True, slots=True)
class DirectStep:
    """How a prepared step's tokens are chosen on the device where it is not replayed."""

    forward: DirectForward
    choice: GraphShape
