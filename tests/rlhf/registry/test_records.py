"""The files that lead from a version back to what made it: what is kept, and what the code had beyond its commit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from rlhf.errors import UserError
from rlhf.registry import records
from rlhf.registry.records import Records
from rlhf.registry.versions import Version
from tests.registered import add_version, store


def git(place: Path, *arguments: str, given: bytes | None = None) -> bytes:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=place, check=True, capture_output=True, input=given).stdout


@pytest.fixture
def repository(tmp_path) -> Path:
    place = tmp_path / "repository"
    for name in ("rlhf/a.py", "rlhf/gone.py", "conf/b.yaml", "params.yaml", "dvc.lock"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"{name}\n")
    (place / "picture").write_bytes(bytes(range(256)))
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "start"]):
        git(place, *arguments)
    return place


def tree(place: Path) -> dict[str, bytes]:
    files = (path for path in place.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in files}


def test_a_clean_checkout_has_no_changes(repository):
    (repository / "params.yaml").write_text("other\n")
    (repository / "dvc.lock").write_text("other\n")
    (repository / "notes.txt").write_text("a new file that is no code\n")
    assert records.changes(repository) == b""


def test_changes_applied_to_the_commit_give_the_same_files(repository, tmp_path):
    git(repository, "config", "diff.noprefix", "true")
    git(repository, "config", "color.diff", "always")
    (repository / "rlhf/a.py").write_bytes("größer\r\nno newline at the end".encode())
    (repository / "rlhf/gone.py").unlink()
    (repository / "rlhf/new.py").write_text("new\n")
    (repository / "picture").write_bytes(bytes(reversed(range(256))))
    (repository / "conf/b.yaml").write_text("staged\n")
    git(repository, "add", "conf")
    before = git(repository, "status", "--porcelain")
    diff = records.changes(repository)
    assert git(repository, "status", "--porcelain") == before
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    git(clone, "apply", "--whitespace=nowarn", "-", given=diff)
    assert tree(clone) == tree(repository)


def test_a_directory_without_git_or_commit_has_no_changes(tmp_path):
    assert records.changes(tmp_path) == b""
    git(tmp_path, "init", "-q")
    assert records.changes(tmp_path) == b""


def test_a_repository_that_git_cannot_compare_is_named(repository):
    (repository / ".git/index").write_bytes(b"broken")
    with pytest.raises(UserError, match=f"{repository}: git add: .*: mend the repository"):
        records.changes(repository)


@pytest.fixture
def version() -> Version:
    made = add_version(f"model-{uuid4().hex}", "a")
    return Version(made.name, made.number, made.policy_hash, {"git.commit": "c1"})


def kept(version: Version) -> dict[str, bytes]:
    return records.read(store().get_model_version(version.name, version.number))


def test_records_are_put_into_the_version_once(version):
    assert kept(version) == {}
    first = Records({"dvc.lock": b"lock", "params.yaml": b"seed: 0\r\n"}, {"git.commit": "c1"})
    records.file(version, first)
    assert kept(version) == first.files
    records.file(version, Records({"dvc.lock": b"another", "sft_manifest.json": b"{}"}, {"git.commit": "c1"}))
    assert kept(version) == {**first.files, "sft_manifest.json": b"{}"}


@pytest.mark.parametrize("code", [{"git.commit": "c2"}, {"git.commit": "c1", "git.diff": "5f7"}, {}])
def test_a_version_that_other_code_registered_keeps_what_it_has(version, code):
    records.file(version, Records({"dvc.lock": b"lock"}, code))
    assert kept(version) == {}
