"""Markers of this suite, and the guard that no test leaves a process behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing import resource_tracker

import psutil
import pytest

from dtprobe import doctor

_GRACE_S = 0.5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the long tests too")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`alone` tests share one worker, which xdist grants in this mode only."""
    option = config.option
    if getattr(option, "numprocesses", None) and option.dist in ("no", "load"):
        option.dist = "loadgroup"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.xdist_group("alone"))
    if config.getoption("nightly") or "nightly" in config.getoption("markexpr"):
        return
    long = [item for item in items if item.get_closest_marker("nightly")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`needs`: skip with doctor's reason; in CI what a package would cure is a failure, or nobody would ever see it missing."""
    names = [name for marker in item.iter_markers("needs") for name in marker.args]
    unavailable = doctor.together(doctor.here().unmet(names))
    if unavailable is None:
        return
    if isinstance(unavailable, doctor.Missing) and os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(f"in CI this must run: {unavailable}", pytrace=False)
    pytest.skip(str(unavailable))


def _children() -> dict[int, psutil.Process]:
    """Children of this process by pid, without multiprocessing's own tracker, which lives as long as the interpreter."""
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    found = {child.pid: child for child in psutil.Process().children()}
    found.pop(getattr(tracker, "_pid", None), None)
    return found


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Fails a test that leaves a child process running; what module and session fixtures started before it is theirs."""
    before = _children()
    yield
    left = {pid: child for pid, child in _children().items() if pid not in before}
    if not left:
        return
    _, running = psutil.wait_procs(list(left.values()), timeout=_GRACE_S)
    told = []
    for child in running:
        with child.oneshot():
            told.append(f"{child.pid} {child.status()} {' '.join(child.cmdline()) or child.name()}")
        child.kill()
    psutil.wait_procs(running, timeout=_GRACE_S)
    assert not told, f"left behind: {'; '.join(told)}"
