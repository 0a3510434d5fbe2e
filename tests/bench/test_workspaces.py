"""Workspaces of measurements: their key, and what they keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import baselines, choices, workspaces
from bench.workspaces import CODE, code_key, prepare, with_marked
from rlhf.errors import UserError


def test_other_code_has_another_key(tmp_path: Path) -> None:
    for name in ("rlhf", "stages", "conf"):
        (tmp_path / name).mkdir()
    (tmp_path / "requirements.lock").write_text("torch==2\n")
    (tmp_path / "rlhf" / "one.py").write_text("x = 1\n")
    first = code_key(tmp_path)
    (tmp_path / "rlhf" / "notes.txt").write_text("no code")
    assert code_key(tmp_path) == first
    (tmp_path / "rlhf" / "one.py").write_text("x = 2\n")
    assert code_key(tmp_path) != first


def test_code_of_a_measurement_s_own_counts_and_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"
    for name in ("rlhf", "stages", "conf", "bench"):
        (checkout / name).mkdir(parents=True)
    (checkout / "requirements.lock").touch()
    own = checkout / "bench" / "runs.py"
    own.write_text("x = 1\n")
    code = (*CODE, "bench/runs.py")
    first, without = code_key(checkout, code), code_key(checkout)
    monkeypatch.setattr(workspaces.anchors, "CHECKOUT", checkout)
    workspace = prepare(tmp_path / "root", "seed-0", ["scale=smoke"], [], code)
    own.write_text("x = 2\n")
    assert code_key(checkout, code) != first
    assert code_key(checkout) == without
    again = prepare(tmp_path / "root", "seed-0", ["scale=smoke"], [], code)
    assert (again / "bench" / "runs.py").read_text() == "x = 1\n"
    assert not (workspace / "bench").is_symlink()


def test_a_table_replaces_what_stands_between_its_marks() -> None:
    page = "before\n<!-- lists: written by python -m bench.lists -->\nold\n<!-- lists: end -->\nafter\n"
    once = with_marked(page, "lists", "new")
    assert once == page.replace("old", "\nnew\n")
    assert with_marked(once, "lists", "new") == once
    with pytest.raises(UserError, match="marks of its table are missing"):
        with_marked("no marks", "lists", "new")
    for module, name in ((choices, "choices"), (baselines, "baselines")):
        with_marked(module.PAGE.read_text(), name, "new")
