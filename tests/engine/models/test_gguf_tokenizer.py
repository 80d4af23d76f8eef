"""Tokenizers built from GGUF settings, held against transformers and against the definition."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers.integrations.gguf import gguf_tokenizer_mapping
from transformers.utils.chat_template_utils import render_jinja_template

from engine.models import gguf_file, gguf_tokenizer
from engine.models.errors import ModelError
from engine.text import Detokenizer, Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# Merges that cross what the rules disagree about: digits, contractions, line ends, case.
MERGES = [
    *("Ġ 1", "1 2", "12 3", "Ġ a", "' s", "' S", "Ċ Ċ", "Ġ Ġ"),
    *("! Ċ", "a b", "A b", "ab c", "Ġ Ċ", "c d"),
]
SPECIAL = ["<|end|>", "<|bos|>"]
SAMPLES = [
    "a  12",
    "x\n 7",
    "ab's AB'S 123 1234",
    "abcd Abcd abC",
    "!\n\n a",
    "  ab\t\tcd \n \n",
    "日本語12３４ é",
    "a<|end|>12",
    "user.name+tag@x.y//z\r\n",
]


def _settings(pre: str | None, **changes: Any) -> dict[str, Any]:
    tokens = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), *SPECIAL, "<tool>"]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "tokenizer.ggml.eos_token_id": len(tokens) - 3,
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
    }
    if pre is not None:
        values["tokenizer.ggml.pre"] = pre
    return values | changes


def _build(pre: str | None = "gpt-2", **changes: Any) -> Tokenizer:
    values = _settings(pre, **changes)
    return gguf_tokenizer.build(values, len(values["tokenizer.ggml.tokens"]))


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special=False)]


@pytest.mark.parametrize(
    "pre", ["llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "tekken", "gpt-2"]
)
def test_words_are_split_as_transformers_splits_them(pre: str) -> None:
    theirs, _ = gguf_tokenizer_mapping.convert_gguf_tokenizer(
        "llama",
        {
            "tokenizer_type": "gpt2",
            "pre_tokenizer_type": pre,
            "tokens": _settings(pre)["tokenizer.ggml.tokens"],
            "merges": MERGES,
            "token_type": _settings(pre)["tokenizer.ggml.token_type"],
        },
    )
    ours = _build(pre)
    for text in SAMPLES:
        ids = ours.encode(text, add_special=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids, skip_special=False) == text


def test_each_rule_splits_digits_its_own_way() -> None:
    assert _pieces(_build("gpt-2"), "a 123") == ["a", " 1", "2", "3"]
    assert _pieces(_build("smollm"), "a 123") == ["a", " ", "1", "2", "3"]
    assert _pieces(_build("qwen2"), "a 123") == ["a", " ", "1", "2", "3"]
    assert _pieces(_build("llama-bpe"), "a 123") == ["a", " ", "123"]


def test_smollm_equals_the_models_own_tokenizer_rule() -> None:
    """The published tokenizer.json of SmolLM2: Digits(individual_digits) before ByteLevel."""
    own = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer = _build("smollm")
    for text in SAMPLES:
        if "<|end|>" not in text:
            words = [word for word, _ in own.pre_tokenize_str(text)]
            ids = [
                i for word in words for i in tokenizer.encode(ByteLevel().decode([word]), add_special=False)
            ]
            assert tokenizer.encode(text, add_special=False) == ids


def test_the_default_rule_of_llama_cpp_parts_signs_and_groups_digits() -> None:
    """Signs apart, then the words of GPT-2, digits apart from them, and in threes from the left."""
    words = [word for word, _ in _default_words("ab+cd 1234!")]
    assert words == ["ab", "+", "cd", "Ġ", "123", "4", "!"]
    tokenizer = _build("default")
    for text in SAMPLES:
        assert tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=False) == text


def _default_words(text: str) -> list[tuple[str, tuple[int, int]]]:
    return pre_tokenizers.Sequence(gguf_tokenizer._SPLITS["default"]()).pre_tokenize_str(text)


def test_whole_words_of_the_vocabulary_win_over_merges_where_the_model_says_so() -> None:
    tokens = [*ALPHABET, "aab", "ab", "<|end|>"]  # no merge leads to "aab"
    changes = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
    }
    assert _pieces(_build("llama-bpe", **changes), "aab") == ["aab"]
    assert _pieces(_build("qwen2", **changes), "aab") == ["a", "ab"]


def test_qwen_texts_are_composed_first() -> None:
    assert _build("qwen2").encode("e\u0301", add_special=False) == _build("qwen2").encode(
        "é", add_special=False
    )


def test_special_and_user_defined_tokens_are_matched_whole() -> None:
    tokenizer = _build()
    assert _pieces(tokenizer, "a<tool>b<|end|>") == ["a", "<tool>", "b", "<|end|>"]
    ids = tokenizer.encode("a<tool>b<|end|>", add_special=False)
    assert tokenizer.decode(ids) == "a<tool>b"


def test_unknown_and_missing_rules_are_refused_by_name() -> None:
    """The rule cannot be told from the vocabulary, so nothing is guessed."""
    with pytest.raises(ModelError, match="unknown pre-tokenizer 'falcon'"):
        _build("falcon")
    with pytest.raises(ModelError, match="does not say how its tokenizer splits words"):
        _build(None)


@pytest.mark.parametrize(
    ("flag", "pre", "count"), [(None, "gpt-2", 0), (None, "llama-bpe", 1), (False, "llama-bpe", 0)]
)
def test_bos_is_added_where_the_file_or_its_kind_says_so(flag: bool | None, pre: str, count: int) -> None:
    changes = {} if flag is None else {"tokenizer.ggml.add_bos_token": flag}
    tokenizer = _build(pre, **changes)
    assert tokenizer.encode("ab", add_special=True).count(tokenizer.bos_token_id or -1) == count


def test_every_end_id_counts() -> None:
    count = len(_settings("gpt-2")["tokenizer.ggml.tokens"])
    more = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    assert _build(**more).eos_token_ids == {count - 3, 5, 6}
    assert _build(**{"tokenizer.ggml.eos_token_ids": np.array([7, 8])}).eos_token_ids == {count - 3, 7, 8}


def test_the_hash_covers_what_decides_about_ids() -> None:
    plain = _build()
    assert _build().sha256 == plain.sha256
    assert _build("smollm").sha256 != plain.sha256
    assert _build(**{"tokenizer.ggml.merges": MERGES[:-1]}).sha256 != plain.sha256
    assert _build(**{"tokenizer.chat_template": "x"}).sha256 != plain.sha256


# --- SentencePiece -------------------------------------------------------------------------------------

BYTES = [f"<0x{i:02X}>" for i in range(256)]
WORDS = [
    "▁",
    "t",
    "h",
    "e",
    "q",
    "u",
    "i",
    "c",
    "k",
    "th",
    "▁th",
    "▁the",
    "he",
    "qu",
    "ick",
    "ic",
    "▁qu",
    "▁quick",
]
SCORES = [0.0] * 3 + [0.0] * 256 + [-50.0 - i for i in range(9)] + [-float(i) for i in range(9)]


def _spm(**changes: Any) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(SCORES, dtype=np.float32),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(WORDS),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return gguf_tokenizer.build(values | changes, len(tokens))


def _by_definition(text: str) -> list[str]:
    """SentencePiece BPE: while neighbours form a token, merge the pair that scores best, leftmost first."""
    score = dict(zip(["<unk>", "<s>", "</s>", *BYTES, *WORDS], SCORES, strict=True))
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [a + b for a, b in itertools.pairwise(parts)]
        pairs = [(-score[text], i) for i, text in enumerate(joined) if text in score]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [joined[i]]
    return [piece for part in parts for piece in ([part] if part in score else _as_bytes(part))]


def _as_bytes(part: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in part.encode()]


@given(st.text(alphabet="the quickzé", max_size=20))
@settings(max_examples=300, deadline=None)
def test_sentencepiece_merges_by_score(text: str) -> None:
    tokenizer = _spm_shared()
    ids = tokenizer.encode(text, add_special=False)
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
    assert [tokens[i] for i in ids] == (_by_definition(text) if text else [])
    assert tokenizer.decode(ids) == (" " + text if text else "")
    detokenizer = Detokenizer(tokenizer)
    assert "".join([*(detokenizer.push([i]) for i in ids), detokenizer.flush()]) == tokenizer.decode(ids)


_SHARED: list[Tokenizer] = []


def _spm_shared() -> Tokenizer:
    if not _SHARED:
        _SHARED.append(_spm())
    return _SHARED[0]


def test_sentencepiece_prefix_space_and_bos() -> None:
    assert _spm().encode("the", add_special=True) == [1, _spm().encode("the", add_special=False)[0]]
    plain = _spm(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    assert plain.decode(plain.encode("the", add_special=True)) == "the"
    assert plain.encode("the", add_special=True)[0] != 1
    with pytest.raises(ModelError, match="no score for each token"):
        _spm(**{"tokenizer.ggml.scores": None})


# --- the demo model ------------------------------------------------------------------------------------


@pytest.mark.demo_model
def test_the_demo_models_ids_equal_transformers_where_no_digit_follows_a_space(demo_model: Path) -> None:
    """transformers derives a tokenizer without the digit rule, so texts without digits must agree exactly."""
    settings = gguf_file.read(demo_model).settings
    names = {"tokens": "tokens", "merges": "merges", "pre": "pre_tokenizer_type", "model": "tokenizer_type"}
    given = {theirs: settings[f"tokenizer.ggml.{ours}"] for ours, theirs in names.items()}
    given["token_type"] = settings["tokenizer.ggml.token_type"].tolist()
    theirs, _ = gguf_tokenizer_mapping.convert_gguf_tokenizer("llama", given)
    ours = gguf_tokenizer.build(settings, 49152)
    texts = [
        "The quick brown fox jumps over the lazy dog.",
        "  def f(x):\n\treturn x ** y\n\n\n",
        "naïve 🙂 日本語",
        "<|im_start|>user\nhi<|im_end|>\n",
    ]
    for text in texts:
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False).ids
    chat = [("system", "Be brief."), ("user", "Why?"), ("assistant", "So."), ("user", "Oh?")]
    for part in (chat, chat[1:]):
        messages = [{"role": role, "content": content} for role, content in part]
        (expected,), _ = render_jinja_template(
            [messages], chat_template=settings["tokenizer.chat_template"], add_generation_prompt=True
        )
        assert ours.render_chat(part) == expected
        assert ours.apply_chat_template(part) == theirs.encode(expected, add_special_tokens=False).ids
    assert ours.encode("a  12", add_special=False) != theirs.encode("a  12", add_special_tokens=False).ids
