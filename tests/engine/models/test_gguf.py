"""GGUF files: the same model as its safetensors twin, every supported storage, and damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models import gguf_file
from engine.models.errors import ModelError
from engine.models.hf_folder import hf_name
from engine.models.loader import LoadedModel, load_model
from tests import tiny_models
from tests.engine.models import gguf_files
from tests.engine.models.gguf_files import Quant

CPU = torch.device("cpu")


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(path, device=CPU, progress=lambda stage, done, total: None, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model of each architecture, with sizes that every block quantization divides."""
    base = tmp_path_factory.mktemp("twins")
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512}
    return {
        arch: tiny_models.build(base / arch, arch, head_dim=32, **sizes) for arch in tiny_models.ARCHITECTURES
    }


@pytest.fixture
def llama(folders: dict[str, Path]) -> Path:
    return folders["llama"]


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_i05_float_files_equal_their_safetensors_twin(
    folders: dict[str, Path], tmp_path: Path, architecture: str
) -> None:
    """I05: rows of q and k are put back for the llama architecture and left alone for the others."""
    twin = load(folders[architecture])
    loaded = load(gguf_files.convert(folders[architecture], tmp_path / "m.gguf"), dtype=torch.float32)
    assert loaded.weights.keys() == twin.weights.keys()
    for name, weight in loaded.weights.items():
        assert torch.equal(weight, twin.weights[name]), name
    assert loaded.spec.qk_norm == twin.spec.qk_norm
    assert torch.equal(loaded.spec.rope.inv_freq()[0], twin.spec.rope.inv_freq()[0])
    assert loaded.eos_token_ids == twin.eos_token_ids
    text = "the quick 12 fox <|im_end|> é"
    assert loaded.tokenizer.encode(text, add_special=True) == twin.tokenizer.encode(text, add_special=True)


def test_i05_odd_head_counts_and_biases(tmp_path: Path) -> None:
    """I05: 9 query heads, 3 KV heads, and biases on q and k, which are reordered too."""
    folder = tiny_models.build(tmp_path / "m", attention_bias=True)
    twin = load(folder)
    loaded = load(gguf_files.convert(folder, tmp_path / "m.gguf"))
    for name in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "o_proj.bias"):
        assert torch.equal(loaded.weights[f"layers.1.{name}"], twin.weights[f"layers.1.{name}"]), name


@pytest.mark.parametrize("quant", [Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1])
def test_i05_stored_kinds_stay_close_to_the_twin(llama: Path, tmp_path: Path, quant: Quant) -> None:
    """I05: q and k point the same way as the original in every layer, whatever they are stored as."""
    twin = load(llama)
    loaded = load(gguf_files.convert(llama, tmp_path / "m.gguf", quant), dtype=torch.float32)
    close = 0.99 if quant in (Quant.Q4_0, Quant.Q4_1) else 0.999
    for layer in range(2):
        for part in "qk":
            name = f"layers.{layer}.{part}_proj.weight"
            ours, theirs = loaded.weights[name].flatten(), twin.weights[name].flatten()
            assert torch.cosine_similarity(ours, theirs, dim=0) > close


@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q4_K, Quant.Q6_K])
@pytest.mark.parametrize("part_elements", [1 << 12, 1 << 20])
def test_expansion_in_parts_equals_the_package(
    llama: Path, tmp_path: Path, quant: Quant, part_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.gguf.PART_ELEMENTS", part_elements)
    rng = np.random.default_rng(0)
    block, block_bytes = gguf.GGML_QUANT_SIZES[quant]

    def pack(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        packed = rng.integers(0, 256, (data.shape[0], data.shape[1] // block, block_bytes), dtype=np.uint8)
        packed[..., :4] = packed[..., -2:] = 0x2C  # scales of any layout: a small half-precision number
        return packed.reshape(data.shape[0], -1)

    path = gguf_files.convert(llama, tmp_path / "m.gguf", quant, pack=pack)
    loaded = load(path, dtype=torch.float32)
    reader = gguf.GGUFReader(path)
    stored = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    assert np.isfinite(stored["blk.0.ffn_down.weight"]).all()
    assert np.array_equal(
        loaded.weights["layers.0.down_proj.weight"].numpy(), stored["blk.0.ffn_down.weight"]
    )
    assert np.array_equal(loaded.weights["embed"].numpy(), stored["token_embd.weight"])
    reordered = gguf_files.neighbours(loaded.weights["layers.1.k_proj.weight"].numpy(), 2)
    assert np.array_equal(reordered, stored["blk.1.attn_k.weight"])
    assert load(path).weights["embed"].dtype == torch.bfloat16  # what a quantized file comes in unless asked


@pytest.mark.parametrize("quant", [Quant.F32, Quant.F16, Quant.BF16])
def test_a_float_file_keeps_its_own_dtype(llama: Path, tmp_path: Path, quant: Quant) -> None:
    own = {Quant.F32: torch.float32, Quant.F16: torch.float16, Quant.BF16: torch.bfloat16}[quant]
    loaded = load(gguf_files.convert(llama, tmp_path / "m.gguf", quant))
    assert {weight.dtype for weight in loaded.weights.values()} == {own}


def test_a_folder_with_one_gguf_file_is_that_model(llama: Path, tmp_path: Path) -> None:
    gguf_files.convert(llama, tmp_path / "one.gguf")
    assert load(tmp_path).info.format == "gguf"
    gguf_files.convert(llama, tmp_path / "two.gguf")
    with pytest.raises(ModelError, match=r"several GGUF files, name one: one\.gguf, two\.gguf"):
        load(tmp_path)


def test_tied_heads_and_rope_tables(tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path / "m", rope_parameters=tiny_models.ROPE_KINDS["llama3"], head_dim=16)
    twin = load(folder).spec.rope
    plain = 1.0 / twin.theta ** (torch.arange(0, 16, 2).float() / 16)
    divisors = (plain / twin.inv_freq()[0]).numpy()
    path = gguf_files.convert(folder, tmp_path / "m.gguf", extra={"rope_freqs.weight": divisors})
    spec = load(path).spec
    assert not spec.tie_word_embeddings
    assert spec.rope.kind == "table"
    torch.testing.assert_close(spec.rope.inv_freq()[0], twin.inv_freq()[0])
    tied = gguf_files.convert(folder, tmp_path / "t.gguf", leave_out=lambda name: name == "lm_head.weight")
    assert load(tied).spec.tie_word_embeddings
    assert "head" not in load(tied).weights


def test_scaled_rope_and_windows(llama: Path, tmp_path: Path) -> None:
    more = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
        "llama.attention.sliding_window": 8,
    }
    spec = load(gguf_files.convert(llama, tmp_path / "m.gguf", settings=more)).spec
    assert (spec.rope.kind, spec.rope.factor, spec.rope.original_len) == ("yarn", 4.0, 128)
    assert spec.layer_windows == (8, 8)
    older = {"llama.rope.scale_linear": 2.0}
    assert load(gguf_files.convert(llama, tmp_path / "o.gguf", settings=older)).spec.rope.kind == "linear"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_count": 8}, "has 8 experts"),
        ({"llama.block_count": None}, "llama.block_count is 'missing'"),
        ({"llama.attention.head_count_kv": [1, 2]}, "differs from layer to layer"),
        ({"llama.attention.value_length": 16}, "of different sizes"),
        ({"llama.rope.scaling.type": "spiral"}, "unknown rope scaling 'spiral'"),
        ({"llama.block_count": 3}, "lacks 9 tensors: blk.2.attn_k.weight"),
        ({"llama.block_count": 1}, "tensors that this architecture does not have: blk.1"),
        ({"llama.feed_forward_length": 511}, r"has shape \[512, 256\], the settings say \[511, 256\]"),
        ({"split.count": 2}, "one of 2 parts"),
        ({"tokenizer.ggml.model": "bert"}, "unknown tokenizer 'bert'"),
        ({"tokenizer.ggml.pre": "klingon"}, "unknown pre-tokenizer 'klingon'"),
        ({"tokenizer.ggml.merges": None}, "holds no merges"),
        ({"tokenizer.ggml.merges": ["xyz"]}, "a merge that is no pair"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "do not fit together"),
        ({"tokenizer.ggml.token_type": [1]}, "320 tokens but 1 token types"),
        ({"tokenizer.ggml.tokens": None}, "holds no tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "a token twice"),
        ({"tokenizer.chat_template": "{% if %}"}, "chat template cannot be read"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    llama: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(gguf_files.convert(llama, tmp_path / "m.gguf", settings=changes))


def test_unknown_architectures_and_storages_are_refused_by_name(llama: Path, tmp_path: Path) -> None:
    path = gguf_files.convert(llama, tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0phi99", 1))
    with pytest.raises(ModelError, match="unknown GGUF architecture 'phi99'; supported: llama, qwen2, qwen3"):
        load(path)
    kind = gguf_files.convert(
        llama,
        tmp_path / "q5.gguf",
        Quant.Q5_0,
        pack=lambda d: np.zeros((d.shape[0], d.shape[1] // 32 * 22), np.uint8),
    )
    with pytest.raises(
        ModelError, match="is stored as Q5_0; supported: F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K"
    ):
        load(kind)


def test_the_head_is_read_like_the_package_reads_it(llama: Path, tmp_path: Path) -> None:
    path = gguf_files.convert(llama, tmp_path / "m.gguf", Quant.Q8_0)
    ours, theirs = gguf_file.read(path), gguf.GGUFReader(path)
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert (found.kind, found.offset) == (tensor.tensor_type.value, tensor.data_offset)
    named = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.settings.keys() == named.keys()
    for key, field in named.items():
        value = ours.settings[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()


def test_a_truncated_file_is_refused_before_anything_is_read(llama: Path, tmp_path: Path) -> None:
    path = gguf_files.convert(llama, tmp_path / "m.gguf")
    raw = path.read_bytes()
    for cut in (0, 3, 4, 20, 100, 5000, len(raw) - 64):
        path.write_bytes(raw[:cut])
        with pytest.raises(ModelError):
            load(path)
    path.write_bytes(raw[:-64])
    with pytest.raises(ModelError, match="download it again"):
        load(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("small")
    return gguf_files.convert(tiny_models.build(base / "m"), base / "m.gguf", Quant.F16)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_a_file_with_a_mutated_head_is_loaded_whole_or_refused(small: Path, data: st.DataObject) -> None:
    raw = bytearray(small.read_bytes())
    head = min(tensor.offset for tensor in gguf_file.read(small).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, head - 1))] = data.draw(st.integers(0, 255))
    mutated = small.with_name("mutated.gguf")
    mutated.write_bytes(raw)
    try:
        loaded = load(mutated)
    except ModelError:
        return
    assert loaded.weights.keys() == loaded.spec.weight_shapes().keys()


# --- the demo model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> LoadedModel:
    return load(demo_model, dtype=torch.float32)


@pytest.mark.demo_model
def test_i05_the_demo_model_speaks(demo: LoadedModel) -> None:
    """I05: with its rows in the wrong order the model would load as well and answer gibberish."""
    spec = demo.spec
    config = tiny_models.transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_model_len,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = tiny_models.transformers.LlamaForCausalLM(config)
    state = {hf_name(name): weight for name, weight in demo.weights.items()}
    model.load_state_dict(state | {"lm_head.weight": demo.weights["embed"]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    prompt = demo.tokenizer.apply_chat_template([("user", "What is the capital of France?")])
    answer = demo.tokenizer.decode(tiny_models.greedy(model.eval(), prompt, 10))
    assert "Paris" in answer


@pytest.mark.demo_model
def test_the_demo_model_is_described_as_it_is(demo: LoadedModel) -> None:
    spec, info = demo.spec, demo.info
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
    assert (spec.head_dim, spec.intermediate_size, spec.vocab_size) == (64, 1536, 49152)
    assert (spec.max_model_len, spec.rope.theta, spec.tie_word_embeddings) == (8192, 1e5, True)
    assert info.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert info.num_params == 134_515_008
    assert demo.eos_token_ids == {2}
    assert demo.tokenizer.bos_token_id == 1
    assert not demo.tokenizer.add_bos
    assert demo.padded_ids.numel() == 0
    assert demo.notes == ()


@pytest.mark.demo_model
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a  12", ["a", "  ", "1", "2"]),
        ("x\n 7", ["x", "\n ", "7"]),
        ("in 1984, 3.14", ["in", " ", "1", "9", "8", "4", ",", " ", "3", ".", "1", "4"]),
        ("Hello world", ["Hello", " world"]),
    ],
)
def test_the_demo_models_tokenizer_splits_digits_first(
    demo: LoadedModel, text: str, pieces: list[str]
) -> None:
    ids = demo.tokenizer.encode(text, add_special=True)
    assert [demo.tokenizer.token_text(i) for i in ids] == pieces
    assert demo.tokenizer.decode(ids) == text
