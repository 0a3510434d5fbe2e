"""An S3 store on loopback as a team has it: DVC's remote in one bucket, MLflow's artifacts in another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from mlflow import MlflowClient
from moto.server import ThreadedMotoServer

from flows.servers import HOST, free_port, server
from rlhf import tracking
from rlhf.ask import ask_directory
from rlhf.registry import versions
from rlhf.registry.answer import ask_registered
from tests.e2e import workspaces
from tests.e2e.pipelines import stages_run
from tests.policies import save_policy
from tests.served import serving, wait_for

NAME = "stored"
QUESTION = "Tom has 3 apples and eats 2. How many are left?"


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    """The environment of a client of an empty store with the buckets `dvc` and `mlflow`."""
    service = ThreadedMotoServer(HOST, port=0, verbose=False)
    service.start()
    host, port = service.get_host_and_port()
    environ = {
        "AWS_ACCESS_KEY_ID": "rlhf",
        "AWS_SECRET_ACCESS_KEY": "planted-secret-of-the-store",
        "AWS_DEFAULT_REGION": "us-east-1",
        "MLFLOW_S3_ENDPOINT_URL": f"http://{host}:{port}",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        for bucket in ("dvc", "mlflow"):
            s3(environ).create_bucket(Bucket=bucket)
    yield environ
    service.stop()


def s3(environ: dict[str, str]) -> Any:
    return boto3.client("s3", endpoint_url=environ["MLFLOW_S3_ENDPOINT_URL"])


def keys(environ: dict[str, str], bucket: str) -> list[str]:
    """The names of all objects in a bucket."""
    pages = s3(environ).get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return [item["Key"] for page in pages for item in page.get("Contents", [])]


@pytest.fixture
def _in_the_store(store: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_in_the_store")
def test_what_one_checkout_pushes_another_pulls_and_computes_nothing(store: dict[str, str], tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    environ = workspaces.environment(tmp_path / "tracking") | {"DVC_SITE_CACHE_DIR": str(tmp_path / "site")}

    def run(*command: str, place: Path) -> str:
        return workspaces.succeed([*command], place, environ)

    workspaces.copy_checkout(first)
    run("python", "-m", "rlhf.config", "compose", "scale=smoke", place=first)
    run("git", "init", "-q", place=first)
    run("dvc", "remote", "add", "--default", "team", "s3://dvc/gsm8k-rlhf", place=first)
    run("dvc", "remote", "modify", "team", "endpointurl", store["MLFLOW_S3_ENDPOINT_URL"], place=first)
    workspaces.commit(first)
    run("git", "clone", "-q", str(first), str(third), place=tmp_path)  # before there is a dvc.lock
    assert stages_run(run("dvc", "repro", "fetch_sft", place=first)) == ["fetch_sft"]
    run("dvc", "push", "--run-cache", place=first)
    made = workspaces.contents(first / "models")
    assert len(keys(store, "dvc")) >= len(made)

    workspaces.commit(first)  # a team with a remote commits dvc.lock
    run("git", "clone", "-q", str(first), str(second), place=tmp_path)
    assert stages_run(run("dvc", "repro", "--pull", "fetch_sft", place=second)) == []
    assert workspaces.contents(second / "models") == made

    # Without a dvc.lock the run cache, which the remote has as well, knows what the stage would make.
    run("dvc", "fetch", "--run-cache", place=third)
    assert stages_run(run("dvc", "repro", "--pull", "fetch_sft", place=third)) == []
    assert workspaces.contents(third / "models") == made


def register(policy: Path) -> versions.Version:
    with tracking.stage_run("register", {}) as run:
        return versions.register_policy(
            policy, name=NAME, metrics={"test.gain": 0.25}, lineage={}, max_new_tokens=12, run=run
        )


def assert_kept(store: dict[str, str], version: versions.Version, policy: Path, prefix: str) -> None:
    """The version's weights are in the bucket below `prefix`, and damage to them is noticed."""
    assert versions.find_version(NAME, policy) == version
    (key,) = (key for key in keys(store, "mlflow") if key.startswith(prefix) and key.endswith("model.safetensors"))
    kept = s3(store).get_object(Bucket="mlflow", Key=key)["Body"].read()
    assert kept == (policy / "model.safetensors").read_bytes()
    s3(store).delete_object(Bucket="mlflow", Key=key)
    try:
        assert versions.find_version(NAME, policy) is None
    finally:
        s3(store).put_object(Bucket="mlflow", Key=key, Body=kept)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policies") / "policy")


@pytest.fixture
def mlflow_server(store: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The address of an MLflow server whose artifacts go to the bucket, as in compose.yaml."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    command += ["--serve-artifacts", "--artifacts-destination", "s3://mlflow/served"]
    address = f"http://{HOST}:{port}"
    with server("mlflow", command, f"{address}/health", store) as own:
        own.wait()
        yield address


def test_a_server_keeps_a_policy_in_the_store_and_clients_need_no_key_to_it(
    store: dict[str, str], mlflow_server: str, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    version = register(policy)
    assert_kept(store, version, policy, "served/")
    MlflowClient(mlflow_server).set_registered_model_alias(NAME, "champion", version.number)
    with serving(NAME) as (_, client):
        health = wait_for(client, ready=True)
        assert health["version"] == {"name": NAME, "number": version.number, "alias": "champion"}
        assert len(client.post("/answers", json={"questions": [QUESTION]}).json()["answers"]) == 1


@pytest.mark.usefixtures("_in_the_store")
def test_clients_of_a_database_put_artifacts_there_themselves(
    store: dict[str, str], policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    command = [
        "experiments",
        "create",
        "--experiment-name",
        tracking.EXPERIMENT,
        "--artifact-location",
        "s3://mlflow/direct",
    ]
    subprocess.run([sys.executable, "-m", "mlflow", *command], check=True, stdout=subprocess.DEVNULL)
    version = register(policy)
    assert_kept(store, version, policy, "direct/")
    answer = ask_registered(NAME, QUESTION)
    assert answer.version == f"{NAME} version {version.number} (candidate)"
    assert answer.text == ask_directory(QUESTION, policy, max_new_tokens=12)
