"""Text to token ids and back.

`Tokenizer` wraps a ``tokenizers`` tokenizer and what its model adds: which ids end an answer, whether a text
begins with BOS, how a conversation is written. `Detokenizer` turns ids into text as they come. It works on
bytes, because a token may end in the middle of a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from engine.chat import ChatError, ChatTemplate

Scheme = Literal["byte_level", "sentencepiece"]


class TextError(Exception):
    """A text cannot become ids, or a conversation a prompt. The text says what, why and what to do."""


class Tokenizer:
    """Both directions for one model.

    ``backend`` is a ``tokenizers.Tokenizer``, ``scheme`` how its tokens spell bytes, ``rows`` the rows of the
    model's embedding (ids from there on do not exist for the model). ``chat_template`` may be None.
    """

    def __init__(
        self,
        backend: Any,
        *,
        scheme: Scheme,
        rows: int,
        bos_token_id: int | None,
        eos_token_ids: Iterable[int],
        add_bos: bool,
        chat_template: ChatTemplate | None,
        sha256: str,
    ) -> None:
        self._backend = backend
        vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = len(vocab)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self.add_bos = add_bos and bos_token_id is not None
        self.chat_template = chat_template
        self.sha256 = sha256
        self.rows = rows
        self._bytes, self._literal = _token_tables(backend, vocab, scheme, rows)
        # Tokens that are whole characters on their own; the others (None) need their neighbours.
        self._texts = [_whole(data) for data in self._bytes]
        # The most text that one token can add; each byte of a broken character may become a U+FFFD.
        lengths = [
            (len(data), 3 * len(data)) if text is None else (len(text), len(data))
            for text, data in zip(self._texts, self._bytes, strict=True)
        ]
        self.max_token_chars = max((chars for chars, _ in lengths), default=0)
        self.max_token_utf8 = max((size for _, size in lengths), default=0)
        self.known_ids = frozenset(vocab.values())
        self._may_exceed = max(self.known_ids, default=0) >= rows

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Ids of ``text``. With ``add_special`` it begins with one BOS if the model wants one.

        Raises `TextError` for text that is no valid Unicode and for ids the model has no embedding for.
        """
        return self.encode_batch([(text, add_special)])[0]

    def encode_batch(self, texts: Sequence[tuple[str, bool]]) -> list[list[int]]:
        """Ids of several texts, each with its ``add_special``; on several cores if there are several texts.

        Raises `TextError` as `encode` does if one of them cannot be encoded. Other Python threads run
        meanwhile: the library's call for a single text would hold them up, for a tenth of a second where a
        prompt has 30,000 tokens, and the one for many does not.
        """
        try:
            encoded = self._backend.encode_batch_fast([text for text, _ in texts], add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise TextError(f"the text is not valid Unicode: {error}") from error
        return [self._checked(each.ids, special) for each, (_, special) in zip(encoded, texts, strict=True)]

    def _checked(self, ids: list[int], add_special: bool) -> list[int]:
        if add_special and self.add_bos and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]  # type: ignore[list-item]  # add_bos implies an id
        if self._may_exceed and ids and max(ids) >= self.rows:
            bad = next(i for i in ids if i >= self.rows)
            token = self._backend.id_to_token(bad)
            raise TextError(
                f"the text contains {token!r} (id {bad}), but the model has no ids from {self.rows} on"
            )
        return ids

    def difference_to(self, other: Tokenizer, text: str) -> str:
        """Why an id of the one is not the same id of the other, or "" if all are.

        Vocabularies are compared token by token, and what becomes of ``text``. Names of files, chat templates
        and which ids end an answer may differ.
        """
        if self.sha256 == other.sha256:
            return ""
        if self.known_ids != other.known_ids:
            mine, theirs = len(self.known_ids), len(other.known_ids)
            if mine == theirs:
                return "their tokens have other ids"
            return f"one has {mine} tokens, the other {theirs}"
        for i in sorted(self.known_ids):
            if self._literal[i] != other._literal[i]:
                return f"id {i} is {self.token_text(i)!r} in one and {other.token_text(i)!r} in the other"
        if self.encode(text, add_special=False) != other.encode(text, add_special=False):
            return "they divide the same text differently"
        return ""

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> str:
        """The prompt text of a conversation of (role, content). Raises `TextError`."""
        if self.chat_template is None:
            raise TextError("this model has no chat template: send a plain prompt instead of messages")
        try:
            return self.chat_template.render(messages)
        except ChatError as error:
            raise TextError(str(error)) from error

    def apply_chat_template(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Ids of a conversation, whose template writes the special tokens. Raises `TextError`."""
        return self.encode(self.render_chat(messages), add_special=False)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ``ids`` as a continuation (a leading space stays). Bad bytes become U+FFFD."""
        table = self._bytes if skip_special else self._literal
        return b"".join([table[i] for i in ids]).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for special tokens and for ids without a token."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """One token for people to read, special tokens by name."""
        return self._literal[token_id].decode("utf-8", errors="replace")


class Detokenizer:
    """Incremental text of one answer: the joined results of `push` and `flush` are the full text.

    Only what may still change is held back: the bytes of an unfinished character, and the longest end of the
    text that could be the beginning of a stop string. Where several stop strings fit, the one that is
    complete first counts, of those the longest, so the result does not depend on how ids are grouped.
    After a hit `matched` names it, the text ends before it, and further ids add nothing.
    """

    __slots__ = ("_firsts", "_held", "_pending", "_stop", "_table", "_texts", "matched")

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), skip_special: bool = True) -> None:
        self._table = tokenizer._bytes if skip_special else tokenizer._literal
        self._texts = tokenizer._texts if skip_special else None
        self._pending = b""  # an unfinished character
        self._held = ""  # a possible beginning of a stop string
        self.matched: str | None = None
        self.watch(stop)

    def watch(self, stop: Sequence[str]) -> None:
        """Look for these stop strings in what is pushed from now on. Raises `TextError` for an empty one."""
        if any(not text for text in stop):
            raise TextError("a stop string is empty, it must hold at least one character")
        self._stop = tuple(stop)
        self._firsts = frozenset(text[0] for text in stop)

    def push(self, ids: Sequence[int]) -> str:
        """Add ids and return the text they release."""
        if len(ids) == 1 and not self._pending and self._texts is not None:
            text = self._texts[ids[0]]
            if text is not None:
                return self._scan(text) if self._stop else text
        data = self._pending + b"".join([self._table[i] for i in ids])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return self._scan(text) if self._stop else text

    def feed(self, ids: Sequence[int]) -> tuple[str, int]:
        """Add ids up to the one that completes a stop string. Returns their text and how many they were."""
        before = self._pending, self._held
        text = self.push(ids)
        if self.matched is None or len(ids) == 1:
            return text, len(ids)
        # Which id it was is found by going back: a stop string is met once in an answer.
        self._go_back(*before)
        parts: list[str] = []
        for token in ids:
            parts.append(self.push((token,)))
            if self.matched is not None:
                break
        return "".join(parts), len(parts)

    def _go_back(self, pending: bytes, held: str) -> None:
        self._pending, self._held, self.matched = pending, held, None

    def flush(self) -> str:
        """End the text: everything held is released, an unfinished character as one U+FFFD."""
        text = self._pending.decode("utf-8", errors="replace")
        self._pending = b""
        if self._stop:
            text = self._scan(text)
            if self.matched is None:
                text, self._held = text + self._held, ""
        return text

    def _scan(self, new: str) -> str:
        if self.matched is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(new):
            return new
        text = self._held + new
        hits = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if hits:
            _, at, self.matched = min(hits)
            self._held = ""
            return text[:at]
        keep = _held_length(text, self._stop)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]


def _held_length(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins a stop string without completing it."""
    best = 0
    for s in stop:
        for size in range(min(len(s) - 1, len(text)), best, -1):
            if text.endswith(s[:size]):
                best = size
                break
    return best


def _whole(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _token_tables(
    backend: Any, vocab: Mapping[str, int], scheme: Scheme, rows: int
) -> tuple[list[bytes], list[bytes]]:
    """For each id the bytes of its token: (special tokens as nothing, special tokens as written)."""
    added = backend.get_added_tokens_decoder()
    spell = _byte_level if scheme == "byte_level" else _sentencepiece
    literal = [b""] * max(rows, max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        literal[i] = token.encode("utf-8") if i in added else spell(token)
    plain = list(literal)
    for i, token in added.items():
        if token.special:
            plain[i] = b""
    return plain, literal


def _byte_alphabet() -> dict[int, int]:
    """The characters that byte-level tokens are written in, to bytes (GPT-2, Radford et al. 2019).

    Printable Latin-1 stands for itself; the other bytes, in order, are written as U+0100 and following.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {0x100 + n: byte for n, byte in enumerate(others)}


_BYTE_OF: Mapping[int, int] = _byte_alphabet()
_ALPHABET = frozenset(map(chr, _BYTE_OF))


def _byte_level(token: str) -> bytes:
    if not _ALPHABET.issuperset(token):
        return token.encode("utf-8")
    return token.translate(_BYTE_OF).encode("latin-1")


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode("utf-8")
