"""The file of results: what each stage found, written whole after each of them, and within long ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

FORMAT = 1
Status = Literal["ok", "failed", "skipped", "unfinished"]


class Results:
    """What was run on, and stages by name: ``{status, seconds, commit, changed_files, result | error}``."""

    def __init__(self, path: Path, identity: dict[str, Any], source: dict[str, Any], *, keep: bool) -> None:
        """``source`` goes with each stage, for a rerun may be of a later one.

        ``keep`` takes over the stages of the file that is there. ValueError if that cannot be read, or is of
        another device or other shapes.
        """
        self.path, self._source = path, source
        self.data: dict[str, Any] = {"format": FORMAT, "identity": identity, "stages": {}, "summary": []}
        if keep and path.exists():
            held = json.loads(path.read_text("utf-8"))
            if (held.get("format"), held.get("identity")) != (FORMAT, identity):
                raise ValueError(f"{path} is of another device or other shapes; name another file with --out")
            self.data["stages"] = held["stages"]

    def put(self, stage: str, status: Status, seconds: float, **content: Any) -> None:
        """Write what a stage ended with, or has so far."""
        self.data["stages"][stage] = {
            "status": status,
            "seconds": round(seconds, 3),
            **self._source,
            **content,
        }
        self.write()

    def of(self, stage: str) -> dict[str, Any] | None:
        """What a stage found, in this run or an earlier one; None if it found nothing."""
        found = self.data["stages"].get(stage, {})
        result: dict[str, Any] | None = found.get("result") if found.get("status") == "ok" else None
        return result

    def so_far(self, stage: str) -> dict[str, Any]:
        """What a stage found, until it failed too."""
        found: dict[str, Any] = self.data["stages"].get(stage, {}).get("result") or {}
        return found

    def why_not(self, stage: str) -> str:
        """Why there is nothing of a stage."""
        found = self.data["stages"].get(stage)
        if found is None:
            return f"{stage} was not run"
        return f"{stage} {found['status']}: {str(found.get('error', '')).strip().splitlines()[-1]}"

    def write(self) -> None:
        """Replace the file as a whole, so that whoever reads it finds one run or the other."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(self.path.name + ".part")
        with beside.open("w", encoding="utf-8") as file:
            json.dump(self.data, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)
