"""Files of rows: what is read, and what is refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.data.readers import read_rows, text_of
from rlhf.errors import UserError


def written(directory: Path, name: str, content: bytes) -> Path:
    path = directory / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.jsonl", b'{"q": 1}\n\n[2]\n', " line 3: not a JSON object"),
        ("a.jsonl", b'{"q": 1}\n{"q": \n', " line 2: not valid JSON"),
        ("a.json", b'[{"q": 1}, 2]', " row 2: not a JSON object"),
        ("a.json", b'[{"q": 1}', ": not valid JSON"),
        ("a.json", b"[]", " holds no rows"),
        ("a.jsonl", b"\n \n", " holds no rows"),
        ("a.csv", b"", " holds no rows"),
        ("a.csv", b"q,a\n", " holds no rows"),
        ("a.csv", b"q,a\n1,2\n1,2,3\n", " row 2: has 3 fields, the first line names 2"),
        ("a.csv", b'q,a\n1,"2" 3\n', " line 2: not valid CSV"),
        ("a.csv", b"q,a\n1,\xff\n", " cannot be read: not UTF-8 after row 0"),
        ("a.parquet", b"PAR1 but not really PAR1", " cannot be read as Parquet"),
        ("a.txt", b"q", ": the ending names no format"),
    ],
)
def test_what_is_no_row_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    path = written(tmp_path, name, content)
    with pytest.raises(UserError) as caught:
        list(read_rows(path))
    assert str(caught.value).startswith(f"{path}{fault}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").mkdir()
    for name, fault in (("a.csv", "Is a directory"), ("b.json", "No such file or directory")):
        with pytest.raises(UserError, match=rf"{name} cannot be read: {fault}"):
            list(read_rows(tmp_path / name))


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    for name, content in (("a.csv", b"q\nx\n"), ("a.json", b'[{"q": "x"}]'), ("a.jsonl", b'{"q": "x"}')):
        assert [values for _, values in read_rows(written(tmp_path, name, mark + content))] == [{"q": "x"}]


def test_rows_are_read_one_by_one(tmp_path: Path) -> None:
    """So that a set larger than the memory can be read: the fault in the second row comes after the first row."""
    rows = read_rows(written(tmp_path, "a.jsonl", b'{"q": "x"}\n{'))
    assert next(rows) == (f"{tmp_path / 'a.jsonl'} line 1", {"q": "x"})
    with pytest.raises(UserError, match="line 2"):
        next(rows)


def test_numbers_are_text_where_they_may_be() -> None:
    values = {"text": "x", "none": None, "int": 5, "float": 0.1, "one": [2.5], "two": [1, 2], "true": True}
    row = ("here", values)
    texts = {name: text_of(row, name, "key", numbers=True) for name in ("text", "none", "int", "float", "one")}
    assert texts == {"text": "x", "none": "", "int": "5", "float": "0.1", "one": "2.5"}
    for name, kind in (("two", "list"), ("true", "bool")):
        with pytest.raises(UserError, match=rf"^here: column {name} is {kind}: write it as text or one number"):
            text_of(row, name, "key", numbers=True)
    with pytest.raises(UserError, match=r"^here: column int is int: write it as text"):
        text_of(row, "int", "key")
