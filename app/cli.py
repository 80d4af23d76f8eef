"""The headless commands: what can be done with stored baselines without a window.

``decodeck snapshot list|show|compare|export|import|delete``. Results go to stdout, complaints to stderr; the
exit status is 0, 1 where something could not be done, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from app.demo_model import data_dir
from app.store.bundle import render
from app.store.errors import StoreError
from app.store.records import BaselineSummary, Comparison, ConfigDiff, ExportFormat
from app.store.store import Store, default_path
from app.version import app_version

HEADLESS = ("snapshot",)


def parser() -> argparse.ArgumentParser:
    """The command line of the headless commands."""
    top = argparse.ArgumentParser(
        prog="decodeck",
        description="Decodeck: flip LLM inference optimizations live and measure what each one did. "
        "Without a command, the console opens.",
        epilog="The console's own options: decodeck --console-help",
    )
    top.add_argument("--version", action="version", version=f"decodeck {app_version()}")
    top.add_argument("--data-dir", type=Path, metavar="DIR", help="where baselines and models are kept")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    snapshot = commands.add_parser("snapshot", help="list, show, compare, export and import baselines")
    snapshot.add_argument("--data-dir", type=Path, default=argparse.SUPPRESS, metavar="DIR")
    actions = snapshot.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(
        name: str, text: str, run: Callable[[Store, argparse.Namespace], None]
    ) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=text)
        made.set_defaults(run=run)
        made.add_argument("--data-dir", type=Path, default=argparse.SUPPRESS, metavar="DIR")
        return made

    listing = action("list", "all baselines, newest first", _list)
    listing.add_argument("--json", action="store_true", help="as JSON")
    show = action("show", "one baseline", _show)
    show.add_argument("id", help="its id, or four digits or more of its beginning")
    show.add_argument("--json", action="store_true", help="the whole of it, raw rows included")
    compare = action("compare", "two baselines side by side", _compare)
    compare.add_argument("a")
    compare.add_argument("b")
    compare.add_argument("--json", action="store_true", help="as JSON")
    export = action("export", "write one to a file", _export)
    export.add_argument("id")
    export.add_argument(
        "--format", choices=("json", "csv", "md"), help="default: the ending of FILE, else json"
    )
    export.add_argument("--out", type=Path, required=True, metavar="FILE")
    import_ = action("import", "take in what was exported as JSON", _import)
    import_.add_argument("file", type=Path)
    delete = action("delete", "delete one that is not locked", _delete)
    delete.add_argument("id")
    return top


def main(arguments: Sequence[str]) -> int:
    """Run a headless command."""
    options = parser().parse_args(arguments)
    if options.command is None:
        parser().print_help()
        return 2
    if options.data_dir is not None:
        os.environ["DECODECK_DATA"] = str(options.data_dir)
    try:
        store = Store(default_path(data_dir()))
        try:
            for notice in store.notices:
                print(notice, file=sys.stderr)
            options.run(store, options)
        finally:
            store.close()
    except StoreError as error:
        print(f"decodeck: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads any more
        return 1
    return 0


def _print_json(value: object) -> None:
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.buffer.flush()


def _print(text: str) -> None:
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.buffer.flush()


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(item: BaselineSummary) -> list[str]:
    when = datetime.fromtimestamp(item.created_unix_ms / 1000).strftime("%Y-%m-%d %H:%M")
    told = (("L", item.locked), ("I", item.imported), ("~", bool(item.caution)), ("!", not item.valid))
    marks = "".join(mark for mark, on in told if on)
    return [
        item.id[:8],
        when,
        marks,
        str(item.requests),
        _ms(item.ttft_p50_s),
        _ms(item.ttft_p99_s),
        _ms(item.tpot_p50_s),
        _number(item.output_tok_s),
        item.name,
    ]


_HEAD = ["id", "saved", "", "requests", "TTFT p50 ms", "p99 ms", "TPOT p50 ms", "output tok/s", "name"]


def _list(store: Store, options: argparse.Namespace) -> None:
    found = store.list()
    if options.json:
        _print_json(found)
    elif not found:
        _print("No baselines are stored yet.")
    else:
        _print(_columns([_HEAD, *(_row(item) for item in found)]))
        _print("L: locked, I: imported, ~: measured beside other work, !: doubtful")


def _show(store: Store, options: argparse.Namespace) -> None:
    made = store.get(options.id)
    if options.json:
        _print_json(made)
    else:
        _print(render(made, "md").decode().rstrip())


def _compare(store: Store, options: argparse.Namespace) -> None:
    found = store.compare(options.a, options.b)
    if options.json:
        _print_json(found)
    else:
        _print(_comparison(found))


def _value(diff: ConfigDiff, side: str) -> str:
    present, value = (diff.in_a, diff.a) if side == "a" else (diff.in_b, diff.b)
    if not present:
        return "(absent)"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _comparison(found: Comparison) -> str:
    parts = [f"A  {found.a.id[:8]}  {found.a.name}", f"B  {found.b.id[:8]}  {found.b.name}", ""]
    for title, diffs in (("Configuration", found.config), ("Model, device and versions", found.identity)):
        parts.append(f"{title}:" if diffs else f"{title}: the same")
        if diffs:
            parts.append(
                _columns([["", "A", "B"], *([d.key, _value(d, "a"), _value(d, "b")] for d in diffs)])
            )
        parts.append("")
    rows = [["metric", "A", "B", "B / A", "better", "n A", "n B"]]
    for delta in found.metrics:
        rows.append(
            [
                f"{delta.name}{f' ({delta.unit})' if delta.unit else ''}",
                _number(delta.a),
                _number(delta.b),
                _number(delta.ratio),
                (delta.better or "-").upper(),
                str(delta.n_a),
                str(delta.n_b),
            ]
        )
    parts.append(_columns(rows))
    parts += [f"Note: {warning}" for warning in found.warnings]
    return "\n".join(parts)


def _export(store: Store, options: argparse.Namespace) -> None:
    ending = options.out.suffix.lower().removeprefix(".")
    by_ending: dict[str, ExportFormat] = {"csv": "csv", "md": "md"}
    form = options.format or by_ending.get(ending, "json")
    _print(str(store.export(options.id, form, options.out)))


def _import(store: Store, options: argparse.Namespace) -> None:
    result = store.import_(options.file)
    for added in result.added:
        _print(f"added {added}")
    for known in result.already_there:
        _print(f"already there {known}")


def _delete(store: Store, options: argparse.Namespace) -> None:
    name = store.summary(options.id).name
    store.delete(options.id)
    _print(f"deleted {name}")
