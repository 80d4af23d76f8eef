"""What is compiled before requests wait is all that their steps launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

from tests.engine.kernels.conftest import SWITCH
from tests.engine.kernels.test_compile import ROOT


def test_nothing_is_compiled_while_a_server_runs() -> None:
    """Batches of 1 to 300 rows, contexts of 1 to 4000 tokens, drafts of every length, chunks, and every kind
    of sampling, with windows and without, with weights in fp8 for which parts quantize or leave it to the
    products, and products of up to 9000 rows with weights in 8 and 4 bits. Counted in a process that does not
    interpret."""
    env = {key: value for key, value in os.environ.items() if key != SWITCH}
    env["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "tests.engine.kernels.variants"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert set(found) == {"llama", "mistral", "llama fp8", "llama int8", "llama int4"}
    for each in found.values():
        assert not each["late"]
        ahead = Counter(each["ahead"])
        assert ahead["_paged_attention"] == 4, "tiles of 16, 32 and 64 rows, and those of a prefill"
        assert ahead["_quantize"] == (2 if each is found["llama fp8"] else 0), "rows of two lengths"
        assert ahead["combine_parts"] == ahead["_highest"] == ahead["_draw"] == ahead["_distribute"] == 1
        assert ahead["_narrow"] == 2 * ahead["_add_up"] == 4, "of both cuts, for drawing and for the law"
        assert ahead["_accept"] == ahead["_add_up_rest"] == ahead["_draw_rest"] == 1
    for kind, written_out in (("int8", 0), ("int4", 1)):
        products = Counter(found[f"llama {kind}"]["ahead"])
        assert products["_gemm"] > products["_add_splits"] > 0, "some share their input channels, some do not"
        assert bool(products["_dequantize"]) == bool(written_out)
