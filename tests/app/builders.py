"""Rows and batches for tests of the console's models, with plain defaults."""

from __future__ import annotations

from typing import Any

from app.lab.stats import LoadRow, row_of_engine, summarize
from app.net.types import Batch, LinkState, LinkStatus
from app.store.records import BaselineData, Environment, Identity
from ipc.messages import Cfg, DeviceInfo, EngineState, KnobInfo, ModelInfo, RequestRow, StepRow

MS = 1_000_000
S = 1_000_000_000

DEVICE = DeviceInfo(
    kind="cpu", name="Test CPU", copy_bytes_per_s=10e9, read_bytes_per_s=9e9, flops_per_s=100e9
)
MODEL = ModelInfo(
    name="tiny", path="/models/tiny", architecture="llama", format="dummy", dtype="float32", num_layers=2,
    hidden_size=72, num_heads=9, num_kv_heads=3, head_dim=8, vocab_size=320, max_model_len=8192,
    num_params=1000, weight_bytes=4000, kv_bytes_per_token=384, sha256="ab" * 32,
)  # fmt: skip


def step_row(step: int, t_s: float, **changes: Any) -> StepRow:
    values: dict[str, Any] = {
        "v": 3, "step": step, "t_ns": round(t_s * S), "dur_us": 10_000, "tokenize_us": 0, "plan_us": 100,
        "draft_us": 0,
        "prepare_us": 200, "copy_us": 0, "forward_us": 9_000, "attention_us": None, "linear_us": None,
        "head_us": None, "sample_us": 300, "detokenize_us": 100, "send_us": 0, "publish_us": 50,
        "overlap_us": 0, "prefill_reqs": 0,
        "decode_reqs": 4, "prefill_tok": 0, "decode_tok": 4, "output_tok": changes.get("decode_tok", 4),
        "running": 4, "waiting": 1, "preempted": 0,
        "recompute_tok": 0, "recompute_us": 0,
        "draft_reqs": 0, "drafted_tok": 0, "accepted_tok": 0, "drafted_at": [], "accepted_at": [],
        "verify_us": 0,
        "used_blk": 20, "cached_blk": 30, "free_blk": 50, "used_tok": 240,
        "host_blk": 0, "swapped_blk": 0, "copied_blk": 0, "query_tok": 0, "hit_tok": 0, "host_hit_tok": 0,
        "weight_bytes": 40_000_000, "kv_bytes": 10_000_000, "flops": 10_000_000,
        "attention": "sdpa", "kernels": "", "cfg_rev": 0,
    }  # fmt: skip
    return StepRow(**(values | changes))


def request_row(rid: int, arrive_s: float, *, tokens: int = 10, **changes: Any) -> RequestRow:
    """One that ended well: queued 10 ms, first token after 50 ms, then one each 20 ms."""
    arrive = round(arrive_s * S)
    first = arrive + 50 * MS
    last = first + max(0, tokens - 1) * 20 * MS
    values: dict[str, Any] = {
        "rid": rid, "tag": f"t/{rid}", "state": "finished", "arrive_ns": arrive, "prompt_tok": 100,
        "output_tok": tokens, "max_tokens": tokens, "sched_ns": arrive + 10 * MS,
        "first_ns": first if tokens else None, "last_ns": last if tokens else None, "end_ns": last + MS,
        "itl_us": [20_000] * max(0, tokens - 1), "finish": "length",
    }  # fmt: skip
    return RequestRow(**(values | changes))


def state(**changes: Any) -> EngineState:
    values: dict[str, Any] = {
        "phase": "ready", "since_ns": 0, "cfg_rev": 0, "num_blocks": 100, "block_size": 16, "running": 0
    }  # fmt: skip
    return EngineState(**(values | changes))


def knob(knob_id: str, **changes: Any) -> KnobInfo:
    values: dict[str, Any] = {
        "id": knob_id, "group": "g", "title": knob_id, "help": "", "type": "bool", "apply": "step",
        "default": True,
    }  # fmt: skip
    return KnobInfo(**(values | changes))


def cfg(rev: int = 0, **values: Any) -> Cfg:
    values = values or {"prefix_cache": True, "max_num_seqs": 64}
    kinds = {bool: "bool", int: "int", float: "float", str: "choice"}
    knobs = [knob(name, type=kinds[type(value)], default=value) for name, value in values.items()]
    return Cfg(id=1, rev=rev, values=values, knobs=knobs)


def batch(now_s: float, **changes: Any) -> Batch:
    link = changes.pop("link", LinkStatus(state=LinkState.READY, session="s1"))
    return Batch(now_s=now_s, link=link, **changes)


def baseline(name: str = "first", count: int = 12, **changes: Any) -> BaselineData:
    """A live baseline with ``count`` engine rows and all kinds of values."""
    rows = [request_row(i + 1, 100.0 + i, tokens=1 + i % 5) for i in range(count)]
    values: dict[str, Any] = {
        "name": name,
        "note": 'a note, with "quotes", = and\nlines — 注释',
        "source": "live",
        "identity": Identity(
            model=MODEL, device=DEVICE, engine=None, environment=Environment(app_version="0.1.0", cpu="Test")
        ),
        "cfg_rev": 3,
        "config": {"prefix_cache": True, "max_num_seqs": 64, "x": None, "share": 0.1, "policy": "fcfs"},
        "requests": rows,
        "stats": summarize([row_of_engine(row) for row in rows]),
        "step_stats": {"steps": 3, "hit_rate": None, "step_mean_s": 0.1 + 0.2},
    }
    return BaselineData(**(values | changes))


def load_row(index: int, **changes: Any) -> LoadRow:
    values: dict[str, Any] = {
        "index": index, "kind": "chat", "tag": f"demo/{index}", "intended_ns": index * S,
        "sent_ns": index * S + MS, "first_ns": index * S + 50 * MS, "last_ns": index * S + 150 * MS,
        "end_ns": index * S + 151 * MS, "output_tok": 6, "prompt_tok": 30, "finish": "stop",
    }  # fmt: skip
    return LoadRow(**(values | changes))
