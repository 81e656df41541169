"""What plug-ins that put faults into a rank share: the parts of a plan that concern this rank, and the record of firings."""

from __future__ import annotations

import json
import os
import time

FIRED = "injected.jsonl"


def rank_of(hook) -> int | None:
    """The rank that the folder is named after, or that the variable tells."""
    text = hook.folder.rpartition("/rank")[2]
    text = text if text.isdigit() else hook.environ.get("RANK", "")
    return int(text) if text.isdigit() else None


def parts(hook, name: str):
    """The faults of plan `name` that this rank is a target of, in their order."""
    folder = hook.environ.get(f"DTPROBE_{name.upper()}_PLAN")
    if not folder or not os.path.isdir(folder):  # noqa: PTH112  pathlib is not loaded at this time
        return
    rank = rank_of(hook)
    for file in sorted(os.listdir(folder)):  # noqa: PTH208
        if file.endswith(".json"):
            with open(f"{folder}/{file}", encoding="utf-8") as opened:  # noqa: PTH123
                part = json.load(opened)
            if part["rank"] is None or rank in part["rank"]:
                yield part


def say(hook, kind: str, index: int, *, call: str | None = None, nth: int | None = None, detail: str = "") -> None:
    """Append a line (`fired`, `ended` or `refused`) at one stroke: what a rank said before it died is kept."""
    os.makedirs(hook.folder, exist_ok=True)  # noqa: PTH103
    line = {
        "kind": kind,
        "index": index,
        "t_ns": _now_ns(hook),
        "rank": rank_of(hook),
        "pid": os.getpid(),
        "call": call,
        "nth": nth,
        "detail": detail,
    }
    with open(f"{hook.folder}/{FIRED}", "a", encoding="utf-8") as file:  # noqa: PTH123
        file.write(json.dumps(line) + "\n")


def _now_ns(hook) -> int:
    """The time. Where a fault shifts this process's clock it is asked of the kernel as a file's time (to a few ms)."""
    if "DTPROBE_CLOCK_FILE" not in hook.environ:
        return time.time_ns()
    handle = os.open(f"{hook.folder}/{FIRED}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.utime(handle)
        return os.fstat(handle).st_mtime_ns
    finally:
        os.close(handle)


def said(hook, kind: str, index: int) -> list[dict]:
    """Lines of that kind and fault which this rank has written, earlier attempts of it too."""
    try:
        with open(f"{hook.folder}/{FIRED}", encoding="utf-8") as file:  # noqa: PTH123
            lines = [json.loads(text) for text in file.read().splitlines()]
    except FileNotFoundError:
        return []
    return [line for line in lines if line["kind"] == kind and line["index"] == index]


def placed(value: str | dict, rank: int, world_size: int) -> str:
    """A value as it is, or one that depends on where the rank is: `{"of": "rank" | "other_rank" | ...}`."""
    if isinstance(value, str):
        return value
    world_size = max(world_size, 1)
    other = (rank + 1) % world_size if world_size > 1 else rank + 1
    return str({"rank": rank, "other_rank": other, "world_size": world_size, "other_size": world_size + 1}[value["of"]])


def world_size_of(hook) -> int:
    """How many ranks there are, as the launcher tells; 1 where it does not."""
    names = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
    return next((int(hook.environ[name]) for name in names if hook.environ.get(name, "").isdigit()), 1)
