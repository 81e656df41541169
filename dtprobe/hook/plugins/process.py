"""In a rank of a foreign command: says which process it is, so that recorders and injectors find it."""

from __future__ import annotations

import os
import sys


def install(hook) -> None:
    """Write `process.json` at one stroke; an attempt before this one keeps its own as `process-<n>.json`."""
    import json
    import time

    os.makedirs(hook.folder, exist_ok=True)  # noqa: PTH103  pathlib is not loaded at this time
    rank = hook.folder.rpartition("/rank")[2]
    said = {
        "rank": int(rank),
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "argv": sys.orig_argv,
        "started_ns": time.time_ns(),
    }
    path = f"{hook.folder}/process.json"
    if _pid_in(path) not in (None, os.getpid()):  # a restarted rank; a fault may start the same process once more
        number = sum(name.startswith("process-") for name in os.listdir(hook.folder))  # noqa: PTH208
        os.replace(path, f"{hook.folder}/process-{number}.json")  # noqa: PTH105
    with open(f"{hook.folder}/.process.json", "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump(said, file)
    os.replace(f"{hook.folder}/.process.json", path)  # noqa: PTH105


def _pid_in(path: str) -> int | None:
    import json

    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            return json.load(file)["pid"]
    except FileNotFoundError:
        return None
