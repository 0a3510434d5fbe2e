"""The table and the plot of docs/performance.md, from the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bench.performance.cases import Case, Row
from bench.performance.floors import Peaks, fitted_exponent
from bench.performance.records import Record, Summary, summaries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD = ("contender", "seconds", "CPU seconds", "peak MB", "times its floor", "compared")
OURS, THEIRS = "#3d6fb6", "#b9bdc6"
COLUMNS = 2


def markdown(rows: Sequence[Row], records: Sequence[Record], machine: str, keys: Mapping[str, str]) -> str:
    """A table for each row that has records, with the machine and its peaks in front.

    `keys` are the rows' keys as code and machine are: a row with another one is marked as out of date.
    """
    measured = [row for row in rows if any(record.row == row.name for record in records)]
    tables = [_table(row, [record for record in records if record.row == row.name], keys[row.name]) for row in measured]
    return "\n\n".join([_machine(records, machine), *tables])


def _machine(records: Sequence[Record], machine: str) -> str:
    """What was measured on, with the range of the peaks over the rows."""

    def between(values: Sequence[float]) -> str:
        low, high = f"{min(values) / 1e9:.0f}", f"{max(values) / 1e9:.0f}"
        return low if low == high else f"{low} to {high}"

    peaks = {name: between([getattr(record, name) for record in records]) for name in Peaks._fields}
    return (
        f"Measured on {machine}. Its peaks, taken in front of each row: {peaks['float32']} GFLOP/s in float32 and "
        f"{peaks['bfloat16']} in bfloat16, in products of few rows as decoding has them {peaks['step_float32']} and "
        f"{peaks['step_bfloat16']}; {peaks['copy']} GB/s copied."
    )


def _table(row: Row, records: Sequence[Record], key: str) -> str:
    found = summaries(records, row.name)
    lines = [f"### {row.title}", "", f"| {' | '.join(HEAD)} |", "| --- " * len(HEAD) + "|"]
    lines += [f"| {' | '.join(_cells(case, found))} |" for case in row.cases]
    rounds = max(record.round for record in records)
    said = [f"Medians of {rounds} rounds in turns." if rounds > 1 else "One round."]
    sizes = [(case.size, found[case.contender].seconds) for case in row.cases if case.size and case.contender in found]
    if len(sizes) > 1:
        said.append(f"Time grows with the power {fitted_exponent(*zip(*sizes, strict=True)):.2f} of the size.")
    if records[0].key != key:
        said.append("With other code, or on another machine.")
    said += dict.fromkeys(record.note for record in records if record.note)
    return "\n".join([*lines, "", " ".join(said)])


def _cells(case: Case, found: dict[str, Summary]) -> list[str]:
    summary = found.get(case.contender)
    if summary is None:
        return [case.contender, *[""] * (len(HEAD) - 1)]
    floors = "" if summary.floors is None else f"{summary.floors:.2f}"
    if summary.decode_floors is not None:
        floors += f", decoding {summary.decode_floors:.2f}"
    numbers = [f"{summary.seconds:.3g}", f"{summary.cpu_seconds:.3g}", f"{summary.peak_mb:.0f}", floors]
    return [case.contender, *numbers, "; ".join(_comparisons(case, summary, found))]


def _comparisons(case: Case, summary: Summary, found: dict[str, Summary]) -> list[str]:
    """How many times as fast as each of its peers, and with which share of its memory."""
    return [
        f"{found[peer].seconds / summary.seconds:.2f} × as fast as {peer}, "
        f"{summary.peak_mb / found[peer].peak_mb:.2f} of its memory"
        for peer in case.against
        if peer in found
    ]


def figure(rows: Sequence[Row], records: Sequence[Record]) -> Figure:
    """A panel a row: bars of seconds, the peers' and ours, or a line where something grows."""
    from matplotlib.figure import Figure  # seconds to import

    measured = [row for row in rows if any(record.row == row.name for record in records)]
    lines = -(-len(measured) // COLUMNS)
    drawn = Figure(figsize=(6 * COLUMNS, 2.8 * lines), layout="constrained")
    panels = drawn.subplots(lines, COLUMNS, squeeze=False).flat
    for row, panel in zip(measured, panels, strict=False):
        found = summaries(records, row.name)
        cases = [case for case in row.cases if case.contender in found]
        seconds = [found[case.contender].seconds for case in cases]
        if all(case.size for case in cases):
            panel.loglog([case.size for case in cases], seconds, "o-", color=OURS)
            panel.grid(color="#ececef", which="both")
            panel.set_ylabel("seconds")
        else:
            names = [case.contender for case in cases]
            panel.barh(names, seconds, color=[OURS if _is_ours(case) else THEIRS for case in cases])
            panel.invert_yaxis()
            panel.set_xlabel("seconds")
        panel.set_title(row.title, fontsize=10, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels:
        panel.set_axis_off()
    return drawn


def _is_ours(case: Case) -> bool:
    settings = case.settings
    return not case.peer and settings.get("way") != "full_logits" and "generate" not in settings.get("engine", "")
