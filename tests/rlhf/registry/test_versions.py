"""What a registration leaves in the registry, and who answers from it, on a real sqlite store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from uuid import uuid4

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlhf import anchors, tracking
from rlhf.data.prompts import decode_response, render_prompt
from rlhf.errors import UserError
from rlhf.generation.engine import generate
from rlhf.models.checkpoints import checkpoint_hash, load_policy, load_tokenizer, read_manifest, write_manifest
from rlhf.registry import versions
from rlhf.registry.answer import _serving, ask_registered
from tests.policies import PARAMS, save_policy

QUESTIONS = ["Tom has 3 apples and eats 2. How many are left?", "A pen costs 4 coins. How much are 5 pens?"]
MAX_NEW_TOKENS = 12


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("first") / "policy")


@pytest.fixture(scope="module")
def other_policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("second") / "policy", seed=1)


@pytest.fixture
def name() -> str:
    """A registered model of the test's own."""
    return f"model-{uuid4().hex}"


@pytest.fixture
def store() -> MlflowClient:
    return MlflowClient(anchors.tracking_uri())


def register(directory: Path, name: str) -> versions.Version:
    with tracking.stage_run("register", {}) as run:
        return versions.register_policy(
            directory,
            name=name,
            metrics={"test.gain": 0.25},
            lineage={"seed": 0, "sft_hash": "5f7"},
            max_new_tokens=MAX_NEW_TOKENS,
            run=run,
        )


def contents(store: MlflowClient, name: str):
    """Everything that a registration could change: versions with their tags, aliases, runs, logged models."""
    versions = [(v.version, v.tags, v.last_updated_timestamp) for v in store.search_model_versions(f"name='{name}'")]
    experiment = store.get_experiment_by_name(tracking.EXPERIMENT).experiment_id
    runs = {run.info.run_id for run in store.search_runs([experiment])}
    models = {model.model_id for model in store.search_logged_models([experiment])}
    return versions, store.get_registered_model(name).aliases, runs, models


def test_a_policy_becomes_the_candidate_with_scores_and_lineage(store, policy, name):
    version = register(policy, name)
    assert version == versions.Version(name, "1", checkpoint_hash(policy), {})
    recorded = store.get_model_version_by_alias(name, "candidate")
    assert str(recorded.version) == "1"
    assert recorded.tags == {
        "policy_hash": checkpoint_hash(policy),
        "registered": "true",
        "seed": "0",
        "sft_hash": "5f7",
        "test.gain": "0.25",
    }
    run = store.get_run(recorded.run_id)
    assert (run.info.run_name, run.info.status) == ("register", "FINISHED")
    assert run.data.metrics == {"test.gain": 0.25}
    assert versions.find_version(name, policy) == version


def test_tags_hold_no_secret(store, policy, name, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "5f7-or-longer")
    with tracking.stage_run("register", {}) as run:
        lineage = {"source": "https://ann:hunter22@host/model", "git.branch": "try-5f7-or-longer"}
        version = versions.register_policy(
            policy, name=name, metrics={}, lineage=lineage, max_new_tokens=MAX_NEW_TOKENS, run=run
        )
    kept = store.get_model_version(name, version.number).tags
    assert (kept["source"], kept["git.branch"]) == ("https://ann:***@host/model", "try-***")


def test_the_same_policy_again_changes_nothing(store, policy, name):
    first = register(policy, name)
    before = contents(store, name)
    copy = policy.parent / f"copy-{name}"
    shutil.copytree(policy, copy)
    assert register(copy, name) == first
    assert contents(store, name) == before


def test_another_policy_is_another_version(store, policy, other_policy, name):
    register(policy, name)
    assert register(other_policy, name).number == "2"
    assert register(policy, name).number == "1"
    assert store.get_registered_model(name).aliases == {"candidate": 2}


def test_an_interrupted_registration_is_completed(store, policy, name, monkeypatch):
    def fail(*_):
        raise MlflowException("the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_registered_model_alias", fail)
        with pytest.raises(UserError, match="the connection broke"):
            register(policy, name)
    assert versions.find_version(name, policy) is None
    assert register(policy, name).number == "1"
    assert store.get_registered_model(name).aliases == {"candidate": 1}
    assert versions.find_version(name, policy) is not None


def files_of(store: MlflowClient, name: str) -> Path:
    """Where the candidate's files lie."""
    version = store.get_model_version_by_alias(name, "candidate").version
    return Path(store.get_model_version_download_uri(name, version).removeprefix("file://"))


def lose_all(files: Path) -> None:
    shutil.rmtree(files)


def lose_the_weights(files: Path) -> None:
    (files / "artifacts/policy/model.safetensors").unlink()


def lose_the_code(files: Path) -> None:
    (files / "served_policy.py").unlink()


def lose_the_library(files: Path) -> None:
    shutil.rmtree(files / "code")


def cut_the_weights(files: Path) -> None:
    with (files / "artifacts/policy/model.safetensors").open("ab") as file:
        file.truncate(1000)


DAMAGES = (lose_all, lose_the_weights, lose_the_code, lose_the_library, cut_the_weights)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_version_whose_files_are_gone_is_registered_anew(store, policy, name, damage, capsys):
    register(policy, name)
    damage(files_of(store, name))
    assert versions.find_version(name, policy) is None
    assert register(policy, name).number == "2"
    assert f"register: the files of {name} version 1 are gone" in capsys.readouterr().out
    assert store.get_registered_model(name).aliases == {"candidate": 2}
    assert versions.find_version(name, policy) == versions.Version(name, "2", checkpoint_hash(policy), {})
    before = contents(store, name)
    assert register(policy, name).number == "2"
    assert contents(store, name) == before


def change_the_weights(files: Path) -> None:
    (files / "artifacts/policy/model.safetensors").write_bytes(b"x")


@pytest.mark.parametrize("damage", [lose_all, lose_the_code, lose_the_library, change_the_weights])
def test_asking_a_candidate_whose_files_are_gone_says_to_register_it(store, policy, name, damage):
    register(policy, name)
    damage(files_of(store, name))
    with pytest.raises(UserError, match=rf"^{name} version 1: .*register it again: make repro stage=register$") as e:
        ask_registered(name, QUESTIONS[0])
    assert "start it" not in str(e.value)


def test_two_at_once_make_one_version(store, policy, name):
    with ThreadPoolExecutor(2) as pool:
        numbers = [version.number for version in pool.map(lambda _: register(policy, name), range(2))]
    assert numbers == ["1", "1"]
    assert len(store.search_model_versions(f"name='{name}'")) == 1


ANYWHERE = """
import json, sys
import mlflow

model = mlflow.pyfunc.load_model({uri!r})
questions = {questions!r}

def refused(questions, **params):
    try:
        model.predict(questions, params=params)
    except mlflow.MlflowException as error:
        return [error.get_http_status_code(), error.message]

refusals = [refused(["word " * 5000]), refused([" "]), refused(questions, samples=3), refused(questions, samples=0)]
sampled = dict(samples=3, temperature=1.0, seed=5)
found = {{
    "answers": model.predict(questions),
    "short": model.predict(questions[:1], params=dict(max_new_tokens=1)),
    "sampled": model.predict(questions, params=sampled),
    "alone": model.predict(questions[1:], params=sampled),
    "other seed": model.predict(questions[1:], params=sampled | dict(seed=6)),
    "refusals": refusals,
    "ours": sorted(module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "rlhf"),
}}
print(json.dumps(found))
"""


def test_a_registered_policy_answers_anywhere_as_the_pipeline_does(store, policy, name, tmp_path):
    """In a process that has no checkout on its path, and no packages but those that its requirements bring."""
    register(policy, name)
    version = store.get_model_version_by_alias(name, "candidate")
    files = Path(store.get_model_version_download_uri(name, version.version).removeprefix("file://"))
    code = ANYWHERE.format(uri=f"models:/{name}@candidate", questions=QUESTIONS)
    environ = os.environ | {"PYTHONPATH": str(link_packages(brought_by(versions.REQUIREMENTS), tmp_path / "packages"))}
    command = [sys.executable, "-S", "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])

    texts = [answer["text"] for answer in found["answers"]]
    assert texts == engine_answers(policy, QUESTIONS, MAX_NEW_TOKENS)
    assert [answer["text"] for answer in found["short"]] == engine_answers(policy, QUESTIONS[:1], 1)
    assert len({*texts, found["short"][0]["text"]}) == 3, "answers that could be told apart"
    first = found["answers"][0]
    assert (first["version"], first["policy"]) == (f"{name}/1", checkpoint_hash(policy)[:12])
    assert first["samples"] == [{key: first[key] for key in ("text", "answer", "finished")}]

    assert [len(answer["samples"]) for answer in found["sampled"]] == [3, 3]
    assert len({sample["text"] for answer in found["sampled"] for sample in answer["samples"]}) == 6
    assert found["sampled"][1:] == found["alone"] != found["other seed"], "an answer depends on its neighbours"

    assert {status for status, _ in found["refusals"]} == {400}
    too_long, empty, greedy, none = (message for _, message in found["refusals"])
    assert f"this policy reads at most {PARAMS.prompt.max_tokens}" in too_long
    assert "the question is empty" in empty
    assert "samples=3 at temperature=0" in greedy
    assert "samples=0" in none

    assert found["ours"] and all(Path(file).is_relative_to(files / "code/rlhf") for file in found["ours"])


def brought_by(names) -> set[str]:
    """The distributions that come with these, themselves included."""
    found, waiting = set[str](), [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name not in found and is_installed(name):
            found.add(name)
            needed = map(Requirement, requires(name) or [])
            waiting += [canonicalize_name(r.name) for r in needed if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


def is_installed(name: str) -> bool:
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return False


def link_packages(names: set[str], place: Path) -> Path:
    """A directory with links to what these distributions installed, and nothing else."""
    place.mkdir()
    installed = [distribution(name) for name in names]
    for top, files in {(file.parts[0], d.locate_file("")) for d in installed for file in d.files or []}:
        if top != ".." and not (place / top).exists():
            (place / top).symlink_to(Path(str(files), top))
    return place


def test_a_clean_environment_gets_the_locked_versions(store, policy, name):
    register(policy, name)
    files = files_of(store, name)
    requirements = (files / "requirements.txt").read_text().splitlines()
    assert sorted(requirements) == sorted([*versions._requirements(versions.LOCK_FILE), "-c constraints.txt"])
    constraints = (files / "constraints.txt").read_text().splitlines()
    assert [line for line in constraints if line.startswith("fastapi")] == [
        str(line) for line in versions._locked(versions.LOCK_FILE) if line.name == "fastapi"
    ]


def engine_answers(directory: Path, questions: list[str], max_new_tokens: int) -> list[str]:
    tokenizer = load_tokenizer(directory)
    samples = generate(
        load_policy(directory),
        [render_prompt(tokenizer, question, PARAMS.prompt) for question in questions],
        stop_ids=[tokenizer.eos_token_id],
        pad_id=tokenizer.pad_token_id,
        max_new_tokens=max_new_tokens,
        batch_size=1,
    )
    return [decode_response(tokenizer, sample.tokens) for sample in samples]


def test_the_champion_is_asked_or_the_candidate_where_there_is_none(store, policy, other_policy, name):
    with pytest.raises(UserError, match=f"no model {name} is registered: run the pipeline first"):
        ask_registered(name, QUESTIONS[0])
    register(policy, name)
    register(other_policy, name)
    alias, version = _serving(store, name)
    assert (alias, str(version.version)) == ("candidate", "2")
    store.set_registered_model_alias(name, "champion", "1")
    answer = ask_registered(name, QUESTIONS[0])
    assert answer.version == f"{name} version 1 (champion)"
    assert answer.text == engine_answers(policy, QUESTIONS[:1], MAX_NEW_TOKENS)[0]


def test_bytes_that_change_on_the_way_are_not_registered(store, policy, name, monkeypatch):
    """Of the same size, so that only their hash tells; what arrived damaged is registered anew the next time."""
    create = versions._create_version

    def damaged(*arguments):
        version = create(*arguments)
        files = Path(store.get_model_version_download_uri(name, version.version).removeprefix("file://"))
        with (files / "artifacts/policy/model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)[0]
            file.seek(-1, 2)
            file.write(bytes([last ^ 1]))
        return version

    with monkeypatch.context() as patch:
        patch.setattr(versions, "_create_version", damaged)
        with pytest.raises(UserError, match=f"^{name} version 1: its files changed on the way: register it again$"):
            register(policy, name)
    assert store.get_registered_model(name).aliases == {}
    assert register(policy, name).number == "2"
    assert store.get_registered_model(name).aliases == {"candidate": 2}


def test_files_that_dvc_links_to_its_cache_are_registered(store, policy, name, tmp_path):
    linked = tmp_path / "policy"
    linked.mkdir()
    for file in policy.iterdir():
        (linked / file.name).symlink_to(file)
    assert register(linked, name).number == "1"
    assert not [file for file in files_of(store, name).rglob("*") if file.is_symlink()]
    assert "registry-register.lock" in [path.name for path in anchors.registry_lock().parent.iterdir()]


def test_a_policy_with_its_adapter_in_a_folder_is_registered_once(store, policy, name, tmp_path):
    with_adapter, adapter = tmp_path / "policy", tmp_path / "policy/adapter/adapter_config.json"
    shutil.copytree(policy, with_adapter)
    adapter.parent.mkdir()
    adapter.write_text("{}")
    write_manifest(with_adapter, read_manifest(with_adapter))
    assert [register(with_adapter, name).number for _ in range(2)] == ["1", "1"]
    assert versions.find_version(name, with_adapter) is not None


def test_a_changed_file_is_not_registered(policy, name, tmp_path):
    broken = tmp_path / "policy"
    shutil.copytree(policy, broken)
    with (broken / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match="model.safetensors is not what"):
        register(broken, name)


def test_a_server_that_is_down_is_named_in_one_line(policy, name, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    with pytest.raises(UserError) as caught:
        register(policy, name)
    message = str(caught.value)
    assert "http://user:***@127.0.0.1:9" in message
    assert "Connection refused" in message
    assert "\n" not in message


def test_a_database_that_cannot_be_opened_is_told_at_once(name, tmp_path, monkeypatch):
    """MLflow itself tries for 100 seconds."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}")
    monkeypatch.setattr(time, "sleep", lambda _seconds: pytest.fail("it is tried again"))
    with pytest.raises(UserError, match=f"^MLflow at sqlite:///{tmp_path}: unable to open database file: "):
        ask_registered(name, QUESTIONS[0])


def test_requirements_are_the_locked_versions_for_this_python(tmp_path):
    lock = tmp_path / "requirements.lock"
    lock.write_text(
        "# comment\n"
        "torch==2.15.0 \\\n    --hash=sha256:00\n"
        "torchvision==1.0\n"
        "numpy==1.0 ; python_full_version < '3.8' \\\n    --hash=sha256:00\n"
        "numpy==2.0 ; python_full_version >= '3.8' \\\n    --hash=sha256:00\n"
    )
    assert versions._requirements(lock) == ["torch==2.15.0", "numpy==2.0"]
    names = {line.split("==")[0] for line in versions._requirements(anchors.CHECKOUT / "requirements.lock")}
    assert names == set(versions.REQUIREMENTS)
