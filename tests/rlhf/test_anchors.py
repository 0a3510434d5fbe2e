"""Every worktree finds the main checkout; a copy without git stays by itself."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from rlhf import anchors
from rlhf.errors import UserError


def git(directory: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    main = tmp_path / "main"
    main.mkdir()
    git(main, "init", "-q")
    git(main, "commit", "-q", "--allow-empty", "-m", "first")
    return main


def test_main_checkout_of_itself_and_of_a_worktree(repository, tmp_path):
    git(repository, "worktree", "add", "-q", str(tmp_path / "tree"))
    assert anchors.main_checkout(repository) == repository
    assert anchors.main_checkout(tmp_path / "tree") == repository


def test_a_copy_inside_another_repository_stays_by_itself(repository):
    copy = repository / "vendor" / "copy"
    copy.mkdir(parents=True)
    assert anchors.main_checkout(copy) == copy


def test_without_git_it_is_the_checkout(tmp_path, monkeypatch):
    assert anchors.main_checkout(tmp_path) == tmp_path
    other = tmp_path / "other"
    monkeypatch.setenv("PATH", "")
    assert anchors.main_checkout(other) == other


def test_a_hooks_git_dir_does_not_mislead(repository, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    git(elsewhere, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(elsewhere / ".git"))
    assert anchors.main_checkout(repository) == repository


def test_tracking_uri_defaults_to_the_main_checkout(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert anchors.tracking_uri() == f"sqlite:///{anchors.main_checkout()}/mlflow.db"
    assert anchors.artifact_root() == anchors.main_checkout() / "mlartifacts"


def test_artifacts_lie_beside_a_database_of_ones_own(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/own.db")
    assert anchors.artifact_root() == tmp_path / "mlartifacts"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("postgresql://user:a+b@host/db?host=/x", "postgresql+psycopg2://user:a+b@host/db?host=/x"),
        ("postgresql+asyncpg://user@host/db", "postgresql+asyncpg://user@host/db"),
        ("sqlite:////tmp/mlflow.db", "sqlite:////tmp/mlflow.db"),
        ("sqlite:///relative.db", "sqlite:///{cwd}/relative.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
    ],
)
def test_tracking_uri_from_the_environment(monkeypatch, tmp_path, given, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    assert anchors.tracking_uri() == expected.format(cwd=tmp_path)
    assert anchors.environment()["MLFLOW_TRACKING_URI"] == anchors.tracking_uri()


def test_what_is_no_tracking_uri_is_told_without_its_password(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://user:a[b@host/db")
    with pytest.raises(
        UserError, match=r"^MLFLOW_TRACKING_URI=postgresql://user:\*\*\*@host/db: Invalid IPv6 URL: write"
    ):
        anchors.tracking_uri()


@pytest.mark.parametrize("uri", ["nonsense://x", "htpp://127.0.0.1:5000", "gs+psycopg2://x/y"])
def test_a_scheme_that_mlflow_does_not_know_is_refused(monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    told = f"MLFLOW_TRACKING_URI={uri}: MLflow keeps nothing under {uri.partition(':')[0]}://: write http://host:port"
    with pytest.raises(UserError, match=f"^{re.escape(told)}"):
        anchors.tracking_uri()


@pytest.mark.parametrize("place", ["nowhere/deeper", "file"])
def test_a_database_in_no_directory_is_told_and_none_is_made(monkeypatch, tmp_path, place):
    (tmp_path / "file").touch()
    uri = f"sqlite:///{tmp_path}/{place}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(UserError, match=f"^MLFLOW_TRACKING_URI={uri}: {tmp_path}/{place} is no directory: make it"):
        anchors.tracking_uri()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_state_is_kept_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("RLHF_STATE_DIR", raising=False)
    assert anchors.state_dir().is_relative_to(anchors.main_checkout())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_STATE_DIR", "mine")
    assert anchors.state_dir() == tmp_path / "mine"
    assert anchors.environment()["RLHF_STATE_DIR"] == str(tmp_path / "mine")


@pytest.mark.parametrize("place", ["state", "journal", "mirror"])
def test_a_file_where_a_directory_should_be_is_told(monkeypatch, tmp_path, place):
    variable, file = f"RLHF_{place.upper()}_DIR", tmp_path / "file"
    file.touch()
    monkeypatch.setenv(variable, str(file))
    with pytest.raises(UserError, match=f"^{file}: a file, and {variable} wants a directory"):
        getattr(anchors, f"{place}_dir")()


def test_children_are_not_tracked_by_vendors():
    assert anchors.environment()["DO_NOT_TRACK"] == "true"
