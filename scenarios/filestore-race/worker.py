"""Two ranks that share a store file, and a third process that publishes a key there and may be cut off in mid-write.

Modes: `whole` lets the publisher finish, `torn` gives it a file-size limit (as a quota or a full disk would) so that the
kernel ends it half-way through the record. `--store safe` uses the framework's file store in place of torch's.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --mode torn`
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import signal
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dtprobe import attempt, record

KEY, VALUE = "config", "y" * 64
START_S = 20.0
BEFORE_THE_CUT = 40
"""Bytes of the publisher's record that still fit: key, and a part of the value."""


def shared_folder() -> Path:
    """Where all ranks look: beside the rank's own artifacts, so that the file is kept as evidence."""
    own = os.environ.get("DTPROBE_RANK_FOLDER")
    folder = Path(own).parent / "shared" if own else Path(tempfile.gettempdir()) / f"filestore-{os.environ['MASTER_PORT']}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def open_store(kind: str, rank: int, members: int) -> tuple[dist.Store, Path]:
    """The store and the file that backs it; `members` counts the publisher too."""
    folder = shared_folder()
    if kind == "safe":
        from dtprobe.framework.filestore import SafeFileStore

        store = SafeFileStore(folder, run="job", rank=rank, world_size=members, timeout_s=START_S)
        return store, store.folder / "log"
    path = folder / "store"
    torch_store = dist.FileStore(str(path), members)
    torch_store.set_timeout(timedelta(seconds=START_S))
    return torch_store, path


def publish(args: argparse.Namespace, members: int, go: object) -> None:
    """The publisher's life: join, wait for the word, write one key, perhaps under a limit that cuts the write short."""
    store, path = open_store(args.store, members - 1, members)
    go.wait()
    if args.mode == "torn":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; a C program would be ended by it
        limit = path.stat().st_size + BEFORE_THE_CUT
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        store.set(KEY, VALUE)
    except RuntimeError as error:
        record("publisher", error=f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001  the framework's own refusal; said in the evidence
        record("publisher", error=f"{type(error).__name__}: {error}")
    if args.mode == "torn":
        # Only the framework's store comes here: it takes a short write back. A host that crashes cannot, so leave its half.
        with path.open("ab") as file:
            file.write(path.read_bytes()[-BEFORE_THE_CUT:])
        os.kill(os.getpid(), signal.SIGKILL)


def watch_locks(path: Path, done: threading.Event) -> None:
    """Say who holds and who awaits the file's lock, as the kernel lists it."""
    inode = str(path.stat().st_ino)
    while not done.wait(0.5):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()[1:]
            waiting = fields[0] == "->"
            fields = fields[1:] if waiting else fields
            if fields[4].rpartition(":")[2] == inode:
                record("lock", mode=fields[2].lower(), holder=int(fields[3]), waiting=waiting)


def touch_store(store: dist.Store, rank: int) -> None:
    """What ranks do after a start: rank 0 reads the published key, the others count themselves in."""
    if rank == 0:
        store.get(KEY)
    else:
        store.add("arrived", 1)


def train(steps: int) -> None:
    """Compute and reduce for a while: the job works, and its time shows what the recorders cost."""
    began = time.perf_counter()
    weights, gradient = torch.randn(512, 512), torch.ones(4096)
    for _ in range(steps):
        torch.mm(weights, weights)
        dist.all_reduce(gradient)
    record("work", duration_s=time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("whole", "torn"), default="whole")
    parser.add_argument("--store", choices=("torch", "safe"), default="torch")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--timeout-s", type=float, default=1.5)
    parser.add_argument("--give-up-s", type=float, default=3.0, help="end by SIGALRM after so long in one store call")
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    members = world_size + 1
    fork = multiprocessing.get_context("fork")  # before any thread or group exists
    go = fork.Event()
    publisher = fork.Process(target=publish, args=(args, members, go)) if rank == 0 else None
    if publisher:
        publisher.start()
    store, path = open_store(args.store, rank, members)
    dist.init_process_group(args.backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=START_S))
    train(100)
    if publisher:
        go.set()
        publisher.join()
        record("published", exit_code=publisher.exitcode, file_bytes=path.stat().st_size)
    dist.barrier()
    store.set_timeout(timedelta(seconds=args.timeout_s))  # the start may take longer on a busy machine

    done = threading.Event()
    if rank == 0:
        threading.Thread(target=watch_locks, args=(path, done), daemon=True).start()
    # A call that spins in C serves no Python signal handler and no exception: only the default action ends it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, args.give_up_s)
    with attempt("store call"):
        touch_store(store, rank)
    signal.setitimer(signal.ITIMER_REAL, 0)
    done.set()
    dist.barrier()
    dist.destroy_process_group()
    if args.store == "safe":
        with contextlib.suppress(Exception):  # a torn store says so once more when it is closed
            store.close(timeout_s=1.0)


if __name__ == "__main__":
    main()
