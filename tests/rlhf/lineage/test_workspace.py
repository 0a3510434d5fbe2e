"""The workspace in which a version is made again, on a small repository whose pipeline is one line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from rlhf import anchors
from rlhf.errors import UserError
from rlhf.hashes import dvc_md5
from rlhf.lineage import workspace
from rlhf.lineage.history import History
from rlhf.redaction import redact_bytes
from rlhf.registry import records

PACKAGES = "# lock\ntorch==2.15.0 ; python_version > '3' \\\n    --hash=sha256:1\nnumpy==2.0 \\\n    --hash=sha256:2\n"


def git(place: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=place, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A repository that has gone on since the version was made."""
    place = tmp_path / "checkout"
    for name, text in {
        "rlhf/a.py": "a\n",
        "requirements.lock": PACKAGES,
        ".dvc/config": "",
        "params.yaml": "p: 0\n",
    }.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    git(place, "init", "-q")
    git(place, "add", "-A")
    git(place, "commit", "-qm", "the version's")
    monkeypatch.setattr(anchors, "CHECKOUT", place)
    return place


@pytest.fixture
def history(checkout) -> History:
    return History(
        name="m", version="2", aliases=(), policy_hash="f00d", gate={}, commit=git(checkout, "rev-parse", "HEAD"),
        dirty=True, diff="", is_masked=False, params={}, data={}, sft={}, stages=(), machine={}, evaluation={},
    )  # fmt: skip


@pytest.fixture
def found(checkout) -> dict[str, bytes]:
    """The records of a version whose code had a change and a new file."""
    (checkout / "rlhf/a.py").write_text("changed\n")
    (checkout / "rlhf/new.py").write_text("new\n")
    paths = ("rlhf/a.py", "rlhf/new.py", "requirements.lock")
    deps = [{"path": path, "md5": dvc_md5(checkout / path)} for path in paths]
    outs = [{"path": "data/prepared", "md5": "d.dir"}]
    later = [{"path": "data/prepared/train.parquet", "md5": "d1"}]
    stages = {"prepare_data": {"deps": deps, "outs": outs}, "train_ppo": {"deps": later, "outs": []}}
    diff = records.changes(checkout)
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "later")
    return {
        "dvc.lock": yaml.safe_dump({"stages": stages}).encode(),
        "params.yaml": b"p: 1\n",
        "changes.diff": diff,
    }


def test_it_has_commit_changes_params_and_lock_and_places_of_its_own(checkout, history, found, tmp_path):
    (checkout / "rlhf/a.py").write_text("later still\n")
    again = tmp_path / "in/again"
    workspace.prepare(history, found, again)
    assert git(again, "rev-parse", "HEAD") == history.commit
    assert (again / "rlhf/a.py").read_text() == "changed\n"
    assert (again / "rlhf/new.py").read_text() == "new\n"
    assert (again / "params.yaml").read_bytes() == found["params.yaml"]
    assert (again / "dvc.lock").read_bytes() == found["dvc.lock"]
    assert anchors.main_checkout(again) == again
    cache = subprocess.run([sys.executable, "-m", "dvc", "cache", "dir"], cwd=again, capture_output=True, text=True)
    assert Path(cache.stdout.strip()) == again / ".dvc/cache"
    workspace.require_same_inputs(found, again)


def test_one_that_was_begun_is_gone_on_with(history, found, tmp_path):
    again = tmp_path / "again"
    again.mkdir()
    workspace.prepare(history, found, again)
    (again / "begun").touch()
    workspace.prepare(history, found, again)
    assert (again / "begun").exists()
    with pytest.raises(UserError, match=f"{again} is in use: name a new directory"):
        workspace.prepare(replace(history, policy_hash="another"), found, again)


@pytest.mark.parametrize("left", ["dvc.lock", "params.yaml", "commit"])
def test_a_version_that_does_not_say_what_made_it_is_refused(history, found, tmp_path, left):
    history = replace(history, commit="") if left == "commit" else history
    found = {name: content for name, content in found.items() if name != left}
    with pytest.raises(UserError, match=f"m version 2 did not keep (its )?{left}: take another version"):
        workspace.prepare(history, found, tmp_path / "again")


def test_changes_that_held_a_secret_are_not_made_again(checkout, history, found, tmp_path, monkeypatch):
    """What is masked may be a line that was there before: such a diff does not even apply."""
    monkeypatch.setenv("HF_TOKEN", "hf_planted")
    git(checkout, "checkout", "-q", history.commit)
    (checkout / "rlhf/a.py").write_text("token = 'hf_planted'\n")
    git(checkout, "commit", "-qam", "with a secret")
    (checkout / "rlhf/a.py").write_text("token = None\n")
    diff = records.changes(checkout)
    code, masked = {records.DIFF_TAG: sha256(diff).hexdigest()}, found | {"changes.diff": redact_bytes(diff)}
    assert not records.is_masked(found | {"changes.diff": diff}, code)
    history = replace(history, commit=git(checkout, "rev-parse", "HEAD"), is_masked=records.is_masked(masked, code))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match="^m version 2: its code held a secret, .* masked: it cannot be made again: "):
        workspace.prepare(history, masked, tmp_path / "again")
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(UserError, match="^git apply: error: patch failed: rlhf/a.py"):
        workspace.prepare(replace(history, is_masked=False), masked, tmp_path / "again")


def test_a_commit_that_is_not_here_has_to_be_fetched(history, found, tmp_path):
    missing = "0123456789" * 4
    with pytest.raises(UserError, match=f"commit {missing} is not in .*: git fetch it"):
        workspace.prepare(replace(history, commit=missing), found, tmp_path / "again")


def test_what_fails_halfway_leaves_nothing(history, found, tmp_path):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match="^git apply: "):
        workspace.prepare(history, found | {"changes.diff": b"diff --git a/x b/x\nnonsense\n"}, tmp_path / "again")
    assert sorted(tmp_path.iterdir()) == before


def test_code_that_is_not_the_locks_is_refused(history, found, tmp_path):
    again = tmp_path / "again"
    workspace.prepare(history, found, again)
    (again / "rlhf/a.py").write_text("other\n")
    with pytest.raises(UserError, match=r"^rlhf/a.py: not what the version was made from \(md5 "):
        workspace.require_same_inputs(found, again)
    (again / "rlhf/a.py").unlink()
    with pytest.raises(UserError, match="again/rlhf/a.py is missing: the version was made from it: copy it there"):
        workspace.require_same_inputs(found, again)


def test_lock_files_are_compared_by_package():
    other = PACKAGES.replace("2.15.0", "2.14.1") + "extra==1 \\\n    --hash=sha256:3\n"
    assert workspace.lock_differences(PACKAGES, PACKAGES) == []
    assert workspace.lock_differences(PACKAGES, other) == [
        "extra none here, 1 there",
        "torch 2.15.0 here, 2.14.1 there",
    ]
    assert workspace.lock_differences(PACKAGES, PACKAGES.replace("sha256:2", "sha256:9")) == ["the hashes alone"]


def test_the_running_environment_serves_where_the_lock_is_the_same(checkout, tmp_path):
    (tmp_path / "requirements.lock").write_text(PACKAGES)
    assert workspace.environment(tmp_path) == (Path(sys.executable), [])


def test_another_lock_gets_an_environment_of_its_own(checkout, tmp_path):
    (tmp_path / "requirements.lock").write_text("# nothing at all\n")
    python, missing = workspace.environment(tmp_path)
    assert missing == ["numpy 2.0 here, none there", "torch 2.15.0 here, none there"]
    prefix = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True).stdout
    assert Path(prefix.strip()) == tmp_path / ".venv"
    (tmp_path / ".venv/kept").touch()
    assert workspace.environment(tmp_path) == (python, missing)
    assert (tmp_path / ".venv/kept").exists()


def test_a_command_gets_none_of_this_checkouts_places(tmp_path, monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "RLHF_STATE_DIR", "RLHF_PARENT_RUN_KEY", "PYTHONPATH"):
        monkeypatch.setenv(name, "here")
    script = "import os, pathlib; pathlib.Path('env').write_text(' '.join(os.environ))"
    workspace.run([sys.executable, "-c", script], tmp_path, {"DO_NOT_TRACK": "true"})
    names = (tmp_path / "env").read_text().split()
    assert not [name for name in names if name.startswith(("MLFLOW_", "RLHF_", "PYTHONPATH"))]
    assert {"DO_NOT_TRACK", "PATH"} <= set(names)


def test_a_command_that_fails_says_how_to_go_on(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}: -c exit.3. failed with 3, see above: the same command goes on"):
        workspace.run([sys.executable, "-c", "exit(3)"], tmp_path, {})


def test_an_interrupted_command_ends_with_its_children(tmp_path):
    script = "import subprocess; subprocess.run('echo $$ > child; exec sleep 60', shell=True)"
    code = (
        "import sys; from pathlib import Path; from rlhf.lineage import workspace\n"
        f"workspace.run([sys.executable, '-c', {script!r}], Path({str(tmp_path)!r}), {{}})"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(workspace.__file__).parents[2], stderr=subprocess.PIPE
    )
    while not (tmp_path / "child").is_file() or not (tmp_path / "child").read_text().strip():
        assert parent.poll() is None
        time.sleep(0.01)
    parent.send_signal(signal.SIGINT)
    parent.communicate()
    assert not runs(int((tmp_path / "child").read_text()))


def runs(process: int) -> bool:
    """Whether the process is there and no zombie that nobody has collected yet."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
