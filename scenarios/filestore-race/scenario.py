"""Files as a meeting point: torch's FileStore and the shell's look-then-create, each with the races that it really has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Scenario, Verdict, inotify, proc, strace

from . import counted, torn, unseen

if TYPE_CHECKING:
    from dtprobe import Evidence

TIMEOUT_S = 1.5
CALL = ("--timeout-s", str(TIMEOUT_S))

REMEMBERS_S = 3.0
"""NFS's own defaults are 3 to 60 s for a file and 30 to 60 s for a folder (nfs(5): acregmin to acdirmax)."""


torn_record = Scenario(
    name="filestore-race",
    variant="torn",
    default=True,
    failure_mode="filestore-torn-record",
    title="A half-written record in a store file stops every rank that touches the store",
    claim="A rendezvous over files on shared storage fails by a race. (The document blames mkdir and touch, see the variant "
    "shell; FileStore calls neither.) Here: a writer that dies in mid-record makes every later store call hang past its timeout, "
    "one at full processor load with the file locked.",
    source="failure document, section 3.2; torch/csrc/distributed/c10d/FileStore.cpp",
    layer="store",
    certifies_not="Nothing about NFS: the file lies on a local file system. The cut comes from a file-size limit, as a quota or "
    "a full disk makes it, not from a network.",
    world_size=2,
    timeout_s=40,
    repeats=3,
    needs=("linux", "torch"),
    probes=(proc(hz=20), inotify(paths=("{folder}/shared",)), strace(calls="flock,read,unlink,ftruncate")),
    control=Arm("worker.py", args=("--mode", "whole", *CALL)),
    fault=Arm("worker.py", args=("--mode", "torn", *CALL)),
    mitigated=Arm("worker.py", args=("--mode", "torn", *CALL, "--store", "safe")),
    expect={"torch>=2.9": "reproduced"},
)


def _variant(variant: str, **changes: object) -> Scenario:
    fields: dict[str, object] = {
        "default": False,
        "world_size": 1,
        "probes": (proc(hz=20), inotify(paths=("{folder}/shared",))),
    }
    return torn_record.with_variant(variant, **{**fields, **changes})


stale = _variant(
    "stale",
    failure_mode="filestore-stale-file",
    title="The store file of a killed run breaks the next start",
    claim="A job that is killed leaves its store file, and the next start on that path reads the dead job's addresses.",
    source="failure document, section 3.2 (the race it looks for lies here); torch's FileStore documentation warns of reuse",
    certifies_not="Nothing about NFS. Each start is a job of two processes on one host, forked from the rank that counts them.",
    control=Arm("starts.py", args=("--case", "after", "--first", "ended")),
    fault=Arm("starts.py", args=("--case", "after", "--first", "killed")),
    mitigated=Arm("starts.py", args=("--case", "after", "--first", "killed", "--store", "safe")),
)

shared = _variant(
    "shared",
    failure_mode="filestore-stale-file",
    title="Two jobs on one store path form one group and reduce each other's data",
    claim="Two jobs that are started with one file path mix: ranks of different jobs form a group, and sums come out wrong "
    "without an error.",
    source="failure document, section 3.2 (the race it looks for lies here)",
    certifies_not="Nothing about NFS. Both jobs run on one host, forked from the rank that counts them.",
    control=Arm("starts.py", args=("--case", "beside", "--paths", "own")),
    fault=Arm("starts.py", args=("--case", "beside", "--paths", "one")),
    mitigated=Arm("starts.py", args=("--case", "beside", "--paths", "one", "--store", "safe")),
)

shell = _variant(
    "shell",
    failure_mode="file-claim-race",
    title="mkdir and touch after a look let several processes win",
    claim="Setting up a rendezvous folder with mkdir and touch is not atomic on NFS, so several workers believe they made it.",
    source="failure document, section 3.2",
    layer="filesystem",
    certifies_not="Nothing about NFS caching: the race is shown on a local file system, where it exists already.",
    probes=(proc(hz=20),),
    control=Arm("claim.py", args=("--mode", "turns")),
    fault=Arm("claim.py", args=("--mode", "race")),
    mitigated=Arm("claim.py", args=("--mode", "exclusive")),
)


def _cached(cto: str) -> tuple[str, ...]:
    """Rank 1's view remembers; with close-to-open (`cto=yes`, NFS's default) opening a file asks anew."""
    return (f"filesystem:cache,path={{scratch}}/meeting,rank={unseen.LOOKER},seconds={REMEMBERS_S:g},cto={cto}",)


fuse = _variant(
    "fuse",
    failure_mode="filestore-stale-read",
    title="A rank whose client remembers the store file waits for keys that are there",
    claim="A rendezvous over files on NFS is not to be relied on. Here: where a client of the file system tells a file's size from memory, a rank waits for "
    "a key in FileStore until that memory's time is over, however often it opens the file.",
    source="failure document, section 3.2; nfs(5), DATA AND METADATA COHERENCE",
    layer="filesystem",
    certifies_not="A client of NFS: the view remembers for a fixed time, and its locks do not make it ask anew, as NFS's do, "
    "also with nocto (see the variant nfs).",
    world_size=2,
    repeats=2,
    probes=(proc(hz=20), strace(calls="openat,flock")),
    control=Arm("looker.py", faults=_cached("yes")),
    fault=Arm("looker.py", faults=_cached("no")),
    mitigated=Arm("looker.py", args=("--store", "safe"), faults=_cached("no")),
    needs=("linux>=5.2", "torch", "fuse", "mount"),
)

REMEMBERS_A_FOLDER_S = 6.0


def _mounted(options: str, *args: str) -> Arm:
    return Arm("nfs_vm.py", args=("--mount", f"vers=4.2,{options}", *args))


STALE_MOUNT = f"acdirmin={REMEMBERS_A_FOLDER_S:g},acdirmax={REMEMBERS_A_FOLDER_S:g}"

nfs = _variant(
    "nfs",
    failure_mode="filestore-stale-read",
    title="On NFS a name that was looked for too early stays unseen for seconds; torch's FileStore does not suffer from it",
    claim="A rendezvous over files on NFS fails by a race, because what one client makes is not there at once for the others.",
    source="failure document, section 3.2; nfs(5), DATA AND METADATA COHERENCE",
    layer="filesystem",
    certifies_not="One server and two clients are one emulated machine with a Linux 6.1 kernel: nothing about other servers and clients, nor about time on a "
    "real network. FileStore is the one of this torch's library, called without torch's Python half and without a process group.",
    timeout_s=300,
    repeats=1,
    probes=(),
    measures_cost=False,
    control=_mounted("lookupcache=none"),
    fault=_mounted(STALE_MOUNT),
    mitigated=_mounted(STALE_MOUNT, "--store", "safe"),
    needs=("linux", "torch", "python~=3.11.0", "lab"),
    expect={"torch>=2.9": "partly"},
)

stale.judge(counted.stale)
shared.judge(counted.shared)
shell.judge(counted.shell)


@torn_record.judge
def judge_torn(evidence: Evidence) -> Verdict:
    return torn.judged(evidence, TIMEOUT_S)


@fuse.judge
def judge_fuse(evidence: Evidence) -> Verdict:
    return unseen.judged(evidence, REMEMBERS_S)


@nfs.judge
def judge_nfs(evidence: Evidence) -> Verdict:
    return unseen.judged_over_nfs(evidence, REMEMBERS_A_FOLDER_S)
