"""The registry itself, and the rules by which values are taken or refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import resources
from engine.availability import preferred
from engine.graphs.counting import MOST_COUNTED
from engine.knob import KnobContext
from engine.knob_store import KnobStore, PatchRefused
from engine.knobs import BY_ID, KNOBS, list_knobs
from engine.scheduler import SchedulerKnobs
from ipc.messages import KnobInfo

LIVE = {
    "batching", "max_num_seqs", "max_num_batched_tokens", "chunked_prefill", "prefill_chunk_tokens", "policy",
    "priority_ageing_s", "max_num_queued", "prefix_cache", "block_size", "kv_allocation", "kv_pool_gib",
    "attention", "batch_wait_ms", "preemption", "swap_space_gib", "overlap", "kv_dtype", "kv_host_gib",
    "sliding_window", "batched_tokenize", "batched_detokenize", "result_cache", "forward_timing",
    "weight_dtype", "int4_method", "high_precision",
    "speculation", "spec_tokens", "spec_adaptive", "spec_self_dtype", "spec_sampling",
    "fused_norm", "fused_rope_kv", "fused_mlp", "fused_sampling", "cuda_graphs", "compile",
}  # fmt: skip


def test_ids_are_unique_and_every_default_can_be_taken() -> None:
    assert len(BY_ID) == len(KNOBS)
    context = KnobContext()
    for knob in KNOBS:
        assert knob.why_not(knob.default, context) == "", knob.id
        assert set(knob.requires) <= set(BY_ID), knob.id
        assert len(knob.help) > 20


def test_what_can_be_used_and_why_the_rest_cannot() -> None:
    infos = {info.id: info for info in list_knobs()}
    assert {i for i, info in infos.items() if info.available} == LIVE
    cannot = "cannot run on cpu"
    assert infos["attention"].choice_reasons == {"flash_attn": cannot, "varlen": cannot}
    assert infos["speculation"].choice_reasons == {"draft": "the engine was started without --draft-model"}


def test_the_registry_passes_the_protocol() -> None:
    """Ids, texts and ranges keep the bounds that the protocol declares, there and back."""
    packed = msgspec.msgpack.encode(list_knobs())
    assert msgspec.msgpack.decode(packed, type=list[KnobInfo]) == list_knobs()


def test_texts_name_what_graphs_leave_to_the_host_and_why() -> None:
    """In both languages: how long a text may be that is penalized in a graph, and by whom ends are hidden."""
    texts = Path(resources.__file__).parent / "i18n" / "zh_CN.json"
    chinese = json.loads(texts.read_text(encoding="utf-8"))["knobs"]
    for told in (BY_ID["cuda_graphs"].help, chinese["cuda_graphs"][1]):
        assert f" {MOST_COUNTED:,} " in told
        assert "min_tokens" in told
        assert "prob" not in told
        assert "概率" not in told


@pytest.mark.parametrize(("key", "value", "why"), [
    ("max_num_seqs", 0, "0 lies outside 1 to 1024 requests"), ("max_num_seqs", 1025, "outside"),
    ("max_num_seqs", 2.0, "not a whole number"), ("max_num_seqs", True, "not a whole number"),
    ("max_num_seqs", None, "not a whole number"), ("max_num_seqs", "8", "not a whole number"),
    ("priority_ageing_s", float("nan"), "not a finite number"), ("priority_ageing_s", float("inf"), "finite"),
    ("chunked_prefill", 1, "not true or false"), ("policy", "lifo", "is not one of fcfs, priority"),
    ("attention", "flash_attn", "flash_attn is not available: cannot run on cpu"),
    ("nonsense", 1, "there is no knob 'nonsense'"),
])  # fmt: skip
def test_a_refusal_names_value_and_limit(key: str, value: Any, why: str) -> None:
    refused = KnobStore(KnobContext()).validate({key: value})
    assert why in refused[key]


def test_what_is_not_there_may_be_said_to_stay_off() -> None:
    """A whole saved configuration can be restored although it names knobs that are not built."""
    store = KnobStore(KnobContext())
    assert store.validate(dict(store.values)) == {}
    assert store.propose(dict(store.values), 0).changed == {}


def test_a_device_may_start_with_other_values_which_are_then_the_defaults() -> None:
    """What resets a knob, and what the console calls changed, follow the device."""
    context = KnobContext(preferred={"attention": "paged", "fused_norm": True})
    store = KnobStore(context, {"fused_norm": False})
    assert store["attention"] == "paged"
    assert store["fused_norm"] is False  # what is asked for at start counts more
    assert store["fused_mlp"] is False
    defaults = {info.id: info.default for info in store.infos()}
    assert defaults["attention"] == "paged"
    assert defaults["fused_norm"] is True
    assert defaults["fused_mlp"] is False


def test_on_a_cpu_what_runs_in_cpp_is_preferred_and_only_that() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    fused = ("fused_norm", "fused_rope_kv", "fused_mlp")
    assert preferred(cpu, {}) == dict.fromkeys(fused, True)
    assert preferred(gpu, {}) == {}
    assert preferred(cpu, dict.fromkeys(fused, "there is no C++ compiler")) == {}


def test_attention_that_cannot_run_here_says_where() -> None:
    store = KnobStore(KnobContext(attention=("naive",)), {"attention": "naive"})
    assert store.validate({"attention": "sdpa"}) == {"attention": "sdpa is not available: cannot run on cpu"}
    store = KnobStore(KnobContext(attention=("sdpa",), reasons={"attention=paged": "there is no kernel"}))
    assert store.validate({"attention": "paged"}) == {
        "attention": "paged is not available: there is no kernel"
    }


def test_a_knob_that_cannot_be_used_here_stays_off_with_the_reason() -> None:
    """B05: it says why, refuses to be switched on, and may still be said to be off."""
    store = KnobStore(KnobContext(reasons={"fused_norm": "there is no such kernel"}))
    infos = {info.id: info for info in store.infos()}
    assert not infos["fused_norm"].available
    assert infos["fused_norm"].reason == "there is no such kernel"
    assert infos["fused_mlp"].available
    refused = store.validate({"fused_norm": True})
    assert refused == {"fused_norm": "fused_norm is not available: there is no such kernel"}
    assert store.validate({"fused_norm": False, "fused_mlp": True}) == {}


def test_reasons_of_any_length_pass_the_protocol() -> None:
    """A library's error may be a page of text with escapes in it: the console must connect all the same."""
    page = "\x1b[31m" + "no such symbol " * 400
    context = KnobContext(
        device="cuda", attention=("sdpa",), reasons={"fused_norm": page, "attention=flash_attn": page}
    )
    for knob in KNOBS:
        info = knob.info(context)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=KnobInfo) == info
    assert BY_ID["fused_norm"].info(context).reason.endswith("…")
    assert BY_ID["attention"].info(context).choice_reasons["flash_attn"].startswith("no such symbol")


def test_wrong_start_values_are_refused() -> None:
    with pytest.raises(PatchRefused, match="block_size"):
        KnobStore(KnobContext(), {"block_size": 0})


def test_the_mode_is_the_heaviest_of_the_patch() -> None:
    store = KnobStore(KnobContext())
    assert store.propose({"max_num_seqs": 3}, 0, dry_run=True).mode == "step"
    assert store.propose({"max_num_seqs": 3, "block_size": 8}, 0, dry_run=True).mode == "rebuild_kv"
    assert store.propose({"max_num_seqs": 3, "block_size": 16}, 0, dry_run=True).mode == "step"


def test_of_many_at_once_one_wins() -> None:
    """Changes proposed from several threads against one revision: exactly one is taken."""
    store = KnobStore(KnobContext())
    taken: list[int] = []
    codes: list[str] = []
    barrier = threading.Barrier(8)

    def propose(value: int) -> None:
        barrier.wait()
        try:
            store.propose({"max_num_seqs": value}, 0)
            taken.append(value)
        except PatchRefused as refused:
            codes.append(refused.code)

    threads = [threading.Thread(target=propose, args=(n + 1,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    assert codes == ["busy"] * 7
    assert store.pending is not None
    assert store.commit(store.pending) == 1
    assert store["max_num_seqs"] == taken[0]


def test_every_scheduler_knob_is_read() -> None:
    before = SchedulerKnobs.of(KnobStore(KnobContext()).values)
    changes: dict[str, Any] = {
        "batching": "static", "max_num_seqs": 3, "max_num_batched_tokens": 5, "chunked_prefill": False,
        "prefill_chunk_tokens": 9, "prefix_cache": False, "kv_allocation": "contiguous", "policy": "priority",
        "priority_ageing_s": 1, "batch_wait_ms": 5, "preemption": "swap",
    }  # fmt: skip
    after = SchedulerKnobs.of(KnobStore(KnobContext(), changes).values)
    for name in SchedulerKnobs.__slots__:
        assert getattr(before, name) != getattr(after, name), name
