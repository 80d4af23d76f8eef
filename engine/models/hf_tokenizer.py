"""The tokenizer of a Hugging Face folder: tokenizer.json and the settings beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from engine.chat import ChatError, ChatTemplate
from engine.models.errors import ModelError
from engine.models.safetensors_file import unique_keys
from engine.text import Scheme, Tokenizer

MAX_JSON_BYTES = 256 << 20
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_json(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """A JSON object from a file; with ``unique`` no key may occur twice. Raises `ModelError`."""
    return _parse(path, _read(path), unique)


def _read(path: Path) -> bytes:
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ModelError(f"{path.name} has {size} bytes, more than {MAX_JSON_BYTES} cannot be settings")
    return path.read_bytes()


def _parse(path: Path, raw: bytes, unique: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys if unique else None)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} holds no JSON object")
    return value


def load(folder: Path, config: Mapping[str, Any], rows: int) -> Tokenizer:
    """Read the folder's tokenizer for a model with ``rows`` embeddings. Raises `ModelError`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        advice = " (save it with transformers to get one)" if (folder / "tokenizer.model").exists() else ""
        raise ModelError(f"{folder.name} has no tokenizer.json{advice}")
    raw = _read(path)
    data = _parse(path, raw)
    try:
        backend = tokenizers.Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises plain Exception for whatever it cannot read
        raise ModelError(f"tokenizer.json cannot be read: {error}") from error
    settings = _optional(folder, "tokenizer_config.json")
    named = _named_tokens(folder, settings)
    bos = _id_of(backend, named.get("bos_token"))
    if bos is None and "bos_token" not in settings:
        bos = next(iter(_ids(config.get("bos_token_id"))), None)
    return Tokenizer(
        backend,
        scheme=_scheme(data.get("decoder")),
        rows=rows,
        bos_token_id=bos,
        eos_token_ids=_eos_ids(folder, config, backend, named),
        add_bos=_adds_bos(backend, settings, bos),
        chat_template=_chat_template(folder, settings, named),
        sha256=hashlib.sha256(raw).hexdigest(),
    )


def _text(path: Path) -> str:
    try:
        return _read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path.name} is not UTF-8 text: {error}") from error


def _optional(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    return load_json(path) if path.is_file() else {}


def _named_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as text; each is written as a string or as an object with its content."""
    found: dict[str, str] = {}
    for source in (_optional(folder, "special_tokens_map.json"), settings):
        for name in _NAMED:
            value = source.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                found[name] = content
    return found


def _id_of(backend: Any, token: str | None) -> int | None:
    if token is None:
        return None
    found: int | None = backend.token_to_id(token)
    return found


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _eos_ids(folder: Path, config: Mapping[str, Any], backend: Any, named: Mapping[str, str]) -> set[int]:
    """Every id that ends an answer: of config.json, generation_config.json and the tokenizer."""
    ids = {*_ids(config.get("eos_token_id"))}
    ids.update(_ids(_optional(folder, "generation_config.json").get("eos_token_id")))
    eos = _id_of(backend, named.get("eos_token"))
    return ids if eos is None else ids | {eos}


def _adds_bos(backend: Any, settings: Mapping[str, Any], bos: int | None) -> bool:
    explicit = settings.get("add_bos_token")
    if isinstance(explicit, bool):
        return explicit
    return bool(backend.encode("a", add_special_tokens=True).ids[:1] == [bos])


def _chat_template(
    folder: Path, settings: Mapping[str, Any], named: Mapping[str, str]
) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    source = _text(path) if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several named ones
        by_name = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = by_name.get("default")
    if not isinstance(source, str):
        return None
    try:
        return ChatTemplate(source, named)
    except ChatError as error:
        raise ModelError(str(error)) from error


def _scheme(decoder: Any) -> Scheme:
    kinds = set(_decoder_types(decoder))
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"ByteFallback", "Metaspace"}:
        return "sentencepiece"
    raise ModelError(
        f"tokenizer.json decodes with {', '.join(sorted(kinds)) or 'nothing'}, which is unsupported"
    )


def _decoder_types(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        if decoder.get("type") == "Sequence":
            for part in decoder.get("decoders", ()):
                yield from _decoder_types(part)
        else:
            yield str(decoder.get("type"))
