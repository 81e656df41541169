"""A scenario whose program cannot be executed."""

from dtprobe import Arm, Scenario

never = Scenario(
    name="never-starts",
    failure_mode="straggler",
    title="a program that is no program",
    claim="none",
    source="nobody",
    layer="code",
    certifies_not="anything",
    needs=("linux",),
    control=Arm("worker.bin"),
    fault=Arm("worker.bin"),
    mitigated=Arm("worker.bin"),
)
never.judge(lambda evidence: None)
