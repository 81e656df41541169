"""What environments mean: every launcher's claim, claims that disagree, and random mixtures of variables."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys

import pytest

from dtprobe.framework.bootstrap.launchers import slurm
from dtprobe.framework.bootstrap.placement import PRECEDENCE, UNORDERED, Placement, PlacementError, resolve

MEET = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "r7", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", **MEET,
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-n1-77@1",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "12", "SLURM_NTASKS": "8", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
}  # fmt: skip
PYTORCHJOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1", "RANK": "1", "WORLD_SIZE": "3", "PET_NNODES": "3", "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "auto", **MEET,
}  # fmt: skip
INDEXED = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "JOB_COMPLETION_INDEX": "2",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "train-0.train",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def placed(environ: dict[str, str]) -> tuple[object, ...]:
    found = resolve(environ)
    return (found.source, found.rank, found.world_size, found.local_rank, found.node_rank, found.master_addr, found.master_port)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("single", 0, 1, 0, 0, "127.0.0.1", None)),
        (TORCHRUN, ("torchrun", 3, 4, 1, 1, "10.0.0.1", 29400)),
        (MPIRUN, ("mpirun", 1, 2, 1, 0, "127.0.0.1", None)),
        (MPIRUN | MEET, ("mpirun", 1, 2, 1, 0, "10.0.0.1", 29400)),
        (PMI, ("pmi", 1, 2, 1, 0, "127.0.0.1", None)),
        (SLURM, ("slurm", 2, 3, 0, 1, "n2", None)),
        (SLURM | {"PMI_RANK": "2", "PMI_SIZE": "3"}, ("slurm", 2, 3, 0, 1, "n2", None)),
        (PYTORCHJOB, ("pytorchjob", 1, 3, 0, 1, "10.0.0.1", 29400)),
        (INDEXED, ("indexed job", 2, 4, 0, 2, "train-0.train", 29500)),
        ({"RANK": "1", "WORLD_SIZE": "2", **MEET}, ("explicit", 1, 2, None, None, "10.0.0.1", 29400)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "NODE_RANK": "1", **MEET}, ("explicit", 1, 2, 0, 1, "10.0.0.1", 29400)),
        ({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ("single", 0, 1, 0, 0, "127.0.0.1", None)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_each_launcher_is_read_from_its_own_variables(environ, expected):
    assert placed(environ) == expected


def test_a_step_smaller_than_its_allocation_counts_its_own_tasks():
    found = resolve(SLURM)
    assert (found.world_size, found.nodes, found.local_world_size, found.run) == (3, 2, 1, "slurm-12.3")


def test_local_ranks_of_open_mpi_need_not_rise_with_the_rank():
    """As `mpirun --oversubscribe -n 4` numbers them on a host of two cores."""
    for rank, local in enumerate((0, 2, 1, 3)):
        own = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": str(rank)}
        found = resolve(MPIRUN | own | {"OMPI_COMM_WORLD_LOCAL_RANK": str(local), "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
        assert (found.rank, found.local_rank) == (rank, local)


def test_a_restart_is_another_attempt_of_the_same_run():
    found = resolve(TORCHRUN)
    assert (found.run, found.attempt, found.agent_store) == ("r7", 1, True)


NESTED = [
    (TORCHRUN, SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, "torchrun"),
    (TORCHRUN, INDEXED | {"JOB_COMPLETION_INDEX": "1"}, "torchrun"),
    (TORCHRUN, MPIRUN, "torchrun"),
    (
        MPIRUN,
        SLURM
        | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1"}
        | {"SLURM_STEP_NODELIST": "n2", "SLURM_STEP_TASKS_PER_NODE": "1"},
        "mpirun",
    ),
]


@pytest.mark.parametrize(("inner", "outer", "source"), NESTED)
def test_a_launcher_that_provably_runs_inside_another_wins_and_the_outer_is_kept(inner, outer, source):
    alone = resolve(inner)
    found = resolve(outer | inner)
    assert found == Placement(**{**alone.__dict__, "disagreed": found.disagreed}) and found.source == source
    assert all(claim.source != source for claim in found.disagreed)


CONFLICTS = [
    # four torchruns under one srun that do not meet: four jobs of world size 1, each sure of itself
    (
        TORCHRUN
        | {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
        }
        | {"ROLE_RANK": "0", "ROLE_WORLD_SIZE": "1"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
        ("RANK=0", "SLURM_PROCID=2", "SLURM_STEP_NUM_TASKS=4", "--ntasks-per-node=1 torchrun"),
    ),
    (TORCHRUN, INDEXED, ("RANK=3", "JOB_COMPLETION_INDEX=2", "--nnodes=PODS")),
    (MPIRUN, SLURM | {"SLURM_STEP_NUM_TASKS": "3"}, ("OMPI_COMM_WORLD_RANK=1", "SLURM_PROCID=2", "start mpirun once")),
    ({"RANK": "0", "WORLD_SIZE": "3", **MEET}, SLURM, ("RANK=0", "SLURM_PROCID=2", "unset RANK")),
    ({"WORLD_SIZE": "8"}, SLURM, ("WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=3", "unset RANK and WORLD_SIZE")),
    ({"RANK": "0", "WORLD_SIZE": "2", **MEET}, MPIRUN, ("RANK=0", "OMPI_COMM_WORLD_RANK=1", "unset RANK")),
    ({"RANK": "0"}, INDEXED, ("RANK=0", "JOB_COMPLETION_INDEX=2", "unset RANK")),
    ({"PMIX_RANK": "0"}, SLURM, ("PMIX_RANK=0", "SLURM_PROCID=2")),
]


@pytest.mark.parametrize(("one", "other", "told"), CONFLICTS)
def test_claims_that_disagree_are_refused_with_both_and_the_remedy(one, other, told):
    with pytest.raises(PlacementError) as caught:
        resolve(other | one)
    assert all(text in str(caught.value) for text in told), str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "2", "WORLD_SIZE": "2", **MEET}, "rank 2 of 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2", **MEET}, "RANK='-1'"),
        ({"RANK": "0x1", "WORLD_SIZE": "2", **MEET}, "RANK='0x1'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **MEET}, "local rank 1 is above rank 0"),
        (TORCHRUN | {"RANK": "1"}, "ROLE_RANK=3"),
        (SLURM | {"SLURM_STEP_NODELIST": "n[1-4]"}, "SLURM_STEP_NODELIST=n[1-4]"),
        (SLURM | {"SLURM_STEP_NODELIST": "n[2-"}, "no node list"),
        (PYTORCHJOB | {"PET_NPROC_PER_NODE": "4"}, "torchrun"),
        (PYTORCHJOB | {"RANK": "2"}, "overwritten"),
        ({"JOB_COMPLETION_INDEX": "2"}, "WORLD_SIZE, MASTER_ADDR"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE"),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "8"}, "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_half_an_environment_and_impossible_numbers_are_refused(environ, told):
    with pytest.raises(PlacementError) as caught:
        resolve(environ)
    assert told in str(caught.value), str(caught.value)


POOL = {name: (value, "0", "1", "5") for name, value in (TORCHRUN | MPIRUN | SLURM | PMI | INDEXED | PYTORCHJOB).items()}
RANK_OF = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"),
    "explicit": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"),
    "pytorchjob": ("RANK", "WORLD_SIZE", None, "RANK"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", None),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", None),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID"),
    "indexed job": ("JOB_COMPLETION_INDEX", "WORLD_SIZE", None, "JOB_COMPLETION_INDEX"),
}


def test_ten_thousand_random_mixtures_give_one_launchers_claim_or_an_error_never_a_mixture():
    assert len(POOL) >= 25
    rng = random.Random(20261129)
    sources: dict[str, int] = {}
    for _ in range(10_000):
        whole = rng.choice([{}, {}, TORCHRUN, MPIRUN, SLURM, PMI, INDEXED, PYTORCHJOB])
        environ = {name: rng.choice(POOL[name]) for name in rng.sample(sorted(POOL), rng.randint(0, 8))} | whole
        for name in rng.sample(sorted(environ), min(len(environ), rng.choice([0, 0, 1, 2]))):
            del environ[name]
        try:
            found = resolve(environ)
        except PlacementError:
            sources["refused"] = sources.get("refused", 0) + 1
            continue
        sources[found.source] = sources.get(found.source, 0) + 1
        _consistent(found, environ)
    assert set(sources) == {*RANK_OF, "single", "refused"}, sources
    assert min(sources.values()) >= 20, sources


def _consistent(found: Placement, environ: dict[str, str]) -> None:
    assert 0 <= found.rank < found.world_size
    assert found.local_rank is None or found.source in UNORDERED or 0 <= found.local_rank <= found.rank
    if found.source == "single":
        assert not any(environ.get(names[0]) and environ.get(names[1]) for names in RANK_OF.values())
        return
    values = (found.rank, found.world_size, found.local_rank, found.node_rank)
    for name, value in zip(RANK_OF[found.source], values, strict=True):
        if name in environ:
            assert value is None or environ[name] == str(value), (found, environ)
    for name in PRECEDENCE:
        claim = importlib.import_module(f"dtprobe.framework.bootstrap.launchers.{name}").claim(environ)
        if isinstance(claim, Placement) and (claim.rank, claim.world_size) != (found.rank, found.world_size):
            assert claim in found.disagreed, (found, claim)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,07],gpu[1-2]-b", ["n1", "n2", "n3", "n07", "gpu1-b", "gpu2-b"]),
        ("r[1-2]c[08-09]", ["r1c08", "r1c09", "r2c08", "r2c09"]),
        ("a,b.c-d", ["a", "b.c-d"]),
    ],
)
def test_slurm_node_lists_are_expanded_with_their_widths(text, names):
    assert list(slurm.node_names(text)) == names


def test_resolving_needs_no_torch():
    program = "import sys, dtprobe.framework.bootstrap as b; b.resolve({}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
