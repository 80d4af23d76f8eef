"""Tokenizer and detokenizer: text survives the way through ids, in whatever pieces they come."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models import hf_tokenizer
from engine.models.dummy import byte_tokenizer
from engine.text import Detokenizer, TextError, Tokenizer
from tests import tiny_models

ROWS = tiny_models.VOCAB_SIZE


def _folder(base: Path, **tokenizer_config: object) -> Path:
    base.mkdir(parents=True, exist_ok=True)
    tiny_models.write_tokenizer(base, **tokenizer_config)
    return base


def _load(folder: Path, config: dict[str, object] | None = None) -> Tokenizer:
    return hf_tokenizer.load(folder, config or {}, ROWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return _load(folder)


def _pieces(detokenizer: Detokenizer, chunks: Sequence[Sequence[int]]) -> list[str]:
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


def _one_by_one(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[str, str | None]:
    detokenizer = Detokenizer(tokenizer, stop)
    return "".join(_pieces(detokenizer, [[i] for i in ids])), detokenizer.matched


def _expected(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """By definition: read character by character, the first stop string complete ends the text before it."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


# --- A21: characters over several tokens ---------------------------------------------------------------


@pytest.mark.parametrize("text", ["🙂 こんにちは é", "e\u0301 naïve", "👩‍👩‍👧 family", "日本語テスト"])
def test_a21_split_characters_never_show_as_replacement(tokenizer: Tokenizer, text: str) -> None:
    """A21: ids fed one by one give no U+FFFD, and the joined text is the full decode."""
    ids = tokenizer.encode(text, add_special=False)
    assert len(ids) > len(text)  # this vocabulary has no tokens for them, so their bytes come one by one
    deltas = _pieces(Detokenizer(tokenizer), [[i] for i in ids])
    assert all("\ufffd" not in delta for delta in deltas)
    assert "".join(deltas) == tokenizer.decode(ids) == text


def test_a21_an_unfinished_character_is_held_and_flushed_once(tokenizer: Tokenizer) -> None:
    """A21: an answer that ends within a character ends with one U+FFFD, at the flush."""
    ids = tokenizer.encode("ok 🙂", add_special=False)[:-1]
    deltas = _pieces(Detokenizer(tokenizer), [[i] for i in ids])
    assert "".join(deltas[:-1]) == "ok "
    assert deltas[-1] == "\ufffd"
    assert Detokenizer(tokenizer).flush() == ""


def test_a21_bad_bytes_come_out_as_soon_as_they_are_known_to_be_bad(tokenizer: Tokenizer) -> None:
    """A21: a byte that no next byte can make valid does not hold anything up."""
    smile = tokenizer.encode("🙂", add_special=False)
    (a,) = tokenizer.encode("a", add_special=False)
    deltas = _pieces(Detokenizer(tokenizer), [[smile[0]], [smile[1]], [a], [smile[1]], [a]])
    assert deltas == ["", "", "\ufffda", "\ufffd", "a", ""]


@given(st.lists(st.integers(0, ROWS - 1), max_size=60), st.data())
@settings(max_examples=300, deadline=None)
def test_a21_joined_deltas_equal_the_full_decode(
    tokenizer: Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    """A21: for any ids in any grouping; special tokens are skipped in both."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    chunks = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(_pieces(Detokenizer(tokenizer), chunks)) == tokenizer.decode(ids)
    whole = Detokenizer(tokenizer, skip_special=False)
    assert "".join(_pieces(whole, chunks)) == tokenizer.decode(ids, skip_special=False)


@given(st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert _one_by_one(tokenizer, ids)[0] == tokenizer.decode(ids)


# --- A20: stop strings ---------------------------------------------------------------------------------


def test_a20_what_is_held_for_a_stop_string_is_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    """A20: a final token that begins a stop string is not lost when the answer ends."""
    ids = tokenizer.encode("one ##", add_special=False)
    detokenizer = Detokenizer(tokenizer, ["\n", "###"])
    released = "".join(detokenizer.push([i]) for i in ids)
    assert released == "one "
    assert detokenizer.flush() == "##"
    assert detokenizer.matched is None
    assert detokenizer.flush() == ""


_WORDS = st.lists(
    st.sampled_from(["the ", "#", "##", "\n", "é", "🙂", "User", "User:", " ", "quick", "\ufffd", "ab"]),
    max_size=25,
).map("".join)
_STOPS = st.lists(
    st.sampled_from(["\n", "###", "User:", "##\n", "🙂", "bab", "aba", "\n\n", "é🙂"]), max_size=4
)


@given(_WORDS, _STOPS, st.data())
@settings(max_examples=500, deadline=None)
def test_a20_streamed_text_equals_whole_text(
    tokenizer: Tokenizer, text: str, stop: list[str], data: st.DataObject
) -> None:
    """A20: with any stop strings and any grouping of ids, the joined text is that of the definition."""
    ids = tokenizer.encode(text, add_special=False)
    keep = data.draw(st.integers(0, len(ids)))
    full = tokenizer.decode(ids[:keep])
    assert _one_by_one(tokenizer, ids[:keep], stop) == _expected(full, stop)
    size = data.draw(st.integers(1, 7))
    detokenizer = Detokenizer(tokenizer, stop)
    chunks = [ids[i : min(i + size, keep)] for i in range(0, keep, size)]
    assert "".join(_pieces(detokenizer, chunks)) == _expected(full, stop)[0]
    assert detokenizer.matched == _expected(full, stop)[1]


@given(_WORDS, _STOPS)
@settings(max_examples=200, deadline=None)
def test_a20_only_a_possible_stop_prefix_is_held(tokenizer: Tokenizer, text: str, stop: list[str]) -> None:
    """A20: after each token, all text is out but an unfinished character and what may begin a stop string."""
    ids = tokenizer.encode(text, add_special=False)
    detokenizer, out = Detokenizer(tokenizer, stop), ""
    for n, token in enumerate(ids, start=1):
        out += detokenizer.push([token])
        if detokenizer.matched is not None:
            break
        whole = b"".join(tokenizer.token_bytes(i) for i in ids[:n]).decode("utf-8", errors="ignore")
        held = whole[len(out) :]
        assert whole.startswith(out)
        assert held == "" or any(s.startswith(held) and s != held for s in stop)


def test_a20_after_a_hit_nothing_follows(tokenizer: Tokenizer) -> None:
    """A20: text ends before the stop string, whatever comes in the same push or later."""
    ids = tokenizer.encode("a###b", add_special=False)
    detokenizer = Detokenizer(tokenizer, ["##"])
    assert detokenizer.push(ids) == "a"
    assert detokenizer.matched == "##"
    assert detokenizer.push(ids) == ""
    assert detokenizer.flush() == ""
    with pytest.raises(TextError, match="a stop string is empty"):
        Detokenizer(tokenizer, [""])


def test_stop_strings_may_come_later(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a#b", add_special=False)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) == "a#b"
    detokenizer.watch(["#b"])  # the one already out is out
    assert detokenizer.push(ids) == "a"
    assert detokenizer.matched == "#b"
    with pytest.raises(TextError, match="a stop string is empty"):
        detokenizer.watch([""])


def test_a_stop_string_may_end_within_a_token(tokenizer: Tokenizer) -> None:
    (token,) = [i for i in range(ROWS) if tokenizer.token_text(i) == "the"]
    assert _one_by_one(tokenizer, [token], ["h"]) == ("t", "h")


# --- I07: BOS and chat templates -----------------------------------------------------------------------


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("in_template", [True, False])
def test_i07_bos_is_never_doubled(tmp_path: Path, add_bos: bool | None, in_template: bool) -> None:
    """I07: a chat has the BOS of its template alone, a raw prompt one if the model wants it."""
    options = {} if add_bos is None else {"add_bos_token": add_bos}
    template = (
        "{{ bos_token }}" if in_template else ""
    ) + "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = _load(_folder(tmp_path, bos_token="<|pad|>", chat_template=template, **options))
    bos = tokenizer.bos_token_id
    assert bos == 3
    assert tokenizer.apply_chat_template([("user", "hi")]).count(bos) == in_template
    assert tokenizer.encode("hi", add_special=True).count(bos) == bool(add_bos)
    assert tokenizer.encode("hi", add_special=False).count(bos) == 0
    assert tokenizer.encode("<|pad|>hi", add_special=True).count(bos) == 1


def test_i07_a_post_processor_that_adds_bos_counts_as_wanting_it(tmp_path: Path) -> None:
    """I07: Llama 3 says it with a template in tokenizer.json, not with add_bos_token."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    backend = Backend.from_file(str(_folder(tmp_path) / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    assert _load(tmp_path).encode("hi", add_special=True)[0] == 1
    assert _load(tmp_path).encode("hi", add_special=False)[0] != 1


def test_i07_without_a_template_a_chat_is_refused(tmp_path: Path) -> None:
    """I07: no template of another model is guessed."""
    tokenizer = _load(_folder(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(TextError, match="this model has no chat template: send a plain prompt"):
        tokenizer.apply_chat_template([("user", "hi")])


@pytest.mark.parametrize("where", ["settings", "file", "named"])
def test_the_template_is_found_wherever_it_is(tmp_path: Path, where: str) -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": source}]
    _folder(tmp_path, chat_template={"settings": source, "file": "no", "named": named}[where])
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    assert _load(tmp_path).render_chat([("user", "hi"), ("assistant", "ho")]) == "[user]hi[assistant]ho"


def test_ids_and_chats_equal_those_of_transformers(folder: Path, tokenizer: Tokenizer) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text in ("the quick brown fox", " é\n\n🙂", "<|im_start|>user\nhi<|im_end|>", "", "<filler3> x"):
        ours = tokenizer.encode(text, add_special=True)
        assert ours == theirs(text)["input_ids"]
        assert tokenizer.decode(ours) == theirs.decode(ours, skip_special_tokens=True)
    chat = [("system", "be brief"), ("user", "hi <b>"), ("assistant", "ho"), ("user", "and?")]
    messages = [{"role": role, "content": content} for role, content in chat]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.apply_chat_template(chat) == expected


# --- what a model's settings say -----------------------------------------------------------------------


def test_every_end_id_counts(tmp_path: Path) -> None:
    _folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}', encoding="utf-8")
    assert _load(tmp_path, {"eos_token_id": [4, 2]}).eos_token_ids == {2, 4, 5, 6}
    assert _load(tmp_path, {"eos_token_id": 9}).eos_token_ids == {9, 2, 5, 6}
    assert _load(tmp_path, {"eos_token_id": None}).eos_token_ids == {2, 5, 6}


def test_named_tokens_may_be_objects_or_in_the_older_file(tmp_path: Path) -> None:
    _folder(tmp_path, bos_token={"content": "<|pad|>", "lstrip": False}, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>"}), encoding="utf-8"
    )
    tokenizer = _load(tmp_path)
    assert tokenizer.bos_token_id == 3
    assert tokenizer.eos_token_ids == {0}


def test_special_tokens_have_no_bytes_but_a_name(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(1) == b""
    assert tokenizer.token_text(1) == "<|im_start|>"
    assert tokenizer.decode([1, 2]) == ""
    assert tokenizer.decode([1, 2], skip_special=False) == "<|im_start|><|im_end|>"
    filler = ROWS - 1  # added, but not special
    assert tokenizer.token_bytes(filler).startswith(b"<filler")


def test_text_that_is_no_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b", add_special=False)


def test_the_byte_tokenizer_spells_any_text() -> None:
    tokenizer = byte_tokenizer(300)
    text = "é🙂\n<end>x"
    ids = tokenizer.encode(text, add_special=True)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert len(tokenizer.encode("é🙂", add_special=False)) == 6
    assert tokenizer.known_ids == frozenset(range(300))
    assert tokenizer.eos_token_ids == {256}


# --- several at once -----------------------------------------------------------------------------------


@given(texts=st.lists(st.tuples(st.text(max_size=30), st.booleans()), max_size=6))
@settings(max_examples=100, deadline=None)
def test_texts_encoded_together_give_the_ids_of_each_alone(
    tokenizer: Tokenizer, texts: list[tuple[str, bool]]
) -> None:
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text, add_special=bos) for text, bos in texts]


def test_one_bad_text_of_several_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match="not valid Unicode"):
        tokenizer.encode_batch([("good", True), ("a\ud800b", True)])


def test_encoding_a_long_text_lets_other_threads_run(tokenizer: Tokenizer) -> None:
    """The step thread must not stand still for as long as somebody's prompt takes."""
    text = "the quick brown fox " * 20_000
    stop, turns = threading.Event(), 0

    def count() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    before = turns
    encoding = tokenizer._backend.encode_batch_fast
    encoding([text], add_special_tokens=False)
    during = turns - before
    before = turns
    tokenizer.encode(text, add_special=False)
    ours = turns - before
    stop.set()
    thread.join(30)
    assert during > 100, "this machine gave the other thread no turn"
    assert ours > during / 20


@given(
    ids=st.lists(st.integers(0, ROWS - 1), max_size=30),
    stop=st.lists(st.text(alphabet="the fox\ufffd", min_size=1, max_size=3), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_feeding_uses_ids_up_to_the_one_that_completes_a_stop_string(
    tokenizer: Tokenizer, ids: list[int], stop: list[str], cuts: list[int]
) -> None:
    """A20, A21: however ids are grouped, the text and the id at which it ends are the same."""
    alone = Detokenizer(tokenizer, stop)
    parts, used = [], 0
    for token in ids:
        parts.append(alone.push((token,)))
        used += 1
        if alone.matched is not None:
            break
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    together = Detokenizer(tokenizer, stop)
    fed_parts, fed = [], 0
    for a, b in pairwise(edges):
        text, count = together.feed(ids[a:b])
        fed_parts.append(text)
        fed += count
        if together.matched is not None:
            break
        assert count == b - a
    assert (fed, together.matched) == (used, alone.matched)
    assert "".join(fed_parts) + together.flush() == "".join(parts) + alone.flush()


@pytest.mark.parametrize("text", ["the fox", "é🙂日本", "x" * 50])
def test_no_text_is_longer_than_its_tokens_may_be(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=False)
    for part in (ids, ids[:-1], ids[1:], list(range(ROWS))):
        decoded = tokenizer.decode(part)
        assert len(decoded) <= len(part) * tokenizer.max_token_chars
        assert len(decoded.encode()) <= len(part) * tokenizer.max_token_utf8
