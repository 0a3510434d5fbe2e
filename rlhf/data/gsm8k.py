"""GSM8K problems: reading them from a source, cutting train into splits, the prepared Parquet files.

Source: Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021. An answer is a rationale, one step a
line, whose last line is `#### number`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from rlhf.data import word_problems
from rlhf.data.answers import MARKER, canonical, extract_answer
from rlhf.data.tables import read_table, write_table
from rlhf.errors import UserError
from rlhf.params import Data

SPLITS = ("train", "validation", "gate", "test")


@dataclass(frozen=True)
class Problem:
    """A row of the prepared data. Text that the source lacks is empty here, and the data gate refuses it."""

    question: str
    answer: str
    """Rationale that ends in `#### gold`."""
    gold: str | None
    """The final number's canonical text; None where the answer holds none."""
    demonstration: str
    """What supervised fine-tuning imitates."""
    steps: int
    """Lines of the rationale before the final one."""
    source: str


Splits = dict[str, list[Problem]]

SCHEMA = pa.schema(
    [
        ("question", pa.string()),
        ("answer", pa.string()),
        ("gold", pa.string()),
        ("demonstration", pa.string()),
        ("steps", pa.int64()),
        ("source", pa.string()),
    ]
)


def make_problem(question: str, answer: str, source: str, demonstration: str | None = None) -> Problem:
    """The prepared row of a question and its answer; the answer is the demonstration unless another is given."""
    number = extract_answer(answer)
    return Problem(
        question=question,
        answer=answer,
        gold=None if number is None else canonical(number),
        demonstration=answer if demonstration is None else demonstration,
        steps=sum(1 for line in answer.partition(MARKER)[0].splitlines() if line.strip()),
        source=source,
    )


def prepare(data: Data) -> Splits:
    """The four splits of `data.source`; raises UserError where the source cannot be read or a split is empty."""
    raw = SOURCES[data.source](data)
    splits = cut(raw["train"], raw["test"], data)
    _refuse_empty(splits, data)
    return splits


# Sources: one function each, from params to the splits train and test


def from_generator(data: Data) -> Splits:
    """The built-in word problems, with their careless demonstrations."""
    return {
        split: [make_problem(p.question, p.answer, "generator", p.demonstration) for p in problems]
        for split, problems in word_problems.generate_splits(data.generator).items()
    }


def from_files(data: Data) -> Splits:
    """`train.jsonl` and `test.jsonl` in the directory `data.reads`."""
    directory = Path(data.reads)
    if not directory.is_dir():
        raise UserError(f"data.reads: {directory} is no directory: it must hold train.jsonl and test.jsonl")
    files = {split: directory / f"{split}.jsonl" for split in ("train", "test")}
    for path in files.values():
        _check_jsonl(path)
    return {split: _from_jsonl(path) for split, path in files.items()}


def _from_jsonl(path: Path) -> list[Problem]:
    from datasets import load_dataset

    _quiet_datasets()
    with TemporaryDirectory() as cache:
        try:
            table = load_dataset("json", data_files=str(path), split="train", cache_dir=cache)
        except Exception as error:  # datasets raises errors of many kinds
            raise UserError(f"{path} cannot be read: {_first_line(error.__cause__ or error)}") from None
        return _problems(table, str(path), "files")


def from_hub(data: Data) -> Splits:
    """The data set `data.hub` on the Hugging Face hub, or its cached copy where the hub is out of reach."""
    from datasets import load_dataset

    hub = data.hub
    name = f"{hub.repo}@{hub.revision}"
    _quiet_datasets()
    try:
        tables = load_dataset(hub.repo, hub.config, revision=hub.revision)
    except Exception as error:  # hub, HTTP client and datasets raise errors of many kinds
        raise UserError(
            f"data.hub: {name} cannot be read: {_first_line(error)}: "
            "check the name and the network, or give local files with data=files data.reads=DIRECTORY"
        ) from None
    missing = [split for split in ("train", "test") if split not in tables]
    if missing:
        raise UserError(f"data.hub: {name} has no split {', '.join(missing)}: choose another data.hub.config")
    return {split: _problems(tables[split], f"data.hub: {name} {split}", name) for split in ("train", "test")}


SOURCES: Mapping[str, Callable[[Data], Splits]] = {
    "generator": from_generator,
    "files": from_files,
    "hub": from_hub,
}


def _check_jsonl(path: Path) -> None:
    """Raises UserError with the line at fault, which `datasets` does not name."""
    if not path.is_file():
        raise UserError(f"{path} is missing: data.reads must hold train.jsonl and test.jsonl")
    count = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                count += 1
                fault = _fault(line)
                if fault:
                    raise UserError(f"{path} line {number}: {fault}")
    if not count:
        raise UserError(f"{path} holds no rows: write one JSON object a line")


def _fault(line: bytes) -> str | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not valid JSON ({_first_line(error)}): write one JSON object a line"
    if not isinstance(row, dict):
        return "not a JSON object: write one with the keys question and answer"
    for key in ("question", "answer"):
        if key not in row:
            return f"has no key {key}: every line needs question and answer"
        if not isinstance(row[key], str | None):
            return f"{key} is {type(row[key]).__name__}: write it as text"
    return None


def _problems(table: Any, where: str, source: str) -> list[Problem]:
    """The rows of a `datasets.Dataset` with columns question and answer."""
    for column in ("question", "answer"):
        if column not in table.column_names:
            raise UserError(f"{where} has no column {column}: it has {', '.join(table.column_names)}")
        if getattr(table.features[column], "dtype", None) not in ("string", "large_string", "null"):
            raise UserError(f"{where}: column {column} is no text")
    return [make_problem(row["question"] or "", row["answer"] or "", source) for row in table]


def _quiet_datasets() -> None:
    """What goes wrong is told in one line of ours."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# Splits


def question_hash(question: str, purpose: str = "") -> float:
    """A number in [0, 1) that depends on the question and the purpose alone; purposes are independent."""
    digest = sha256(f"{purpose}\n{question}".encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def cut(train: Sequence[Problem], test: Sequence[Problem], data: Data) -> Splits:
    """Cuts validation and gate from train by the question's hash and applies the caps; order is kept.

    A row stays in its split whatever rows come or go around it, and a cap keeps the lowest hashes.
    """
    splits: Splits = {"train": [], "validation": [], "gate": [], "test": list(test)}
    for problem in train:
        position = question_hash(problem.question)
        if position < data.validation_share:
            splits["validation"].append(problem)
        elif position < data.validation_share + data.gate_share:
            splits["gate"].append(problem)
        else:
            splits["train"].append(problem)
    return {split: _capped(problems, getattr(data, f"max_{split}")) for split, problems in splits.items()}


def _capped(problems: list[Problem], limit: int | None) -> list[Problem]:
    if limit is None or len(problems) <= limit:
        return problems
    kept = sorted(range(len(problems)), key=lambda i: (question_hash(problems[i].question), i))[:limit]
    return [problems[i] for i in sorted(kept)]


def _refuse_empty(splits: Splits, data: Data) -> None:
    for split in SPLITS:
        if not splits[split]:
            keys = {
                "validation": f"raise data.validation_share ({data.validation_share}) or give more train rows",
                "gate": f"raise data.gate_share ({data.gate_share}) or give more train rows",
                "train": f"lower data.validation_share ({data.validation_share}) and data.gate_share "
                f"({data.gate_share}) or give more train rows",
                "test": "data.source must give test rows",
            }
            raise UserError(f"data: the {split} split is empty: {keys[split]}")


# Files


def write_prepared(path: Path, problems: Iterable[Problem]) -> None:
    """Writes one split as Parquet; the same problems give the same bytes."""
    write_table(path, [asdict(problem) for problem in problems], SCHEMA)


def read_prepared(path: Path) -> list[Problem]:
    """The problems of one prepared split; raises UserError where the file is missing or damaged."""
    return [Problem(**row) for row in read_table(path, SCHEMA)]
