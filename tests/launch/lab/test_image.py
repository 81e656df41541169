"""The image in the cache: believed, read again, refused; built once, by one, or not at all with one line why."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from dtprobe.errors import DtprobeError
from dtprobe.launch.lab import build, image, recipe


@pytest.fixture
def environ(tmp_path):
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}


@pytest.fixture
def builds(monkeypatch):
    """A builder that makes small files: what is tested is who builds, when, and what is left."""
    made: list[Path] = []

    def write(into, told, *, environ, mirror):
        made.append(into)
        told("halfway", 0.5)
        for name in recipe.FILES:
            (into / name).write_bytes(name.encode() * 100)

    monkeypatch.setattr(build, "image", write)
    monkeypatch.setattr(build, "unmet", lambda: "")
    return made


def told(what: str, share: float) -> None:
    pass


def test_built_once_and_then_found(environ, builds):
    first = image.ensure(environ, told=told)
    assert image.ensure(environ, told=told) == first
    assert len(builds) == 1 and image.present(environ)
    assert sorted(file.name for file in first.folder.iterdir()) == sorted([*recipe.FILES, image.MANIFEST])


def test_a_damaged_file_is_found_and_the_image_built_anew(environ, builds):
    place = image.ensure(environ, told=told).folder
    (place / "root.img").chmod(0o644)
    (place / "root.img").write_bytes(b"x" * (place / "root.img").stat().st_size)

    image.ensure(environ, told=told)

    assert len(builds) == 2 and image.whole(place)
    assert [left.name for left in place.parent.iterdir() if left.name.startswith(image.BUILDING)] == []


@pytest.mark.parametrize("name", [*recipe.FILES, image.MANIFEST])
def test_a_missing_file_is_as_good_as_no_image(environ, builds, name):
    place = image.ensure(environ, told=told).folder
    (place / name).unlink()
    assert not image.whole(place)


def test_a_copied_image_is_read_once_and_then_believed(environ, builds):
    place = image.ensure(environ, told=told).folder
    for name in recipe.FILES:
        os.utime(place / name, (1, 1))

    assert image.whole(place)

    said = json.loads((place / image.MANIFEST).read_text())["files"]
    assert {one["changed_ns"] for one in said.values()} == {10**9}
    assert len(builds) == 1


def test_of_two_that_ask_at_once_one_builds(environ, builds):
    asking = [threading.Thread(target=image.ensure, args=(environ,), kwargs={"told": told}) for _ in range(4)]
    for one in asking:
        one.start()
    for one in asking:
        one.join()
    assert len(builds) == 1


def test_a_build_that_fails_leaves_neither_an_image_nor_its_parts(environ, monkeypatch):
    def fails(into, told, *, environ, mirror):
        (into / "vmlinux").write_bytes(b"half")
        raise DtprobeError("no room")

    monkeypatch.setattr(build, "image", fails)
    monkeypatch.setattr(build, "unmet", lambda: "")

    with pytest.raises(DtprobeError, match="no room"):
        image.ensure(environ, told=told)

    assert [file.name for file in image.cache(environ).iterdir()] == ["lock"]


def test_who_cannot_build_is_told_so_in_one_line(environ, monkeypatch):
    monkeypatch.setattr(build, "unmet", lambda: "building needs root (user id 7)")
    with pytest.raises(DtprobeError, match=r"not built, and building needs root \(user id 7\); start it as root"):
        image.ensure(environ, told=told)


def test_another_recipe_is_another_image(monkeypatch):
    before = recipe.key()
    monkeypatch.setattr(recipe, "PACKAGES", (*recipe.PACKAGES, "more"))
    assert recipe.key() != before


@pytest.mark.needs("root", "command:debootstrap", "command:unshare")
def test_a_mirror_that_cannot_be_reached_is_one_line(environ):
    with pytest.raises(DtprobeError) as caught:
        image.ensure(environ, told=told, mirror="http://127.0.0.1:9/debian")

    assert "the package mirror cannot be reached" in str(caught.value) and "\n" not in str(caught.value)
    assert "127.0.0.1:9" in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        "E: Failed getting release file http://127.0.0.1:9/debian/dists/bookworm/Release",
        "Err:1 http://mirror/debian bookworm InRelease\n  Could not resolve 'mirror'\nE: Failed to fetch http://mirror/x  Could not connect",
        "E: Couldn't download packages: adduser apt",
    ],
)
def test_how_an_unreachable_mirror_is_said(said):
    assert build.UNREACHED.search(said)
