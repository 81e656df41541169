"""The MPI transport under a real mpirun, against gloo in the same processes, and with ranks that do wrong."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# as root, on a host with fewer cores than processes
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "btl", "self,sm"]
MARK = "DTPROBE_TEST_MPI"

pytestmark = pytest.mark.needs("mpi4py")


@dataclass(frozen=True)
class Ran:
    """A job that ended: its exit code, what was said by part and rank, and its output for a failing test."""

    code: int
    said: dict[str, dict[int, dict[str, Any]]]
    output: str

    def part(self, name: str, ranks: int) -> dict[int, dict[str, Any]]:
        """What a part gave on each of so many ranks."""
        found = self.said.get(name, {})
        assert len(found) == ranks, self.output[-6000:]
        return found


def marked(mark: str) -> list[str]:
    """Processes that carry the mark of a job: its launcher, its daemons and its ranks."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def vanished(mark: str) -> bool:
    """Whether nothing of a job is left; a rank that waits for its launcher sees within a second that there is none."""
    deadline = time.monotonic() + 30
    while marked(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def mpirun(*arguments: str, folder: Path, timeout_s: float = 240) -> Ran:
    """Run a job to its end; nothing of it is left afterwards, which is asserted."""
    mark = secrets.token_hex(8)
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMI", "PRTE_", "SLURM_", "MASTER_", "TORCHELASTIC_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    } | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        MARK: mark,
    }
    log = folder / f"{mark}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*MPIRUN, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environ, cwd=folder
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(30)
            pytest.fail(f"mpirun did not end\n{log.read_text(errors='replace')[-6000:]}")
    text = log.read_text(encoding="utf-8", errors="replace")
    assert vanished(mark)
    said: dict[str, dict[int, dict[str, Any]]] = {}
    for line in text.splitlines():
        if line.startswith("say "):
            facts = json.loads(line[4:])
            said.setdefault(facts["part"], {})[facts["rank"]] = facts
    return Ran(process.returncode, said, text)


def parts(size: int, *names: str, folder: Path, ulfm: bool = False) -> Ran:
    flags = ["--with-ft", "ulfm"] if ulfm else []
    return mpirun(*flags, "-n", str(size), sys.executable, str(HERE / "mpi_run.py"), *names, folder=folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """One job of two ranks for many tests."""
    yield parts(2, "quick", "training", folder=tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """One job of four ranks for many tests; rank 1 is killed at its end, and Open MPI lets the others live."""
    names = ("turned", "quick", "refused", "late", "killed")
    yield parts(4, *names, folder=tmp_path_factory.mktemp("four"), ulfm=True)


def check_table(found: dict[int, dict[str, Any]], cases: int) -> None:
    for facts in found.values():
        assert facts["number"] == 0, facts["different"]
        assert facts["cases"] >= cases
        assert facts["sees"]


def test_every_operation_gives_what_gloo_gives_on_two_ranks(two):
    check_table(two.part("quick", 2), 200)
    assert two.code == 0, two.output[-3000:]


def test_every_operation_gives_what_gloo_gives_on_four_ranks(four):
    check_table(four.part("quick", 4), 200)


def test_ddp_dtensor_and_fsdp2_give_what_they_give_over_gloo(two):
    for facts in two.part("training", 2).values():
        # two numbers are added in one order only: not even the last bit differs
        assert facts["apart"] == {"ddp": 0, "ddp_with_hook": 0, "fsdp2": 0, "fsdp2_divided": 0, "dtensor": 0}


def test_axes_of_a_mesh_are_groups_of_the_back_end(two):
    for rank, facts in two.part("training", 2).items():
        assert facts["axes"] == [[1.0, "dtprobe-mpi"], [float(rank), "dtprobe-mpi"]]


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, 4])
def test_the_full_cross_product_gives_what_gloo_gives(size, tmp_path):
    ran = parts(size, "full", folder=tmp_path)
    check_table(ran.part("full", size), 8000)
    assert ran.code == 0


@pytest.mark.nightly
def test_training_on_four_ranks_gives_what_it_gives_over_gloo(tmp_path):
    for facts in parts(4, "training", folder=tmp_path).part("training", 4).values():
        assert max(facts["apart"][name] for name in ("ddp", "fsdp2", "fsdp2_divided", "dtensor")) < 1e-6
        assert facts["apart"]["ddp_with_hook"] < 1e-4  # gloo rounds each addition to float16, MPI only the sum


def test_what_mpi_cannot_do_is_refused_and_the_group_goes_on(four):
    refusals = {
        "bits of floats": "BAND of torch.float32",
        "mean of integers": "AVG of torch.int64",
        "float8": "SUM of torch.float8_e4m3fn",
        "sparse": "torch.sparse_coo",
        "elsewhere": "on meta",
        "unequal parts": "5 elements are not 4 parts of 4",
        "two dtypes": "torch.float32 and torch.float64",
        "splits": "[1, 1, 1, 1] do not cut 8 rows",
    }
    for facts in four.part("refused", 4).values():
        for name, words in refusals.items():
            told = facts["told"][name]
            assert told["error"] == "Unsupported" and words in told["text"], told
        assert facts["sum"] == 4.0


def test_a_message_of_another_size_than_was_expected_is_an_error_of_the_receiver(four):
    told = four.part("refused", 4)[0]["told"]
    assert "30000 elements came, 10000 were expected" in told["too long a message"]["text"]
    assert told["too long a message"]["overwritten"] == 0  # Open MPI itself writes past the buffer
    assert "2 elements came, 3 were expected" in told["too short a message"]["text"]


def test_ranks_that_sum_tensors_of_different_sizes_are_told(four):
    told = [facts["told"]["other sizes"] for facts in four.part("refused", 4).values()]
    assert {each["error"] for each in told} <= {"CollectiveMismatch", "PeerLost"}
    assert all("a part of 5001 elements" in each["text"] or "has 5001" in each["text"] for each in told), told


@pytest.mark.nightly
def test_open_mpi_itself_writes_past_the_buffer_of_a_message_that_is_too_long(tmp_path):
    """The fault that looking at messages first cures; once it is gone from Open MPI, so may the looking."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import json, sys, time
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
room = np.zeros(300_000)
if comm.rank == 0:
    request = comm.Irecv([room[:100_000], MPI.DOUBLE], 1, 3)
else:
    request = comm.Isend([np.ones(200_000), MPI.DOUBLE], 0, 3)
kind = None
try:
    until = time.monotonic() + 10
    while not request.Test() and time.monotonic() < until:
        time.sleep(0.001)
except MPI.Exception as error:
    kind = error.Get_error_class() == MPI.ERR_TRUNCATE
if comm.rank == 0:
    past = int(np.count_nonzero(room[100_000:]))
    sys.stdout.write("say " + json.dumps({"part": "past", "rank": 0, "truncate": kind, "past": past}) + chr(10))
comm.Barrier()
""",
        encoding="utf-8",
    )
    said = mpirun("-n", "2", sys.executable, str(program), folder=tmp_path).part("past", 1)[0]
    assert said["truncate"] and said["past"] > 0


def test_a_split_keeps_the_order_of_its_ranks_and_an_ended_group_refuses(four):
    found = four.part("refused", 4)
    assert [found[rank]["turned"] for rank in range(4)] == [[2.0, 0.0], [0.0, 0.0], [2.0, 0.0], [0.0, 0.0]]
    assert {found[rank]["told"]["after the end"]["error"] for rank in (0, 1)} == {"GroupEnded"}


def test_ranks_that_torch_numbers_otherwise_than_mpi_are_named_on_all(four):
    for facts in four.part("turned", 4).values():
        assert (facts["error"], facts["ranks"]) == ("RankDisagreement", [0, 1, 2, 3])
        assert "torch says rank 0, MPI says rank 3 of 4" in facts["text"]


def test_a_rank_that_does_not_join_is_named_with_where_it_is(four):
    found = four.part("late", 4)
    for rank in (0, 2, 3):
        told = found[rank]["told"]
        assert told["error"] in ("CollectiveTimeout", "PeerLost") and told["ranks"] == [1], told
        assert "all_reduce" in told["text"] and "within 1.5 s" in told["text"] and "rank 1 is at operation 0" in told["text"]
        assert found[rank]["again"]["error"] == told["error"]
    assert any(found[rank]["told"]["error"] == "CollectiveTimeout" for rank in (0, 2, 3))
    # the one who comes too late learns that the group is no more, and which rank was missed
    assert (found[1]["told"]["error"], found[1]["told"]["ranks"]) == ("PeerLost", [1])
    assert [facts["sum"] for facts in found.values()] == [1.0] * 4  # other groups go on


def test_a_receive_that_nobody_sends_ends_alone(four):
    told = four.part("late", 4)[0]["receive"]
    assert (told["error"], told["ranks"]) == ("CollectiveTimeout", [1])
    assert "recv from rank 1 with tag 5" in told["text"]


def test_the_death_of_a_rank_is_an_error_on_the_others_long_before_the_deadline(four):
    found = four.part("killed", 3)
    for facts in found.values():
        # through DDP's C++ the typed error arrives as a RuntimeError that carries its name
        assert facts["backward"]["error"] == "RuntimeError" and "PeerLost" in facts["backward"]["text"]
        assert (facts["after"]["error"], facts["after"]["ranks"]) == ("PeerLost", [1])
        assert "rank 1 died" in facts["after"]["text"]
        assert facts["backward"]["took_s"] < 20  # the timeout is 60 s
    assert four.code == 7, four.output[-3000:]


@pytest.mark.nightly
def test_without_fault_tolerance_mpirun_ends_the_job_of_a_dead_rank(tmp_path):
    ran = parts(3, "killed", folder=tmp_path)
    assert ran.code == 137 and not ran.said


@pytest.mark.nightly
@pytest.mark.parametrize("ulfm", [False, True])
def test_a_rank_that_leaves_by_an_exception_is_named_to_those_who_wait_for_it(ulfm, tmp_path):
    ran = parts(3, "left", folder=tmp_path, ulfm=ulfm)
    assert ran.code != 0
    for facts in ran.part("left", 2).values():
        assert (facts["error"], facts["ranks"]) == ("PeerLost", [1])
        assert facts["took_s"] < 20


def test_a_rank_that_never_starts_mpi_is_an_error_in_time(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        """
import json, sys
from dtprobe.framework.transport import mpi
try:
    mpi.register(timeout_s=1.5)
except mpi.MpiUnavailable as error:
    sys.stdout.write("say " + json.dumps({"part": "absent", "rank": 0, "text": str(error)}) + chr(10))
    sys.stdout.flush()
    sys.exit(3)
""",
        encoding="utf-8",
    )
    ran = mpirun("-n", "1", sys.executable, str(program), ":", "-n", "1", "sleep", "60", folder=tmp_path)
    assert "within 1.5 s: a rank of this job has not come" in ran.part("absent", 1)[0]["text"]
    assert ran.code == 3


Job = Callable[..., list[Any]]

REGISTER = "from dtprobe.framework.transport import mpi\n"


@pytest.fixture
def alone(job: Job, tmp_path: Path) -> Job:
    """Ranks that no mpirun starts: each is a world of its own to Open MPI, which leaves an empty folder in the temporary one."""

    def run(source: str, environ: dict[str, str | None] | None = None, **options: Any) -> list[Any]:
        return job(REGISTER + source, environ=lambda rank: {"TMPDIR": str(tmp_path), **(environ or {})}, **options)

    return run


def test_without_a_launcher_the_job_is_a_world_of_one(alone: Job):
    bare = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    ranks = alone(
        """
where = mpi.register()
dist.init_process_group(mpi.NAME)
x = torch.ones(3)
dist.all_reduce(x)
half = dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(0.5), async_op=True)
future = half.get_future().then(lambda done: done.value()[0].sum().item())
with open("/proc/self/maps") as maps:
    shared = "sm_segment" in maps.read()  # Open MPI would leave it in /dev/shm
say(sum=future.wait(), source=where.source, rank=os.environ["RANK"], name=dist.get_backend(), shared=shared)
dist.destroy_process_group()
""",
        processes=1,
        environ=bare,
    )
    assert ranks[0].only == {"sum": 1.5, "source": "single", "rank": "0", "name": "dtprobe-mpi", "shared": False}


def test_another_launcher_than_mpis_is_refused_with_both_ranks(alone: Job):
    for rank in alone("say(**caught(mpi.register))"):
        assert rank.only["error"] == "RankDisagreement", rank.output
        assert f"RANK={rank.rank}, WORLD_SIZE=2" in rank.only["text"] and "MPI (rank 0 of 1)" in rank.only["text"]


def test_without_the_part_torch_refuses_both_names(job: Job):
    """The fault that the part cures: torch's wheels have no MPI."""
    ranks = job(
        """
init = lambda name: caught(lambda: dist.init_process_group(name))
say(torch=init("mpi"), ours=init("dtprobe-mpi"))
""",
        processes=1,
        world_size=1,
    )
    assert "doesn't have MPI built in" in ranks[0].only["torch"]["text"]
    assert ranks[0].only["ours"]["error"] is not None


def test_mpi_that_was_initialised_without_threads_is_refused(alone: Job):
    ranks = alone(
        """
import mpi4py
mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI
say(**caught(mpi.register))
""",
        processes=1,
        world_size=1,
        environ={"OMPI_MCA_btl": "self"},
    )
    assert ranks[0].only["error"] == "ThreadLevelTooLow" and "FUNNELED" in ranks[0].only["text"]


def test_a_forked_process_is_refused_and_does_not_end_mpi_of_its_parent(alone: Job):
    ranks = alone(
        """
mpi.register()
dist.init_process_group(mpi.NAME)
read, write = os.pipe()
child = os.fork()
if not child:
    told = caught(lambda: dist.all_reduce(torch.ones(1)))
    os.write(write, json.dumps([told["error"], told["text"]]).encode())
    os._exit(0)
os.waitpid(child, 0)
x = torch.ones(1)
dist.all_reduce(x)
say(told=json.loads(os.read(read, 10_000)), sum=x.item())
dist.destroy_process_group()
""",
        processes=1,
        world_size=1,
    )
    assert ranks[0].only["told"][0] == "MpiUnavailable" and "forked" in ranks[0].only["told"][1]
    assert ranks[0].only["sum"] == 1.0


def test_the_probe_says_what_is_missing():
    from dtprobe.framework.transport import mpi

    assert mpi.probe() is None
