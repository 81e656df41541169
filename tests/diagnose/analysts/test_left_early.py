"""A rank that ended well while its peers needed it, told by codes and last words, where no traceback was kept."""

from __future__ import annotations

import pytest

from dtprobe.diagnose.analysts import conclude
from dtprobe.diagnose.decide import decide

NCCL = "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error, NCCL version 2.22.3"
GLOO = "RuntimeError: [pair.cc:544] Connection closed by peer [10.8.0.4]:5123"


def answer(case, *lines: str):
    read = case(*lines)
    return decide(read, *conclude(read))


@pytest.mark.parametrize("lost", [NCCL, GLOO])
@pytest.mark.parametrize(
    "told",
    [
        "exit codes: rank0=1 rank1=0 rank2=1",
        "exit codes: [1, 0, 1]",
        "[rank1] calling sys.exit(0)",
        "[rank1] training finished",
    ],
)
def test_who_left_with_success_is_named_and_not_those_who_lost_it(case, told, lost):
    said = answer(case, f"[rank0]: {lost}", told, f"[rank2]: {lost}")
    assert (said.failure_mode, said.first_failing_rank) == ("peer-exited-early", 1)


@pytest.mark.parametrize("word", ["makedirs /out/step_50 done", "copying the index done", "barrier done"])
def test_the_end_of_an_action_is_no_end_of_a_rank(case, word):
    said = answer(case, f"[rank0] {word}", f"[rank1]: {GLOO}", f"[rank2]: {GLOO}")
    assert said.failure_mode != "peer-exited-early"


def test_an_exception_whose_traceback_is_lost_makes_a_job_ill_though_another_rank_is_done(case):
    assert answer(case, "[rank0] training finished", "[rank1]: KeyError: 'mask'").failure_mode != "healthy"
    assert answer(case, "[rank0] training finished", "[rank1] training finished").failure_mode == "healthy"


def test_ray_tells_the_rank_of_a_process_by_its_address(case):
    said = answer(
        case,
        "(Controller pid=9) - (ip=10.5.0.2, pid=70) world_rank=0, local_rank=0, node_rank=0",
        "(Controller pid=9) - (ip=10.5.0.3, pid=70) world_rank=1, local_rank=0, node_rank=1",
        "(RayTrainWorker pid=70, ip=10.5.0.3) Traceback (most recent call last):",
        '(RayTrainWorker pid=70, ip=10.5.0.3)   File "/srv/loop.py", line 5, in step',
        "(RayTrainWorker pid=70, ip=10.5.0.3) KeyError: 'mask'",
    )
    assert (said.failure_mode, said.first_failing_rank) == ("python-exception-one-rank", 1)
