"""The command as a whole, on a tiny model; the peers' environment is left out."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.performance import __main__ as command
from bench.performance import measuring, peers, records, verdicts
from bench.performance.cases import TRY, rows
from rlhf.errors import UsageError, UserError

TRL = "TRL, float32"


def test_rows_are_chosen_by_name_or_by_how_it_begins() -> None:
    every = rows(TRY)
    assert command.select(every, None) == every
    assert [row.name for row in command.select(every, "update,scaling-batch")] == ["update", "scaling-batch"]
    assert {row.name.partition("-")[0] for row in command.select(every, "scaling,rollout")} == {"scaling", "rollout"}
    with pytest.raises(UsageError, match="no row 'roll': there are rollout-4, update"):
        command.select(every, "roll")


def test_a_measurement_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PLACE", tmp_path)
    monkeypatch.setattr(peers, "environment", lambda _place: None)
    (update,) = command.select(rows(TRY), "update")
    (iteration,) = command.select(rows(TRY), "iteration")
    cases = [case for case in (*update.cases, *iteration.cases) if case.contender in ("ours, bfloat16", TRL)]
    monkeypatch.setattr(command, "rows", lambda _scale: [update._replace(cases=cases)])
    given = argparse.Namespace(trial=True, rows="update", rounds=1, again=False, data=None)
    command.measure(given)
    known = records.read(tmp_path / "try" / "performance.csv")
    assert [record.contender for record in known] == ["ours, bfloat16"]
    assert all(record.seconds > 0 and record.cpu_seconds > 0 and record.tokens for record in known)
    assert all(record.peak_mb > 100 and record.floor for record in known)
    page = (tmp_path / "try" / "performance.md").read_text()
    assert "Update: one pass over 4 prompts" in page
    assert f"| {TRL} |  |  |  |  |  |" in page
    assert "round 1 of 1: ours, bfloat16" in capsys.readouterr().out
    command.measure(given)
    assert capsys.readouterr().out == "update: finished before\n"
    assert records.read(tmp_path / "try" / "performance.csv") == known


def test_a_program_that_fails_is_told_with_its_output(tmp_path: Path) -> None:
    machine = measuring.Machine(tmp_path, ["scale=smoke", "ppo.epochs=0"], count=4, rounds=1)
    with pytest.raises(UserError, match="ppo.epochs"):
        machine.measured(rows(TRY)[1])


def test_verdicts_on_the_same_answers_are_compared() -> None:
    answers = [
        {"response": "So it is 4.\n#### 4", "correct": True},
        {"response": "#### 5", "correct": True},
        {"response": "none", "correct": False},
    ]
    ours = [{"response": answers[0]["response"] + "\n"}, {"response": "#### 6"}, {"response": "none"}]
    assert verdicts.told("them", answers, ours, ["4", "4", "4", "4"]) == (
        "Of 3 answers of them, 2 are ours word for word, and our verifier says the same of 2."
    )
