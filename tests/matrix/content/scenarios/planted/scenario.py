"""A planted failure that torch has before 2.12, and that any torch has under torchrun or not: it asks for the version alone."""

from dtprobe import Arm, Metric, Mitigation, Scenario, Verdict, VerdictKind

planted = Scenario(
    name="planted",
    failure_mode="gloo-thread-leak",
    title="something leaks before 2.12",
    claim="it leaks",
    source="nobody",
    layer="code",
    certifies_not="anything",
    timeout_s=20,
    repeats=1,
    needs=("linux",),
    control=Arm("worker.py", ("control",)),
    fault=Arm("worker.py", ("fault",)),
    mitigated=Arm("worker.py", ("mitigated",)),
    expect={"torch<2.12": "reproduced", "torch>=2.12": "not-reproduced"},
    measures_cost=False,
)


@planted.judge
def judge(evidence):
    from dtprobe import stats

    def leaked(arm):
        return list(evidence.events("leak", arm)["value"])

    there = max(leaked("fault")) > 0
    return Verdict(
        kind=VerdictKind.REPRODUCED if there else VerdictKind.NOT_REPRODUCED,
        mitigation=Mitigation.FAILED if max(leaked("mitigated")) > 0 else Mitigation.HELD,
        control_healthy=len(leaked("control")) == 2,
        metrics={
            "leaks": Metric(unit="leaks", **{arm: stats.measured(leaked(arm)) for arm in ("control", "fault", "mitigated")})
        },
        because="it leaked" if there else "nothing leaked",
    )
