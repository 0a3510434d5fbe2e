"""What a killed stage goes on from: one holder at a time, one key a run."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch

from rlhf import resuming
from rlhf.errors import UserError


def hold(directory: Path, held: Event) -> None:
    """Holds the directory until it is killed."""
    with resuming.exclusive(directory):
        held.set()
        time.sleep(600)


def test_a_second_holder_is_refused_with_the_process_id_of_the_first(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    held = multiprocessing.get_context("fork").Event()
    holder = multiprocessing.get_context("fork").Process(target=hold, args=(directory, held))
    holder.start()
    assert held.wait(60)
    with pytest.raises(UserError, match=rf"process {holder.pid} "), resuming.exclusive(directory):
        pass
    holder.kill()
    holder.join()
    with resuming.exclusive(directory):  # the kernel frees a dead holder's lock
        assert (directory / "lock").read_text() == str(os.getpid())
    with resuming.exclusive(directory):
        pass


def test_discard_removes_the_directory(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with resuming.exclusive(directory):
        (directory / "kept").touch()
        resuming.discard(directory)
    assert not directory.exists()
    resuming.discard(directory)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with one module, one stage, a lock file and one input."""
    for name in ("rlhf/ppo/losses.py", "stages/train_ppo.py", "requirements.lock", "train.parquet"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def key(project: Path, seed: int = 0) -> str:
    return resuming.fingerprint(resuming.identity("train_ppo", {"seed": seed}, [project / "train.parquet"], project))


def test_the_fingerprint_is_stable_and_free_of_places(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "checkout"
    elsewhere.parent.mkdir(exist_ok=True)
    project.rename(elsewhere)
    moved = key(elsewhere)
    elsewhere.rename(project)
    assert key(project) == moved


@pytest.mark.parametrize("name", ["rlhf/ppo/losses.py", "stages/train_ppo.py", "requirements.lock", "train.parquet"])
def test_the_fingerprint_changes_with_code_lock_and_inputs(project: Path, name: str) -> None:
    before = key(project)
    (project / name).write_text("changed")
    assert key(project) != before


def test_the_fingerprint_changes_with_params_new_modules_and_threads(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(project)
    assert key(project, seed=1) != before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert key(project) != before
    monkeypatch.undo()
    (project / "rlhf" / "new.py").write_text("")
    assert key(project) != before
