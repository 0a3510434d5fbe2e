from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.files import appearing


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def test_a_file_appears_with_all_of_its_content(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text("old")
    with appearing(path) as written:
        written.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["metrics.json"]


def test_what_fails_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text("old")
    with pytest.raises(TypeError), appearing(path) as written:
        written.write_bytes(b"half" + None)  # type: ignore[operator]
    assert path.read_text() == "old"
    assert names(tmp_path) == ["metrics.json"]


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), appearing(tmp_path / "missing" / "a") as written:
        written.write_text("new")
    assert names(tmp_path) == []
