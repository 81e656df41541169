"""Parts: what they say about themselves, and what importing the framework costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dtprobe.errors import Unavailable
from dtprobe.framework import part


def test_every_part_answers_none_or_why_not():
    found = part.parts()
    assert {"bootstrap", "checked", "groups", "stores"} <= set(found)
    assert all(answer is None or isinstance(answer, Unavailable) for answer in found.values())
    assert found["groups"] is None


@pytest.mark.parametrize(
    ("requirement", "told"),
    [
        ("no-such-distribution>=1", "no-such-distribution is not installed"),
        ("pytest>=999", "does not satisfy pytest>=999"),
    ],
)
def test_a_package_that_is_missing_or_too_old_is_told_with_the_extra_that_brings_it(requirement, told):
    answer = part.package(requirement, extra="mpi")
    assert answer is not None and told in answer.reason and "dtprobe[mpi]" in answer.remedy
    assert part.package("pytest>=1", extra="dev") is None


def test_importing_the_framework_imports_neither_torch_nor_the_harness():
    program = """
import sys
import dtprobe.framework
import dtprobe.framework.part
harness = [name for name in sys.modules if name.startswith("dtprobe.") and not name.startswith(("dtprobe.framework", "dtprobe.errors"))]
sys.exit(str([name for name in ("torch", "numpy") if name in sys.modules] + harness) if harness or "torch" in sys.modules else 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_public_names_resolve():
    from dtprobe import framework

    for name in framework.__all__:
        assert getattr(framework, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = framework.nothing
