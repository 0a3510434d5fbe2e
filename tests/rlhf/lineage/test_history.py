"""What `python -m rlhf.lineage` tells of a version, on a real sqlite store, and one line where it cannot."""

from __future__ import annotations

import json
from hashlib import sha256
from uuid import uuid4

import pytest
import yaml

from rlhf import anchors, tracking
from rlhf.lineage.__main__ import main
from rlhf.registry import records
from rlhf.registry.records import Records
from rlhf.registry.versions import Version
from tests.registered import add_version, candidate, decide, store

COMMIT = anchors.git("rev-parse", "HEAD")
PREPARED = {"data/prepared": uuid4().hex}
POLICY = {"models/policy": uuid4().hex, "metrics/ppo.json": uuid4().hex}


def entries(hashes: dict[str, str]) -> list[dict[str, str]]:
    return [{"path": path, "hash": "md5", "md5": md5} for path, md5 in hashes.items()]


LOCK = {
    "prepare_data": {"deps": entries({"rlhf/config.py": "c0"}), "outs": entries(PREPARED)},
    "train_ppo": {"deps": entries({"data/prepared/train.parquet": "d1"}), "outs": entries(POLICY)},
    "register": {"deps": entries({"data/other": "d2"})},
}
SFT = {
    "source": "tiny:",
    "revision": None,
    "license": "MIT",
    "seed": 3,
    "stop_token": "<e>",
    "parents": {"fetched": "f"},
}
ACCURACY = {"accuracy": 0.75, "low": 0.5, "high": 0.875}
EVALUATION = {"test": {"policy": ACCURACY, "sft": ACCURACY | {"accuracy": 0.625}}}
FILES = {
    "dvc.lock": yaml.safe_dump({"schema": "2.0", "stages": LOCK}, sort_keys=False).encode(),
    "params.yaml": b"seed: 4711\nppo: {lr: 0.5}\n",
    "changes.diff": b"diff --git a/rlhf/ppo/kl.py b/rlhf/ppo/kl.py\n+more\n",
    "sft_manifest.json": json.dumps(SFT).encode(),
    "evaluation.json": json.dumps(EVALUATION).encode(),
}


@pytest.fixture
def name() -> str:
    return f"model-{uuid4().hex}"


@pytest.fixture
def version(name) -> Version:
    """A version with all its records; the run of `prepare_data` is gone."""
    with tracking.stage_run("train_ppo", {}) as run:
        run.tag_outs(POLICY)
    made = add_version(name, "f00d")
    code = {"git.commit": COMMIT or "", "git.diff": sha256(FILES["changes.diff"]).hexdigest()}
    tags = code | {"git.dirty": "true", "machine.processor": "P 9", "run": run.id}
    for key, value in tags.items():
        store().set_model_version_tag(name, made.number, key, value)
    records.file(Version(name, made.number, "f00d", tags), Records(FILES, code))
    decide(made, candidate(60))
    return Version(name, made.number, "f00d", tags)


def test_the_tree_leads_from_the_alias_to_all_that_made_the_version(version, capsys):
    assert main([f"models:/{version.name}@champion"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{version.name} version 1 (champion)",
        "  policy f00d",
        "    test: 75.0 % [50.0, 87.5] right, its start 62.5 % [50.0, 87.5]",
        "  gate: passed",
        "    reasons: gain on gate +40.0 points, p 9.1e-13",
        "    compared_with: none",
        f"  code: commit {COMMIT} with changes of",
        "    rlhf/ppo/kl.py",
        "  params.yaml: 2 of 2 other than the commit's",
        "    seed: 4711",
        "    ppo.lr: 0.5",
        "  data",
        "    data/prepared/train.parquet: d1",
        "  SFT start",
        "    source: tiny:",
        "    license: MIT",
        "    seed: 3",
        "    stop_token: <e>",
        "    made from fetched: f",
        "  stages",
        "    prepare_data: no run found",
        f"      data/prepared: {PREPARED['data/prepared']}",
        f"    train_ppo: run {version.tags['run']}",
        f"      models/policy: {POLICY['models/policy']}",
        f"      metrics/ppo.json: {POLICY['metrics/ppo.json']}",
        "  trained on",
        "    processor: P 9",
    ]


def test_the_json_has_all_of_it(version, capsys):
    assert main([f"models:/{version.name}/1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["params"] == {"seed": 4711, "ppo": {"lr": 0.5}}
    assert told["diff"] == FILES["changes.diff"].decode()
    assert not told["is_masked"]
    assert told["sft"] == SFT
    assert told["evaluation"] == EVALUATION
    assert (told["name"], told["version"], told["aliases"]) == (version.name, "1", ["champion"])
    assert (told["commit"], told["dirty"], told["machine"]) == (COMMIT, True, {"processor": "P 9"})
    assert [(stage["stage"], stage["outs"]) for stage in told["stages"]] == [
        ("prepare_data", PREPARED),
        ("train_ppo", POLICY),
    ]


def test_a_version_without_records_says_what_was_not_kept(name, capsys):
    add_version(name, "f00d")
    assert main([f"models:/{name}/1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{name} version 1",
        "  policy f00d",
        "  gate: not judged",
        "  code: in no git repository",
        "  params.yaml: not kept with this version",
        "  data: not kept with this version",
        "  SFT manifest: not kept with this version",
        "  dvc.lock: not kept with this version",
        "  machine: not kept with this version",
    ]


@pytest.mark.parametrize(
    ("uri", "code", "fault"),
    [
        ("gsm8k-policy", 2, "gsm8k-policy: no version of a model: write models:/gsm8k-policy@champion or"),
        ("models:/gsm8k-policy", 2, "models:/gsm8k-policy: no version of a model"),
        ("models:/nobody@champion", 1, "no model nobody is registered"),
        ("models:/{name}@champion", 1, "{name} has no version 'champion': take one of 1"),
        ("models:/{name}/12", 1, "{name} has no version '12': take one of 1"),
    ],
)
def test_what_is_not_there_is_one_line(name, capfd, uri, code, fault):
    add_version(name, "f00d")
    assert main([uri.format(name=name)]) == code
    err = capfd.readouterr().err
    assert err.startswith(f"lineage: {fault.format(name=name)}")
    assert err.count("\n") == 1


def test_a_server_that_is_down_is_one_line(monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert main(["models:/gsm8k-policy@champion"]) == 1
    err = capfd.readouterr().err
    assert err.startswith("lineage: MLflow at http://127.0.0.1:9: ") and err.count("\n") == 1


def test_register_made_nothing_of_the_policy():
    assert list(records.lock_stages(FILES)) == ["prepare_data", "train_ppo"]
    assert records.data_read(FILES) == {"data/prepared/train.parquet": "d1"}
    assert records.lock_stages({}) == {}
