"""A tokenizer from the settings of a GGUF file.

The file holds the vocabulary and the merges, but of the rule that splits a text into words first only a name
(``tokenizer.ggml.pre``). The rules below are those of the models' own tokenizers, under llama.cpp's names; an
unknown name is refused, since ids of a wrong split look right and make the model answer badly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from engine.chat import ChatError, ChatTemplate
from engine.models.errors import ModelError
from engine.text import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# Word rules as the models' tokenizer.json files publish them.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's own rule for vocabularies without a better name: each pattern splits what the one before left.
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def _words(*patterns: str) -> list[Any]:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _gpt2() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _digits_first() -> list[Any]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


_SPLITS: dict[str, Callable[[], list[Any]]] = {
    "smollm": _digits_first,
    "starcoder": _digits_first,
    "default": lambda: _words(*_DEFAULT),
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "llama-bpe": lambda: _words(_LLAMA3),
    "llama3": lambda: _words(_LLAMA3),
    "llama-v3": lambda: _words(_LLAMA3),
    "qwen2": lambda: _words(_QWEN2),
    "deepseek-r1-qwen": lambda: _words(_QWEN2),
    "tekken": lambda: _words(_TEKKEN),
}
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # a word in the vocabulary is not split
_NFC = {"qwen2", "deepseek-r1-qwen"}
_BOS_BY_DEFAULT = {"llama-bpe", "llama3", "llama-v3", "tekken"}


def build(settings: Mapping[str, Any], rows: int) -> Tokenizer:
    """Build the tokenizer for a model with ``rows`` embeddings. Raises `ModelError`."""
    kind = settings.get("tokenizer.ggml.model")
    tokens = settings.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError("the GGUF file holds no tokens (tokenizer.ggml.tokens)")
    if len(set(tokens)) != len(tokens):
        raise ModelError("the GGUF file holds a token twice (tokenizer.ggml.tokens)")
    types = settings.get("tokenizer.ggml.token_type")
    types = [_NORMAL] * len(tokens) if types is None else [int(t) for t in types]
    if len(types) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types")
    if kind == "gpt2":
        pre = settings.get("tokenizer.ggml.pre")
        backend, bos_default = _byte_level(settings, tokens, pre), pre in _BOS_BY_DEFAULT
    elif kind == "llama":
        backend, bos_default = _sentencepiece(settings, tokens), True
    else:
        raise ModelError(f"unknown tokenizer {kind!r} in the GGUF file; supported: gpt2, llama")
    _add_special(backend, tokens, types)
    bos = _id(settings, "bos", len(tokens))
    return Tokenizer(
        backend,
        scheme="byte_level" if kind == "gpt2" else "sentencepiece",
        rows=rows,
        bos_token_id=bos,
        eos_token_ids=_eos_ids(settings, len(tokens)),
        add_bos=bool(settings.get("tokenizer.ggml.add_bos_token", bos_default)),
        chat_template=_chat_template(settings, tokens),
        sha256=_sha256(settings, tokens, types),
    )


def _byte_level(settings: Mapping[str, Any], tokens: Sequence[str], pre: Any) -> Backend:
    if pre is None:
        raise ModelError(
            "the GGUF file does not say how its tokenizer splits words (tokenizer.ggml.pre): "
            "convert the model again with a current converter"
        )
    if pre not in _SPLITS:
        raise ModelError(f"unknown pre-tokenizer {pre!r} in the GGUF file; supported: {', '.join(_SPLITS)}")
    merges = settings.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError("the GGUF file holds no merges (tokenizer.ggml.merges)")
    vocab = {token: i for i, token in enumerate(tokens)}
    # A merged token may begin with a space, so the separator is looked for from the second character.
    pairs = [(m[:cut], m[cut + 1 :]) for m in merges if (cut := m.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        raise ModelError("the GGUF file holds a merge that is no pair (tokenizer.ggml.merges)")
    backend = Backend(_bpe(vocab, pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    backend.pre_tokenizer = pre_tokenizers.Sequence(_SPLITS[pre]())
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(settings: Mapping[str, Any], tokens: Sequence[str]) -> Backend:
    scores = settings.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError("the GGUF file has no score for each token (tokenizer.ggml.scores)")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = _id(settings, "unknown", len(tokens))
    backend = Backend(
        _bpe(
            vocab,
            _merges_by_score(vocab, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    if settings.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence(steps)
    return backend


def _merges_by_score(vocab: Mapping[str, int], scores: Any) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores best, so results in order of score are the merges."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, i in vocab.items():
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                found.append((-float(scores[i]), left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _bpe(vocab: dict[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> Any:
    try:
        return BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the library raises plain Exception for merges outside the vocabulary
        raise ModelError(f"the GGUF file's vocabulary and merges do not fit together: {error}") from error


def _add_special(backend: Backend, tokens: Sequence[str], types: Sequence[int]) -> None:
    control = [
        AddedToken(token, normalized=False, special=True)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _UNKNOWN)
    ]
    own = [
        AddedToken(token, normalized=False, special=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == _USER_DEFINED
    ]
    backend.add_special_tokens(control)
    backend.add_tokens(own)


def _id(settings: Mapping[str, Any], name: str, count: int) -> int | None:
    value = settings.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < count else None


def _eos_ids(settings: Mapping[str, Any], count: int) -> set[int]:
    """End of sequence, of turn and of message: each ends an answer."""
    ids = {_id(settings, name, count) for name in ("eos", "eot", "eom")}
    several = settings.get("tokenizer.ggml.eos_token_ids")
    ids.update(int(i) for i in (() if several is None else several))
    return {i for i in ids if i is not None}


def _chat_template(settings: Mapping[str, Any], tokens: Sequence[str]) -> ChatTemplate | None:
    source = settings.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None
    named = {
        f"{name}_token": tokens[i]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (i := _id(settings, key, len(tokens))) is not None
    }
    try:
        return ChatTemplate(source, named)
    except ChatError as error:
        raise ModelError(str(error)) from error


def _sha256(settings: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> str:
    """Of everything here that decides about ids and templates."""
    digest = hashlib.sha256()
    for part in (tokens, map(str, types), settings.get("tokenizer.ggml.merges") or ()):
        digest.update("\0".join(part).encode("utf-8") + b"\1")
    for key in ("model", "pre", "add_bos_token", "add_space_prefix"):
        digest.update(f"{key}={settings.get(f'tokenizer.ggml.{key}')}\0".encode())
    digest.update(str(settings.get("tokenizer.chat_template")).encode("utf-8"))
    return digest.hexdigest()
