"""Our hashes against DVC's own and against published digests."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.errors import UserError
from rlhf.hashes import dvc_md5, sha256_file


def dvc_says(path: Path, scratch: Path) -> str:
    from dvc_data.hashfile.build import build
    from dvc_data.hashfile.db.local import LocalHashFileDB
    from dvc_objects.fs.local import LocalFileSystem

    cache = LocalHashFileDB(LocalFileSystem(), str(scratch / "cache"))
    return build(cache, str(path), LocalFileSystem(), "md5", dry_run=True)[2].hash_info.value


def test_file_hashes_are_the_published_ones(tmp_path):
    file = tmp_path / "abc.txt"
    file.write_bytes(b"abc")
    assert dvc_md5(file) == "900150983cd24fb0d6963f7d28e17f72"  # RFC 1321, A.5
    assert sha256_file(file) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1


@pytest.mark.parametrize("content", [b"", b"a\r\nb\r\n", bytes(range(256)) * 5000])
def test_file_hash_equals_dvcs(tmp_path, content):
    file = tmp_path / "file"
    file.write_bytes(content)
    assert dvc_md5(file) == dvc_says(file, tmp_path)


def test_directory_hash_equals_dvcs(tmp_path):
    directory = tmp_path / "models"
    # Names chosen so that sorting by path parts, by text and by creation all differ.
    for name in ["b.txt", "a/z.bin", "a.txt", 'a/deep/er/é "quoted".json', "a-b/x", "A/x", ".hidden"]:
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"content of {name}")
    (directory / "empty").mkdir()
    assert dvc_md5(directory) == dvc_says(directory, tmp_path)
    assert dvc_md5(directory).endswith(".dir")


def test_directory_hash_changes_with_a_name_and_with_a_byte(tmp_path):
    directory = tmp_path / "d"
    directory.mkdir()
    (directory / "one").write_text("1")
    first = dvc_md5(directory)
    (directory / "one").rename(directory / "two")
    second = dvc_md5(directory)
    (directory / "two").write_text("2")
    assert len({first, second, dvc_md5(directory)}) == 3


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere is missing"):
        dvc_md5(tmp_path / "nowhere")
