"""Frames to messages and back; whatever else arrives is one `BadMessage`."""

from __future__ import annotations

import ast
import math
import pickle
import random
from pathlib import Path

import msgspec
import pytest

from ipc import codec
from ipc import messages as m
from tests.ipc.samples import COMMANDS, REPLIES, TELEMETRY, step_row

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: type(c).__name__)
def test_commands_survive_the_wire(command: m.Command) -> None:
    assert codec.decode_command([codec.encode(command)]) == command


@pytest.mark.parametrize("reply", REPLIES, ids=lambda r: type(r).__name__)
def test_replies_survive_the_wire(reply: m.Reply) -> None:
    assert codec.decode_reply([codec.encode(reply)]) == reply


@pytest.mark.parametrize("message", TELEMETRY, ids=lambda t: type(t).__name__)
def test_telemetry_survives_the_wire_with_topic_and_number(message: m.Telemetry) -> None:
    topic, seq, decoded = codec.unpack_telemetry(codec.pack_telemetry((1 << 40) + 7, message))
    assert (topic, seq, decoded) == (codec.TOPIC_OF[type(message)], (1 << 40) + 7, message)


def test_every_topic_has_messages_and_none_begins_another() -> None:
    assert set(codec.TOPIC_OF.values()) == set(m.TOPICS)
    for a in m.TOPICS:
        assert not [b for b in m.TOPICS if b != a and b.startswith(a)], "SUB topics are prefixes"


def test_step_rows_keep_their_order_on_the_wire() -> None:
    """Positional rows decode silently when fields are swapped, so their order is frozen here."""
    golden = (
        "v step t_ns dur_us tokenize_us plan_us draft_us prepare_us copy_us forward_us attention_us "
        "linear_us head_us sample_us detokenize_us send_us publish_us overlap_us prefill_reqs decode_reqs "
        "prefill_tok decode_tok output_tok running waiting preempted recompute_tok recompute_us "
        "draft_reqs drafted_tok accepted_tok drafted_at accepted_at verify_us used_blk cached_blk "
        "free_blk used_tok host_blk swapped_blk copied_blk query_tok hit_tok host_hit_tok weight_bytes "
        "kv_bytes flops attention kernels cfg_rev"
    )
    assert list(m.StepRow.__struct_fields__) == golden.split()
    wire = msgspec.msgpack.decode(codec.encode(m.StepRows(rows=[step_row(5)])))
    places = [[9, 8], [7, 6]]
    expected = [3, 5, *range(102, 131), *places, *range(133, 147), "sdpa", "linear=fp32", 149]
    assert wire == {"type": "steps", "rows": [expected]}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_that_is_not_finite_gets_in(value: float) -> None:
    for command in (
        {"type": "cfg.set", "id": 1, "expect_rev": 0, "patch": {"x": value}},
        {"type": "req.submit", "id": 1, "prompt": "a", "sampling": {"temperature": value}},
        {"type": "req.submit", "id": 1, "prompt": "a", "sampling": {"frequency_penalty": value}},
    ):
        with pytest.raises(codec.BadMessage) as caught:
            codec.decode_command([msgspec.msgpack.encode(command)])
        assert caught.value.command_id == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e19])
def test_a_number_of_a_patch_that_is_refused_is_told_with_its_knob(value: float) -> None:
    patch = {"policy": "fcfs", "kv_pool_gib": 1.5, "kv_host_gib": value, "swap_space_gib": -1e18}
    command = {"type": "cfg.set", "id": 7, "expect_rev": 0, "patch": patch}
    with pytest.raises(codec.BadMessage) as caught:
        codec.decode_command([msgspec.msgpack.encode(command)])
    assert caught.value.message == (
        f"cfg.set: kv_host_gib: {value} is not a finite number from -1e+18 to 1e+18"
    )
    assert (caught.value.code, caught.value.command_id) == ("bad_message", 7)


@pytest.mark.parametrize("patch", [{"a": 1 << 60}, {"a": [math.nan]}, {"a": "x" * 2000}, {}, 5])
def test_other_faults_of_a_patch_are_told_as_they_were_found(patch: object) -> None:
    command = {"type": "cfg.set", "id": 7, "expect_rev": 0, "patch": patch}
    with pytest.raises(codec.BadMessage, match=r"^cfg.set: Expected .* - at `\$\.patch") as caught:
        codec.decode_command([msgspec.msgpack.encode(command)])
    assert caught.value.command_id == 7


@pytest.mark.parametrize(("value", "bound"), [(1e-40, ">= 0.01"), (0.0099, ">= 0.01"), (100.1, "<= 100")])
def test_a_repetition_penalty_that_scores_cannot_bear_is_refused_by_name(value: float, bound: str) -> None:
    """Scores that overflowed would be drawn from as if nothing was wrong."""
    command = {"type": "req.submit", "id": 1, "prompt": "a", "sampling": {"repetition_penalty": value}}
    with pytest.raises(codec.BadMessage, match=rf"{bound}.*repetition_penalty"):
        codec.decode_command([msgspec.msgpack.encode(command)])


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "bad_message"),
        (b"\xff" * 40, "bad_message"),
        (b"\x91" * 10_000 + b"\x90", "bad_message"),  # nested deeper than the interpreter's stack
        (b"\xdd\xff\xff\xff\xff", "bad_message"),  # an array of 4 billion entries, none of them there
        (msgspec.msgpack.encode({"type": "ping", "id": 5}) + b"\0", "bad_message"),  # trailing byte
        (msgspec.msgpack.encode({"type": "ping", "id": 5, "more": 1}), "bad_message"),
        (msgspec.msgpack.encode({"type": "ping", "id": -5}), "bad_message"),
        (msgspec.msgpack.encode({"type": "ping", "id": 5.0}), "bad_message"),
        (msgspec.msgpack.encode({"type": "ping", "id": 1 << 53}), "bad_message"),
        (msgspec.msgpack.encode({"type": "eval", "id": 5}), "unknown_command"),
        (msgspec.msgpack.encode({"type": "welcome", "id": 5}), "unknown_command"),
        (msgspec.msgpack.encode({"type": "ping", "id": 5, "pad": "x" * (300 << 10)}), "too_large"),
        (b"\x81\xa4type\xa4ping" + b"x" * (5 << 20), "too_large"),
    ],
)
def test_what_is_no_command_is_one_error_with_a_code(body: bytes, code: str) -> None:
    with pytest.raises(codec.BadMessage) as caught:
        codec.decode_command([body])
    assert caught.value.code == code
    assert codec.decode_reply([codec.encode(caught.value.reply())]) == caught.value.reply()


@pytest.mark.parametrize("count", [0, 2, 3, 1000])
def test_a_wrong_number_of_frames_is_refused(count: int) -> None:
    body = codec.encode(m.Ping(id=1))
    with pytest.raises(codec.BadMessage):
        codec.decode_command([body] * count)
    if count != 3:
        with pytest.raises(codec.BadMessage):
            codec.unpack_telemetry([b"hb"] * count)


def test_telemetry_under_a_wrong_topic_is_refused() -> None:
    _, seq, body = codec.pack_telemetry(1, TELEMETRY[0])
    for topic in (b"step", b"", b"stat", b"x" * 100_000):
        with pytest.raises(codec.BadMessage):
            codec.unpack_telemetry([topic, seq, body])
    with pytest.raises(codec.BadMessage):
        codec.unpack_telemetry([b"state", seq[:7], body])


def test_mutated_frames_decode_or_raise_bad_message_only() -> None:
    rng = random.Random(20260801)
    golden = [codec.encode(message) for message in (*COMMANDS, *REPLIES, *TELEMETRY)]
    refused = 0
    for _ in range(30_000):
        frame = bytearray(rng.choice(golden))
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        body = bytes(frame[: rng.randint(0, len(frame))] if rng.random() < 0.2 else frame)
        for decode in (
            lambda b: codec.decode_command([b]),
            lambda b: codec.decode_reply([b]),
            lambda b: codec.unpack_telemetry([b"step", b"\0" * 8, b]),
        ):
            try:
                decode(body)
            except codec.BadMessage as bad:
                codec.encode(bad.reply())
                refused += 1
    assert 60_000 < refused < 90_000  # a frame is of one union at most; some mutations leave it valid


def test_text_for_people_has_no_control_sequences_and_an_end() -> None:
    assert codec.clip("a\x1b[31mred\x1b[0m\0b\tc\nd\x9b") == "aredb\tc\nd"
    assert codec.clip("x" * 5000) == "x" * 4095 + "…"
    assert codec.clip("bad \udcff name") == "bad ? name"


def test_text_that_no_utf8_holds_is_refused_when_sent() -> None:
    with pytest.raises(codec.BadMessage, match="Submit cannot be encoded"):
        codec.encode(m.Submit(id=1, prompt="\ud800"))


class _Payload:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("pickle-was-loaded"),)


def test_a_pickle_is_only_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F01: what `recv_pyobj` would have executed is refused like any other noise."""
    monkeypatch.chdir(tmp_path)
    body = pickle.dumps(_Payload())
    for decode in (codec.decode_command, codec.decode_reply):
        with pytest.raises(codec.BadMessage):
            decode([body])
    assert not list(tmp_path.iterdir())


def test_no_code_loads_objects_from_bytes() -> None:
    """F01: none of the ways in which bytes become code occurs in the product."""
    found = []
    for folder in ("ipc", "engine", "app"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if why := _ways_to_code(node):
                    found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {why}")
    assert not found


def _ways_to_code(node: ast.AST) -> str:
    modules = {"pickle", "cPickle", "marshal", "dill", "shelve", "joblib", "cloudpickle", "yaml"}
    match node:
        case ast.Import(names=names) if bad := modules & {name.name.split(".")[0] for name in names}:
            return f"imports {bad}"
        case ast.ImportFrom(module=str(module)) if module.split(".")[0] in modules:
            return f"imports {module}"
        case ast.Attribute(attr="recv_pyobj" | "send_pyobj" | "recv_json" | "send_json" as name):
            return name
        case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
            return "torch.load"
        case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
            return name
        case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
            return "trust_remote_code"
    return ""
