"""Which artifacts may go: those that no registered version leads to, on a real sqlite store."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from mlflow import MlflowClient

from rlhf import tracking
from rlhf.registry import leftovers as module
from rlhf.registry import versions
from rlhf.registry.leftovers import leftovers
from tests import registered
from tests.policies import save_policy


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """A tracking database of the test's own."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("RLHF_JOURNAL_DIR", str(tmp_path / "journal"))
    return registered.store()


def logged(text: str) -> str:
    """A finished run with one artifact."""
    with tracking.pipeline_run({}, {}) as run:
        run.log_text(text, "note.txt")
        return run.id


def test_what_a_version_leads_to_stays_and_the_rest_may_go(store: MlflowClient, tmp_path: Path) -> None:
    assert leftovers() == []
    maker, other, deleted = logged("the maker"), logged("another"), logged("one that somebody deleted")
    name = f"model-{uuid4().hex}"
    policy = save_policy(tmp_path / "policy")
    with tracking.stage_run("register", {}) as run:
        made = versions.register_policy(
            policy, name=name, metrics={}, lineage={"train_ppo_run_id": maker}, max_new_tokens=12, run=run
        )
    store.delete_run(deleted)
    found = {item.path.parent.name: item for item in leftovers()}
    assert found.keys() == {other, deleted}
    assert (found[other].is_waste, found[deleted].is_waste) == (False, True)
    for item in found.values():
        item.remove()
        assert not item.path.exists()
    assert store.get_run(other).data.tags["artifacts.removed"] == "true"
    assert leftovers() == []
    assert versions.find_version(name, policy) == made


def test_a_model_that_is_no_version_any_more_is_waste_once_it_has_settled(
    store: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"model-{uuid4().hex}"
    with tracking.stage_run("register", {}) as run:
        policy = save_policy(tmp_path / "policy")
        versions.register_policy(policy, name=name, metrics={}, lineage={}, max_new_tokens=12, run=run)
    model = store.get_model_version(name, "1").source.removeprefix("models:/")
    store.delete_model_version(name, "1")
    assert not any(model in item.what for item in leftovers())
    monkeypatch.setattr(module, "SETTLED_SECONDS", 0)
    (found,) = [item for item in leftovers() if model in item.what]
    assert found.is_waste and (found.path / "MLmodel").is_file()
    found.remove()
    assert not found.path.exists()
    assert not any(model in item.what for item in leftovers())


def test_a_servers_artifacts_are_the_servers_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert leftovers() == []
