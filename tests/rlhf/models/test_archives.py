"""Archives that are what they should be, and those that are out for harm."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.errors import UserError
from rlhf.models import archives

FILES = {"model/config.json": b"{}", "model/model.safetensors": bytes(range(256)) * 40}


def tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member, content in members:
            member.size = len(content) if member.isfile() else member.size
            archive.addfile(member, io.BytesIO(content))
    return path


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def below(place: Path) -> dict[str, bytes]:
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_all_kinds_unpack(tmp_path: Path, place: Path) -> None:
    packed = tar(tmp_path / "a.tar.gz", *((tarfile.TarInfo(name), content) for name, content in FILES.items()))
    (tmp_path / "a.tar").write_bytes(gzip.decompress(packed.read_bytes()))
    zipped(tmp_path / "a.zip", FILES)
    for name in ("a.tar.gz", "a.tar", "a.zip"):
        target = place / name
        target.mkdir()
        archives.unpack(tmp_path / name, name, target)
        assert below(target) == FILES


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (member("../out"), r"wants to write '../out', outside its directory"),
        (member("a/../../out"), r"outside its directory"),
        (member("/tmp/out"), r"wants to write '/tmp/out', outside"),
        (member("..\\out"), r"outside its directory"),
        (member("link", tarfile.SYMTYPE, "/etc/passwd"), "holds a link, 'link'"),
        (member("link", tarfile.LNKTYPE, "model/config.json"), "holds a link"),
        (member("device", tarfile.CHRTYPE), "holds something that is no plain file, 'device'"),
        (member("pipe", tarfile.FIFOTYPE), "no plain file"),
        (member("model/config.json"), "holds a file twice"),
        (member("model"), "holds a file twice"),
        (member("x" * 256), "name has over 255 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name[:20],
)
def test_what_could_write_elsewhere_is_refused(tmp_path: Path, place: Path, bad: tarfile.TarInfo, fault: str) -> None:
    packed = tar(tmp_path / "a.tar.gz", (member("model/config.json"), b"{}"), (bad, b"harm" if bad.isfile() else b""))
    with pytest.raises(UserError, match=fault):
        archives.unpack(packed, packed.name, place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz", "place"]
    assert set(below(place)) <= {"model/config.json"}


def test_a_zip_that_could_write_elsewhere_is_refused(tmp_path: Path, place: Path) -> None:
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    zipped(tmp_path / "out.zip", {"../out": b"harm"})
    for name, fault in (("link.zip", "holds a link, 'link'"), ("out.zip", "outside its directory")):
        with pytest.raises(UserError, match=fault):
            archives.unpack(tmp_path / name, name, place)
    assert not below(place) and not (tmp_path / "out").exists()


def pack_zip(path: Path, content: bytes) -> Path:
    return zipped(path.with_suffix(".zip"), {"bomb": content})


def pack_tar(path: Path, content: bytes) -> Path:
    return tar(path.with_suffix(".tgz"), (member("bomb"), content))


def pack_headers(path: Path, content: bytes) -> Path:
    """All of it in headers, which are in front of a file and none of it."""
    parts = []
    for start in range(0, len(content), 512_000):
        header = member("././@PaxHeader", tarfile.XHDTYPE)
        header.size = 512_000
        parts += [header.tobuf(), content[start : start + 512_000].ljust(512_000, b"\0")]
    whole = path.with_suffix(".tgz")
    whole.write_bytes(gzip.compress(b"".join([*parts, member("file").tobuf(), bytes(1024)])))
    return whole


@pytest.mark.parametrize("pack", [pack_zip, pack_tar, pack_headers])
def test_a_bomb_stops_at_the_limit(
    tmp_path: Path, place: Path, pack: Callable[[Path, bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "LEAST_LIMIT", 2_000_000)
    fitting, bomb = pack(tmp_path / "fitting", bytes(1_500_000)), pack(tmp_path / "bomb", bytes(9_000_000))
    archives.unpack(fitting, fitting.name, place)
    with pytest.raises(UserError, match="unpacks to more than 2 MB"):
        archives.unpack(bomb, bomb.name, place / "bomb-place")
    assert sum(len(content) for content in below(place).values()) <= 2 * 2_000_000


def test_a_header_that_would_fill_the_memory_is_refused(tmp_path: Path, place: Path) -> None:
    header = member("././@PaxHeader", tarfile.XHDTYPE)
    header.size = 100_000_000
    (tmp_path / "a.tgz").write_bytes(gzip.compress(header.tobuf() + bytes(1024)))
    with pytest.raises(UserError, match="does not unpack .a header of 100000000 bytes"):
        archives.unpack(tmp_path / "a.tgz", "a.tgz", place)


def test_many_files_are_refused(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MOST_MEMBERS", 3)
    zipped(tmp_path / "a.zip", {str(number): b"" for number in range(4)})
    with pytest.raises(UserError, match="more than 3 files"):
        archives.unpack(tmp_path / "a.zip", "a.zip", place)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tar", "a.zip"])
@pytest.mark.parametrize("damage", [b"", b"no archive at all" * 99, None])
def test_a_damaged_archive_is_one_line(tmp_path: Path, place: Path, name: str, damage: bytes | None) -> None:
    if damage is None:  # cut in the middle
        packed = tar(tmp_path / "b.tar.gz", (member("model.safetensors"), bytes(range(256)) * 4000))
        whole = packed.read_bytes() if name == "a.tar.gz" else gzip.decompress(packed.read_bytes())
        damage = whole[: len(whole) // 2]
    (tmp_path / name).write_bytes(damage)
    with pytest.raises(UserError, match="the archive does not unpack"):
        archives.unpack(tmp_path / name, name, place)
