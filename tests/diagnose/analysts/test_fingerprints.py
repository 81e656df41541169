"""Reports of the debug wrapper: whose call differs, and in what."""

from __future__ import annotations

import pytest

from dtprobe.diagnose.analysts import reports


def report(rank: int, op: str, frame: str) -> list[str]:
    def printed(shape: int) -> str:
        return f"CollectiveFingerPrint(SequenceNumber=41, OpType={op}, TensorShape=[{shape}], TensorDtypes=Float, TensorDeviceTypes=x)"

    return [
        f"[rank{rank}]: Traceback (most recent call last):",
        f'[rank{rank}]:   File "/srv/app/{frame}',
        f"[rank{rank}]: RuntimeError: Detected mismatch between collectives on ranks. Rank {rank} is running collective: "
        f"{printed(640)}, but Rank 2 is running collective: {printed(512)}.",
    ]


@pytest.mark.parametrize(
    ("op", "frame", "mode"),
    [
        ("_ALLGATHER_BASE", 'loss.py", line 8, in contrast', "collective-shape-mismatch"),
        ("_REDUCE_SCATTER_BASE", 'moe.py", line 8, in combine', "collective-shape-mismatch"),
        ("ALLREDUCE", 'loss.py", line 8, in contrast', "collective-shape-mismatch"),
        ("_ALLGATHER_BASE", 'torch/distributed/fsdp/_flat_param.py", line 8, in _all_gather', "data-dependent-branch-desync"),
    ],
)
def test_a_gather_that_the_program_calls_itself_differs_in_its_shape(case, op, frame, mode):
    found = list(reports.analyse(case(*report(0, op, frame), *report(1, op, frame), *report(3, op, frame))))
    assert [(one.mode, one.first) for one in found] == [(mode, 2)]
