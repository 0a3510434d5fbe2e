from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf import config
from rlhf.config import compose, validate
from rlhf.data.gsm8k import Problem, read_prepared, write_prepared
from rlhf.data.prompts import encode_response
from rlhf.errors import UserError
from rlhf.evaluation import accuracy
from rlhf.evaluation.right_answers import problem_id, read_right_answers
from rlhf.faults import KILL_VARIABLE
from rlhf.generation.engine import Sample
from rlhf.models.checkpoints import Manifest, checkpoint_hash, read_manifest, save_checkpoint
from rlhf.models.tiny import make_tiny
from rlhf.stage import Stage
from stages import evaluate
from tests import ppo_workspace
from tests.policies import save_policy

ROOT = Path(__file__).resolve().parents[2]
COUNTS = {"gate": 2, "test": 4}
PANEL_CSV = "iteration,question,gold,response,correct\n0,panel question?,7,#### 8,False\n"
PPO_CSV = "iteration,score,validation_accuracy\n0,,0.25\n1,0.4,0.5\n"


class Log:
    """What the stage sends to tracking."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.tables: dict[str, tuple[list[str], list[list[object]]]] = {}
        self.artifacts: list[str] = []
        self.datasets: list[tuple[str, str, str]] = []

    def resume(self, place: Path) -> None:
        place.touch()

    def log_metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        assert step is None
        self.metrics.update(values)

    def log_table(self, columns: list[str], rows: list[list[object]], name: str) -> None:
        self.tables[name] = (columns, rows)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        assert path.exists()
        self.artifacts.append(f"{folder}/{path.name}")

    def log_dataset(self, path: Path, name: str, context: str) -> None:
        self.datasets.append((path.name, name, context))


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """The stage over a workspace with two tiny checkpoints and two splits whose gold answers are 0, 1, 2, ..."""
    params = validate(compose(["scale=smoke", "runtime.device=cpu"]))
    model, tokenizer = make_tiny(params.sft.tiny, seed=0)
    for name in ("models", ".partial"):
        (tmp_path / name).mkdir()
    for name in ("rlhf", "stages", "requirements.lock"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path / "state"))
    sft = Manifest(kind="sft", source="tiny:", seed=0, stop_token="<|end|>")
    save_checkpoint(tmp_path / "models/sft", model, tokenizer, sft)
    parents = {"sft": checkpoint_hash(tmp_path / "models/sft")}
    policy = Manifest(kind="policy", source="tiny:", parents=parents, seed=0, stop_token="<|end|>")
    save_checkpoint(tmp_path / "models/policy", model, tokenizer, policy)
    for split, count in COUNTS.items():
        problems = [Problem(f"{split} {i}?", f"#### {i}", str(i), f"#### {i}", 0, "test") for i in range(count)]
        write_prepared(tmp_path / f"data/prepared/{split}.parquet", problems)
    write_training(tmp_path)
    with ExitStack() as held:
        yield Stage("evaluate", params, Log(), tmp_path, tmp_path, held, tmp_path / ".partial")  # type: ignore[arg-type]


def write_training(workspace: Path) -> None:
    """What `train_ppo` leaves beside the policy."""
    written = {
        "metrics/ppo.json": '{"best_iteration": 1}',
        "plots/ppo.csv": PPO_CSV,
        "plots/panel.csv": PANEL_CSV,
    }
    for name, text in written.items():
        (workspace / name).parent.mkdir(exist_ok=True)
        (workspace / name).write_text(text)


@pytest.fixture
def log(stage: Stage) -> Log:
    assert isinstance(stage.log, Log)
    return stage.log


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    """The engine's place is taken: SFT, which comes first, answers 0 to all problems, the policy 0, 1, 2, ..."""
    _, tokenizer = make_tiny(stage.params.sft.tiny, seed=0)
    calls: list[int] = []

    def generate(model: object, prompts: Sequence[list[int]], **_: Any) -> list[Sample]:
        first_model = len(calls) < len(COUNTS)
        calls.append(len(prompts))
        texts = [f"#### {0 if first_model else i}" for i in range(len(prompts))]
        tokens = [encode_response(tokenizer, text) for text in texts]
        return [Sample(ids, [0.0] * len(ids), True) for ids in tokens]

    monkeypatch.setattr(accuracy, "generate", generate)


@pytest.mark.usefixtures("answers")
def test_writes_metrics_plot_and_report(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate.main(stage)
    stage.publish()

    text = (stage.workspace / "metrics/evaluation.json").read_text()
    metrics = json.loads(text)
    assert text == json.dumps(metrics, indent=2, sort_keys=True) + "\n"
    assert metrics["test"]["n"] == 4
    assert metrics["test"]["sft"]["accuracy"] == 0.25
    assert metrics["test"]["policy"]["accuracy"] == 1.0
    assert metrics["test"]["gain"] == 0.75
    assert metrics["test"]["p_value"] == 0.125
    assert metrics["test"]["paired"] == {"both_right": 1, "gained": 3, "lost": 0, "both_wrong": 0}
    assert metrics["gate"]["gain"] == 0.5

    rows = list(csv.DictReader((stage.workspace / "plots/accuracy.csv").open()))
    assert [(row["split"], row["model"], row["accuracy"]) for row in rows] == [
        ("gate", "sft", "0.5"),
        ("gate", "policy", "1.0"),
        ("test", "sft", "0.25"),
        ("test", "policy", "1.0"),
    ]
    answers = (stage.workspace / "reports/evaluation/gate.csv").read_text()
    assert read_right_answers(answers, "strict") == {problem_id(f"gate {i}?", str(i)): True for i in range(2)}
    page = (stage.workspace / "reports/evaluation/index.html").read_text(encoding="utf-8")
    sentence = "SFT 25.0 % → policy 100.0 % on 4 test problems, gain 75.0 points"
    assert sentence in page
    assert checkpoint_hash(stage.workspace / "models/policy") in page
    assert sentence in capsys.readouterr().out


def page_of(stage: Stage) -> str:
    """The report as the stage makes it, taken away again."""
    with ExitStack() as held:
        one = replace(stage, held=held)
        evaluate.main(one)
        assert not (stage.place / "reports").exists()
        one.publish()
    page = stage.place / "reports/evaluation/index.html"
    text = page.read_text(encoding="utf-8")
    shutil.rmtree(stage.place / "reports")
    return text


def test_the_report_depends_on_nothing_that_does_not_rerun_the_stage(stage: Stage) -> None:
    """DVC restores it by the stage's deps and params: other params, another place, another hour must not show."""
    first = page_of(stage)
    assert page_of(stage) == first
    others = ["seed=7", "reward_model.lr=0.5", "registry.name=other", "sft.finetune.steps=1", "ppo.lr=0.25"]
    params = validate(
        compose(["scale=smoke", "runtime.device=cpu", "data=files", f"data.reads={stage.place}", *others])
    )
    assert page_of(replace(stage, params=params)) == first
    assert str(stage.workspace) not in first
    params = validate(compose(["scale=smoke", "runtime.device=cpu", "evaluation.samples=3"]))
    assert page_of(replace(stage, params=params)) != first


@pytest.mark.usefixtures("answers")
def test_logs_numbers_samples_report_and_datasets(stage: Stage, log: Log) -> None:
    evaluate.main(stage)
    assert log.metrics["test/policy_accuracy"] == 1.0
    assert log.metrics["gate/sft_accuracy"] == 0.5
    assert log.artifacts == ["evaluation/index.html"]
    columns, rows = log.tables["eval_results_table.json"]
    results = [dict(zip(columns, row, strict=True)) for row in rows]
    outcomes = [row["outcome"] for row in results if row["split"] == "test"]
    assert outcomes == ["both_right", "gained", "gained", "gained"]
    assert len(results) == sum(COUNTS.values())
    assert log.datasets == [("gate.parquet", "gate", "evaluation"), ("test.parquet", "test", "evaluation")]


def test_with_the_real_engine_equal_models_score_alike(stage: Stage) -> None:
    evaluate.main(stage)
    stage.publish()
    metrics = json.loads((stage.workspace / "metrics/evaluation.json").read_text())
    for split, count in COUNTS.items():
        assert metrics[split]["n"] == count
        assert metrics[split]["sft"] == metrics[split]["policy"]
        assert metrics[split]["paired"]["gained"] == metrics[split]["paired"]["lost"] == 0
        assert metrics[split]["p_value"] == 1.0
    assert metrics["test"]["kl"] == {"sequence": 0.0, "token": 0.0}


def test_the_kl_of_another_policy_is_in_metrics_buckets_and_report(stage: Stage) -> None:
    directory = stage.workspace / "models/policy"
    manifest = read_manifest(directory)
    shutil.rmtree(directory)
    save_checkpoint(directory, *make_tiny(stage.params.sft.tiny, seed=1), manifest)
    evaluate.main(stage)
    stage.publish()
    metrics = json.loads((stage.workspace / "metrics/evaluation.json").read_text())
    assert metrics["test"]["kl"]["sequence"] > metrics["test"]["kl"]["token"] > 0
    assert "kl" not in metrics["gate"]
    rows = list(csv.DictReader((stage.workspace / "plots/length_buckets.csv").open()))
    assert sum(int(row["n"]) for row in rows) == COUNTS["test"]
    mean = sum(int(row["n"]) * float(row["kl"]) for row in rows) / COUNTS["test"]
    assert mean == pytest.approx(metrics["test"]["kl"]["sequence"], abs=1e-5)
    assert "would write" in (stage.workspace / "reports/evaluation/index.html").read_text(encoding="utf-8")


def test_a_missing_policy_names_its_stage(stage: Stage) -> None:
    (stage.workspace / "models/policy").rename(stage.workspace / "models/elsewhere")
    with pytest.raises(UserError, match="models/policy is missing: run dvc repro train_ppo"):
        evaluate.main(stage)
    assert not (stage.workspace / "metrics/evaluation.json").exists()


@pytest.mark.parametrize("content", ["", '{"best_iteration": ', "{}"])
def test_damaged_metrics_of_ppo_are_told_before_anything_is_evaluated(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(evaluate, "_evaluate", lambda *_: pytest.fail("evaluated"))
    (stage.workspace / "metrics/ppo.json").write_text(content)
    with pytest.raises(UserError, match=r"metrics/ppo\.json: not as its stage writes it .*: run dvc repro train_ppo"):
        evaluate.main(stage)


def test_a_curve_without_rows_is_told_before_anything_is_evaluated(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "_evaluate", lambda *_: pytest.fail("evaluated"))
    (stage.workspace / "plots/ppo.csv").write_text(PPO_CSV.splitlines()[0])
    with pytest.raises(UserError, match=r"plots/ppo\.csv: no rows: run dvc repro train_ppo"):
        evaluate.main(stage)


OUTPUTS = ("metrics/evaluation.json", "plots/accuracy.csv", "plots/length_buckets.csv", "reports/evaluation/index.html")


def run_alone(workspace: Path, kill: str = "") -> int:
    """The stage in a process of its own; its exit code."""
    environ = os.environ | {"RLHF_STATE_DIR": str(workspace / "state"), KILL_VARIABLE: kill}
    return subprocess.run([sys.executable, "-m", "stages.evaluate"], cwd=workspace, env=environ, check=False).returncode


def kept(workspace: Path) -> list[str]:
    """The parts that are on disk."""
    return sorted(path.stem for path in (workspace / "state/evaluate").rglob("*.json"))


def test_killed_after_any_part_and_resumed_the_files_are_those_of_a_run_that_was_never_killed(tmp_path: Path) -> None:
    """24 test problems and 6 of the gate in batches of 3: parts of 6, five for each model."""
    places = [ppo_workspace.fill(tmp_path / name) for name in ("never", "killed")]
    for place in places:
        overrides = ["scale=smoke", "runtime.threads=1", "runtime.device=cpu", "ppo.sampling.max_new_tokens=8"]
        config.write(config.compose([*overrides, "evaluation.batch_size=3"]), place / "params.yaml")
        shutil.copy(place / "data/prepared/train.parquet", place / "data/prepared/test.parquet")
        write_prepared(place / "data/prepared/gate.parquet", read_prepared(place / "data/prepared/test.parquet")[:6])
        save_policy(place / "models/policy", seed=1)
        write_training(place)
    never, killed = places
    assert run_alone(never) == 0
    assert run_alone(killed, kill="chunk.kept:3") == -signal.SIGKILL
    assert kept(killed) == ["sft-gate-0", "sft-test-0", "sft-test-1"]
    assert not (killed / "metrics/evaluation.json").exists()
    assert run_alone(killed, kill="chunk.kept:4") == -signal.SIGKILL
    assert kept(killed)[:2] == ["policy-gate-0", "policy-test-0"] and len(kept(killed)) == 7
    assert run_alone(killed) == 0
    assert kept(killed) == []
    for name in OUTPUTS:
        assert (killed / name).read_bytes() == (never / name).read_bytes(), name
    assert json.loads((never / "metrics/evaluation.json").read_text())["test"]["n"] == 24
