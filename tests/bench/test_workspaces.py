"""Workspaces of measurements: their key, and what they keep."""

from __future__ import annotations

from pathlib import Path

from bench.workspaces import code_key


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
