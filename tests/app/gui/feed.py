"""A link whose batches the test writes: protocol messages at the edge, everything behind it real."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from app.net.types import Batch, BlockView, LinkState, LinkStatus
from ipc.messages import Accepted, ApplyEvent, Cfg, CfgAccepted, CfgSet, Command, Reply, Submit
from tests.app import builders as b

KNOBS = [
    b.knob("batching", group="batching", title="Batching", type="choice", default="continuous",
           choices=["static", "continuous"]),
    b.knob("max_num_seqs", group="batching", title="Running requests", type="int", default=64, minimum=1,
           maximum=1024, unit="requests"),
    b.knob("priority_ageing_s", group="batching", title="Ageing", type="float", default=2.0, minimum=0.001,
           maximum=3600.0, unit="s"),
    b.knob("prefix_cache", group="kv memory", title="Prefix cache", help="Reuses <b>blocks</b>."),
    b.knob("block_size", group="kv memory", title="Block size", type="int", default=16, minimum=1,
           maximum=1024, apply="rebuild_kv", unit="tokens"),
    b.knob("attention", group="kernels", title="Attention", type="choice", default="sdpa",
           choices=["naive", "sdpa", "flash_attn", "auto"], choice_reasons={"flash_attn": "needs CUDA"}),
    b.knob("cuda_graphs", group="kernels", title="CUDA graphs", default=False, available=False,
           reason="not built yet"),
]  # fmt: skip
VALUES = {info.id: info.default for info in KNOBS}


class FeedLink:
    """Stands where `EngineLink` stands: hands out what `push` was given and keeps what was sent."""

    def __init__(self) -> None:
        self.status = LinkStatus(state=LinkState.OFFLINE)
        self.sent: list[Command] = []
        self.calls: list[str] = []
        self.restarted_with: dict[str, Any] | None = None
        self.items: dict[int, Callable[[Any], None]] = {}
        self._replies: dict[int, Callable[[Reply], None] | None] = {}
        self._due: list[Callable[[], None]] = []
        self._next: dict[str, Any] = {}
        self._id = 0

    def push(self, **changes: Any) -> None:
        """Let the next `drain` hand this out."""
        self._next |= changes

    def drain(self) -> Batch:
        due, self._due = self._due, []
        for call in due:
            call()
        changes, self._next = self._next, {}
        return Batch(now_s=time.monotonic(), link=self.status, **changes)

    def send(
        self,
        command: Command,
        on_reply: Callable[[Reply], None] | None = None,
        on_item: Callable[[Any], None] | None = None,
        timeout_s: float = 10.0,
    ) -> int:
        self._id += 1
        self.sent.append(command)
        self._replies[self._id] = on_reply
        if on_item is not None:
            self.items[self._id] = on_item
        return self._id

    def answer(self, request_id: int, reply: Reply) -> None:
        """Let a command that was sent be answered in the next `drain`."""
        on_reply = self._replies.pop(request_id)
        if on_reply is not None:
            self._due.append(lambda: on_reply(reply))

    def stream(self, request_id: int, item: Any) -> None:
        """Let a stream bring an item in the next `drain`."""
        self._due.append(lambda: self.items[request_id](item))

    def last(self, kind: type) -> tuple[int, Any]:
        """The number and the command of the last one sent of a kind."""
        for number, command in reversed(list(enumerate(self.sent, 1))):
            if isinstance(command, kind):
                return number, command
        raise AssertionError(f"no {kind.__name__} was sent")

    def start(self) -> None:
        self.calls.append("start")

    def launch(self, spec: Any) -> None:
        self.calls.append(f"launch {spec.model}")

    def attach(self, ctl: str) -> None:
        self.calls.append(f"attach {ctl}")

    def restart(self, knobs: Any = None) -> None:
        self.calls.append("restart")

    def restart_with_draft(self, draft_model: Any, knobs: Any = None) -> None:
        self.calls.append(f"restart with draft {draft_model}")
        self.restarted_with = knobs

    def stop_engine(self) -> None:
        self.calls.append("stop")

    def close(self) -> None:
        self.calls.append("close")

    # --- whole situations ---------------------------------------------------------------------------

    def ready(self, **knob_values: Any) -> None:
        """An engine that has loaded its model."""
        self.status = LinkStatus(
            state=LinkState.READY, session="s1", pid=4711, managed=True, can_restart=True, data_age_s=0.1,
            endpoint="ipc:///nowhere",
        )  # fmt: skip
        cfg = Cfg(id=1, rev=0, values=VALUES | knob_values, knobs=KNOBS)
        self.push(
            new_session=True, state=b.state(model=b.MODEL, device=b.DEVICE), cfg=cfg, model=b.MODEL,
            device=b.DEVICE,
        )  # fmt: skip

    def traffic(self, seconds: float = 60.0, blocks: int = 640) -> None:
        """A minute of steps and requests that ends now."""
        now = time.monotonic()
        steps = [
            b.step_row(i, now - seconds + i * 0.05, query_tok=100, hit_tok=60, prefill_tok=20 * (i % 3 == 0))
            for i in range(int(seconds / 0.05))
        ]
        requests = [
            b.request_row(i + 1, now - seconds + 0.4 * i, tokens=20) for i in range(int(seconds / 0.4))
        ]
        live = [
            b.request_row(1000 + i, now - 1.0, tokens=5, state="decode", end_ns=None, finish=None, itl_us=[])
            for i in range(3)
        ]
        self.push(steps=steps, requests=requests + live, blocks=block_view(blocks, owner=1000))

    def apply(self, number: int, command: CfgSet, *, ok: bool = True, why: str = "", rev: int = 1) -> None:
        """Accept a change, and in the drain after tell how it ended."""
        self.answer(
            number, CfgAccepted(id=number, apply_id=rev, mode="step", changed=command.patch, running=0)
        )
        event = ApplyEvent(
            apply_id=rev, from_rev=rev - 1, to_rev=rev if ok else rev - 1,
            result="ok" if ok else "rolled_back",
            t_ns=time.monotonic_ns(), at_step=5, took_us=1500, mode="step", patch=command.patch, why=why,
        )  # fmt: skip
        self._due.append(lambda: self.push(events=[event]))

    def accept_chat(self, rid: int) -> int:
        """Accept the last submitted request."""
        number, _ = self.last(Submit)
        self.answer(number, Accepted(id=number, rid=rid, prompt_tokens=12))
        return number


def block_view(blocks: int, owner: int = 7) -> BlockView:
    """Used, shared, cached and free blocks in known numbers: a quarter of each."""
    state = np.repeat(np.array([2, 3, 1, 0], np.uint8), blocks // 4)
    fill = np.where(state == 0, 0, 16).astype(np.uint16)
    owners = np.where(state == 2, owner, 0).astype(np.uint32)
    return BlockView(t_s=time.monotonic(), block_size=16, state=state, fill=fill, owner=owners)
