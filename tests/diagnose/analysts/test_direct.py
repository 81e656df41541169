"""Findings from lines: about the rank that a line names, alike or first, several kinds together, joins of two facts."""

from __future__ import annotations

import pytest

from dtprobe.diagnose import read
from dtprobe.diagnose.analysts import direct, gpu_faults, joined, placement


@pytest.fixture
def case(tmp_path):
    """A job of these files."""

    def make(**files: str):
        for name, text in files.items():
            (tmp_path / f"{name}.log").write_text(text)
        return read([tmp_path])

    return make


def _init(host: str, pid: int, rank: int, size: int, bus: str) -> str:
    return (
        f"{host}:{pid}:{pid + 9} [0] NCCL INFO ncclCommInitRank comm 0x5{rank}f0 rank {rank} nranks {size} cudaDev 0 nvmlDev 0 "
        f"busId {bus} commId 0x77aa - Init COMPLETE\n"
    )


def _of(findings, mode):
    return next((one for one in findings if one.mode == mode), None)


def test_a_xid_is_about_the_rank_on_that_gpu(case):
    log = "".join(_init("gx", 70 + rank, rank, 4, f"{rank + 1}b000") for rank in range(4))
    found = direct.analyse(case(job=log, kern="NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"))
    finding = _of(found, "gpu-fell-off-bus")
    assert (finding.first, finding.suspects) == (2, (2,))


def test_a_killed_process_is_the_rank_of_that_process(case):
    log = "".join(_init("gx", 70 + rank, rank, 4, f"{rank + 1}b000") for rank in range(4))
    found = direct.analyse(case(job=log, kern="Memory cgroup out of memory: Killed process 73 (python3) total-vm:9kB\n"))
    assert _of(found, "host-oom-kill").first == 3


def test_what_all_ranks_say_alike_is_about_all(case):
    log = "".join(f"[rank{rank}]: RuntimeError: No backend type associated with device type cpu\n" for rank in range(3))
    assert _of(direct.analyse(case(job=log)), "cpu-tensor-on-nccl").first == "all"


def test_one_rank_out_of_memory_is_about_that_rank_only(case):
    log = "[rank0]: step 1\n[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n[rank1]: step 1\n"
    assert _of(direct.analyse(case(job=log)), "cuda-oom-one-rank").suspects == (2,)


def test_several_kinds_of_lines_make_a_mode_surer(case):
    one = "[rank1]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    alone = _of(direct.analyse(case(job=one)), "gpu-ecc-uncorrectable").likelihood
    both = case(job=one, kern="NVRM: Xid (PCI:0000:3b:00): 63, pid='<unknown>', Row Remapper: New row marked for remapping\n")
    assert _of(direct.analyse(both), "gpu-ecc-uncorrectable").likelihood > alone


def test_warnings_of_good_runs_are_no_finding(case):
    log = (
        "[W1112 10:00:00 socket.cpp:752] [c10d] The IPv6 network addresses of (n1, 29500) cannot be retrieved (gai error: -2 - x).\n"
        "[W1112 11:00:00 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=65): Connection reset by peer\n"
    )
    assert list(direct.analyse(case(job=log))) == []


def test_one_gpu_that_faults_under_several_processes_is_broken_and_many_gpus_at_once_are_not(case):
    def fault(bus: str, pid: int) -> str:
        return f"NVRM: Xid (PCI:0000:{bus}:00): 31, pid={pid}, Ch 00000008, intr 0. MMU Fault: ENGINE GRAPHICS\n"

    (broken,) = gpu_faults.analyse(case(kern=fault("c1", 5) + fault("c1", 6)))
    assert broken.mode == "gpu-mmu-fault-faulty-device"
    (bug,) = gpu_faults.analyse(case(kern=fault("c1", 5) + fault("c2", 6)))
    assert (bug.mode, bug.first) == ("gpu-illegal-address-kernel-bug", "all")


def test_acs_is_evidence_only_beside_a_hang(case):
    bridges = "\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+\n"
    hang = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)\n"
    assert list(joined.analyse(case(lspci=bridges))) == []
    assert _of(joined.analyse(case(lspci=bridges, job=hang)), "p2p-acs-hang") is not None


def test_a_store_file_counts_as_stale_only_where_it_is_the_file_of_the_store(case):
    used = "init_method='file:///scratch/init/a.store'\n"
    listed = "-rw-r--r-- 1 carol ml 912 Mar  3 09:11 /scratch/init/{}.store\n"
    assert _of(joined.analyse(case(job=used, ls=listed.format("b"))), "filestore-stale-file") is None
    assert _of(joined.analyse(case(job=used, ls=listed.format("a"))), "filestore-stale-file").first == "all"


def test_processes_beyond_the_devices_are_counted(case):
    log = (
        "CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc-per-node=4 fit.py\n"
        "[rank3]: RuntimeError: CUDA error: invalid device ordinal\n[rank2]: RuntimeError: CUDA error: invalid device ordinal\n"
    )
    finding = _of(placement.analyse(case(job=log)), "invalid-device-ordinal")
    assert finding.first == 2
    assert "nproc-per-node=4" in finding.evidence[0].text


def test_one_address_on_two_hosts_is_a_containers_own(case):
    def says(host: str, pid: int, more: str = "") -> str:
        return f"{host}:{pid}:{pid} [0] NCCL INFO Bootstrap : Using eth0:10.88.0.2<0>\n{more}"

    failed = (
        "h2:6:9 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.88.0.2<39121> failed : Connection refused\n"
    )
    assert _of(placement.analyse(case(a=says("h1", 5), b=says("h2", 6))), "container-network-unreachable") is None
    assert _of(placement.analyse(case(a=says("h1", 5), b=says("h2", 6, failed))), "container-network-unreachable") is not None
