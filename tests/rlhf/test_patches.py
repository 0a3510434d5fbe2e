"""What a checkout has beyond its commit, with the real git."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rlhf.errors import UserError
from rlhf.patches import changes

CODE = ("rlhf", "stages")


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
    assert changes(repository, CODE) == b""


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
    diff = changes(repository, CODE)
    assert git(repository, "status", "--porcelain") == before
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    git(clone, "apply", "--whitespace=nowarn", "-", given=diff)
    assert tree(clone) == tree(repository)


def test_a_patch_has_the_context_that_git_apply_wants_whatever_the_users_settings(repository):
    (repository / "rlhf/a.py").write_text("1\n2\n3\n")
    git(repository, "commit", "-qam", "lines")
    git(repository, "config", "diff.context", "0")
    (repository / "rlhf/a.py").write_text("1\ntwo\n3\n")
    diff = changes(repository)
    git(repository, "checkout", "-q", "--", ".")
    git(repository, "apply", "-", given=diff)
    assert (repository / "rlhf/a.py").read_text() == "1\ntwo\n3\n"


def test_a_directory_without_git_or_commit_has_no_changes(tmp_path):
    assert changes(tmp_path) == b""
    git(tmp_path, "init", "-q")
    assert changes(tmp_path) == b""


def test_a_repository_that_git_cannot_compare_is_named(repository):
    (repository / ".git/index").write_bytes(b"broken")
    with pytest.raises(UserError, match=f"{repository}: git add: .*: mend the repository"):
        changes(repository, CODE)


def test_all_new_files_are_changes_unless_they_are_left_out_or_ignored(repository):
    (repository / ".gitignore").write_text("*.log\n/dvc.lock\n")
    (repository / "new.log").write_text("ignored\n")
    (repository / "notes.txt").write_text("a new file\n")
    (repository / "params.yaml").write_text("other\n")
    diff = changes(repository)
    named = [line.split(b" b/")[1] for line in diff.splitlines() if line.startswith(b"diff --git")]
    assert named == [b".gitignore", b"notes.txt"]
