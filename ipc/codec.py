"""Turns frames into messages and back. Everything that comes off a socket passes through here.

Frames on ``ctl`` are ``[body]`` (a ROUTER adds the peer's identity in front); on ``tel`` they are
``[topic][seq: u64 big endian][body]``. A frame that does not fit raises `BadMessage`, whatever is wrong
with it, so that a reader needs one ``except``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import msgspec

from ipc import messages as m

MAX_CONTROL_BYTES = 256 << 10
MAX_SUBMIT_BYTES = 4 << 20
MAX_ENGINE_BYTES = 32 << 20  # replies and telemetry; a keyframe holds 7 bytes a block

TOPIC_OF: dict[type[m.Telemetry], m.Topic] = {
    m.EngineState: "state",
    m.Heartbeat: "hb",
    m.StepRows: "step",
    m.RequestRows: "req",
    m.Refusals: "req",
    m.BlockKeyframe: "blk",
    m.BlockDelta: "blk",
    m.ApplyEvent: "event",
    m.Preempted: "event",
    m.LogLine: "log",
    m.GpuRow: "gpu",
}
_TOPIC_BYTES: dict[bytes, m.Topic] = {topic.encode(): topic for topic in TOPIC_OF.values()}
_SEQ = struct.Struct(">Q")
_CONTROL_CHARS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SUBMIT_TAG = b"req.submit"

_encoder = msgspec.msgpack.Encoder()
_command: msgspec.msgpack.Decoder[m.Command] = msgspec.msgpack.Decoder(m.Command)
_reply: msgspec.msgpack.Decoder[m.Reply] = msgspec.msgpack.Decoder(m.Reply)
_telemetry: msgspec.msgpack.Decoder[m.Telemetry] = msgspec.msgpack.Decoder(m.Telemetry)


class _Envelope(msgspec.Struct, frozen=True):
    """What a refused command is still searched for, so that its sender can be told."""

    id: m.Id | None = None
    type: m.Name | None = None


class _Patch(msgspec.Struct, frozen=True):
    """What is searched for the number that a `CfgSet` was refused for, as msgspec names no key."""

    patch: dict[str, bool | int | float | str | None]


_envelope = msgspec.msgpack.Decoder(_Envelope)
_patch = msgspec.msgpack.Decoder(_Patch)
_command_tags = frozenset(
    info.tag
    for info in msgspec.inspect.type_info(m.Command).types  # type: ignore[attr-defined]
)


class BadMessage(Exception):
    """A frame that is not a message of the protocol. ``id`` is 0 where no command id could be read."""

    def __init__(self, code: m.ErrorCode, message: str, command_id: int = 0) -> None:
        super().__init__(message)
        self.code: m.ErrorCode = code
        self.message = clip(message)
        self.command_id = command_id

    def reply(self) -> m.Error:
        """The answer to whoever sent it."""
        return m.Error(id=self.command_id, code=self.code, message=self.message)


def clip(text: str, limit: int = 4096) -> str:
    """``text`` made fit for a message: at most ``limit`` characters, no control or escape sequences."""
    clean = _CONTROL_CHARS.sub("", text).encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def encode(message: m.Command | m.Reply | m.Telemetry) -> bytes:
    """The body of ``message``. Raises `BadMessage` for text that no UTF-8 can hold."""
    try:
        return _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError, msgspec.MsgspecError) as error:
        raise BadMessage("invalid", f"{type(message).__name__} cannot be encoded: {error}") from error


def decode_command(frames: Sequence[bytes]) -> m.Command:
    """The command in ``frames`` (without the identity). Raises `BadMessage`."""
    body = _single(frames)
    if len(body) > MAX_SUBMIT_BYTES or (len(body) > MAX_CONTROL_BYTES and _SUBMIT_TAG not in body[:64]):
        limit = MAX_SUBMIT_BYTES if _SUBMIT_TAG in body[:64] else MAX_CONTROL_BYTES
        raise BadMessage("too_large", f"a command of {len(body)} bytes; the limit is {limit}")
    try:
        return _command.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _refused(body, error) from error


def decode_reply(frames: Sequence[bytes]) -> m.Reply:
    """The reply or stream item in ``frames``. Raises `BadMessage`."""
    body = _single(frames)
    if len(body) > MAX_ENGINE_BYTES:
        raise BadMessage("too_large", f"a reply of {len(body)} bytes; the limit is {MAX_ENGINE_BYTES}")
    try:
        return _reply.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage("bad_message", f"not a reply of protocol {m.PROTOCOL}: {error}") from error


def pack_telemetry(seq: int, message: m.Telemetry) -> list[bytes]:
    """The three frames of one telemetry message."""
    return [TOPIC_OF[type(message)].encode(), _SEQ.pack(seq), encode(message)]


def unpack_telemetry(frames: Sequence[bytes]) -> tuple[m.Topic, int, m.Telemetry]:
    """Topic, sequence number and message of three telemetry frames. Raises `BadMessage`."""
    if len(frames) != 3:
        raise BadMessage("bad_message", f"telemetry of {len(frames)} frames; there must be 3")
    topic = _TOPIC_BYTES.get(bytes(frames[0][:16]))
    if topic is None or len(frames[1]) != _SEQ.size:
        raise BadMessage("bad_message", "telemetry with an unknown topic or a broken sequence number")
    if len(frames[2]) > MAX_ENGINE_BYTES:
        raise BadMessage("too_large", f"telemetry of {len(frames[2])} bytes; the limit is {MAX_ENGINE_BYTES}")
    try:
        message = _telemetry.decode(frames[2])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage("bad_message", f"not telemetry of protocol {m.PROTOCOL}: {error}") from error
    if TOPIC_OF[type(message)] != topic:
        raise BadMessage("bad_message", f"{type(message).__name__} came under the topic {topic}")
    return topic, _SEQ.unpack(frames[1])[0], message


def _single(frames: Sequence[bytes]) -> bytes:
    if len(frames) != 1:
        raise BadMessage("bad_message", f"a message of {len(frames)} frames; there must be 1")
    return frames[0]


def _refused(body: bytes, error: Exception) -> BadMessage:
    """Says as much about an undecodable command as can be read from it."""
    try:
        envelope = _envelope.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return BadMessage("bad_message", f"not a command of protocol {m.PROTOCOL}: {error}")
    if envelope.type is not None and envelope.type not in _command_tags:
        return BadMessage("unknown_command", f"no command is named {envelope.type}", envelope.id or 0)
    why = (_wrong_number(body) if envelope.type == "cfg.set" else "") or str(error)
    return BadMessage("bad_message", f"{envelope.type or 'message'}: {why}", envelope.id or 0)


def _wrong_number(body: bytes) -> str:
    """Which value of a patch is no finite number or too large a one; "" if none is."""
    try:
        patch = _patch.decode(body).patch
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return ""
    for key, value in patch.items():
        if isinstance(value, float) and not abs(value) <= m.MAX_FLOAT:
            return f"{key}: {value} is not a finite number from -{m.MAX_FLOAT:g} to {m.MAX_FLOAT:g}"
    return ""
