"""Sets our verifier's verdicts beside those of lm-evaluation-harness on the same answers to real GSM8K problems.

    python -m bench.verdicts DIRECTORY [--problems 200]

DIRECTORY holds train.jsonl and test.jsonl in GSM8K's format. SmolLM2-135M-Instruct as it comes, and after the warm
start of scale=smollm2-135m, which teaches it the format, answer test problems greedily with our engine; GSM8K's own
answers to them are a third set of texts. The harness, in the environment of bench/peers.lock, runs its GSM8K task on
exactly these texts (bench/judged_by_harness.py). What is sampled is not sampled again. It writes
bench/results/verdicts.csv, and the tables in docs/evaluation.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.performance import peers
from bench.performance.measuring import QUIET
from bench.workspaces import CODE, RESULTS, measuring, prepare, run, with_marked, write_csv, write_text
from rlhf import anchors, config
from rlhf.data.answers import Method, canonical, extract_answer, is_correct, read_number
from rlhf.data.gsm8k import read_prepared
from rlhf.errors import UserError, run_command
from rlhf.models.checkpoints import load_tokenizer

METHODS: tuple[Method, ...] = ("strict", "flexible")
FIRST = "as it comes"
MODELS = {FIRST: "models/fetched", "after the warm start": "models/sft"}
GOLD = "GSM8K's own answers"
STAGES = ("prepare_data", "fetch_sft", "finetune_sft")
OWN = (*CODE, "bench/__init__.py", *(f"bench/{name}.py" for name in ("baseline_methods", "baseline_runs", "best_of_n")))
TABLE = RESULTS / "verdicts.csv"
PAGE = anchors.CHECKOUT / "docs" / "evaluation.md"
TOKENS = 256
"""The longest answer."""
NOTHING = "[invalid]"
"""What the harness reads where it finds no number."""
SHOWN = 60
"""Characters of an answer's end in the table."""


DIFFERENCES = {
    "marker": "ours reads the line behind the first marker, the harness the last number of the text",
    "refused": "ours reads no number out of a list, a calculation or a ratio; the harness takes a piece of it",
    "behind marker": "ours reads the number of the first marker's line, behind words, a line break, a currency or the "
    "last `=` as well; the harness wants a digit right behind the marker, and else reads none or a later marker's",
    "whole number": "ours reads a fraction or a decimal whole and drops calculator annotations",
}
"""Why the two read different numbers."""


class Verdict(NamedTuple):
    """What both sides say of one text by one method; the number that each read, empty for none."""

    texts: str
    problem: int
    method: str
    gold: str
    ours: bool
    harness: bool
    our_number: str
    harness_number: str
    difference: str
    """A key of DIFFERENCES where the two read different numbers, or only one of them any."""
    end: str
    """How the text ends, where they differ."""


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.verdicts", description="Our verdicts beside the harness's.")
    parser.add_argument("data", type=Path, help="directory of train.jsonl and test.jsonl in GSM8K's format")
    parser.add_argument("--problems", type=int, default=200, help="test problems (%(default)s)")
    given = parser.parse_args(arguments)
    return run_command("bench.verdicts", lambda: measure(given.data.resolve(), given.problems))


def measure(data: Path, problems: int) -> None:
    """Judges every text by both, and writes rows and tables."""
    python = peers.environment(anchors.CHECKOUT / ".cache" / "performance")
    if python is None:
        raise UserError("bench.verdicts: lm-evaluation-harness could not be installed: see the line above")
    words = ["scale=smollm2-135m", "data=files", f"data.reads={data}", f"data.max_test={problems}"]
    words.append(f"ppo.sampling.max_new_tokens={TOKENS}")
    with measuring("verdicts", OWN) as root:
        publish(prepare(root, f"problems-{problems}", words, STAGES, OWN), python)


def publish(workspace: Path, python: Path) -> None:
    """Judges the workspace's texts and writes rows and tables; `python` is that of the peers' environment."""
    verdicts = [row for texts in (*MODELS, GOLD) for row in judged(texts, answers(workspace, texts), workspace, python)]
    write_csv(TABLE, [Verdict._fields, *verdicts])
    write_text(PAGE, with_marked(PAGE.read_text(), "verdicts", tables(verdicts)))


def answers(workspace: Path, texts: str) -> list[dict[str, str]]:
    """The problems with one text each: prompt, the user's part of it, GSM8K's answer, gold number, response."""
    template = config.load([], workspace / config.PARAMS_FILE).prompt.template
    tokenizer = load_tokenizer(workspace / MODELS[FIRST])
    solutions = {row.question: row.answer for row in read_prepared(workspace / "data/prepared/test.parquet")}
    directory = MODELS.get(texts, MODELS[FIRST])
    file = f"answers/{Path(directory).name}.json"
    if not (workspace / file).is_file():
        run(workspace, "bench.baseline_runs", ["answer", directory, file])
    return [
        {
            "prompt": tokenizer.decode(row["prompt"]),
            "user": template.replace("{question}", row["question"]),
            "answer": solutions[row["question"]],
            "gold": row["gold"],
            "response": row["response"] if texts in MODELS else solutions[row["question"]],
        }
        for row in json.loads((workspace / file).read_text())
        if not row["too_long"]
    ]


def judged(texts: str, rows: Sequence[Mapping[str, str]], workspace: Path, python: Path) -> list[Verdict]:
    """Both sides' verdicts on the rows, by both methods."""
    given, told = workspace / "judged.json", workspace / "verdicts.json"
    given.write_text(json.dumps(rows))
    model = str(workspace / MODELS[FIRST])
    command = [str(python), "-m", "bench.judged_by_harness", str(given), model, str(told)]
    done = subprocess.run(command, cwd=anchors.CHECKOUT, capture_output=True, text=True, env=os.environ | QUIET)
    if done.returncode:
        raise UserError(f"bench.judged_by_harness failed: {done.stderr.strip().splitlines()[-1]}")
    return [
        verdict(texts, number, method, row, harness[method])
        for number, (row, harness) in enumerate(zip(rows, json.loads(told.read_text()), strict=True))
        for method in METHODS
    ]


def verdict(texts: str, problem: int, method: Method, row: Mapping[str, str], harness: Mapping[str, Any]) -> Verdict:
    """The row of one text by one method."""
    response, gold = row["response"], row["gold"]
    number = extract_answer(response, method)
    read = "" if harness["read"] == NOTHING else harness["read"]
    why = difference(response, method, read)
    end = " ".join(response.split())[-SHOWN:] if why else ""
    told = "" if number is None else canonical(number)
    return Verdict(
        texts, problem, method, gold, is_correct(response, gold, method), harness["right"], told, read, why, end
    )


def difference(response: str, method: Method, read: str) -> str:
    """Why ours reads another number than `read`, the harness's; empty where both mean the same one, or none.

    As the harness compares them, commas, dollar signs and a last point do not count.
    """
    ours, theirs = extract_answer(response, method), read.replace(",", "").replace("$", "").removesuffix(".")
    if theirs == ("" if ours is None else canonical(ours)) or (theirs and ours == read_number(theirs)):
        return ""
    if ours is None:
        return "refused"
    if method == "strict":
        return "behind marker"
    return "marker" if ours == extract_answer(response, "strict") else "whole number"


def tables(verdicts: Sequence[Verdict]) -> str:
    """Markdown: how often both say the same, and how often they read different numbers, by cause."""
    lines = ["| texts | method | both right | ours alone | the harness alone | both wrong |", "| --- |" + " --- |" * 5]
    for texts in (*MODELS, GOLD):
        for method in METHODS:
            rows = [row for row in verdicts if (row.texts, row.method) == (texts, method)]
            pairs = [(row.ours, row.harness) for row in rows]
            counts = (pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False)))
            lines.append(f"| {texts} | {method} | {' | '.join(map(str, counts))} |")
    lines += ["", "| read differently | strict | flexible | why |", "| --- | --- | --- | --- |"]
    for key, why in DIFFERENCES.items():
        counts = (sum((row.method, row.difference) == (method, key) for row in verdicts) for method in METHODS)
        lines.append(f"| {key} | {' | '.join(map(str, counts))} | {why} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
