"""What torchrun starts in place of a rank: gives the rank its folder, its own variables and command, and sees how it ends.

torchrun reaps its workers and tells nobody their exit codes, so this small program stays as the rank's parent: it passes
signals on, writes `exit.json`, and then ends exactly as the rank did. When it is killed, the rank is too (PDEATHSIG).
Run by path as `python -I -S rank_shim.py PLAN`; standard library only, so that no hook of a recorder gets into it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}
PR_SET_PDEATHSIG = 1


def main(plan_path: str) -> NoReturn:
    """Become the parent of the rank that RANK names; the plan holds each rank's folder, argv and added variables."""
    rank = int(os.environ["RANK"])
    part = json.loads(Path(plan_path).read_text(encoding="utf-8"))[rank]
    folder = Path(part["folder"])
    set_aside(folder)
    for name, target in (("stdout.log", 1), ("stderr.log", 2)):
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, target)
        os.close(descriptor)
    # Blocked until the rank can be told: a signal between here and there is neither lost nor deadly.
    watched = PASSED_ON | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    me = os.getpid()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become(rank, part, folder, me)
    while True:
        got = signal.sigwait(watched)
        if got != signal.SIGCHLD:
            _pass_on(pid, got)
            continue
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            break
    code = os.waitstatus_to_exitcode(status)
    exit_ = {
        "rank": rank,
        "pid": pid,
        "code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "wall_s": time.monotonic() - started,
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }
    _write(folder / "exit.json", exit_)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank's core, if any, is written already
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(me, -code)
    os._exit(code)


def set_aside(folder: Path) -> None:
    """Move what an earlier attempt of this rank left to `attempt<j>/`; what the harness still writes to stays."""
    if not (folder / "process.json").exists():
        return
    number = sum(1 for _ in folder.glob("attempt*"))
    aside = folder / f"attempt{number}"
    aside.mkdir()
    open_there = _open_files(int(os.environ.get("DTPROBE_HARNESS", "0").partition(".")[0]))
    for path in list(folder.iterdir()):
        if not path.name.startswith("attempt") and str(path.resolve()) not in open_there:
            path.rename(aside / path.name)


def _open_files(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(str(link.readlink()))
    return found


def _pass_on(pid: int, signum: int) -> None:
    """To the rank's whole group, as torchrun sends it to the group of what it started."""
    with suppress(ProcessLookupError):
        try:
            os.killpg(pid, signum)
        except ProcessLookupError:
            os.kill(pid, signum)  # it has not made its session yet


def _become(rank: int, part: dict[str, Any], folder: Path, shim: int) -> NoReturn:
    argv: list[str] = part["argv"]
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != shim:
            os._exit(1)
        for signum in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        _write(
            folder / "process.json",
            {
                "rank": rank,
                "pid": os.getpid(),
                "host": os.uname().nodename,
                "argv": argv,
                "started_ns": time.time_ns(),
                "attempt": sum(1 for _ in folder.glob("attempt*")),
            },
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            os.execvpe(argv[0], argv, {**os.environ, **part["env"]})
        except OSError as error:
            os.write(2, f"cannot execute {argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _write(path: Path, data: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(data, indent=1), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    main(sys.argv[1])
