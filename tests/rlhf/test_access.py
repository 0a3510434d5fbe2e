"""One password for servers and clients: the environments that follow from it, and real servers that ask for it."""

from __future__ import annotations

import configparser
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from flows import servers, ui
from rlhf import access, anchors, tracking
from rlhf.errors import UsageError
from rlhf.tracking import server
from tasks.supervisor import descendants

PASSWORD = "a long password"
CLIENTS = ("PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(access.VARIABLE, PASSWORD)
    for name in CLIENTS:  # set here, so that monkeypatch takes back what the code sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_without_a_password_nobody_asks_for_one_and_nobody_gives_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (None, ""):
        monkeypatch.delenv(access.VARIABLE, raising=False) if given is None else monkeypatch.setenv(access.VARIABLE, "")
        assert (access.password(), access.for_clients(), access.for_prefect()) == ("", {}, {})


def test_a_password_that_mlflow_would_refuse_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(access.VARIABLE, "elevenchars")
    with pytest.raises(UsageError, match="^RLHF_PASSWORD: has 11 characters: MLflow wants 12 or more$"):
        access.password()


def test_clients_and_servers_agree(planted: None, tmp_path: Path) -> None:
    assert access.for_clients() == {
        "PREFECT_API_AUTH_STRING": "rlhf:a long password",
        "MLFLOW_TRACKING_USERNAME": "rlhf",
        "MLFLOW_TRACKING_PASSWORD": "a long password",
    }
    assert access.for_prefect() == {"PREFECT_SERVER_API_AUTH_STRING": "rlhf:a long password"}
    mlflow = access.for_mlflow(tmp_path)
    assert mlflow["MLFLOW_AUTH_ADMIN_PASSWORD"] == "a long password"
    assert len(mlflow["MLFLOW_FLASK_SERVER_SECRET_KEY"]) == 64
    users = configparser.ConfigParser()
    users.read(mlflow["MLFLOW_AUTH_CONFIG_PATH"])
    assert users["mlflow"]["database_uri"] == f"sqlite:///{tmp_path}/users.db"
    assert all(PASSWORD not in path.read_text() for path in tmp_path.iterdir())


def test_what_the_user_has_set_for_other_servers_wins(planted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
    server.quiet_mlflow()
    assert os.environ["MLFLOW_TRACKING_USERNAME"] == "ann"


@pytest.fixture
def addresses(planted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The addresses of both servers as `make ui` starts them, each on a free port."""
    monkeypatch.setattr(anchors, "main_checkout", lambda: tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "100")
    monkeypatch.setattr(servers, "START_SECONDS", 300.0)
    monkeypatch.setattr(ui, "PREFECT_UI_PORT", servers.free_port())
    monkeypatch.setattr(ui, "MLFLOW_UI_PORT", servers.free_port())
    with ExitStack() as running:
        started = [ui.start_prefect(running), ui._mlflow(running)]
        for _, _, own in started:
            assert own is not None
            own.wait()
        yield {name: address for name, address, _ in started}


def test_the_servers_let_in_who_has_the_password_and_nobody_else(
    addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = {"Prefect": "/api/flows/filter", "MLflow": "/api/2.0/mlflow/experiments/search"}
    for name, path in questions.items():
        body = json.dumps({"max_results": 1} if name == "MLflow" else {}).encode()
        request = Request(addresses[name] + path, body, {"Content-Type": "application/json"})
        with pytest.raises(HTTPError) as refused:
            urlopen(request)
        assert refused.value.code == 401

    monkeypatch.setenv("MLFLOW_TRACKING_URI", addresses["MLflow"])
    with tracking.pipeline_run({"seed": 7}, {}) as run:
        run_id = run.id
    assert MlflowClient(addresses["MLflow"]).get_run(run_id).data.params == {"seed": "7"}
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "another password")
    with pytest.raises(MlflowException, match="401|authenticated"):
        MlflowClient(addresses["MLflow"]).get_run(run_id)

    from prefect.client.orchestration import SyncPrefectClient

    api = f"{addresses['Prefect']}/api"
    with SyncPrefectClient(api, auth_string=os.environ["PREFECT_API_AUTH_STRING"]) as client:
        assert client.read_flows() == []

    commands = [Path(f"/proc/{pid}/cmdline") for pid in descendants(os.getpid())]
    assert commands
    assert not any(PASSWORD.encode() in command.read_bytes() for command in commands if command.exists())
