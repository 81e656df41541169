"""A case out of a few lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dtprobe.diagnose import read
from dtprobe.diagnose.case import Case

MakeCase = Callable[..., Case]


@pytest.fixture
def case(tmp_path: Path) -> MakeCase:
    """`case("one line", "another")`, or `case(**{"rank0.log": [...], "rank1.log": [...]})`: what was read of such files."""

    def make(*lines: str, **files: list[str]) -> Case:
        folder = tmp_path / f"job{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for name, content in (files or {"all.log": list(lines)}).items():
            (folder / name).write_text("\n".join(content) + "\n")
        return read([folder])

    return make
