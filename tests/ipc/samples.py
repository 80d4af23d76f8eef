"""One valid message of every kind, for golden frames, mutation and round trips."""

from __future__ import annotations

from typing import Any

from ipc import messages as m


def step_row(step: int, **changes: Any) -> m.StepRow:
    """A step row whose counts are all different, so that swapped columns show."""
    values: dict[str, Any] = {name: 100 + n for n, name in enumerate(m.StepRow.__struct_fields__)}
    values |= {"v": 3, "step": step, "attention": "sdpa", "kernels": "linear=fp32"}
    values |= {"drafted_at": [9, 8], "accepted_at": [7, 6]}
    return m.StepRow(**{**values, **changes})


def request_row(rid: int, **changes: Any) -> m.RequestRow:
    """A request's row, waiting unless changed."""
    values: dict[str, Any] = {"tag": "t", "state": "waiting", "arrive_ns": 5, "prompt_tok": 7}
    return m.RequestRow(rid=rid, **{**values, **changes})


def cfg(rev: int = 3, **values: m.KnobValue) -> m.Cfg:
    """A configuration with one knob of each type."""
    knob = m.KnobInfo(
        id="policy",
        group="batching",
        title="Order",
        help="",
        type="choice",
        apply="step",
        default="fcfs",
        choices=["fcfs", "priority"],
    )
    return m.Cfg(
        id=9, rev=rev, values={"policy": "fcfs", "n": 1, "x": 0.5, "b": True, **values}, knobs=[knob]
    )


def state(**changes: Any) -> m.EngineState:
    """A ready engine."""
    return m.EngineState(**{"phase": "ready", "since_ns": 1, "cfg_rev": 3, **changes})


COMMANDS: list[m.Command] = [
    m.Hello(id=1, proto_min=1, proto_max=4, client="test", version="1", pid=12),
    m.Ping(id=2),
    m.Snapshot(id=3),
    m.CfgGet(id=4),
    m.CfgSet(id=5, expect_rev=0, patch={"prefix_cache": False, "max_num_seqs": 8, "policy": "fcfs"}),
    m.CfgCancel(id=12, apply_id=3),
    m.Submit(id=6, prompt="Grüße, 世界", sampling=m.Sampling(temperature=0.7, stop=["\n\n"], seed=3)),
    m.Submit(id=7, messages=[m.ChatMessage(role="user", content="hi")], tag="x", priority=-3),
    m.Submit(id=8, tokens=[1, 2, 3], stream=False, sampling=m.Sampling(max_tokens=2, logprobs=2)),
    m.Cancel(id=9, rid=4),
    m.LogTail(id=10, after=3, max=20),
    m.Shutdown(id=11, mode="drain", timeout_ms=10),
]

REPLIES: list[m.Reply] = [
    m.Error(id=0, code="invalid", message="no", keys={"policy": "why"}, retry_after_ms=4),
    m.Pong(id=2, mono_ns=1 << 62),
    cfg(),
    m.CfgAccepted(id=5, apply_id=1, mode="rebuild_kv", changed={"block_size": 32}, running=2),
    m.Accepted(id=6, rid=1, prompt_tokens=4),
    m.Cancelled(id=9, n=1),
    m.Ok(id=11),
    m.Probe(mono_ns=3),
    m.Tokens(rid=1, index=0, ids=[5, 6], text="ab", t_ns=[1, 2]),
    m.Done(rid=1, finish="stop", row=request_row(1, state="finished", finish="stop"), stop_reason="\n\n"),
]

TELEMETRY: list[m.Telemetry] = [
    state(graphs=m.GraphUse(replayed_n=1, replayed_tok=8, padded_tok=2, missed_n={"prefill": 3}, ahead_n=2)),
    state(
        graphs=m.GraphUse(
            drafted_n=4, drafts_missed_n={"penalties": 1}, drafts_read_n=2, drafts_waited_n={"room": 3}
        )
    ),
    m.Heartbeat(mono_ns=1, step=2, busy="idle", last_step_age_us=3, rss_bytes=4),
    m.StepRows(rows=[step_row(1), step_row(2)]),
    m.RequestRows(rows=[request_row(1), request_row(2, state="decode")]),
    m.Refusals(rows=[m.Refusal(t_ns=1, client="c", tag="t", code="too_long", message="no")], total=2),
    m.BlockKeyframe(
        frame=1, t_ns=1, num_blocks=2, block_size=16, state=b"\0\1", fill=b"\0\0\1\0", owner=b"\0" * 8
    ),
    m.BlockDelta(frame=2, t_ns=2, index=b"\1\0\0\0", state=b"\2", fill=b"\3\0", owner=b"\4\0\0\0"),
    m.ApplyEvent(
        apply_id=1,
        from_rev=0,
        to_rev=1,
        result="ok",
        t_ns=1,
        at_step=2,
        took_us=3,
        mode="step",
        patch={"policy": "priority"},
    ),
    m.Preempted(t_ns=1, rid=2, by=3, reason="priority", mode="swap", lost_tok=4, swapped_blk=5, cfg_rev=6),
    m.LogLine(n=1, level="info", unix_ms=2, source="engine", message="hello"),
    m.GpuRow(
        t_ns=1,
        uuid="GPU-1",
        name="card",
        utilization_percent=5.0,
        pcie_rx_bytes_per_s=1e9,
        ecc_corrected=2,
        fault="Xid 48",
        unknown={"power": "Not Supported"},
    ),
]
