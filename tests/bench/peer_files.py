"""The same weights in each peer's format. ``python -m tests.bench.peer_files KIND MODEL OUT``.

KIND: ``hf`` (a Hugging Face folder in bfloat16, from our loader's tensors) or ``bf16.gguf`` (a GGUF file with
every matrix of MODEL, which is a GGUF file, rounded to bfloat16). Made once for each model and kept.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Any

OPENVINO_FORMATS = {
    "openvino-fp32": ("fp32",),
    "openvino-int8": ("int8",),
    "openvino-int4": ("int4", "--group-size", "64", "--ratio", "1.0"),
}
KINDS = ("gguf", "bf16.gguf", "hf", *OPENVINO_FORMATS)


class NoFile(Exception):
    """A model's weights cannot be had in a peer's format."""


def key(model: Path) -> str:
    """Another one when any file of the model changed."""
    files = sorted(model.rglob("*")) if model.is_dir() else [model]
    facts = [f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files if f.is_file()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def place(kind: str, model: Path, folder: Path) -> Path:
    """Where the weights of ``model`` lie in the format ``kind``, made or not. Raises `NoFile`."""
    if kind.endswith("gguf") and model.suffix != ".gguf":
        raise NoFile(f"it reads GGUF files, {model.name} is none")
    return model if kind == "gguf" else folder / "models" / key(model) / kind


def export_command(kind: str, hf: Path, out: Path, bin_folder: Path) -> list[str]:
    """How OpenVINO's own converter makes its format from a Hugging Face folder."""
    weights = OPENVINO_FORMATS[kind]
    return [
        str(bin_folder / "optimum-cli"), "export", "openvino", "-m", str(hf),
        "--task", "text-generation-with-past", "--weight-format", *weights, str(out),
    ]  # fmt: skip


def write_hf(model: Path, out: Path) -> None:
    """A folder that transformers, vLLM and OpenVINO's converter read."""
    import torch
    from tokenizers import Tokenizer, decoders
    from transformers import PreTrainedTokenizerFast

    from engine.models.loader import load_model
    from tests.bench.peer_transformers import hf_model

    loaded = load_model(model, dtype=None, device=torch.device("cpu"), progress=lambda *_: None)
    backend = Tokenizer.from_str(loaded.tokenizer._backend.to_str())
    if backend.decoder is None:  # ours needs none, peers make text with it
        if "ByteLevel" not in str(backend.pre_tokenizer):
            raise NoFile(f"the tokenizer of {model.name} has no decoder, and its tokens are not bytes")
        backend.decoder = decoders.ByteLevel()
    ends = [backend.id_to_token(token) for token in sorted(loaded.eos_token_ids)]
    hf_model(model, torch.bfloat16).save_pretrained(out)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=ends[0], pad_token=ends[0]).save_pretrained(
        out
    )


def write_bf16_gguf(model: Path, out: Path) -> None:
    """Settings and tokenizer as they are; matrices in bfloat16; vectors, which are small, in float32."""
    import gguf

    reader = gguf.GGUFReader(model)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, values)
        else:
            data: Any = gguf.quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pass_bytes(file: Path) -> int:
    """Bytes of a GGUF file's weights that one token's pass reads: all, but for an embedding beside a head."""
    import gguf

    tensors = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors}
    return sum(tensors.values()) - (tensors.get("token_embd.weight", 0) if "output.weight" in tensors else 0)


def main(kind: str, model: str, out: str) -> None:
    """Written beside its place and moved there when complete."""
    target = Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"unfinished-{target.name}")
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    {"hf": write_hf, "bf16.gguf": write_bf16_gguf}[kind](Path(model), unfinished)
    unfinished.rename(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
