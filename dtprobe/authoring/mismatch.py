"""Both sides of the scenarios in which one rank calls a collective differently: the worker's trials, and what a judge makes of them.

Each trial has a group of its own, a few steps on which all ranks agree, then the step in which one rank differs. It is made
unguarded (`none`), under torch's own check (`detail`, TORCH_DISTRIBUTED_DEBUG) and under `dtprobe.framework.checked`.

The fault is in the worker's own call: the `collective` injector acts below `checked`, which would not see it.
torch, pandas and the framework are imported when a function is called.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from dtprobe.authoring import symptoms
from dtprobe.authoring.rendezvous import join
from dtprobe.scenario import Arm, Metric, Mitigation, Verdict, VerdictKind
from dtprobe.worker import attempt

if TYPE_CHECKING:
    import pandas as pd
    import torch
    import torch.distributed as dist

    from dtprobe.evidence import Evidence

CULPRIT = 1
"""The rank that differs."""

TIMEOUT_S = 2.0
START_S = 60.0
WARM = 3
"""Steps before: what a repeating program called before tells `checked` which of two ranks is wrong."""

CONTROL = Arm(
    "worker.py", ("--guards", "detail,checked,none", "--timeout-s", "30")
)  # nothing is waited for: a busy machine may be slow
FAULT = Arm("worker.py", ("--differs", "--guards", "detail,none"))
MITIGATED = Arm("worker.py", ("--differs", "--guards", "checked"))

Bring = Callable[[int, int, bool, str], "tuple[torch.Tensor, torch.Tensor]"]
"""From rank, world size, whether this rank differs, and device: what goes in, and what ought to come out."""

Call = Callable[["dist.ProcessGroup", "torch.Tensor", bool], object]
"""The collective on a group, in place, and whether this rank differs."""


def work(bring: Bring, call: Call, description: str | None) -> None:
    """A worker's main: the trials under each guard, recorded as tries `step GUARD`, and `next GUARD` for the all-reduce after it."""
    import torch
    import torch.distributed as dist

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--differs", action="store_true", help=f"rank {CULPRIT} calls something else")
    parser.add_argument("--guards", default="none", help="none, detail, checked: one trial under each, in this order")
    parser.add_argument("--trials", type=int, default=2, help="rounds over the guards")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    device, rank = args.device, join(START_S, device=args.device)
    size = dist.get_world_size()
    differs = args.differs and rank == CULPRIT
    for guard in args.guards.split(",") * args.trials:
        dist.barrier()  # the default group is left alone by what follows, and keeps the ranks together
        with _guarded(guard, args.timeout_s) as group:
            for _ in range(WARM):
                call(group, bring(rank, size, False, device)[0], False)
            sent, right = bring(rank, size, differs, device)
            tensor = sent.clone()
            with attempt(f"step {guard}") as made:
                try:
                    call(group, tensor, differs)
                except Exception as error:
                    made.note(named=",".join(map(str, getattr(error, "ranks", ()))))
                    raise
                finally:
                    made.note(
                        wrong=int((tensor != right).sum()), changed=int((tensor != sent).sum()), value=str(tensor.tolist())
                    )
            with attempt(f"next {guard}"):
                dist.all_reduce(torch.ones(1, device=device), group=group)
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def _guarded(guard: str, timeout_s: float) -> Iterator[dist.ProcessGroup]:
    """A new group of all ranks, under that guard."""
    import torch.distributed as dist

    dist.set_debug_level(dist.DebugLevel.DETAIL if guard == "detail" else dist.DebugLevel.OFF)
    group = dist.new_group(timeout=timedelta(seconds=timeout_s), group_desc=guard)
    if guard != "checked":
        yield group
        return
    from dtprobe.framework.checked import checked

    dist.barrier()  # all have imported it: from here on its deadline measures the calls alone
    with checked(group, timeout_s=START_S) as outer:
        yield outer


def steps(evidence: Evidence) -> pd.DataFrame:
    """The steps under each `guard`, with `silent`, `late`, `died` (null counts as no) and `detected` beside their own columns."""
    rows = _under_guards(evidence, "step").reindex(columns=[*symptoms.COLUMNS, "guard", "named", "wrong", "changed"])
    plain = rows["error"].eq("")
    return rows.assign(
        silent=plain & rows["wrong"].fillna(0).astype(int).gt(0),
        late=rows["error"].ne("") & rows["took_s"].ge(0.9 * TIMEOUT_S),
        died=~rows["ended"],
        detected=rows["text"].str.contains("Detected mismatch", regex=False),
        named_culprit=rows["named"].eq(str(CULPRIT)),
    )


def _under_guards(evidence: Evidence, what: str) -> pd.DataFrame:
    """The tries `WHAT GUARD`, split; a try in which the rank died has nothing but that name."""
    rows = symptoms.attempts(evidence)
    names = rows["what"].str.extract(r"^(\w+) (\w+)$")
    return rows.assign(guard=names[1])[names[0].eq(what)]


def judged(
    evidence: Evidence,
    symptom: Callable[[pd.DataFrame], pd.Series],
    shown: str,
    *,
    detail_catches: bool,
    recorder_sees: bool | None = None,
    only: Sequence[int] = (),
) -> Verdict:
    """The verdict from the tries: `symptom` says of each unguarded step whether it shows it, `shown` names it in words.

    `only` are the ranks that can show it at all (default: all). Reproduced where the symptom is in every such step of the fault
    arm and in no other, torch's own check catches it as often as `detail_catches` says (always, or never), and in the flight
    recorder, where it could record, ranks differ as `recorder_sees` says (None: a rank that dies takes its records along).
    """
    rows = steps(evidence)
    bare = rows[rows["guard"].eq("none")]
    own = bare[bare["rank"].isin(only)] if only else bare
    if (nothing := symptoms.undecided(evidence, {"unguarded steps": own})) is not None:
        return nothing
    holds = symptom(own)
    bad, clean = symptoms.counts(own, holds, "fault"), symptoms.counts(own, holds, "control")
    detail = rows[rows["guard"].eq("detail")]
    caught = symptoms.counts(detail, detail["detected"], "fault")
    recorder = _recorder(evidence)
    as_said = caught[0] == (caught[1] if detail_catches else 0) and (
        recorder_sees is None or recorder.fault is None or recorder.fault.value == float(recorder_sees)
    )
    kind = symptoms.apart(bad, clean, VerdictKind.REPRODUCED if as_said else VerdictKind.PARTLY)
    every = symptoms.attempts(evidence)
    healthy = symptoms.ended_well(evidence, "control") and symptoms.unmarred(every, "control")
    healthy = healthy and not rows.loc[rows["arm"].eq("control"), "wrong"].fillna(1).astype(int).any()
    mitigation = _mitigation(evidence, rows)
    because = (
        f"{bad[0]} of {bad[1]} unguarded steps {shown}, {clean[0]} of {clean[1]} in control. "
        f"TORCH_DISTRIBUTED_DEBUG=DETAIL reported {caught[0]} of {caught[1]}."
    )
    because += symptoms.chance(kind)
    if recorder.fault is not None:
        because += f" The flight recorder's entries differed in {recorder.fault.value:.0%} of the runs."
    cured = rows[rows["arm"].eq("mitigated") & rows["guard"].eq("checked")]
    if len(cured):
        named, total = symptoms.counts(cured, cured["named_culprit"], "mitigated")
        because += f" Checked: {named} of {total} steps raised an error naming rank {CULPRIT}, before anything was sent."
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=healthy,
        metrics=_metrics(evidence, rows, symptoms.share(own, holds), recorder),
        because=because,
    )


def _mitigation(evidence: Evidence, rows: pd.DataFrame) -> Mitigation:
    """Held where each rank's step raised an error naming the culprit, left the tensor alone, and the group was still of use."""
    if not evidence.ran("mitigated"):
        return Mitigation.NONE
    own = rows[rows["arm"].eq("mitigated")]
    after = _under_guards(evidence, "next")
    held = len(own) and own["guard"].eq("checked").all() and own["named_culprit"].all() and own["changed"].eq(0).all()
    held = held and symptoms.unmarred(after, "mitigated") and symptoms.ended_well(evidence, "mitigated")
    return Mitigation.HELD if held else Mitigation.FAILED


def _metrics(evidence: Evidence, rows: pd.DataFrame, shown: Metric, recorder: Metric) -> dict[str, Metric]:
    unguarded = rows[rows["guard"].isin(("none", "checked"))]
    detail, checked = (rows[rows["guard"].eq(guard)] for guard in ("detail", "checked"))
    failed = unguarded[unguarded["error"].fillna("").ne("")]
    after = _under_guards(evidence, "next")
    after = after[after["guard"].isin(("none", "checked"))]
    found = {
        "shown": shown,
        "silently_wrong": symptoms.share(unguarded, unguarded["silent"]),
        "timed_out": symptoms.share(unguarded, unguarded["late"]),
        "process_aborted": symptoms.share(unguarded, unguarded["died"]),
        "time_to_error_s": symptoms.measure(failed, "took_s"),
        "errors_naming_the_culprit": symptoms.share(failed, failed["named_culprit"]),
        "next_collective_failed": symptoms.share(after, after["error"].fillna("unknown").ne("")),
        "caught_by_detail": symptoms.share(detail, detail["detected"]),
        "step_under_detail_s": symptoms.measure(detail, "took_s"),
        "caught_by_checked": symptoms.share(checked, checked["named_culprit"]),
        "runs_in_which_the_flight_recorder_differs": recorder,
    }
    return {name: metric for name, metric in found.items() if any(metric.arm(arm) for arm in ("control", "fault", "mitigated"))}


def _recorder(evidence: Evidence) -> Metric:
    """Of the runs whose unguarded groups were recorded on several ranks, those in which operation, sizes or dtype differ."""
    import pandas as pd

    calls = evidence.frame("collectives")
    calls = calls[calls["group_desc"].eq("none")]
    seen = []
    for (arm, repeat), some in calls.groupby(["arm", "repeat"]):
        if some["rank"].nunique() > 1:
            kinds = some.assign(**{name: some[name].fillna("") for name in ("op", "sizes", "dtypes")})
            each = kinds.drop_duplicates(["group", "seq", "op", "sizes", "dtypes"]).groupby(["group", "seq"]).size()
            seen.append({"arm": arm, "repeat": repeat, "differs": bool(each.gt(1).any())})
    found = pd.DataFrame(seen, columns=["arm", "repeat", "differs"])
    return symptoms.share(found, found["differs"])
