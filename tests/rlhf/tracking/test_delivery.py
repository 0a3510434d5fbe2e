"""Runs logged for a server that misbehaves: training goes on, and in the end every point is there once."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import ViewType

from rlhf import anchors, tracking
from rlhf.errors import UserError
from rlhf.tracking.__main__ import main
from rlhf.tracking.delivery import KEY_TAG
from rlhf.tracking.journal import RECORDS, SENT, Journal, waiting
from tests.rlhf.tracking.loopback import Loopback

STEPS = 120
EXPECTED = {(name, step, step / scale): 1 for name, scale in (("kl", 8), ("score", 2)) for step in range(STEPS)}
PATIENCE_SECONDS = 60


@pytest.fixture
def loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    """A server of this test's own experiment, with an artifact store of its own; this process's runs log to it."""
    made = Loopback(anchors.tracking_uri(), tmp_path / "artifacts", monkeypatch.setenv)
    monkeypatch.setattr("rlhf.tracking.server.EXPERIMENT", f"loopback-{tmp_path.name}")
    monkeypatch.setattr("rlhf.tracking.sender.PERIOD_SECONDS", 0.1)
    monkeypatch.setenv("RLHF_JOURNAL_DIR", str(tmp_path / "journal"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", made.uri)
    yield made
    made.close()


@pytest.fixture
def store(loopback: Loopback) -> MlflowClient:
    return MlflowClient(loopback.uri)


def log(run: tracking.Run, steps: range) -> None:
    for step in steps:
        run.log_metrics({"kl": step / 8, "score": step / 2}, step)


def points_on_disk(run: tracking.Run) -> list[int]:
    records = Journal(anchors.journal_dir() / run.key).records()
    return [record["step"] for record, _ in records if record["op"] == "points"]


def points_in(database: Path, run_id: str) -> Counter[tuple[str, int, float]]:
    """How often the database has each point, whatever its time."""
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT key, step, value FROM metrics WHERE run_uuid = ?", [run_id])
        return Counter(rows.fetchall())


def the_run(store: MlflowClient, run: tracking.Run) -> str:
    """The id of the one run with that key that is not deleted."""
    from rlhf.tracking.server import EXPERIMENT

    experiment = store.get_experiment_by_name(EXPERIMENT)
    assert experiment
    (found,) = store.search_runs([experiment.experiment_id], f"tags.`{KEY_TAG}` = '{run.key}'", ViewType.ACTIVE_ONLY)
    return found.info.run_id


def flush(*arguments: str) -> int:
    """The command's exit code, once this process's own thread has let go of its journals, as another's end does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    for journal in waiting(anchors.journal_dir()):
        while time.monotonic() < deadline:
            with suppress(UserError), journal.delivering():
                break
            time.sleep(0.01)
    return main(["flush", *arguments])


@pytest.fixture
def database() -> Path:
    """Of the tests' session, behind every server here; to be asked for before the server."""
    found = anchors.sqlite_file(anchors.tracking_uri())
    assert found
    return found


@pytest.mark.parametrize("mode", ["absent", "fails", "silent", "loses"])
def test_a_stage_succeeds_without_its_server_and_flush_delivers_each_point_once(
    database, loopback, store, capfd, tmp_path, mode
):
    loopback.be(mode)
    (tmp_path / "table.csv").write_text("a,b\n")
    with tracking.stage_run("train_reward", {"seed": 3}) as run:
        log(run, range(STEPS))
        run.log_artifact(tmp_path / "table.csv", "tables")
        run.set_tags({"note": "kept"})
        assert points_on_disk(run) == list(range(STEPS))
    assert loopback.answered == 0
    assert f"this run is kept in {anchors.journal_dir() / run.key}" in capfd.readouterr().err
    (tmp_path / "table.csv").unlink()

    loopback.be("well")
    assert flush() == 0
    found = store.get_run(the_run(store, run))
    assert points_in(database, found.info.run_id) == EXPECTED
    assert (found.info.status, found.data.params) == ("FINISHED", {"seed": "3"})
    assert found.data.tags["note"] == "kept"
    assert Path(store.download_artifacts(found.info.run_id, "tables/table.csv")).read_text() == "a,b\n"
    assert flush() == 0
    assert "nothing waits" in capfd.readouterr().out
    assert points_in(database, found.info.run_id) == EXPECTED


def test_a_slow_server_has_every_point_once_when_the_stage_ends(database, loopback, store):
    loopback.be("slow")
    with tracking.stage_run("train_reward", {}) as run:
        log(run, range(STEPS))
        assert points_on_disk(run) == list(range(STEPS))
    assert points_in(database, the_run(store, run)) == EXPECTED
    assert not Journal(anchors.journal_dir() / run.key).exists


@pytest.mark.parametrize("mode", ["absent", "fails", "silent", "loses"])
def test_a_server_that_goes_in_the_middle_and_comes_back_has_every_point_once(database, loopback, store, mode):
    third = STEPS // 3
    with tracking.stage_run("train_reward", {}) as run:
        log(run, range(third))
        assert run.flush()
        assert sum(points_in(database, run.id).values()) == 2 * third
        loopback.be(mode)
        answered = loopback.answered
        log(run, range(third, 2 * third))
        assert points_on_disk(run) == list(range(2 * third))
        assert not run.flush()
        assert loopback.answered == answered
        loopback.be("well")
        log(run, range(2 * third, STEPS))
    assert points_in(database, the_run(store, run)) == EXPECTED
    assert not Journal(anchors.journal_dir() / run.key).exists


def test_points_reach_the_server_while_the_stage_runs_and_nobody_waits(database, loopback):
    with tracking.stage_run("train_reward", {}) as run:
        assert run.id
        log(run, range(STEPS))
        deadline = time.monotonic() + PATIENCE_SECONDS
        while points_in(database, run.id) != EXPECTED:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_next_stage_delivers_what_an_earlier_one_left(database, loopback, store):
    loopback.be("absent")
    with tracking.stage_run("train_reward", {}) as left:
        log(left, range(STEPS))
    loopback.be("well")
    assert tracking.find_run_by_outs("train_reward", {"models/policy": "0"}) is None
    assert points_in(database, the_run(store, left)) == EXPECTED


def test_flush_delivers_to_another_server(database, loopback, store, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with tracking.stage_run("train_reward", {}) as run:
        log(run, range(STEPS))
    with pytest.raises(UserError, match=r"http://127.0.0.1:9 cannot be reached .*: 1 of 1 runs stay in"):
        flush()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", loopback.uri)
    assert flush() == 1
    assert "is meant for http://127.0.0.1:9" in capfd.readouterr().err
    assert flush("--uri", loopback.uri) == 0
    assert capfd.readouterr().out == f"tracking: 1 runs with {2 * STEPS} points delivered to {loopback.uri}\n"
    assert points_in(database, the_run(store, run)) == EXPECTED


def test_a_journal_from_before_the_runs_end_does_not_take_the_end_back(database, loopback, store):
    """As a backup that was made a moment before has it."""
    loopback.be("absent")
    with tracking.stage_run("train_reward", {}) as run:
        log(run, range(STEPS))
    journal = Journal(anchors.journal_dir() / run.key)
    *before, end = (journal.place / RECORDS).read_text().splitlines(keepends=True)
    loopback.be("well")
    assert flush() == 0
    ended = store.get_run(the_run(store, run)).info
    journal.place.mkdir()
    (journal.place / RECORDS).write_text("".join(before))
    assert flush() == 0
    assert '"end"' in end
    assert store.get_run(the_run(store, run)).info == ended
    assert ended.status == "FINISHED"
    assert points_in(database, ended.run_id) == EXPECTED
    assert not journal.exists


def test_what_a_server_refuses_for_good_is_said_and_left_out(loopback, store, capfd):
    with tracking.stage_run("train_reward", {}) as run:
        run.log_metrics({"good": 1.0, "b@d": 2.0, "too": 3.0})
    assert store.get_run(the_run(store, run)).data.metrics == {"good": 1.0, "too": 3.0}
    assert f"{loopback.uri} refused an entry of {run.key}" in capfd.readouterr().err


def test_a_run_that_is_deleted_while_it_logs_stays_deleted(loopback, store, capfd):
    with tracking.stage_run("train_reward", {}) as run:
        store.delete_run(run.id)
        log(run, range(STEPS))
    assert store.get_run(run.id).info.lifecycle_stage == "deleted"
    assert not Journal(anchors.journal_dir() / run.key).exists
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "the following arguments are required: command"),
        (["flush", "--url", "x"], "unrecognized arguments: --url x"),
        (["flush", "--uri"], "argument --uri: expected one argument"),
        (["send"], "invalid choice: 'send'"),
    ],
)
def test_a_wrong_command_line_is_told_what_is_wrong_with_it(arguments, fault, capfd):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert fault in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--uri", "nonsense://x"], "MLFLOW_TRACKING_URI=nonsense://x: MLflow keeps nothing under nonsense://: write"),
        (["--uri=nonsense://x"], "MLFLOW_TRACKING_URI=nonsense://x: MLflow keeps nothing under nonsense://: write"),
        (["--uri", ""], "--uri : no tracking server: write http://HOST:PORT"),
    ],
)
def test_what_is_no_server_is_refused_though_nothing_waits(arguments, fault, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", anchors.tracking_uri())  # which the command sets
    with pytest.raises(UserError) as refused:
        main(["flush", *arguments])
    assert str(refused.value).startswith(fault)


def test_an_address_may_come_after_an_equals_sign(tmp_path, capfd):
    assert main(["flush", f"--uri=sqlite:///{tmp_path}/other.db"]) == 0
    assert "tracking: nothing waits" in capfd.readouterr().out


BROKEN = {"no JSON": "{torn\n", "no record": "[]\n", "no run": '{"op": "end", "time": 1, "status": "FINISHED"}\n'}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_journal_is_told_and_no_other_run_waits_for_it(database, loopback, store, capfd, content):
    broken = anchors.journal_dir() / "evaluate-0"
    broken.mkdir(parents=True)
    (broken / RECORDS).write_text(content)
    with tracking.stage_run("train_reward", {}) as run:
        log(run, range(STEPS))
    assert "cannot be reached" not in capfd.readouterr().err
    assert points_in(database, the_run(store, run)) == EXPECTED
    assert flush() == 1
    left = capfd.readouterr().err
    assert left.startswith(f"tracking: left: {broken / RECORDS}: ") and "mend or remove" in left
    assert (broken / RECORDS).read_text() == content


@pytest.mark.parametrize("content", ["", "{", "[]", '{"server": "x"}'])
def test_without_a_readable_note_of_what_was_sent_all_is_compared(database, loopback, store, content):
    loopback.be("absent")
    with tracking.stage_run("train_reward", {}) as run:
        log(run, range(STEPS))
    (anchors.journal_dir() / run.key / SENT).write_text(content)
    loopback.be("well")
    assert flush() == 0
    assert points_in(database, the_run(store, run)) == EXPECTED
