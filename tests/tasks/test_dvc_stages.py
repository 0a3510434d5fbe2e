"""The stage task with the real dvc on a small pipeline, and what it reads from dvc.yaml, dvc.lock and DVC's lines."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dvc.lock import Lock
from prefect.logging import disable_run_logger

from rlhf import anchors, tracking
from rlhf.config import compose, validate, write
from rlhf.errors import UserError
from tasks import dvc_stages
from tasks.dvc_stages import (
    RETRIES,
    Outcome,
    StageFailedError,
    _Output,
    locked_outs,
    mend_rwlock,
    retries,
    run_stage,
    stage_terms,
    upstream,
)
from tasks.processes import Terms

DVC_YAML = """
stages:
  good:
    cmd: python -c "import os; print('good - made'); open('made', 'w').write(os.environ['RLHF_PARENT_RUN_KEY'])"
    deps: [source]
    outs: [made]
  bad:
    cmd: python -c "import sys; print('loading'); sys.exit('bad - data/x is missing. run dvc repro x')"
    outs: [never]
  blind:
    cmd: python -c "pass"
    deps: [nowhere]
  train_ppo:
    cmd: python -c "import time; print('train_ppo - loading'); time.sleep(600)"
    params: [runtime]
  evaluate:
    cmd: python -c "print('evaluate - done')"
    params: [runtime]
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("workspace")
    (place / "dvc.yaml").write_text(DVC_YAML)
    (place / "source").write_text("without a dependency DVC keeps nothing in its run cache")
    write(compose(["runtime.device=cpu", "limits.train_ppo_seconds=4"]), place / "params.yaml")
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=place, check=True)
    return place


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, list[str]]]:
    """The calls that record a cached stage: parent, stage, outputs."""
    calls: list[tuple[str, str, list[str]]] = []
    monkeypatch.setattr(tracking, "cached_child", lambda parent, stage, outs: calls.append((parent, stage, [*outs])))
    return calls


def run(name: str, workspace: Path) -> Outcome:
    with disable_run_logger():
        return run_stage.fn(name, "parent", workspace)


def test_a_stage_runs_once_and_is_then_recorded_as_cached(
    workspace: Path, cached: list[tuple[str, str, list[str]]]
) -> None:
    assert run("good", workspace) == Outcome("good", ran=True, last_line="good - made")
    assert (workspace / "made").read_text() == "parent"
    assert cached == []
    assert run("good", workspace) == Outcome("good", ran=False, last_line="")
    assert cached == [("parent", "good", ["made"])]


def test_a_restored_stage_is_cached_too(workspace: Path, cached: list[tuple[str, str, list[str]]]) -> None:
    run("good", workspace)
    (workspace / "made").unlink()
    (workspace / "dvc.lock").unlink()
    cached.clear()
    assert not run("good", workspace).ran
    assert (workspace / "made").read_text() == "parent"
    assert len(cached) == 1


def test_a_failed_stage_says_its_own_last_line(workspace: Path) -> None:
    with pytest.raises(StageFailedError) as failure:
        run("bad", workspace)
    assert str(failure.value) == "bad: bad - data/x is missing. run dvc repro x"


def test_where_dvc_refuses_to_run_a_stage_its_error_is_the_reason(workspace: Path) -> None:
    with pytest.raises(StageFailedError, match=r"^blind: .*nowhere"):
        run("blind", workspace)


def test_a_stage_over_its_limit_is_ended_and_the_line_names_the_param(workspace: Path) -> None:
    reason = "limits.train_ppo_seconds=4: it took longer and was ended: raise the limit"
    with pytest.raises(StageFailedError, match=f"^train_ppo: {reason}, or set it to 0 for none$"):
        run("train_ppo", workspace)


def test_a_stage_that_computes_takes_its_turn_on_the_device(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "main_checkout", lambda: workspace)
    cpu = workspace / ".cache" / "devices" / "cpu.lock"
    assert stage_terms("train_ppo", workspace, "red-fox") == Terms([cpu], "train_ppo of red-fox", 4)
    assert stage_terms("good", workspace) == Terms([], "good", 0)
    monkeypatch.setenv("HF_TOKEN", "open-sesame")
    assert stage_terms("good", workspace, "try open-sesame").holder == "good of try ***"


def test_a_stage_waits_for_its_device_and_says_for_whom(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "main_checkout", lambda: workspace)
    monkeypatch.setattr(tracking, "find_run_by_outs", lambda *_: None)
    (cpu,) = stage_terms("evaluate", workspace).locks
    cpu.write_text("process 42 (train_ppo of red-fox)")
    held, lines = cpu.open(), []
    fcntl.flock(held, fcntl.LOCK_EX)

    class Log:
        def info(self, line: str) -> None:
            lines.append(line)
            held.close()

    monkeypatch.setattr(dvc_stages, "get_run_logger", Log)
    outcome = run_stage.fn("evaluate", "parent", workspace)
    assert lines[0] == "waiting for device cpu, which process 42 (train_ppo of red-fox) holds"
    assert lines[1].startswith("device cpu is free after ")
    assert lines[2:] == [outcome.last_line] == ["evaluate - done"]


@pytest.mark.parametrize("left", ["", "{", '{"write": {"/a'])
def test_a_list_of_locks_that_a_killed_dvc_left_half_written_is_removed(
    workspace: Path, cached: list[tuple[str, str, list[str]]], left: str
) -> None:
    listing = workspace / ".dvc" / "tmp" / "rwlock"
    listing.write_text(left)
    with pytest.raises(StageFailedError, match="corrupted"):
        run("good", workspace)
    mend_rwlock(workspace)
    run("good", workspace)


def test_a_whole_list_of_locks_stays_and_so_does_one_that_is_being_written(tmp_path: Path) -> None:
    mend_rwlock(tmp_path)
    listing = tmp_path / ".dvc" / "tmp" / "rwlock"
    listing.parent.mkdir(parents=True)
    listing.write_text('{"write": {}}')
    mend_rwlock(tmp_path)
    assert listing.read_text() == '{"write": {}}'
    listing.write_text("{")
    dvcs = Lock(str(listing.with_name("rwlock.lock")))
    with dvcs, pytest.raises(UserError, match=rf"^process {os.getpid()} is running DVC here: wait for it$"):
        mend_rwlock(tmp_path)
    assert listing.exists()


def read(lines: list[str]) -> _Output:
    output = _Output()
    for line in lines:
        output.read(line)
    return output


def test_only_the_stages_own_lines_are_shown() -> None:
    output = _Output()
    lines = ["Running stage 'x':", "> python -m stages.x", "x: 3 rows", "Updating lock file 'dvc.lock'", ""]
    lines += [
        "To track the changes with git, run:",
        "\tgit add dvc.lock",
        "Use `dvc push` to send your updates to remote",
    ]
    lines += ["ERROR: a library's word", "x: still here"]
    assert [shown for line in lines if (shown := output.read(line))] == ["x: 3 rows", "x: still here"]
    assert (output.ran, output.restored) == (True, False)


def test_a_fault_is_one_line_and_names_the_stage_once() -> None:
    dvc = "ERROR: failed to reproduce 'x': failed to run: python -m stages.x, exited with 1"
    assert (
        read(["Running stage 'x':", "x: hub: out of reach: wait", dvc]).fault("x", 255) == "x: hub: out of reach: wait"
    )
    busy = ["ERROR: 'o' is busy, it is being blocked by:", "  (PID 7): dvc repro", "", "If there are no", "ERROR: hint"]
    assert read(busy).fault("x", 255) == "x: 'o' is busy, it is being blocked by: (PID 7): dvc repro If there are no"
    assert read(["ERROR: busy", "ERROR: hint"]).fault("x", 255) == "x: busy"
    assert read(["Running stage 'x':", dvc]).fault("x", 255) == "x: exit code 255 without a word"


@pytest.mark.parametrize(
    ("overrides", "tracking_uri", "retried"),
    [
        ([], "sqlite:////tmp/mlflow.db", set()),
        (["data=gsm8k"], "sqlite:////tmp/mlflow.db", {"prepare_data"}),
        (["preferences.source=hf://org/name@main"], "sqlite:////tmp/mlflow.db", {"collect_preferences"}),
        (["sft.source=hf://org/name@main"], "sqlite:////tmp/mlflow.db", {"fetch_sft"}),
        (["sft.source=models:/name@champion"], "sqlite:////tmp/mlflow.db", set()),
        (["sft.source=models:/name@champion"], "http://mlflow.example:5000", {"fetch_sft", "register"}),
        ([], "http://mlflow.example:5000", {"register"}),
    ],
)
def test_only_what_goes_over_the_network_is_retried(
    overrides: list[str], tracking_uri: str, retried: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
    params = validate(compose(overrides))
    stages = upstream(anchors.CHECKOUT / "dvc.yaml", compose(overrides))
    assert {name for name in stages if retries(name, params, is_tracked=True) == RETRIES} == retried
    assert {name for name in stages if retries(name, params, is_tracked=True) == 0} == set(stages) - retried


def test_a_server_that_was_down_from_the_start_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example:5000")
    assert retries("register", validate(compose()), is_tracked=False) == 0


@pytest.mark.parametrize(("reward", "needs_reward_model"), [("verifier", False), ("reward_model", True)])
def test_the_graph_follows_the_params(reward: str, needs_reward_model: bool) -> None:
    graph = upstream(anchors.CHECKOUT / "dvc.yaml", compose([f"reward={reward}"]))
    assert list(graph) == [
        "prepare_data",
        "fetch_sft",
        "finetune_sft",
        "collect_preferences",
        "train_reward",
        "train_ppo",
        "evaluate",
        "register",
    ]
    assert graph["prepare_data"] == graph["fetch_sft"] == []
    assert set(graph["finetune_sft"]) == {"prepare_data", "fetch_sft"}
    assert ("train_reward" in graph["train_ppo"]) == needs_reward_model
    assert set(graph["register"]) >= {"train_ppo", "evaluate"}


def test_every_stage_comes_after_what_it_needs() -> None:
    seen: set[str] = set()
    for name, needed in upstream(anchors.CHECKOUT / "dvc.yaml", compose(["reward=mixture"])).items():
        assert seen >= set(needed)
        seen.add(name)


def test_locked_outs(tmp_path: Path) -> None:
    lock = tmp_path / "dvc.lock"
    assert locked_outs(lock, "x") == {}
    lock.write_text("schema: '2.0'\nstages:\n  x:\n    cmd: y\n    outs:\n    - path: models/x\n      md5: abc.dir\n")
    assert locked_outs(lock, "x") == {"models/x": "abc.dir"}
    assert locked_outs(lock, "y") == {}
