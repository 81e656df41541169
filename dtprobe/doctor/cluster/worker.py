"""What every rank does: join, say what it found about itself, try collectives, measure links; then rank 0 reports.

Ranks agree over the store at the end of each stage, so one that died or stopped is named by the others, however the back end
puts it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

import dtprobe
from dtprobe.doctor.cluster import checks, collectives, links, matrix, measured, ssh
from dtprobe.doctor.cluster.clocks import Offset, from_first
from dtprobe.doctor.cluster.facts import Facts, gather
from dtprobe.doctor.cluster.guard import guarded, signals_held
from dtprobe.doctor.cluster.matrix import Link
from dtprobe.doctor.cluster.verdict import ClusterReport, Collective, Problem
from dtprobe.errors import DtprobeError
from dtprobe.framework.agreement import Agreement, Said
from dtprobe.framework.bootstrap import Job, Placement, PlacementError, resolve, start
from dtprobe.framework.bootstrap.identity import IdentityError
from dtprobe.framework.bootstrap.job import StartFailed
from dtprobe.framework.errors import FrameworkError, MissingRanks, RankError, StoreLost
from dtprobe.framework.groups import ScopedGroup
from dtprobe.framework.stores import meet

_JOIN_SHARE = 0.5
_LIMIT_SHARE = 1 / 6
"""One message may take this share of the deadline: a silent rank costs it once or twice, and time to say so is left."""
_SLOT_S = 0.5
_LINKS_SHARE = 0.4
_SUSPECTS = 8
_AGAIN = 3


class RankFailed(DtprobeError):
    """This rank's own fatal error, where rank 0 cannot report: exit code 1."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """The seam to time: seconds that only grow, and nanoseconds of UTC."""

    monotonic: Callable[[], float] = time.monotonic
    wall_ns: Callable[[], int] = time.time_ns


def run(
    *,
    environ: Mapping[str, str],
    deadline_s: float,
    show: Callable[[ClusterReport], None],
    time_by: Clocks | None = None,
) -> int:
    """Check the cluster as one of its ranks; the exit code: 0 healthy (or not rank 0), 1 a problem was found.

    Call it in the main thread. `environ` is what the launcher left. `show` is called on rank 0 alone, once, also when the job
    breaks off. Raises PlacementError for an environment that contradicts itself, and RankFailed on a rank whose rank 0 is
    lost. Where the job hangs or is ended by its launcher, the process ends here, by `os._exit`, with everything said.
    """
    placement = resolve(environ)
    examination = Examination(placement, environ, deadline_s, time_by or Clocks())
    with signals_held():
        with guarded(examination, show):
            try:
                examination.through()
            except FrameworkError as error:
                if placement.rank != 0 and not _heard_by_rank_0(error):
                    raise RankFailed(f"rank {placement.rank}: {error.message}", error.remedy) from None
                examination.broken(error)
        if placement.rank != 0:
            return 0
        report = examination.report()
        show(report)
    return 0 if report.healthy else 1


def _heard_by_rank_0(error: FrameworkError) -> bool:
    """Whether rank 0 lives and learnt the same, so that its report says it for all."""
    if isinstance(error, MissingRanks):
        return 0 not in error.ranks
    return isinstance(error, (IdentityError, StartFailed, PlacementError))


@dataclass(frozen=True)
class _Pairs:
    """What all pairs of one transport are measured with."""

    group: ScopedGroup
    transport: str
    wire: links.Wire
    hosts: list[str]


class Examination:
    """One rank's side of the whole check, and what it has found out so far."""

    def __init__(self, placement: Placement, environ: Mapping[str, str], deadline_s: float, time_by: Clocks) -> None:
        self.placement = placement
        self.deadline_s = deadline_s
        self.stage = "start"
        self._environ = environ
        self._time = time_by
        self._begun = time_by.monotonic()
        self._started_ns = time_by.wall_ns()
        self._mine: Facts | None = None
        self._facts: list[Facts] = []
        self._problems: list[Problem] = []
        self._tried: list[Collective] = []
        self._links: list[Link] = []
        self._not_measured = ""
        self._stages: dict[str, float] = {}
        self._limit_s = deadline_s * _LIMIT_SHARE
        self._agreement: Agreement | None = None
        self._broken = False
        self.job: Job | None = None

    @property
    def left_s(self) -> float:
        return self._begun + self.deadline_s - self._time.monotonic()

    def through(self) -> None:
        """All stages in order. Raises FrameworkError where ranks do not come, stop or contradict each other."""
        where = self.placement
        with self._timed("looking at this rank"):
            self._mine = gather(rank=where.rank, local_rank=where.local_rank, launcher=where.source, environ=self._environ)
            self._facts = [self._mine]
        with self._timed("joining"):
            before = _listening()
            try:
                job = start(where, backend="gloo", deadline_s=self.left_s * _JOIN_SHARE, timeout_s=self._limit_s)
            except (MissingRanks, IdentityError, StoreLost):
                raise
            except RankError as error:  # everyone is there and learnt the same: facts can still be exchanged
                self._facts_without_group()
                raise error
        self._mine = self._mine.with_gloo_address(next(iter(_listening() - before), None))
        with job:
            self.job = job
            self._agreement = Agreement(
                job.store, rank=where.rank, members=tuple(range(where.world_size)), prefix="dtprobe.cluster"
            )
            try:
                self._with_job(job)
            except FrameworkError as error:
                self.broken(error)  # before groups are ended, which may take until the deadline where a peer is silent
                raise
            finally:
                self._agreement.close()

    def _with_job(self, job: Job) -> None:
        with self._timed("comparing facts"):
            gpu = self._mine.gpu if self._mine else None
            able = f"{self._mine.host} {gpu.uuid}" if self._mine and gpu and self._mine.versions.get("nccl") else ""
            told, facts = self._shared("facts", {"gpu": able}, self._mine.as_json() if self._mine else {})
            self._facts = [Facts.from_json(each) for each in facts] or self._facts
        gpus = {each["gpu"] for each in told} - {""}
        with ThreadPoolExecutor(1) as aside:  # the others need not wait for ssh
            reached = aside.submit(self._ssh) if self.placement.rank == 0 else None
            went = self._over(job, job.world, "gloo", "cpu")
            if went and gpu is not None and len(gpus) == self.placement.world_size:
                with torch.cuda.device(gpu.index):
                    self._over_nccl(job)
            self._problems += reached.result() if reached is not None else []
        self.stage = "ending the job"

    def broken(self, error: FrameworkError) -> None:
        """Note that the job broke off, as a problem of the ranks that the error names. What broke it first counts."""
        if self._broken:
            return
        self._broken = True
        blamed = tuple(getattr(error, "ranks", ()))
        what = "placement" if isinstance(error, (IdentityError, PlacementError)) else "ranks"
        hosts = tuple(dict.fromkeys(each.host for each in self._facts if each.rank in blamed))
        self._problems.append(
            Problem(
                check=what,
                severity="error",
                ranks=blamed,
                hosts=hosts,
                found=f"while {self.stage}: {error.message}",
                wanted=f"all {self.placement.world_size} ranks to the end",
                remedy=error.remedy or "look at the named ranks first",
            )
        )

    def report(self) -> ClusterReport:
        """Everything found so far; on rank 0 that is of all ranks."""
        facts = sorted(self._facts, key=lambda each: each.rank)
        pairs = [
            Offset(rank=each.b, of=each.a, offset_s=each.offset_s, uncertainty_s=each.uncertainty_s)
            for each in self._links
            if each.offset_s is not None and each.uncertainty_s is not None
        ]
        offsets = from_first(pairs)
        judged = matrix.judged(self._links)
        several = len({each.host for each in facts}) > 1
        problems = [*self._problems, *checks.of_facts(facts, self.placement, several_hosts=several)]
        problems += (
            measured.of_links(judged, facts) + measured.of_clocks(offsets, facts) + measured.of_collectives(self._tried, facts)
        )
        return ClusterReport(
            launcher=self.placement.source,
            world_size=self.placement.world_size,
            hosts=self._hosts(),
            ranks=facts,
            problems=problems,
            collectives=self._tried,
            links=judged,
            not_measured=self._not_measured,
            offsets=offsets,
            stages_s=self._stages,
            started_ns=self._started_ns,
            took_s=self._time.monotonic() - self._begun,
            deadline_s=self.deadline_s,
            dtprobe=dtprobe.__version__,
        )

    # the stages

    def _ssh(self) -> list[Problem]:
        return ssh.check(self._hosts(), self.placement, self._environ, limit_s=min(5.0, self._limit_s))

    def _over(self, job: Job, group: ScopedGroup, transport: str, device: str) -> bool:
        """Measure links and try collectives over one group; False where it failed outright, and is of no use any more."""
        wire = links.Wire(group, device=device, limit_s=self._limit_s, clock=self._time.monotonic)
        went = True
        if job.placement.world_size > 1:
            with self._timed(f"measuring {transport} links"):
                went = self._measure(job, group, transport, wire)
        if went:
            with self._timed(f"trying {transport} collectives"):
                went = self._collectives(group, transport, device, wire)
        return went

    def _over_nccl(self, job: Job) -> None:
        # its own watchdog would abort the process at the timeout, before anything could be said: let it never come
        group = job.groups.create("nccl", backend="nccl", timeout_s=2 * self.deadline_s)
        if group is not None:
            self._over(job, group, "nccl", "cuda")

    def _collectives(self, group: ScopedGroup, transport: str, device: str, wire: links.Wire) -> bool:
        """Try every collective; False where one failed outright on any rank."""
        size, rank = self.placement.world_size, self.placement.rank
        tried: list[collectives.Tried] = []
        with self._group_work(group) as failure:
            for op, dtype, elements in collectives.cases(size):
                tried.append(
                    collectives.attempt(
                        op,
                        dtype,
                        elements,
                        rank=rank,
                        world_size=size,
                        group=group,
                        device=device,
                        settle=wire.settle,
                    )
                )
        told, heard = self._shared(f"{transport} collectives", {"failure": failure}, [each.blamed for each in tried])
        for number, (op, dtype, elements) in enumerate(collectives.cases(size)):
            seen = {one: said[number] for one, said in enumerate(heard) if number < len(said)}
            if seen:
                self._tried.append(
                    Collective(
                        transport=transport,
                        op=op,
                        dtype=str(dtype).removeprefix("torch."),
                        elements=elements,
                        wrong=tuple(one for one, blamed in seen.items() if blamed),
                        blamed=tuple(sorted({each for blamed in seen.values() for each in blamed})),
                    )
                )
        return not self._failed("collectives", transport, told)

    def _measure(self, job: Job, group: ScopedGroup, transport: str, wire: links.Wire) -> bool:
        """Measure every link once, then those that look slow again, alone; False where one failed outright."""
        hosts = [peer.host for peer in job.peers]
        chosen, self._not_measured = matrix.measuring(hosts)
        plan = matrix.rounds(chosen)
        slot_s = min(_SLOT_S, max(self.left_s * _LINKS_SHARE / len(plan), 0.1))
        plan, left_out = self._as_many_as_fit(plan, slot_s)
        if left_out:
            self._not_measured = f"{self._not_measured}; {left_out}".removeprefix("; ")
        others = self._links
        pairs = _Pairs(group, transport, wire, hosts)
        found, went = self._pairs("links", pairs, [pair for each in plan for pair in each], slot_s)
        self._links = [*others, *found]
        for attempt in range(_AGAIN):
            suspects = self._suspects(found) if went else []
            if not suspects:
                break
            # one pair at a time, alone: what stays slow now is not the others' doing
            for pair in suspects:
                again, went = self._pairs(f"links again {attempt}", pairs, [pair], _SLOT_S)
                found = matrix.merged(found, again)
                self._links = [*others, *found]
                if not went:
                    break
        return went

    def _suspects(self, found: list[Link]) -> list[tuple[int, int]]:
        """The links to measure again, by what rank 0 has of all; none where some rank's deadline is too near."""
        slow = [(each.a, each.b) for each in matrix.judged(found) if each.slow][:_SUSPECTS]
        left_s = self.left_s - 3 * self._limit_s
        told, _ = self._shared("choosing links to measure again", {"slow": slow, "left_s": left_s})
        chosen = [(a, b) for a, b in told[0]["slow"]]
        return chosen if min(each["left_s"] for each in told) > len(chosen) * 2 * _SLOT_S else []

    def _as_many_as_fit(self, plan: list[Any], slot_s: float) -> tuple[list[Any], str]:
        most = max(1, int(self.left_s * _LINKS_SHARE / slot_s))
        if len(plan) <= most:
            return plan, ""
        total, kept = sum(map(len, plan)), sum(map(len, plan[:most]))
        return plan[:most], f"{kept} of {total} links fit before the deadline of {self.deadline_s:g} s; --deadline-s gives more"

    def _pairs(self, what: str, over: _Pairs, pairs: list[tuple[int, int]], slot_s: float) -> tuple[list[Link], bool]:
        """Measure this rank's links among `pairs`, in their order; on rank 0 those of all ranks, and whether all went."""
        rank = self.placement.rank
        mine: list[Link] = []
        with self._group_work(over.group) as failure:
            for a, b in pairs:
                if rank == b:
                    links.answer(over.wire, a, wall_ns=self._time.wall_ns)
                elif rank == a:
                    mine.append(
                        links.lead(
                            over.wire,
                            a,
                            b,
                            transport=over.transport,
                            kind="same host" if over.hosts[a] == over.hosts[b] else "between hosts",
                            slot_s=slot_s,
                            wall_ns=self._time.wall_ns,
                        )
                    )
        told, heard = self._shared(f"{over.transport} {what}", {"failure": failure}, [each.as_json() for each in mine])
        found = [Link(**{**each, "slow": ()}) for said in heard for each in said]
        return sorted(found, key=lambda each: (each.a, each.b)), not self._failed("links", over.transport, told)

    # how stages are made

    def _shared(self, what: str, said: Said, whole: Any = None) -> tuple[list[Said], list[Any]]:
        """What every rank says, in the order of ranks, and on rank 0 the `whole` of each, which may be long.

        Raises MissingRanks naming ranks that did not come.
        """
        assert self.job is not None and self._agreement is not None
        store, number = self.job.store, self._agreement.done
        # a rank that is blocked by a silent one comes when its own limit is over: wait longer than that for it
        wait_s = self._limit_s * (1.2 if said.get("failure") else 2.2) + 1.0
        try:
            store.set(f"dtprobe.cluster.said/{number}/{self.placement.rank}", json.dumps(whole))
            verdict = self._agreement.reach(said, _in_order, max(min(wait_s, self.left_s - 1.0), 0.2), what=what)
            if self.placement.rank != 0 or whole is None:
                return verdict["said"], []
            keys = [f"dtprobe.cluster.said/{number}/{one}" for one in range(self.placement.world_size)]
            return verdict["said"], [json.loads(each) for each in store.multi_get(keys)]
        except dist.DistError as error:
            raise StoreLost(
                f"{what}: the store stopped answering ({str(error).partition(chr(10))[0][:200]})", "look at rank 0 first"
            ) from None

    @contextlib.contextmanager
    def _group_work(self, group: ScopedGroup) -> Iterator[list[str]]:
        """Collectives and messages in the block may fail: why goes into the list, and the group is cut for the others' sake."""
        failure: list[str] = []
        try:
            yield failure
        except RuntimeError as error:
            failure.append(str(error).strip().partition("\n")[0][:300] or type(error).__name__)
            group.abort()

    def _failed(self, check: str, transport: str, heard: list[Said]) -> bool:
        """Whether the transport failed on some rank; noted as a problem of those ranks, whose processes all live."""
        said = {rank: each["failure"][0] for rank, each in enumerate(heard) if each["failure"]}
        if said:
            first = min(said)
            self._problems.append(
                Problem(
                    check=check,
                    severity="error",
                    ranks=tuple(sorted(said)),
                    hosts=tuple(dict.fromkeys(each.host for each in self._facts if each.rank in said)),
                    found=f"{transport} failed though every process lives; rank {first}: {said[first]}",
                    wanted="messages between all ranks",
                    remedy="open all ports between the hosts on this interface (firewall, security group), "
                    f"or name another one in {transport.upper()}_SOCKET_IFNAME",
                )
            )
        return bool(said)

    def _facts_without_group(self) -> None:
        """The default group could not be made: exchange facts over a store alone, so that rank 0 can say why."""
        where, mine = self.placement, self._mine
        if mine is None:
            return
        with contextlib.suppress(FrameworkError, dist.DistError):  # the error that led here is the one to report
            raw = meet(where, timeout_s=min(10.0, self.left_s / 3), again=1)
            store = dist.PrefixStore(f"dtprobe.cluster/{where.run}/{where.attempt}", raw)
            agreement = Agreement(store, rank=where.rank, members=tuple(range(where.world_size)), prefix="dtprobe.facts")
            store.set(str(where.rank), json.dumps(mine.as_json()))
            agreement.reach({}, lambda heard: {}, min(10.0, self.left_s / 3), what="comparing facts")
            if where.rank == 0:
                self._facts = [
                    Facts.from_json(json.loads(each)) for each in store.multi_get([str(one) for one in range(where.world_size)])
                ]

    def _hosts(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for each in sorted(self._facts, key=lambda one: one.rank):
            found.setdefault(each.host, []).append(each.rank)
        return found

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        self.stage = stage
        begun = self._time.monotonic()
        try:
            yield
        finally:
            self._stages[stage] = self._time.monotonic() - begun


def _listening() -> set[str]:
    """Addresses other than the wildcard at which this process listens."""
    try:
        found = psutil.Process().net_connections("tcp")
    except psutil.Error:
        return set()
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN} - {"0.0.0.0", "::"}


def _in_order(heard: Mapping[int, list[Said]]) -> Said:
    return {"said": [said for _, (said, *_) in sorted(heard.items())]}
