"""Paths that another host does not see, ranks of another attempt, paces on one line, samples that were dropped."""

from __future__ import annotations

from dtprobe.diagnose.analysts import conclude, pace, restarts, visibility
from dtprobe.diagnose.decide import decide


def raising(rank: int, text: str) -> list[str]:
    return [
        f"[rank{rank}]: Traceback (most recent call last):",
        f'[rank{rank}]:   File "/srv/save.py", line 41, in store',
        f"[rank{rank}]: {text}",
    ]


def test_a_path_that_one_rank_made_and_another_host_misses_is_a_stale_view(case):
    lost = "RuntimeError: output folder /lustre/exp9/shards was not found"
    read = case("[rank0] created /lustre/exp9/shards", *raising(4, lost), *raising(5, lost))
    (found,) = visibility.analyse(read)
    assert (found.mode, found.first, found.suspects) == ("nfs-stale-view", 4, (4, 5))
    assert decide(read, *conclude(read)).failure_mode == "nfs-stale-view"


def test_a_path_that_nobody_made_or_that_its_maker_misses_too_is_none(case):
    lost = "FileNotFoundError: [Errno 2] No such file or directory: '/lustre/exp9/shards'"
    assert not list(visibility.analyse(case("[rank0] reading /lustre/exp9/shards", *raising(1, lost))))
    assert not list(visibility.analyse(case("[rank0] created /lustre/exp9/shards", *raising(0, lost), *raising(1, lost))))
    assert not list(visibility.analyse(case("[rank0] created /tmp/exp9/shards", *raising(1, lost.replace("lustre", "tmp")))))


ROOTS = (
    "[default] Worker group FAILED. 1/2 attempts left; will restart worker group",
    "[rank0] wrote the bootstrap root 10.7.0.2<40010>",
    "[rank3] got the bootstrap root 10.7.0.2<{port}>",
    "n2:7:8 [1] NCCL INFO connect to 10.7.0.2<{port}> returned Connection refused, retrying",
)


def test_a_rank_that_goes_to_the_address_of_the_attempt_before_met_a_stale_store(case):
    (found,) = restarts.analyse(case(*(line.format(port=38222) for line in ROOTS)))
    assert (found.mode, found.first) == ("restart-stale-store", 3)
    assert not list(restarts.analyse(case(*(line.format(port=40010) for line in ROOTS))))
    assert not list(restarts.analyse(case(*(line.format(port=38222) for line in ROOTS[1:]))))


def test_a_rank_that_counts_fewer_restarts_after_its_peers_count_more_is_behind(case):
    refused = "[rank1] connect to store: Connection refused"
    (found,) = restarts.analyse(case("[rank0] restart_count=2", "[rank1] restart_count=1", refused))
    assert found.suspects == (1,)
    assert not list(restarts.analyse(case("[rank1] restart_count=1", "[rank0] restart_count=2", refused)))


def test_the_slow_rank_is_found_where_one_line_tells_of_all(case):
    lines = [f"step {step} | r0: fwd 80.{step} ms, r1: fwd 8{step} ms, r2: fwd 311 ms, r3: fwd 82 ms" for step in range(6)]
    (found,) = pace.analyse(case(*lines))
    assert (found.mode, found.first) == ("straggler", 2)
    assert not list(pace.analyse(case(*(line.replace("311", "84") for line in lines))))


def test_the_slow_rank_is_found_in_a_list_of_all(case):
    lines = [f"step {step} time (ms) per rank: [80, 8{step}, 290, 82]" for step in range(6)]
    (found,) = pace.analyse(case(*lines))
    assert (found.mode, found.first) == ("straggler", 2)


def gave_up(rank: int) -> str:
    return (
        f"[rank{rank}]:[E0912 03:00:01.{rank:09d} ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=88, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
    )


def test_a_rank_whose_samples_were_dropped_waits_for_the_next_batch_but_was_not_starved(case):
    start = [f"[rank{rank}] step 7 loss 1.{rank}" for rank in range(3)]
    waits = "[rank2] waiting for the next batch"
    hung = [gave_up(0), gave_up(1)]

    def said(*lines: str):
        read = case(*start, *lines, waits, *hung)
        return decide(read, *conclude(read))

    assert said("[rank2] sample 551 discarded: no target tokens").failure_mode == "data-dependent-branch-desync"
    assert said().failure_mode == "data-starvation"


def old_time_out(rank: int) -> str:
    return (
        f"[E ProcessGroupNCCL.cpp:821] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=61, OpType=ALLREDUCE, "
        "Timeout(ms)=1800000) ran for 1800900 milliseconds before timing out."
    )


def test_last_words_of_two_branches_part_a_rank_where_time_outs_tell_no_sizes(case):
    before = [f"[rank{rank}] round 3 begins" for rank in range(4)]
    hung = [old_time_out(rank) for rank in range(4)]

    def said(*lines: str):
        read = case(*before, *lines, *hung)
        return decide(read, *conclude(read))

    others = [f"[rank{rank}] round 4 begins" for rank in (0, 1, 3)]
    parted = said(*others, "[rank2] early stopping: collecting predictions")
    assert (parted.failure_mode, parted.first_failing_rank) == ("data-dependent-branch-desync", 2)
    assert said(*others, "[rank2] round 4 begins").failure_mode == "symmetric-hang"
    assert said(*others, "[rank2] round 4 begins", "[rank2] throughput 31.2").failure_mode == "symmetric-hang"


def test_an_evicted_pod_is_the_ranks_at_its_address(case):
    read = case(
        **{
            "pod.txt": [
                "Name:         ft-gpu-b7x2",
                "Node:         pool-3/10.9.0.8",
                "IP:           10.60.1.9",
                "Reason:       Evicted",
            ],
            "driver.log": [
                f"(Controller pid=2) - (ip=10.60.1.{8 + rank // 2}, pid={50 + rank}) world_rank={rank}, local_rank={rank % 2}, node_rank={rank // 2}"
                for rank in range(4)
            ],
        }
    )
    found = decide(read, *conclude(read))
    assert (found.failure_mode, found.first_failing_rank) == ("k8s-pod-evicted", 2)


def test_sockets_without_a_device_are_a_slow_path_where_more_was_expected(case):
    lines = [f"h{host}:5:6 [0] NCCL INFO NET/IB : No device found." for host in (1, 2)]
    lines += [f"h{host}:5:6 [0] NCCL INFO Using network Socket" for host in (1, 2)]
    slow, fast = "all_reduce 1 GiB: busbw 1.1 GB/s, expected 40", "all_reduce 1 GiB: busbw 1.1 GB/s"
    read = case(*lines, slow)
    assert decide(read, *conclude(read)).failure_mode == "slow-collective-path"
    read = case(*lines, fast)
    assert decide(read, *conclude(read)).failure_mode != "slow-collective-path"


def test_a_launcher_in_every_task_of_a_node_is_nested(case):
    clash = "1: RuntimeError: The server socket has failed to bind to [::]:29400 (errno: 98 - Address already in use)."

    def said(*script: str) -> str:
        read = case(*script, clash)
        return decide(read, *conclude(read)).failure_mode

    assert (
        said("#SBATCH --ntasks-per-node=8", "srun python -m torch.distributed.run --nproc-per-node=8 fit.py")
        == "nested-launcher"
    )
    assert said("#SBATCH --ntasks-per-node=8", "srun --ntasks-per-node=1 torchrun --nproc_per_node=8 fit.py") == "eaddrinuse"
    assert said("#SBATCH --ntasks-per-node=1", "srun torchrun --nproc_per_node=8 fit.py") == "eaddrinuse"
