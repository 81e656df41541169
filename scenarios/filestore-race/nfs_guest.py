"""Two clients of a real NFS server, all in the lab VM: client 0 makes names and sets keys, client 1 waits until it sees them.

Each client is a process with a network, host name and mounts of its own, so the kernel keeps two clients' caches. Tries of client 1:
`see name` waits for files that it has looked for before, `see key` for a key in a store, both with `blind_s`, from when it was
made until it was seen. `--store torch` is torch's FileStore, out of torch's own library; of torch's Python nothing is imported, which
would take the emulated processor most of a minute. `--store safe` is the framework's, which makes its names itself: then no other is waited for.

By hand: `python -m dtprobe.launch.lab` cannot share the packages; run the scenario.
"""

from __future__ import annotations

import argparse
import ctypes
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dtprobe import attempt, record

PACKAGES = "/packages"
SHARED = Path("/mnt/shared")
EXPORTED = Path("/export")
SEES_S = 40.0
STORE_S = 20.0
PAUSE_S = 0.05
NAMESPACES = 0x40000000 | 0x04000000 | 0x20000
"""CLONE_NEWNET, CLONE_NEWUTS, CLONE_NEWNS (sched.h)."""
MS_PRIVATE = 0x4000 | 0x40000


def run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")


def torch_library() -> None:
    """torch's C++ half under the names by which the stores are known."""
    sys.path.append(PACKAGES)
    torch, distributed = types.ModuleType("torch"), types.ModuleType("torch.distributed")
    torch.__path__ = [f"{PACKAGES}/torch"]
    torch.__dict__["distributed"] = distributed
    sys.modules |= {"torch": torch, "torch.distributed": distributed}
    ctypes.CDLL(f"{PACKAGES}/torch/lib/libtorch_global_deps.so", mode=ctypes.RTLD_GLOBAL)
    import torch._C as library

    library._c10d_init()
    from torch._C._distributed_c10d import FileStore, Store

    names = {"FileStore": FileStore, "Store": Store}
    errors = {name: getattr(library, f"_{name}") for name in ("DistError", "DistStoreError")}
    distributed.__dict__.update(names, **errors)


def serve() -> None:
    """The kernel's NFS server, version 4: with version 3 locks would be those of lockd, which gives none in its first 50 s."""
    run("modprobe", "-a", "nfsd", "nfs", "nfsv4", "veth")
    for folder in (EXPORTED, Path("/var/lib/nfs/v4recovery"), Path("/var/lib/nfs/rpc_pipefs")):
        folder.mkdir(parents=True, exist_ok=True)
    run("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
    run("exportfs", "-o", "rw,no_root_squash,no_subtree_check,sync,fsid=0", f"10.0.0.0/8:{EXPORTED}")
    run("rpc.mountd", "--no-nfs-version", "3")
    run("rpc.nfsd", "--no-nfs-version", "3", "4")
    Path("/proc/fs/nfsd/v4_end_grace").write_text("Y", encoding="ascii")  # nobody has locks from before to claim


class Client:
    """A client in this process: mounts the server's folder and does what it is told to."""

    def __init__(self, number: int, options: str) -> None:
        self.number = number
        run("ip", "link", "set", "lo", "up")
        run("ip", "address", "add", f"10.0.{number}.2/24", "dev", f"c{number}")
        run("ip", "link", "set", f"c{number}", "up")
        SHARED.mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "nfs4", "-o", options, f"10.0.{number}.1:/", str(SHARED))
        mount = next(line for line in Path("/proc/mounts").read_text(encoding="ascii").splitlines() if f" {SHARED} " in line)
        record("mount", line=mount)

    def absent(self, names: Sequence[str]) -> None:
        """Ask for names that are not there."""
        assert not any((SHARED / name).exists() for name in names)

    def folders(self, names: Sequence[str]) -> None:
        for name in names:
            (SHARED / name).parent.mkdir(parents=True, exist_ok=True)

    def make(self, names: Sequence[str]) -> None:
        for name in names:
            (SHARED / name).write_text(str(time.time_ns()), encoding="ascii")

    def see_names(self, names: Sequence[str]) -> None:
        """Wait for all of them at once."""

        def see(name: str) -> None:
            with attempt("see name") as made:
                deadline = time.monotonic() + SEES_S
                while not (SHARED / name).exists():
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{name} was not seen within {SEES_S:g} s")
                    time.sleep(PAUSE_S)
                seen_ns = time.time_ns()
                while not (made_ns := (SHARED / name).read_text(encoding="ascii")) and time.monotonic() < deadline:
                    time.sleep(PAUSE_S)  # it is made before it is written
                made.note(blind_s=(seen_ns - int(made_ns)) / 1e9)

        threads = [threading.Thread(target=see, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def open_store(self, kind: str) -> None:
        with attempt(f"open {self.number}"):
            if kind == "safe":
                from dtprobe.framework.filestore import SafeFileStore

                self.store: Any = SafeFileStore(SHARED, run="job", rank=self.number, world_size=2, timeout_s=STORE_S)
            else:
                from torch.distributed import FileStore

                self.store = FileStore(str(SHARED / "store"), 2)
                self.store.set_timeout(timedelta(seconds=STORE_S))

    def check(self, key: str) -> None:
        assert not self.store.check([key])

    def set(self, key: str) -> None:
        self.store.set(key, str(time.time_ns()))

    def see_key(self, key: str) -> None:
        with attempt("see key") as made:
            set_ns = int(self.store.get(key))
            made.note(blind_s=(time.time_ns() - set_ns) / 1e9)

    def close_store(self, kind: str) -> None:
        if kind == "safe":
            self.store.close()


def be_client(number: int, options: str, told: Connection) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NAMESPACES) or libc.mount(None, b"/", None, ctypes.c_ulong(MS_PRIVATE), None):
        raise OSError(ctypes.get_errno(), "a client needs namespaces of its own")
    socket.sethostname(f"client{number}")  # NFS 4 knows its clients by it
    told.send(None)
    told.recv()
    client = Client(number, options)
    told.send(None)
    try:
        while (asked := told.recv()) is not None:
            name, *arguments = asked
            getattr(client, name)(*arguments)
            told.send(None)
    except Exception:
        traceback.print_exc()
        raise


class Told:
    """A client's process, from outside: a call asks and waits, `begin` only asks."""

    def __init__(self, number: int, options: str) -> None:
        context = get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=be_client, args=(number, options, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.wait()
        near, far = f"s{number}", f"c{number}"
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", str(self._process.pid))
        run("ip", "address", "add", f"10.0.{number}.1/24", "dev", near)
        run("ip", "link", "set", near, "up")
        self._pipe.send(None)
        self.wait()

    def begin(self, name: str, *arguments: object) -> None:
        self._pipe.send((name, *arguments))

    def wait(self) -> None:
        if not self._pipe.poll(SEES_S + STORE_S):
            raise TimeoutError("a client does not answer")
        self._pipe.recv()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def ask(*arguments: object) -> None:
            self.begin(name, *arguments)
            self.wait()

        return partial(ask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mount", required=True, help="mount options of both clients")
    parser.add_argument("--store", choices=("torch", "safe"), default="torch")
    parser.add_argument("--tries", type=int, default=6)
    args = parser.parse_args()
    serve()
    began = time.monotonic()
    torch_library()
    if args.store == "safe":
        import dtprobe.framework.filestore  # noqa: F401  before the fork: once for both
    record("torch", seconds=time.monotonic() - began)
    maker, seer = (Told(number, args.mount) for number in range(2))

    if args.store == "torch":
        names = [f"{number}/ready" for number in range(args.tries)]
        maker.folders(names)
        seer.absent(names)
        seer.begin("see_names", names)
        time.sleep(2 * PAUSE_S)
        maker.make(names)
        seer.wait()
    seer.absent(["store", "job.0"])
    for each in (maker, seer):
        each.open_store(args.store)
    for number in range(args.tries):
        seer.check(f"key{number}")
        seer.begin("see_key", f"key{number}")
        time.sleep(2 * PAUSE_S)
        maker.set(f"key{number}")
        seer.wait()
    seer.begin("close_store", args.store)
    maker.close_store(args.store)
    seer.wait()
    record("left", names=" ".join(sorted(path.name for path in EXPORTED.iterdir())))


if __name__ == "__main__":
    main()
