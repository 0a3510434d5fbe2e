"""Measuring a row: every contender in a process of its own, in turns, with the machine's peaks in front."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.performance import peers, verdicts
from bench.performance.cases import Case, Floor, Row
from bench.performance.floors import Peaks, Shape, read_shape
from bench.performance.records import Record, finished
from bench.workspaces import code_key
from rlhf import anchors, config
from rlhf.errors import UserError
from rlhf.machine import processor
from tasks.processes import supervised

MEASURED = "bench.performance.measured"
MANY, MOST_STEP = 512, 64
"""Rows of the matrix products that a long pass's peak is taken from, and the most for a decoding step's."""

QUIET = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def code() -> list[str]:
    """What decides how fast a row is, beside the machine: other code needs other measurements."""
    kernels = sorted(path for kind in ("*.cpp", "*.h") for path in (anchors.CHECKOUT / "rlhf").rglob(kind))
    rooms = ["conf", "bench/performance/measured", "bench/peers.lock", "requirements.lock"]
    rooms += [f"rlhf/{room}" for room in ("data", "evaluation/accuracy.py", "generation", "models", "ppo", "training")]
    return rooms + [str(path.relative_to(anchors.CHECKOUT)) for path in kernels]


class Machine:
    """This machine, with what all rows read: checkpoints and prompts, made once below `place`."""

    def __init__(self, place: Path, words: Sequence[str], count: int, rounds: int) -> None:
        self._place, self._words, self._count, self._rounds = place, list(words), count, rounds
        self._cores = len(os.sched_getaffinity(0))
        self.name = f"{processor()}, {self._cores} cores"

    def key(self, row: Row) -> str:
        """Of the code, the row's work and the machine."""
        work = [self.name, self._words, self._count, [(c.contender, c.program, c.settings) for c in row.cases]]
        return sha256((code_key(anchors.CHECKOUT, code()) + json.dumps(work)).encode()).hexdigest()[:12]

    def finished(self, row: Row, known: Sequence[Record]) -> bool:
        """Whether the records hold all of the row that can be measured here."""
        here = [case.contender for case in row.cases if not case.peer or self._peers is not None]
        return finished(known, row.name, self.key(row), here, self._rounds_of(row))

    def measured(self, row: Row) -> list[Record]:
        """All rounds of the row; without those of a peer that cannot run here, of which one line says why.

        Raises UserError where one of ours fails, or the code changes meanwhile.
        """
        key, records, silent = self.key(row), list[Record](), set[str]()
        peaks = self._peaks(row)
        for number in range(1, self._rounds_of(row) + 1):
            for case in row.cases:
                if case.contender in silent:
                    continue
                took = self._took(case)
                if took is None:
                    silent.add(case.contender)
                    continue
                records.append(self._record(row, key, case, number, peaks, took))
                told = f"{took['seconds']:.3g} s, {took['peak_mb']:.0f} MB"
                print(f"{row.name}: round {number} of {self._rounds_of(row)}: {case.contender}: {told}", flush=True)
        if self.key(row) != key:
            raise UserError(f"{row.name}: the code was changed while it was measured: measure it again")
        return self._with_verdicts(row, records)

    def _rounds_of(self, row: Row) -> int:
        return 1 if row.once else self._rounds

    @cached_property
    def _data(self) -> Path:
        """The directory that measured programs read."""
        made = "-".join([*self._words, str(self._count)])
        directory = self._place / f"data-{sha256(made.encode()).hexdigest()[:12]}"
        if not directory.is_dir():
            print("preparing the model and the prompts", flush=True)
            self._run(sys.executable, "prepare", {"data": str(directory), "count": self._count})
        return directory

    @cached_property
    def _shape(self) -> Shape:
        return read_shape(self._data / "model" / "config.json")

    @cached_property
    def _peers(self) -> Path | None:
        return peers.environment(self._place.parent if self._place.name == "try" else self._place)

    def _peaks(self, row: Row) -> Peaks:
        shape = self._shape
        matrices = [(shape.hidden, 2 * shape.intermediate), (shape.intermediate, shape.hidden)]
        matrices += [(shape.hidden, shape.vocabulary)]
        step = min(MOST_STEP, row.cases[0].settings["rows"])
        found = self._run(sys.executable, "peaks", {"rows": step, "many": MANY, "matrices": matrices})
        return Peaks(**{name: found[name] for name in Peaks._fields})

    def _took(self, case: Case) -> dict[str, Any] | None:
        """What a case took; None where it is a peer's that does not run."""
        settings = {"answers": str(self._answers(case)), **case.settings}
        if not case.peer:
            return self._run(sys.executable, case.program, settings)
        if self._peers is None:
            return None
        try:
            return self._run(str(self._peers), case.program, settings)
        except UserError as error:
            print(f"{case.contender}: its cells stay empty: {error}", flush=True)
            return None

    def _run(self, python: str, program: str, settings: dict[str, Any]) -> dict[str, Any]:
        """The numbers that a measured program prints; raises UserError that names the file with its output."""
        threads = max(1, self._cores // settings.get("processes", 1))
        common: dict[str, Any] = {"words": self._words, "threads": threads}
        common["template"] = config.compose(self._words)["prompt"]["template"]
        if program != "prepare":
            common["data"] = str(self._data)
        command = [python, "-m", f"{MEASURED}.{program}", json.dumps(common | settings)]
        with supervised(
            command, directory=anchors.CHECKOUT, environ=QUIET | {"OMP_NUM_THREADS": str(threads)}
        ) as process:
            assert process.stdout is not None
            said = process.stdout.read()
            process.wait()
        lines = said.strip().splitlines()
        if process.returncode or not lines or not lines[-1].startswith("{"):
            log = self._place / "logs" / f"{program}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(said)
            raise UserError(f"{program} failed with {process.returncode}: {' '.join(lines[-1:])[:200]}: see {log}")
        numbers: dict[str, Any] = json.loads(lines[-1])
        return numbers

    def _record(self, row: Row, key: str, case: Case, number: int, peaks: Peaks, took: dict[str, Any]) -> Record:
        floor = Floor()
        if case.floor is not None:
            rows = json.loads((self._data / "prompts.json").read_text())
            lengths = [len(rows[place % len(rows)]) for place in range(case.settings["rows"])]
            floor = case.floor(self._shape, lengths, peaks)
        measured = {name: took[name] for name in ("seconds", "cpu_seconds", "peak_mb", "tokens")}
        first = took.get("first_seconds")
        return Record(
            row.name,
            key,
            case.contender,
            number,
            **measured,
            **peaks._asdict(),
            first_seconds=first,
            floor=floor.seconds,
            decode_floor=floor.decode,
        )

    def _answers(self, case: Case) -> Path:
        """Where an evaluation leaves its answers."""
        directory = self._place / "answers"
        directory.mkdir(parents=True, exist_ok=True)
        return directory / f"{case.contender.replace(' ', '-').replace(',', '')}.json"

    def _with_verdicts(self, row: Row, records: list[Record]) -> list[Record]:
        """The records of a row of evaluations with what both sides' verdicts on the peers' answers are."""
        golds = [problem["gold"] for problem in json.loads((self._data / "problems.json").read_text())]
        notes, measured = {}, {record.contender for record in records}
        for case in row.cases:
            for peer in [other for other in row.cases if other.contender in case.against]:
                if peer.program == "harness_evaluation" and peer.contender in measured:
                    theirs, ours = (json.loads(self._answers(each).read_text()) for each in (peer, case))
                    notes[peer.contender] = verdicts.told(peer.contender, theirs, ours, golds)
        return [record._replace(note=notes.get(record.contender, "")) for record in records]
