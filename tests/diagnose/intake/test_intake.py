"""Whatever lies there becomes artifacts or a problem that says why not."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import struct
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
import zstandard

from dtprobe.diagnose import intake
from dtprobe.diagnose.intake import Limits, folders, taken
from dtprobe.errors import UsageError

LOG = b"[rank3]: ValueError: boom\n" * 50


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files of the intake go here, so that a test can see that none is left."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def _contents(path: Path, limits: Limits = intake.LIMITS) -> tuple[dict[str, bytes], list[str]]:
    with taken([path], limits) as found:
        return {one.name: one.path.read_bytes() for one in found.artifacts}, [
            f"{one.kind} {one.source}: {one.text}" for one in found.problems
        ]


def _tar(mode: str, **members: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _zip(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("b.tar", _tar("w", log=LOG)),
        ("b.tgz", _tar("w:gz", log=LOG)),
        ("b.tar.xz", _tar("w:xz", log=LOG)),
        ("b.tar.bz2", _tar("w:bz2", log=LOG)),
        ("b.tar.zst", zstandard.compress(_tar("w", log=LOG))),
        ("b.zip", _zip(log=LOG)),
        ("named.as.nothing", _tar("w:gz", log=LOG)),
    ],
)
def test_an_archive_of_each_form_gives_its_members(tmp_path: Path, scratch: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert _contents(tmp_path / name) == ({f"{name}/log": LOG}, [])
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.log.gz", gzip.compress(LOG[:100]) + gzip.compress(LOG[100:])),
        ("a.log.xz", lzma.compress(LOG[:100]) + lzma.compress(LOG[100:]) + b"\0" * 8),
        ("a.log.bz2", bz2.compress(LOG[:100]) + bz2.compress(LOG[100:])),
        ("a.log.zst", zstandard.compress(LOG[:100]) + zstandard.compress(LOG[100:])),
    ],
)
def test_a_compressed_file_is_read_through_all_its_streams(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert _contents(tmp_path / name) == ({"a.log": LOG}, [])


def test_archives_within_archives_are_read_and_those_beyond_the_limit_are_told(tmp_path: Path) -> None:
    inner = gzip.compress(LOG)
    path = tmp_path / "b.tgz"
    path.write_bytes(_tar("w:gz", deep=_zip(**{"a.log.gz": inner})))
    assert _contents(path) == ({"b.tgz/deep/a.log": LOG}, [])
    path.write_bytes(_tar("w:gz", deep=_zip(**{"a.log.gz": gzip.compress(inner)})))
    found, problems = _contents(path)
    assert list(found.values()) == [inner]
    assert len(problems) == 1 and "within 3 others" in problems[0]


def test_members_that_point_outside_links_and_devices_write_nothing_anywhere(tmp_path: Path, scratch: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name in ("../../escaped", "/escaped"):
            info = tarfile.TarInfo(name)
            info.size = 2
            tar.addfile(info, io.BytesIO(b"x\n"))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo("link")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    (tmp_path / "b.tgz").write_bytes(out.getvalue())
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        link = zipfile.ZipInfo("link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("..\\..\\escaped", "x\n")
    with taken([tmp_path / "b.tgz", tmp_path / "b.zip"]) as found:
        assert [one.name for one in found.artifacts] == ["b.tgz/escaped", "b.tgz/escaped", "b.zip/escaped"]
        assert all(one.path.parent.parent == scratch for one in found.artifacts)
        text = " ".join(one.text for one in found.problems)
    assert "4 links or devices" in text and "1 links or devices" in text and "a path outside" in text
    assert not list(tmp_path.rglob("escaped")) and not list(scratch.iterdir())


@pytest.mark.parametrize("form", ["zip", "gz", "xz", "zst", "sparse"])
def test_a_bomb_is_refused_and_that_is_said(tmp_path: Path, scratch: Path, form: str) -> None:
    limits = Limits(ratio_from=1 << 20, ratio=20)
    zeros = b"\n" * (8 << 20)
    path = tmp_path / f"bomb.{form}"
    if form == "sparse":
        member = (
            b"a".ljust(100, b"\0")
            + b"0000644\0" * 3
            + b"%011o\0" % 512
            + b"0" * 11
            + b"\0"
            + b" " * 8
            + b"S"
            + b"\0" * 100
            + b"ustar  \0"
        )
        member = member.ljust(386, b"\0") + b"%011o\0%011o\0" % (8 << 20, 512)
        member = (member + b"\0" * (483 - len(member)) + b"%011o\0" % ((8 << 20) + 512)).ljust(512, b"\0")
        total = sum(member[:148]) + 256 + sum(member[156:])
        path.write_bytes(member[:148] + b"%06o\0 " % total + member[156:] + b"x" * 512 + b"\0" * 1024)
    else:
        pack = {"zip": lambda data: _zip(a=LOG, b=data), "gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.compress}[
            form
        ]
        path.write_bytes(pack(zeros))
    found, problems = _contents(path, limits)
    assert any(one.startswith(f"refused bomb.{form}") and "bomb" in one for one in problems)
    assert found == ({"bomb.zip/a": LOG} if form == "zip" else {})
    assert not list(scratch.iterdir())


def test_limits_hold_over_all_archives_together(tmp_path: Path) -> None:
    for name in ("a.zip", "b.zip"):
        (tmp_path / name).write_bytes(_zip(x=os.urandom(1000), y=os.urandom(1000)))
    found, problems = _contents(tmp_path, Limits(bytes=3500))
    assert len(found) == 3 and "unpack to more than" in problems[0]
    found, problems = _contents(tmp_path, Limits(members=3))
    assert len(found) == 3 and "more than 3 members" in problems[0]


def test_headers_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 33
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 4096)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9, 9, 1 << 30, 0, 0)
    (tmp_path / "a.zip").write_bytes(b"PK\3\4" + b"\0" * 100 + end)
    found, problems = _contents(tmp_path)
    assert not found and len(problems) == 2
    assert "extended header" in problems[0] and "directory" in problems[1]


@pytest.mark.parametrize("form", ["tgz", "txz", "zip", "gz", "zst"])
def test_of_a_cut_archive_what_came_before_is_read(tmp_path: Path, form: str) -> None:
    noise = os.urandom(200_000).hex().encode()
    whole = {
        "tgz": lambda: _tar("w:gz", a=LOG, b=noise),
        "txz": lambda: _tar("w:xz", a=LOG, b=noise),
        "zip": lambda: _zip(a=LOG, b=noise),
        "gz": lambda: gzip.compress(LOG + noise),
        "zst": lambda: zstandard.compress(LOG + noise),
    }[form]()
    path = tmp_path / f"cut.{form}"
    path.write_bytes(whole[: len(whole) * 2 // 3])
    found, problems = _contents(path)
    assert problems and all(one.startswith("cut ") for one in problems)
    assert (LOG in b"".join(found.values())) or form == "zip"


def test_an_encrypted_member_and_an_archive_of_another_kind_are_told(tmp_path: Path) -> None:
    data = bytearray(_zip(a=LOG))
    for magic, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(magic) + at] |= 1
    (tmp_path / "a.zip").write_bytes(data)
    (tmp_path / "b.7z").write_bytes(b"7z\xbc\xaf\x27\x1c" + b"\0" * 50)
    _, problems = _contents(tmp_path)
    assert "encrypted" in problems[0] and "7z archive cannot be read" in problems[1]


def test_what_is_no_file_is_counted_and_not_opened(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    (job / "a.log").write_bytes(LOG)
    os.mkfifo(job / "pipe")
    (job / "link").symlink_to("/etc/passwd")
    (job / "loop").symlink_to(job)
    found, problems = _contents(job)
    assert found == {"a.log": LOG}
    assert len(problems) == 2 and any("named pipe" in one for one in problems) and any("a link" in one for one in problems)
    with taken([job / "pipe"]) as nothing:
        assert not nothing.artifacts and "not opened" in nothing.problems[0].text


def test_names_that_break_lines_or_are_no_text_are_shown_on_one_line(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    for name in (b"a\nb", b"\xff\xfe", b"\x1b[31m"):
        (job / os.fsdecode(name)).write_bytes(LOG)
    found, _ = _contents(job)
    assert set(found) == {"a\\nb", "\\udcff\\udcfe", "\\x1b[31m"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_a_problem(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    (job / "a").write_bytes(LOG)
    (job / "a").chmod(0)
    _, problems = _contents(job)
    assert "Permission denied" in problems[0]


def test_of_very_many_files_the_largest_are_opened_and_all_are_counted(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    for at in range(300):
        (job / f"{at:03}").write_bytes(b"x" * (at % 7))
    (job / "zz.log").write_bytes(LOG)
    problems: list = []
    files = folders.listed(job, problems, most=20).files
    assert len(files) == 20 and files[-1].name == "zz.log"
    assert "301 files: only the 20 largest" in problems[0].text


def test_a_path_that_does_not_exist_is_the_callers_mistake(tmp_path: Path) -> None:
    for path in (tmp_path / "no", tmp_path / ("x" * 300), Path("a\0b")):
        with pytest.raises(UsageError), taken([path]):
            pass


def test_the_temporary_folder_of_a_killed_process_is_removed_and_one_in_use_is_not(tmp_path: Path, scratch: Path) -> None:
    (scratch / "dtprobe-postmortem-left").mkdir()
    (scratch / "dtprobe-postmortem-left" / "000001").write_bytes(b"x")
    with taken([tmp_path]) as _:
        (mine,) = scratch.iterdir()
        with taken([tmp_path]) as _:
            assert mine.exists() and len(list(scratch.iterdir())) == 2
    assert not list(scratch.iterdir())
