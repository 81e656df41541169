"""A scenario of the tests' own: three arms in a second, without torch."""

from dtprobe import Arm, Metric, Mitigation, Scenario, Verdict, VerdictKind

quick = Scenario(
    name="quick",
    failure_mode="straggler",
    title="a slow step is slow",
    claim="steps take no time",
    source="nobody",
    layer="code",
    certifies_not="anything",
    timeout_s=20,
    repeats=2,
    needs=("linux",),
    control=Arm("worker.py"),
    fault=Arm("worker.py", ("--step-s", "0.3")),
    mitigated=Arm("worker.py", ("--step-s", "0.03")),
    expect={"torch>=2": "reproduced"},
    default=True,
    variant="plain",
)


def judge(evidence):
    from dtprobe import stats

    def steps(arm):
        return list(evidence.events("step", arm)["duration_s"])

    return Verdict(
        kind=VerdictKind.REPRODUCED if stats.separated(steps("control"), steps("fault")) else VerdictKind.NOT_REPRODUCED,
        mitigation=Mitigation.HELD if stats.separated(steps("mitigated"), steps("fault")) else Mitigation.FAILED,
        control_healthy=bool((evidence.outcomes.query("arm == 'control'")["exit_code"].eq(0).fillna(False)).all()),
        metrics={"step": Metric(unit="s", **{arm: stats.measured(steps(arm)) for arm in ("control", "fault", "mitigated")})},
        because="steps were timed",
    )


quick.judge(judge)
single = quick.with_variant("single", default=False, tags=("alone",))
single.judge(judge)
leaves = quick.with_variant("leaves", default=False, fault=Arm("worker.py", ("--step-s", "0.3", "--behave", "daemon")))
leaves.judge(judge)
crashes = quick.with_variant("crashes", default=False, control=Arm("worker.py", ("--behave", "raise")))
crashes.judge(judge)
hangs = quick.with_variant(
    "hangs", default=False, fault=Arm("worker.py", ("--step-s", "0.3", "--behave", "hang"), timeout_s=1.5)
)
hangs.judge(judge)
lasts = quick.with_variant("lasts", default=False, control=Arm("worker.py", ("--behave", "hang")))
lasts.judge(judge)
needy = quick.with_variant("needy", default=False, needs=("linux", "cuda:64"))
needy.judge(judge)
misjudged = quick.with_variant("misjudged", default=False)


@misjudged.judge
def _raises(evidence):
    raise ZeroDivisionError("the judge cannot divide")
