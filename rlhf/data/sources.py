"""Where problems come from: one function a source, from params to rows, and from rows to problems.

A row's final number is that of its gold column where one is named; else the one behind the answer's `####` (GSM8K), in
its last `\\boxed{}` (MATH), or of an answer of one line that holds a single number (SVAMP, ASDiv, MAWPS). What an
answer lacks of GSM8K's form is put around it: the rationale, then `#### number`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Literal

from rlhf.data import word_problems
from rlhf.data.answers import MARKER, Number, canonical, extract_answer, read_number
from rlhf.data.gsm8k import SPLITS, Problem, Splits, cut, make_problem, question_hash, split_of
from rlhf.data.readers import Placed, find_file, read_rows, text_of
from rlhf.errors import UserError, first_line
from rlhf.params import Columns, Data

BOXED = "\\boxed{"
Half = Literal["train", "test"]
"""What a source gives; validation and gate are cut from train."""
HALVES: tuple[Half, Half] = ("train", "test")


@dataclass(frozen=True)
class Row:
    """A row as its source has it; text that the source lacks is empty, and the data gate refuses it."""

    place: str
    """Where it stands, for messages: `train.csv row 3`."""
    question: str
    answer: str
    gold: str | None = None
    """Text of the gold column; None where params name none."""
    rationale: str | None = None
    """Text of the rationale column; None where params name none."""
    demonstration: str | None = None
    """What to imitate, where that is not the answer."""


Rows = dict[Half, list[Row]]
Source = Mapping[Half, Iterable[Row]]


def prepare(data: Data) -> Splits:
    """The four splits of `data.source`; raises UserError where the source cannot be read or a split is empty."""
    return split(read(data), data)


def read(data: Data) -> Rows:
    """The rows of `data.source` that the caps keep; raises UserError where it cannot be read.

    Rows are read one by one: with a cap on every split a source may be larger than the memory.
    """
    return {half: _within_caps(rows, half, data) for half, rows in SOURCES[data.source](data).items()}


def _within_caps(rows: Iterable[Row], half: Half, data: Data) -> list[Row]:
    """Those rows that `cut` would keep, in their order: of a capped split the ones with the lowest hashes."""
    kept: dict[int, Row] = {}
    highest_first: dict[str, list[tuple[float, int]]] = {}
    for number, row in enumerate(rows):
        split = "test" if half == "test" else split_of(row.question, data)
        limit, heap = getattr(data, f"max_{split}"), highest_first.setdefault(split, [])
        kept[number] = row
        if limit is not None:
            heappush(heap, (-question_hash(row.question), -number))
            if len(heap) > limit:
                del kept[-heappop(heap)[1]]
    return list(kept.values())


def split(rows: Rows, data: Data) -> Splits:
    """The rows as problems in four splits; raises UserError where one is empty."""
    name = f"{data.hub.repo}@{data.hub.revision}" if data.source == "hub" else data.source
    problems = {half: [to_problem(row, name) for row in rows[half]] for half in HALVES}
    splits = cut(problems["train"], problems["test"], data)
    _refuse_empty(splits, data)
    return splits


# Sources


def from_generator(data: Data) -> Source:
    """The built-in word problems, with their careless demonstrations."""
    made = word_problems.generate_splits(data.generator)
    return {
        half: [
            Row(f"generator: {half} row {number}", p.question, p.answer, demonstration=p.demonstration)
            for number, p in enumerate(made[half], start=1)
        ]
        for half in HALVES
    }


def from_files(data: Data) -> Source:
    """The files of train and test in the directory `data.reads`."""
    directory = Path(data.reads)
    if not directory.is_dir():
        raise UserError(f"data.reads: {directory} is no directory: it must hold train.jsonl and test.jsonl")
    names: Mapping[Half, str] = {"train": data.train, "test": data.test}
    files = {half: _file(directory, half, names[half]) for half in HALVES}
    return {half: (to_row(row, data.columns) for row in read_rows(files[half])) for half in HALVES}


def _file(directory: Path, half: Half, name: str) -> Path:
    if not name:
        return find_file(directory, half, f"data.{half}")
    path = directory / name
    if not path.is_file():
        raise UserError(f"{path} is missing: data.{half} must name a file in data.reads={directory}")
    return path


def from_hub(data: Data) -> Source:
    """The data set `data.hub` on the Hugging Face hub, or its cached copy where the hub is out of reach."""
    hub = data.hub
    names: Mapping[Half, str] = {"train": data.train or "train", "test": data.test or "test"}
    tables = load_hub(hub.repo, hub.config, hub.revision, "data.hub", "data=files data.reads=DIRECTORY")
    name = f"{hub.repo}@{hub.revision}"
    missing = [f"{names[half]}" for half in HALVES if names[half] not in tables]
    if missing:
        there = ", ".join(map(str, tables))
        advice = "choose another data.hub.config, or name splits with data.train and data.test"
        raise UserError(f"data.hub: {name} has no split {', '.join(missing)}: it has {there}: {advice}")
    return {half: _hub_rows(tables[names[half]], f"data.hub: {name} {names[half]}", data.columns) for half in HALVES}


def _hub_rows(table: Iterable[dict[str, Any]], place: str, columns: Columns) -> Iterator[Row]:
    """The rows of one split, which `datasets` keeps on disk."""
    return (to_row((f"{place} row {number}", row), columns) for number, row in enumerate(table, start=1))


def load_hub(
    repo: str, config: str | None, revision: str, key: str, instead: str
) -> Mapping[str, Iterable[dict[str, Any]]]:
    """The splits of a data set on the hub; raises UserError that names the params `key` and what to give `instead`."""
    import datasets
    import huggingface_hub

    # What goes wrong is told in one line of ours.
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()
    try:
        return datasets.load_dataset(repo, config, revision=revision)
    except Exception as error:  # hub, HTTP client and datasets raise errors of many kinds
        raise UserError(
            f"{key}: {repo}@{revision} cannot be read: {first_line(error)}: "
            f"check the name and the network, or give local files with {instead}"
        ) from None


SOURCES: Mapping[str, Callable[[Data], Source]] = {
    "generator": from_generator,
    "files": from_files,
    "hub": from_hub,
}


# Rows


def to_row(row: Placed, columns: Columns) -> Row:
    """The mapped columns of a row; raises UserError where one is missing or neither text nor number."""
    parts = [text_of(row, name, "data.columns.question") for name in columns.question]
    return Row(
        place=row[0],
        question=" ".join(part for part in parts if part),
        answer=text_of(row, columns.answer, "data.columns.answer", numbers=True),
        gold=text_of(row, columns.gold, "data.columns.gold", numbers=True) if columns.gold else None,
        rationale=text_of(row, columns.rationale, "data.columns.rationale") if columns.rationale else None,
    )


def to_problem(row: Row, source: str) -> Problem:
    """The prepared row; where there is no final number the answer stays as it is, and the data gate refuses it."""
    return make_problem(row.question, _written(row), source, row.demonstration)


def final_number(row: Row) -> Number | None:
    """The number that the row gives as its answer; None where it gives none, or none for sure."""
    return answer_number(row.answer) if row.gold is None else read_number(row.gold)


def answer_number(answer: str) -> Number | None:
    """The number behind `####`, in the last `\\boxed{}`, or of an answer of one line."""
    if MARKER in answer:
        return extract_answer(answer)
    if BOXED in answer:
        return read_number(_boxed(answer))
    return read_number(answer) if len(answer.split("\n")) == 1 else None


def is_bare(answer: str) -> bool:
    """Whether an answer is its number alone, without a rationale."""
    return MARKER not in answer and BOXED not in answer and "\n" not in answer


def _written(row: Row) -> str:
    number = final_number(row)
    if number is None or (row.gold is None and row.rationale is None and MARKER in row.answer):
        return row.answer
    text = ("" if is_bare(row.answer) else row.answer) if row.rationale is None else row.rationale
    steps = text.partition(MARKER)[0].rstrip()
    return f"{steps}\n{MARKER} {canonical(number)}" if steps else f"{MARKER} {canonical(number)}"


def _boxed(text: str) -> str:
    """What the last `\\boxed{` holds, up to its closing brace."""
    inside = text[text.rindex(BOXED) + len(BOXED) :]
    depth = 1
    for place, char in enumerate(inside):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return inside[:place]
    return inside


def _refuse_empty(splits: Splits, data: Data) -> None:
    for name in SPLITS:
        if not splits[name]:
            keys = {
                "validation": f"raise data.validation_share ({data.validation_share}) or give more train rows",
                "gate": f"raise data.gate_share ({data.gate_share}) or give more train rows",
                "train": f"lower data.validation_share ({data.validation_share}) and data.gate_share "
                f"({data.gate_share}) or give more train rows",
                "test": "data.source must give test rows",
            }
            raise UserError(f"data: the {name} split is empty: {keys[name]}")
