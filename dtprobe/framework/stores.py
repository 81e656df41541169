"""The meeting point of a job: a TCPStore that is known to answer, and to be this job's own.

c10d's client keeps knocking at a port that nobody listens on, believes whatever store answers there, and two jobs that derive
their port from a job number can meet. Here rank 0 writes who it is before anyone relies on the store, the others read it, and
where no port was given both sides walk one list of candidates derived from the run's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from datetime import timedelta

import psutil
import torch.distributed as dist

from dtprobe.errors import Unavailable
from dtprobe.framework.bootstrap.placement import Placement, PlacementError
from dtprobe.framework.errors import MissingRanks, RankError
from dtprobe.framework.filestore import Claim, SafeFileStore, StaleStore, TornRecord
from dtprobe.framework.part import torch_distributed
from dtprobe.framework.wires import Wires, watch

__all__ = ["Claim", "PortTaken", "SafeFileStore", "StaleStore", "TornRecord", "meet", "ports", "probe"]

_READY = "dtprobe.ready"
_CANDIDATES = 64
_LOW, _HIGH = 20_000, 32_000  # below the range from which Linux gives ports to outgoing connections
_LOOK_S = 1.0


class PortTaken(RankError):
    """The port at which this job must meet belongs to someone else."""


def probe() -> Unavailable | None:
    """None where torch.distributed was built in."""
    return torch_distributed()


def ports(run: str, attempt: int = 0) -> Iterator[int]:
    """Candidate ports of a run and attempt, the same on every rank, in the order in which they are tried."""
    for number in range(_CANDIDATES):
        digest = hashlib.sha256(f"{run}/{attempt}/{number}".encode()).digest()
        yield _LOW + int.from_bytes(digest[:4], "big") % (_HIGH - _LOW)


def meet(
    placement: Placement, *, timeout_s: float, again: int = 0, clock: Callable[[], float] = time.monotonic
) -> dist.TCPStore:
    """This job's store, served by rank 0 (or the launcher's agent) and reached by the others, within `timeout_s` seconds.

    `again` counts the jobs that the same processes had before: rank 0 may still be ending the last one when a quicker rank is
    here already, and that store is not the one to join.

    Raises PortTaken when another job or program has the port, StaleStore when a second process claims to be rank 0,
    MissingRanks naming rank 0 when nobody serves the store in time, PlacementError when the environment names no place.
    """
    if not placement.master_addr:
        raise PlacementError(
            f"{placement}: no address to meet at", "set MASTER_ADDR to rank 0's host (mpirun -x MASTER_ADDR=HOST)"
        )
    if placement.master_port is None and not placement.run:
        raise PlacementError(f"{placement}: neither a port nor a run id to derive one from", "set MASTER_PORT")
    deadline = clock() + timeout_s
    if placement.rank == 0 and not placement.agent_store:
        return _serve(placement, timeout_s, again)
    return _join(placement, deadline, timeout_s, again, clock)


def _serve(placement: Placement, timeout_s: float, again: int) -> dist.TCPStore:
    claim = Claim(placement.run, placement.attempt, 0, placement.world_size, socket.gethostname(), os.getpid())
    for port in _candidates(placement):
        try:
            store = dist.TCPStore(
                placement.master_addr, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
                raise PortTaken(f"rank 0 cannot listen on port {port}: {str(error).splitlines()[0]}", ranks=(0,)) from None
            found = _server(placement.master_addr, port)
            if found is not None and _same_run(found, claim) and found.pid != claim.pid:
                raise StaleStore(
                    f"two processes claim to be rank 0 of run {claim.run!r}: {found} and {claim}",
                    "give each process a rank of its own, and each run an id of its own",
                    ranks=(0,),
                ) from None
            if placement.master_port is not None:
                raise PortTaken(
                    f"port {port} is in use by {found or _listener(port)}; rank 0 must serve the store there",
                    "choose another MASTER_PORT, or end that process",
                    ranks=(0,),
                ) from None
            continue
        store.set(_READY, json.dumps([again, *astuple(claim)]))
        return store
    raise PortTaken(f"none of {_CANDIDATES} ports derived from run {placement.run!r} is free", "set MASTER_PORT", ranks=(0,))


def _join(placement: Placement, deadline: float, timeout_s: float, again: int, clock: Callable[[], float]) -> dist.TCPStore:
    problem = "nobody listens"
    while clock() < deadline:
        for port in _candidates(placement):
            try:
                socket.create_connection((placement.master_addr, port), timeout=_LOOK_S).close()
            except socket.gaierror as error:
                raise PlacementError(
                    f"MASTER_ADDR={placement.master_addr}: {error.strerror}", "name a host that resolves"
                ) from None
            except OSError as error:
                problem = f"port {port}: {error.strerror or error}"
                # rank 0 took the first candidate that was free when it came: look at the next few, then begin again
                continue
            with contextlib.suppress(dist.DistError):
                store = _client(placement.master_addr, port, timeout_s)
                if placement.agent_store:
                    return store
                number, found = _greeting(store)
                ours = (found.run, found.attempt) == (placement.run, placement.attempt)
                if ours and number == again:
                    return store
                problem = f"port {port} belongs to {found}" + (f", to the start number {number} of this run" if ours else "")
                if not ours and placement.master_port is not None:
                    raise PortTaken(
                        f"{placement.master_addr}: {problem}, not to run {placement.run!r} attempt {placement.attempt}",
                        "two jobs use one address: choose another MASTER_PORT",
                    )
                continue
            problem = f"port {port} belongs to a program that is no dtprobe store"
        time.sleep(0.02)
    raise MissingRanks(
        f"rank 0 does not serve the store at {placement.master_addr} within {timeout_s:.3g} s ({problem})",
        "look at rank 0: it died, did not start, or its host cannot be reached at that address",
        ranks=(0,),
    )


def _candidates(placement: Placement) -> Iterator[int]:
    if placement.master_port is not None:
        return iter([placement.master_port])
    return ports(placement.run, placement.attempt)


def _client(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A connection to the store there; raises DistNetworkError when what listens does not speak within a second.

    c10d's own constructor waits for ever for a listener that says nothing, whatever its timeout (torch 2.13), so it runs in a
    thread whose connection is shut down when it is late.
    """
    found: list[dist.TCPStore | dist.DistError] = []

    def connect() -> None:
        try:
            # the constructor tries again until its timeout: a short one, and the real one afterwards
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_LOOK_S))
            store.set_timeout(timedelta(seconds=timeout_s))
            found.append(store)
        except dist.DistError as error:
            found.append(error.with_traceback(None))

    with watch() as opened:
        thread = threading.Thread(target=connect, name="dtprobe-store-connect", daemon=True)
        thread.start()
        thread.join(_LOOK_S)
    if thread.is_alive():
        Wires.among(opened, [port]).cut()
        thread.join()
    if isinstance(found[0], dist.DistError):
        raise found[0]
    return found[0]


def _greeting(store: dist.TCPStore) -> tuple[int, Claim]:
    """Who serves the store, and for which of its jobs; raises DistStoreError for a store of someone else's."""
    store.wait([_READY], timedelta(seconds=_LOOK_S))
    try:
        number, *fields = json.loads(store.get(_READY))
        return number, Claim(*fields)
    except (ValueError, TypeError) as error:
        raise dist.DistStoreError(f"{_READY} is not what this library writes: {error}") from None


def _server(host: str, port: int) -> Claim | None:
    """Who serves the store there; None when it is no store of ours."""
    with contextlib.suppress(dist.DistError):
        return _greeting(_client(host, port, _LOOK_S))[1]
    return None


def _same_run(found: Claim, claim: Claim) -> bool:
    return (found.run, found.attempt) == (claim.run, claim.attempt)


def _listener(port: int) -> str:
    """The process of this host that listens on `port`, as far as we may see it."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    return "a process that we may not see"
