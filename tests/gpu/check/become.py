"""The script, begun anew in the place of this process, whatever its threads are doing."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from tests.gpu.check.environment import ROOT

MOST_FILES = 1 << 16


def become(arguments: Sequence[str] | None) -> NoReturn:
    """The script with these arguments; None for none, but the end with exit code 1. From any thread.

    Nothing that is open is closed in an orderly way, for that may wait for a card that does not answer.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if arguments is None:
        os._exit(1)
    os.closerange(3, MOST_FILES)  # the card's among them, whose memory would stay taken
    script = str(ROOT / "packaging" / "gpu_check.py")
    os.execv(sys.executable, [sys.executable, script, *arguments])
