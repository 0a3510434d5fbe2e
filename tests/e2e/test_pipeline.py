"""The whole pipeline for real at smoke scale: one `dvc repro` in a copy of this checkout, and what it leaves behind."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from mlflow import MlflowClient
from peft import PeftModel

from rlhf import tracking
from rlhf.data.answers import is_correct
from rlhf.data.prompts import decode_response, encode_prompts, encode_response
from rlhf.generation.engine import Sample, generate
from rlhf.hashes import dvc_md5, sha256_file
from rlhf.models.batches import pad
from rlhf.models.checkpoints import Manifest, load_policy, load_reward_model, load_tokenizer, read_manifest
from rlhf.models.reward_model import raw_scores
from rlhf.params import Params
from tests.e2e import workspaces
from tests.e2e.pipelines import Pipeline, readable, saved_iteration, stages_run, wait_for_iteration

# Smoke scale, with a start that gets some problems right, and enough of them to validate on: PPO finds a better policy.
CHOICES = (
    "scale=smoke",
    "reward=mixture",
    "runtime.threads=1",
    "data.generator.train=1000",
    "data.max_validation=100",
    "sft.tiny.hidden_size=64",
    "sft.tiny.intermediate_size=128",
    "sft.finetune.steps=300",
    "sft.finetune.lr=0.006",
    "ppo.iterations=4",
)
OUTS = {
    "prepare_data": {"data/prepared", "metrics/data_validation.json"},
    "fetch_sft": {"models/fetched"},
    "finetune_sft": {"models/sft"},
    "collect_preferences": {"data/preferences"},
    "train_reward": {"models/reward", "metrics/reward_model.json", "plots/reward_calibration.csv"},
    "train_ppo": {"models/policy", "metrics/ppo.json", "plots/ppo.csv", "plots/panel.csv"},
    "evaluate": {
        "metrics/evaluation.json",
        "plots/accuracy.csv",
        "plots/length_buckets.csv",
        "reports/evaluation/gate.csv",
        "reports/evaluation/index.html",
    },
    "register": set(),
}
STAGES = list(OUTS)
ALL_OUTS = sorted(set().union(*OUTS.values()))
SPLITS = ("train", "validation", "gate", "test")
ITERATIONS = 4
QUESTIONS = 6


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    place, tracking = (tmp_path_factory.mktemp(name) for name in ("checkout", "tracking"))
    return Pipeline.run(place, tracking, *CHOICES)


# --- what is on disk


def test_every_stage_ran_once_and_left_its_outputs(pipeline: Pipeline) -> None:
    assert stages_run(pipeline.output) == STAGES
    locked = pipeline.locked()
    assert {stage: set(outs) for stage, outs in locked.items()} == OUTS
    for outs in locked.values():
        for path, md5 in outs.items():
            assert dvc_md5(pipeline.place / path) == md5, path
    assert not (pipeline.place / "runs/prepare_data/data_docs").exists()
    assert pipeline.succeed("git", "status", "--porcelain") == "?? dvc.lock\n"


def test_the_prepared_data(pipeline: Pipeline) -> None:
    rows = {split: pipeline.problems(split) for split in SPLITS}
    assert (len(rows["gate"]), len(rows["test"])) == (16, 24)
    assert 50 <= len(rows["validation"]) <= 100
    assert 600 <= len(rows["train"]) < 1000
    questions = [problem.question for problems in rows.values() for problem in problems]
    assert len(set(questions)) == len(questions)
    for problem in (problem for problems in rows.values() for problem in problems):
        assert problem.answer.endswith(f"#### {problem.gold}")
        assert problem.demonstration
        assert problem.source == "generator"
    names = {tuple(pq.read_schema(path).names) for path in (pipeline.place / "data/prepared").iterdir()}
    assert names == {("question", "answer", "gold", "demonstration", "steps", "source")}
    validation = pipeline.json("metrics/data_validation.json")
    assert validation["success"] is True
    assert {split: found["rows"] for split, found in validation["splits"].items()} == {
        split: len(problems) for split, problems in rows.items()
    }


def test_the_preferences(pipeline: Pipeline) -> None:
    files = {path.stem: path for path in (pipeline.place / "data/preferences").iterdir()}
    assert set(files) == {"train", "validation"}
    pairs = {split: pq.read_table(path) for split, path in files.items()}
    for table in pairs.values():
        assert table.column_names == ["question", "chosen", "rejected", "origin"]
        assert table.num_rows > 0
        assert set(table["origin"].to_pylist()) <= {"sampled", "gold"}
    train, held_out = (set(pairs[split]["question"].to_pylist()) for split in ("train", "validation"))
    assert not train & held_out
    assert train | held_out <= {problem.question for problem in pipeline.problems("train")}
    reward_model = pipeline.json("metrics/reward_model.json")
    assert set(reward_model) >= {"pair_accuracy", "pairs"}
    assert 0 <= reward_model["pair_accuracy"] <= 1


def test_the_curve_has_a_row_an_iteration(pipeline: Pipeline) -> None:
    with (pipeline.place / "plots/ppo.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    # fmt: off
    assert set(rows[0]) == {
        "iteration", "score", "accuracy", "validation_accuracy", "kl_token", "kl_sequence", "kl_k2", "kl_k3",
        "kl_k2_sequence", "kl_k3_sequence",
        "approx_kl", "clip_fraction", "policy_loss", "value_loss", "explained_variance", "entropy",
        "response_length", "cut_off", "lr", "kl_coef", "mismatch", "importance", "cut_mass", "ptx_loss", "steps",
        "validation_score",
    }
    # fmt: on
    assert [int(row["iteration"]) for row in rows] == list(range(ITERATIONS + 1))
    assert {name for name, value in rows[0].items() if value} == {"iteration", "validation_accuracy"}
    for row in rows[1:]:
        assert row.pop("validation_score") == ""  # selection looks at accuracy here
        assert all(float(value) == float(value) for value in row.values())
    accuracies = [float(row["validation_accuracy"]) for row in rows]
    metrics = pipeline.json("metrics/ppo.json")
    assert metrics["iterations"] == ITERATIONS
    assert metrics["best_iteration"] == accuracies.index(max(accuracies))
    assert metrics["best"] == {"validation_accuracy": pytest.approx(max(accuracies), abs=1e-6)}
    assert metrics["initial"] == {"validation_accuracy": pytest.approx(accuracies[0], abs=1e-6)}
    assert metrics["final"]["validation_accuracy"] == pytest.approx(accuracies[-1], abs=1e-6)


def test_the_panel_answers_at_every_validation(pipeline: Pipeline) -> None:
    with (pipeline.place / "plots/panel.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    panel = [row["question"] for row in rows[: pipeline.params.ppo.panel]]
    assert [row["question"] for row in rows] == panel * (ITERATIONS + 1)
    assert [int(row["iteration"]) for row in rows[:: len(panel)]] == list(range(ITERATIONS + 1))
    golds = {problem.question: problem.gold for problem in pipeline.problems("validation")}
    for row in rows:
        assert row["gold"] == golds[row["question"]]
        assert row["correct"] == str(is_correct(row["response"], row["gold"], "strict"))


def test_the_evaluation(pipeline: Pipeline) -> None:
    evaluation = pipeline.json("metrics/evaluation.json")
    assert {split: found["n"] for split, found in evaluation.items()} == {"gate": 16, "test": 24}
    for found in evaluation.values():
        assert found["method"] == "strict"
        for model in ("sft", "policy"):
            assert 0 <= found[model]["low"] <= found[model]["accuracy"] <= found[model]["high"] <= 1
        assert found["gain"] == pytest.approx(found["policy"]["accuracy"] - found["sft"]["accuracy"], abs=1e-5)
        assert found["gain_low"] <= found["gain"]
        assert set(found) >= {"p_value", "parse_failures", "cut_off"}
    assert evaluation["test"]["kl"]["sequence"] > evaluation["test"]["kl"]["token"] > 0
    assert (pipeline.place / "plots/accuracy.csv").read_text().count("\n") == 5
    with (pipeline.place / "plots/length_buckets.csv").open(newline="") as file:
        assert sum(int(row["n"]) for row in csv.DictReader(file)) == 24


def test_the_checkpoints_and_where_they_come_from(pipeline: Pipeline) -> None:
    manifests: dict[str, Manifest] = {}
    for name in ("fetched", "sft", "reward", "policy"):
        directory = pipeline.place / "models" / name
        manifests[name] = read_manifest(directory)
        files = {path: sha256_file(directory / path) for path in workspaces.contents(directory)}
        files.pop("manifest.json")
        assert manifests[name].files == files
        assert set(files) >= {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"}
        assert manifests[name].kind == name
        assert manifests[name].source == "tiny:"
        assert manifests[name].license == "Apache-2.0"
        assert manifests[name].stop_token == "<|end|>"
    assert "value_head.safetensors" in manifests["policy"].files
    identity = {name: sha256_file(pipeline.place / f"models/{name}/manifest.json") for name in manifests}
    assert {name: manifest.parents for name, manifest in manifests.items()} == {
        "fetched": {},
        "sft": {"fetched": identity["fetched"]},
        "reward": {"sft": identity["sft"]},
        "policy": {"sft": identity["sft"], "reward": identity["reward"]},
    }
    assert manifests["policy"].params["ppo"] == pipeline.params.ppo.model_dump()
    assert manifests["policy"].prompt == pipeline.params.prompt.model_dump()
    assert manifests["policy"].seed == 0


def test_what_dvc_hashes_tells_nothing_of_time_place_or_run(pipeline: Pipeline) -> None:
    places = [str(pipeline.place), str(pipeline.tracking), str(workspaces.ROOT), str(Path.home())]
    runs = [run.info.run_id for run in pipeline.runs.values()]
    days = {f"{moment:%Y-%m-%d}" for moment in (pipeline.started, datetime.now(UTC), datetime.now())}
    for out in ALL_OUTS:
        path = pipeline.place / out
        for file in path.rglob("*") if path.is_dir() else [path]:
            text = readable(file)
            found = [needle for needle in (*places, *runs, *days) if needle in text]
            assert not found, f"{file}: {found}"


# --- the checkpoints in other hands


def sample(directory: Path, questions: list[str], params: Params) -> list[Sample]:
    """Greedy responses by our own engine."""
    tokenizer = load_tokenizer(directory)
    prompts = [prompt for prompt in encode_prompts(tokenizer, questions, params.prompt) if prompt]
    assert len(prompts) == len(questions)
    return generate(
        load_policy(directory),
        prompts,
        stop_ids=[tokenizer.eos_token_id],
        pad_id=tokenizer.eos_token_id,
        max_new_tokens=params.ppo.sampling.max_new_tokens,
        batch_size=len(prompts),
    )


def test_the_checkpoints_load_with_plain_libraries_and_answer_and_score_the_same(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    problems = pipeline.problems("test")[:QUESTIONS]
    questions = [problem.question for problem in problems]
    models = {name: pipeline.place / "models" / name for name in ("policy", "sft", "reward")}
    tokenizer = load_tokenizer(models["policy"])
    ours = {name: sample(models[name], questions, pipeline.params) for name in ("policy", "sft")}
    texts = {name: [decode_response(tokenizer, s.tokens) for s in samples] for name, samples in ours.items()}
    # Whole responses, cut-off ones and very short ones, so that the batch has padding.
    prompts = [prompt for prompt in encode_prompts(tokenizer, questions, pipeline.params.prompt) if prompt]
    whole = [encode_response(tokenizer, problem.answer) for problem in problems]
    responses = [*whole, *(ids[: len(ids) // 2] for ids in whole), *([tokenizer.eos_token_id] for _ in whole)]
    batch = pad([*prompts, *prompts, *prompts], responses, load_tokenizer(models["reward"]).pad_token_id)
    rows = [ids[:length].tolist() for ids, length in zip(batch.tokens, batch.lengths.tolist(), strict=True)]
    with torch.no_grad():
        scores = raw_scores(load_reward_model(models["reward"]), batch, torch.float32).tolist()
    assert len(set(batch.lengths.tolist())) > QUESTIONS
    assert len({round(score, 4) for score in scores}) > QUESTIONS

    request = {
        **{name: str(directory) for name, directory in models.items()},
        "questions": questions,
        "max_new_tokens": pipeline.params.ppo.sampling.max_new_tokens,
        "pairs": [[problem.question, problem.answer] for problem in problems],
        "rows": rows,
        "tracking_uri": pipeline.environ["MLFLOW_TRACKING_URI"],
        "model_uri": "models:/gsm8k-policy@candidate",
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    shutil.copy(workspaces.ROOT / "tests/e2e/plain_libraries.py", tmp_path)
    command = [sys.executable, "-I", "plain_libraries.py", "request.json", "answer.json"]
    workspaces.succeed(command, tmp_path, pipeline.environ)
    theirs = json.loads((tmp_path / "answer.json").read_text())

    assert theirs["ours"] == []
    assert theirs["policy"] == texts["policy"]
    assert theirs["sft"] == texts["sft"]
    assert theirs["served"] == texts["policy"]
    assert theirs["tokens"] == rows[:QUESTIONS]
    assert theirs["scores"] == pytest.approx(scores, abs=1e-5)
    assert theirs["scores_alone"] == pytest.approx(scores, abs=1e-5)


# --- what MLflow has


def test_each_stage_has_one_run_with_params_inputs_and_hashes(pipeline: Pipeline) -> None:
    assert set(pipeline.runs) == set(STAGES)
    locked = pipeline.locked()
    commit = pipeline.succeed("git", "rev-parse", "HEAD").strip()
    for stage, run in pipeline.runs.items():
        tags = run.data.tags
        assert run.info.status == "FINISHED"
        assert "mlflow.parentRunId" not in tags
        assert (tags["mlflow.source.git.commit"], tags["git.dirty"]) == (commit, "false")
        outs = {key.removeprefix("dvc.out."): value for key, value in tags.items() if key.startswith("dvc.out.")}
        assert outs == locked[stage]
    ppo = pipeline.runs["train_ppo"].data.params
    assert (ppo["ppo.reward.source"], ppo["seed"], ppo["ppo.lr"]) == ("mixture", "0", "0.0003")
    assert "registry.name" not in ppo
    assert inputs(pipeline, "train_ppo") == {("train", "training"), ("validation", "selection")}
    assert inputs(pipeline, "evaluate") == {("gate", "evaluation"), ("test", "evaluation")}
    assert inputs(pipeline, "prepare_data") == {(split, split) for split in SPLITS}


def inputs(pipeline: Pipeline, stage: str) -> set[tuple[str, str]]:
    """Name and context of a run's data sets, whose digests must be those of the prepared files."""
    found = set()
    for item in pipeline.runs[stage].inputs.dataset_inputs:
        context = {tag.key: tag.value for tag in item.tags}["mlflow.data.context"]
        source = json.loads(item.dataset.source)["uri"]
        assert source == f"data/prepared/{item.dataset.name}.parquet"
        assert item.dataset.digest == dvc_md5(pipeline.place / source)
        found.add((item.dataset.name, context))
    return found


def test_metrics_are_there_step_by_step(pipeline: Pipeline) -> None:
    def steps(stage: str, key: str) -> list[int]:
        return pipeline.steps(pipeline.runs[stage], key)

    for key in ("score", "kl_sequence", "policy_loss", "entropy"):
        assert steps("train_ppo", key) == list(range(1, ITERATIONS + 1))
    assert steps("train_ppo", "validation_accuracy") == list(range(ITERATIONS + 1))
    assert steps("finetune_sft", "loss") == list(range(1, pipeline.params.sft.finetune.steps + 1))
    assert steps("train_reward", "loss") == list(range(1, len(steps("train_reward", "loss")) + 1))
    evaluation = pipeline.json("metrics/evaluation.json")
    assert pipeline.runs["evaluate"].data.metrics["test/gain"] == evaluation["test"]["gain"]
    assert pipeline.runs["prepare_data"].data.metrics["rows.test"] == 24


def test_the_policy_is_registered_with_its_lineage(pipeline: Pipeline) -> None:
    version = pipeline.client.get_model_version_by_alias("gsm8k-policy", "candidate")
    assert str(version.version) == "1"
    assert version.run_id == pipeline.runs["register"].info.run_id
    manifest = pipeline.place / "models/policy/manifest.json"
    locked = {path: md5 for outs in pipeline.locked().values() for path, md5 in outs.items()}
    evaluation = pipeline.json("metrics/evaluation.json")
    expected = {
        "policy_hash": sha256_file(manifest),
        **{f"{kind}_hash": parent for kind, parent in read_manifest(manifest.parent).parents.items()},
        "dvc.models/sft": locked["models/sft"],
        "dvc.models/reward": locked["models/reward"],
        "train_ppo_run_id": pipeline.runs["train_ppo"].info.run_id,
        "evaluate_run_id": pipeline.runs["evaluate"].info.run_id,
        "git.commit": pipeline.runs["register"].data.tags["mlflow.source.git.commit"],
        "seed": "0",
        "source": "tiny:",
        "test.policy_accuracy": str(evaluation["test"]["policy"]["accuracy"]),
        "gate.gain": str(evaluation["gate"]["gain"]),
    }
    assert {key: version.tags.get(key) for key in expected} == expected


# --- once more


def test_a_second_repro_runs_register_alone_and_changes_nothing(pipeline: Pipeline) -> None:
    lock, before = (pipeline.place / "dvc.lock").read_bytes(), pipeline.server_state()
    output = pipeline.succeed("dvc", "repro")
    assert stages_run(output) == ["register"]
    assert "gsm8k-policy version 1, policy " in output and ", registered already: " in output
    assert [stage for stage in STAGES if f"Stage '{stage}' didn't change, skipping" in output] == STAGES[:-1]
    assert pipeline.server_state() == before
    assert (pipeline.place / "dvc.lock").read_bytes() == lock


def test_dvc_restores_the_report_with_the_metrics(pipeline: Pipeline) -> None:
    page = pipeline.place / "reports/evaluation/index.html"
    before = page.read_bytes()
    page.write_text("the page of another policy")
    (pipeline.place / "metrics/evaluation.json").unlink()
    assert stages_run(pipeline.succeed("dvc", "repro")) == ["register"]
    assert page.read_bytes() == before


def test_the_same_run_by_hand_gives_the_same_bytes(pipeline: Pipeline, tmp_path: Path) -> None:
    outs = ("models", "metrics/ppo.json", "plots/ppo.csv", "plots/panel.csv")
    before = {out: dvc_md5(pipeline.place / out) for out in outs}
    output = pipeline.train_ppo("seed=0", state=tmp_path)
    assert "resumed" not in output
    assert "with overrides the outputs go to runs/train_ppo/" in output
    again = pipeline.take_results()
    policy = workspaces.contents(pipeline.place / "models/policy")
    assert again.keys() == {f"models/policy/{name}" for name in policy} | set(outs[1:])
    for path, content in again.items():
        assert content == (pipeline.place / path).read_bytes(), path
    assert {out: dvc_md5(pipeline.place / out) for out in outs} == before


def test_a_run_that_an_alarm_stops_keeps_a_bundle_that_replays(pipeline: Pipeline, tmp_path: Path) -> None:
    child = pipeline.start_ppo("ppo.kl.limit=1e-6", "ppo.kl.coef=0", state=tmp_path)
    assert child.wait() == 1
    (bundle,) = (pipeline.place / "runs/debug").glob("train_ppo-*-kl")
    told = pipeline.succeed("python", "-m", "rlhf.ppo.replay", str(bundle.relative_to(pipeline.place)))
    assert "ppo.kl.limit=1e-06" in told and "not finite: nothing" in told
    assert "rows with most KL" in told
    shutil.rmtree(pipeline.place / "runs")


def test_a_killed_run_goes_on_to_the_same_bytes(pipeline: Pipeline, tmp_path: Path) -> None:
    last = 8
    overrides = ("seed=1", f"ppo.iterations={last}")
    pipeline.train_ppo(*overrides, state=tmp_path / "whole")
    whole = pipeline.take_results()
    assert whole["plots/ppo.csv"] != (pipeline.place / "plots/ppo.csv").read_bytes()  # this seed is another run

    child = pipeline.start_ppo(*overrides, state=tmp_path / "killed")
    wait_for_iteration(tmp_path / "killed", child, 2)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    done = saved_iteration(tmp_path / "killed")
    assert done in range(2, last)
    assert not list((pipeline.place / "runs/train_ppo").iterdir())

    output = pipeline.train_ppo(*overrides, state=tmp_path / "killed")
    assert f"train_ppo: resumed after iteration {done}" in output
    assert pipeline.take_results() == whole
    assert saved_iteration(tmp_path / "killed") is None
    assert pipeline.steps(pipeline.all_runs()[0], "score") == list(range(1, last + 1))
    assert pipeline.succeed("git", "status", "--porcelain") == "?? dvc.lock\n"


# --- from the registry back


def test_a_version_is_made_again_hash_for_hash_from_what_the_registry_kept(pipeline: Pipeline, tmp_path: Path) -> None:
    command, again, before = ("python", "-m", "rlhf.lineage"), tmp_path / "again", pipeline.server_state()
    version = "models:/gsm8k-policy@candidate"
    history = json.loads(pipeline.succeed(*command, version, "--json"))
    assert {stage["stage"]: stage["run_id"] for stage in history["stages"]} == {
        stage: pipeline.runs[stage].info.run_id for stage in STAGES[:-1]
    }
    assert history["params"] == pipeline.params.model_dump()
    assert history["sft"] == pipeline.json("models/sft/manifest.json")
    assert (history["dirty"], history["diff"]) == (False, "")

    outcome = json.loads(pipeline.succeed(*command, version, "--reproduce", str(again), "--json"))
    policy = pipeline.locked()["train_ppo"]["models/policy"]
    assert outcome == {
        "reproduced": True,
        "verdict": f"reproduced: the same policy, hash for hash ({policy})",
        "details": [],
    }
    assert workspaces.contents(again / "models/policy") == workspaces.contents(pipeline.place / "models/policy")
    assert (again / ".dvc/cache/files/md5" / policy[:2]).is_dir()
    there = MlflowClient(f"sqlite:///{again / 'mlflow.db'}")
    experiment = there.get_experiment_by_name(tracking.EXPERIMENT)
    assert experiment is not None
    trained = there.search_runs([experiment.experiment_id])
    assert {run.data.tags["stage"] for run in trained} == set(STAGES[:-1])  # every one ran, and none registered
    assert pipeline.server_state() == before


# --- with an adapter


def test_an_adapter_is_merged_into_the_policy_and_lies_beside_it(pipeline: Pipeline, tmp_path: Path) -> None:
    # Nothing this small learns arithmetic for sure, but the score that it is trained on rises.
    overrides = ("ppo.lora.rank=4", "ppo.lr=0.003", "ppo.selection=reward_model", "ppo.reward.verifier_weight=0")
    pipeline.train_ppo(*overrides, state=tmp_path / "state")
    for path, content in pipeline.take_results().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    assert json.loads((tmp_path / "metrics/ppo.json").read_text())["best_iteration"] > 0
    directory, base = tmp_path / "models/policy", pipeline.place / "models/sft"
    policy, sft = load_policy(directory), load_policy(base)
    assert policy.state_dict().keys() == sft.state_dict().keys()
    adapter = {name for name in read_manifest(directory).files if name.startswith("adapter/")}
    assert adapter == {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    assert str(pipeline.place) not in "".join(readable(directory / name) for name in adapter)

    tokens = torch.tensor(encode_prompts(load_tokenizer(base), ["How many?"], pipeline.params.prompt))
    with torch.no_grad():
        before, merged = sft(tokens).logits, policy(tokens).logits
        beside = PeftModel.from_pretrained(sft, directory / "adapter")(tokens).logits
    torch.testing.assert_close(merged, beside, atol=1e-4, rtol=1e-5)
    assert (merged - before).abs().max() > 0.01

    script = (
        "import sys; sys.modules['peft'] = None\n"  # as where it is not installed
        "from transformers import AutoModelForCausalLM\n"
        f"found = AutoModelForCausalLM.from_pretrained({str(directory)!r}, output_loading_info=True)[1]\n"
        "assert not any(found.values()), found"
    )
    workspaces.succeed([sys.executable, "-c", script], tmp_path, pipeline.environ)
