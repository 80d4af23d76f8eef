#!/usr/bin/env python3
"""Measures the engine on a card: ``python packaging/gpu_check.py [--out FILE] [--only STAGE,...]``.

Random weights of the shape of Llama 3 8B, made on the device: nothing is downloaded. Seven minutes at most.
``--device cpu --tiny`` runs every stage on small shapes without a card. See tests/gpu/README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
# The folder of this script must not come before the libraries: a library is named as the folder is.
sys.path[:] = [
    str(ROOT),
    *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "packaging"),
]

EPILOG = (
    "Exit codes: 0 every stage that was asked for ran; 1 a stage failed or was left out; 2 wrong arguments."
)


def _parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(description=__doc__, epilog=EPILOG)
    cli.add_argument("--out", type=Path, default=Path("out/gpu.json"), help="the results (out/gpu.json)")
    cli.add_argument("--only", metavar="STAGE[,STAGE]", help="only these; the rest of --out is kept")
    cli.add_argument("--deadline", type=float, default=420.0, metavar="SECONDS", help="default: 420")
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    cli.add_argument("--tiny", action="store_true", help="small shapes, for a dry run")
    cli.add_argument("--lost", action="store_true", help=argparse.SUPPRESS)  # it was started anew,
    cli.add_argument("--began", type=float, help=argparse.SUPPRESS)  # and had begun then
    return cli


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; returns the exit code."""
    began_s = perf_counter()  # importing what the stages need counts too
    cli = _parser()
    options = cli.parse_args(arguments)
    if options.device == "cpu":
        if not options.tiny:
            cli.error("--device cpu needs --tiny: the shapes of an 8B model are for a card")
        # Settled before torch and triton are imported, and for every process that is started from here.
        os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)

    try:
        from tests.gpu.check import stages
        from tests.gpu.check.settings import Settings
    except ModuleNotFoundError as error:
        cli.error(
            f"{error}; run it with the Python in .venv; tests/gpu/README.md names the packages that it needs"
        )

    only = None if options.only is None else tuple(name.strip() for name in options.only.split(","))
    unknown = set(only or ()) - set(stages.NAMES)
    if unknown:
        cli.error(f"there is no stage {', '.join(sorted(unknown))}; there are {', '.join(stages.NAMES)}")
    settings = Settings(
        device=options.device, tiny=options.tiny, deadline_s=options.deadline, only=only, out=options.out,
        lost=options.lost, began_s=began_s if options.began is None else options.began,
    )  # fmt: skip
    return stages.run(settings)


if __name__ == "__main__":
    sys.exit(main())
