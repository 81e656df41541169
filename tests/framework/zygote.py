"""Forks ranks from one process that has imported torch already: a job of ranks then starts in milliseconds, not seconds.

One JSON line in: {"program", "cwd", "timeout_s", "ranks": [{"env", "output"}]}. One JSON line out: the exit codes of the ranks,
negative for a signal; a rank that is late is killed. Ends when its input does. Starts no thread before it forks.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time

import psutil  # noqa: F401  (imported here so that no rank has to)
import torch
import torch._dynamo  # DDP's wrapping imports it, and the next one
import torch.distributed
import torch.distributed.tensor

import dtprobe.framework.bootstrap.job
import dtprobe.framework.checked
import dtprobe.framework.groups  # noqa: F401


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        pids = [_fork(request["program"], request["cwd"], rank) for rank in request["ranks"]]
        sys.stdout.write(json.dumps(_codes(pids, time.monotonic() + request["timeout_s"])) + "\n")
        sys.stdout.flush()


def _fork(program: str, cwd: str, rank: dict) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        output = os.open(rank["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 100)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(rank["env"])
        sys.argv = [program]
        runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:  # noqa: BLE001  (what python itself does with an uncaught exception)
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _codes(pids: list[int], deadline: float) -> list[int]:
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid in codes:
                continue
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                deadline = float("inf") if pid == pids[-1] else deadline
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    main()
