"""Real engines for tests: a tiny model folder (random weights), and a console without a window."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from app.model.knobs import KnobModel
from app.model.session import SessionModel
from app.net.io_thread import EngineLink
from app.net.types import Batch, LaunchSpec, LinkState, StreamEvent, StreamLost
from ipc.messages import Done, Error, Reply, Sampling, Submit

ROOT = Path(__file__).resolve().parents[2]  # where a process started by a test finds `app` and `tests`

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 256 + len(_SPECIAL)


def write_tiny_model(folder: Path) -> Path:
    """A Llama of two layers whose tokens are bytes; returns ``folder``."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 257, "eos_token_id": 258,
        "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "chat_template": _TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


class Console:
    """A console without a window: a link, and the models that are fed from it."""

    def __init__(self) -> None:
        self.link = EngineLink()
        self.session = SessionModel()
        self.knobs = KnobModel(self.link.send)
        self.link.start()

    def pump(self) -> Batch:
        """One beat of the clock."""
        batch = self.link.drain()
        self.session.ingest(batch)
        self.knobs.ingest(batch)
        return batch

    def until(self, so: Callable[[], object], what: str, limit_s: float = 90.0) -> None:
        """Beat until ``so()``; a failure names ``what`` and where the link stands."""
        end_s = time.monotonic() + limit_s
        while not so():
            link = self.session.link
            assert time.monotonic() < end_s, (
                f"{what} did not come; {link.state}: {link.reason} {link.log_tail}"
            )
            self.pump()
            time.sleep(0.02)

    def until_state(self, *states: LinkState) -> None:
        lost = {LinkState.FAILED, LinkState.DEAD} - set(states)

        def there() -> bool:
            link = self.session.link
            assert link.state not in lost, f"{link.state}: {link.reason} {link.log_tail[-20:]}"
            return link.state in states

        self.until(there, f"one of {states}")

    def submit(self, prompt: str, max_tokens: int = 8, **sampling: Any) -> list[StreamEvent | Reply]:
        """Send a prompt; the returned list fills with its reply and its items as the clock beats."""
        found: list[StreamEvent | Reply] = []
        chosen = Sampling(max_tokens=max_tokens, ignore_eos=True, **sampling)
        self.link.send(Submit(id=1, prompt=prompt, sampling=chosen), found.append, found.append)
        return found

    def close(self) -> None:
        self.link.close()


def ended(items: list[StreamEvent | Reply]) -> bool:
    """The stream has its last item, or was refused."""
    return bool(items) and isinstance(items[-1], Done | StreamLost | Error)


def spec(folder: Path, **changes: Any) -> LaunchSpec:
    """How to start an engine on a tiny model."""
    return LaunchSpec(
        model=str(folder), dtype="float32", load_format="dummy", kv_pool_gib=0.05, threads=1, **changes
    )
