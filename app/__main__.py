"""``python -m app`` or ``decodeck``: the console, or a headless command that loads no Qt."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from app import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Open the console with ``arguments``, or run the headless command they begin with."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    words, data_dir = _take_data_dir(given)
    if data_dir is not None:
        os.environ["DECODECK_DATA"] = data_dir
    if words and (words[0] in cli.HEADLESS or words[0] in ("-h", "--help", "--version")):
        return cli.main(given)
    if words and words[0] == "--console-help":
        words = ["--help", *words[1:]]
    if "--smoke" in words:
        from app.smoke import main as smoke

        return smoke(words)
    from app.application import main as open_console

    return open_console(words)


def _take_data_dir(words: Sequence[str]) -> tuple[list[str], str | None]:
    """``words`` without ``--data-dir DIR``, and DIR. Console and headless commands share the option."""
    rest: list[str] = []
    data_dir: str | None = None
    items = iter(words)
    for word in items:
        if word == "--data-dir":
            data_dir = next(items, None)
            if data_dir is None:
                rest.append(word)  # the parser says what is missing
        elif word.startswith("--data-dir="):
            data_dir = word.partition("=")[2]
        else:
            rest.append(word)
    return rest, data_dir


if __name__ == "__main__":
    raise SystemExit(main())
