"""The whole check on real ranks, with faults planted in one of them: who is named, what is found, what is left."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

CLUSTER = """
import threading
os.environ.pop("_", None)
def cluster(*options):
    sys.argv = ["dtprobe", "doctor", "--cluster", "--json", *options]
    from dtprobe.__main__ import main
    main()
"""


def report(rank: Any) -> dict[str, Any]:
    """The one JSON document that rank 0 printed."""
    start = rank.output.index("{\n")
    data = json.loads(rank.output[start : rank.output.rindex("}") + 1])
    assert data["schema"] == "dtprobe.cluster/1"
    return data


def problems(data: dict[str, Any], check: str) -> list[dict[str, Any]]:
    return [each for each in data["problems"] if each["check"] == check]


def only(data: dict[str, Any], check: str) -> dict[str, Any]:
    found = problems(data, check)
    assert len(found) == 1, data["problems"]
    return found[0]


def test_a_healthy_job_is_measured_whole_and_only_rank_0_speaks(job: Any, tmp_path: Path) -> None:
    ranks = job(CLUSTER + f"cluster('--out', {str(tmp_path / 'found')!r})", world_size=3)
    assert [each.code for each in ranks] == [0, 0, 0], [each.output for each in ranks]
    assert [each.output for each in ranks[1:]] == ["", ""]
    data = report(ranks[0])
    assert data["healthy"] and data["problems"] == [] and data["launcher"] == "explicit" and data["world_size"] == 3
    assert [(each["a"], each["b"], each["kind"]) for each in data["links"]] == [
        (0, 1, "same host"),
        (0, 2, "same host"),
        (1, 2, "same host"),
    ]
    for link in data["links"]:
        assert 0 < link["latency_s"] < 1 and link["out_bytes_s"] > 1e6 and link["back_bytes_s"] > 1e6
    for clock in data["clocks"]:  # one host, one clock
        assert abs(clock["offset_s"]) <= clock["uncertainty_s"] < 1
    assert {each["op"] for each in data["collectives"]} == {
        "all_reduce sum",
        "all_reduce max",
        "all_gather",
        "broadcast from 0",
        "broadcast from 2",
    }
    assert all(each["right"] for each in data["collectives"])
    assert [each["rank"] for each in data["ranks"]] == [0, 1, 2]
    assert all(each["network"]["gloo_address"] == "127.0.0.1" for each in data["ranks"])
    assert json.loads((tmp_path / "found" / "cluster.json").read_text()) == data
    page = (tmp_path / "found" / "cluster.html").read_text()
    assert "Healthy" in page and "http" not in page.replace("http-equiv", "") and "<script" not in page


def test_each_planted_difference_is_found_on_its_rank_with_its_remedy(job: Any) -> None:
    """The older version is a mock: the attribute that torch reports is changed, nothing is installed."""
    ranks = job(
        CLUSTER
        + """
import resource
if RANK == 0:
    torch.__version__ = "2.2.1"
if RANK == 2:
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
cluster()
""",
        world_size=3,
        environ=lambda rank: {"NCCL_ALGO": "Tree"} if rank == 1 else {"NCCL_DEBUG": "INFO"} if rank == 2 else {},
    )
    assert [each.code for each in ranks] == [1, 0, 0], ranks[0].output
    data = report(ranks[0])
    variable = only(data, "environment")
    assert (
        variable["ranks"] == [1]
        and "NCCL_ALGO: Tree on rank 1" in variable["found"]
        and "mpirun -x NCCL_ALGO" in variable["remedy"]
    )
    assert "not set as on ranks 0, 2" in variable["wanted"]
    assert [(each["check"], each["ranks"]) for each in data["notes"]] == [("environment", [2])]  # what is logged may differ
    files = only(data, "nofile")
    assert files["ranks"] == [2] and "200" in files["found"] and "ulimit -n" in files["remedy"]
    version = only(data, "versions")
    assert (version["ranks"], version["severity"]) == ([0], "error") and "2.2.1" in version["found"]
    floor = only(data, "floors")
    assert floor["ranks"] == [0] and "PyTorch 2.3 or newer" in floor["wanted"]
    assert len(data["problems"]) == 4


def test_a_rank_that_never_comes_is_named_and_the_others_are_silent(job: Any) -> None:
    ranks = job(CLUSTER + "cluster('--deadline-s', '4')", world_size=3, processes=2)
    assert [each.code for each in ranks] == [1, 0]
    assert ranks[1].output == ""
    data = report(ranks[0])
    assert only(data, "ranks")["ranks"] == [2]
    assert data["took_s"] < 4


@pytest.mark.nightly
def test_when_rank_0_never_comes_each_other_says_so_itself(job: Any) -> None:
    ranks = job(CLUSTER + "cluster('--deadline-s', '4') if RANK else None", world_size=2)
    assert ranks[1].code == 1
    assert re.fullmatch(r"dtprobe: rank 1: rank 0 does not serve the store at .*\n", ranks[1].output)


def test_another_world_size_and_a_rank_claimed_twice_are_told_at_once(job: Any) -> None:
    ranks = job(
        CLUSTER + "cluster('--deadline-s', '20')", world_size=2, environ=lambda rank: {"WORLD_SIZE": "3"} if rank else {}
    )
    assert [each.code for each in ranks] == [1, 0] and ranks[1].output == ""
    found = only(report(ranks[0]), "placement")
    assert "rank 0" in found["found"] and "says 2" in found["found"] and "says 3" in found["found"]
    ranks = job(
        CLUSTER + "cluster('--deadline-s', '20')",
        world_size=3,
        environ=lambda rank: {"RANK": "1", "LOCAL_RANK": None} if rank == 2 else {},
    )
    found = only(report(ranks[0]), "placement")
    assert found["ranks"] == [1] and "claimed by more than one process" in found["found"]


@pytest.mark.nightly
def test_a_contradiction_in_the_environment_is_a_usage_error(job: Any) -> None:
    ranks = job(
        CLUSTER + "cluster()",
        world_size=1,
        environ=lambda rank: {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
    )
    assert ranks[0].code == 2 and ranks[0].output.count("\n") == 1
    assert "RANK=0" in ranks[0].output and "OMPI_COMM_WORLD_RANK=1" in ranks[0].output


def test_an_interface_that_is_not_there_is_told_of_its_rank_although_no_group_can_be_made(job: Any) -> None:
    ranks = job(
        CLUSTER + "cluster('--deadline-s', '20')",
        world_size=2,
        environ=lambda rank: {"GLOO_SOCKET_IFNAME": "nope0"} if rank else {},
    )
    assert ranks[0].code == 1
    found = only(report(ranks[0]), "interface")
    assert found["ranks"] == [1] and "GLOO_SOCKET_IFNAME=nope0" in found["found"] and "there are lo" in found["found"]


STRUCK = """
def when_in(function, number):
    main = threading.main_thread().ident
    while True:
        frame = sys._current_frames().get(main)
        while frame is not None:
            if frame.f_code.co_name == function:
                os.kill(os.getpid(), number)
                return
            frame = frame.f_back
        time.sleep(0.001)
if RANK == VICTIM:
    if SIGNAL == signal.SIGSTOP:  # ended by a process apart once the others have spoken: nobody else can. Forked before any thread
        victim = os.getpid()
        if os.fork() == 0:
            late = time.monotonic() + DEADLINE_S + 5
            def spoken(rank):
                with open(f"rank{rank}.log") as log:
                    return "dtprobe" in log.read()
            while time.monotonic() < late and not (spoken(0) if VICTIM else spoken(1) and spoken(2)):
                time.sleep(0.05)
            time.sleep(0.3)
            os.kill(victim, signal.SIGKILL)
            os._exit(0)
    threading.Thread(target=when_in, args=(FUNCTION, SIGNAL), daemon=True).start()
cluster("--deadline-s", str(DEADLINE_S))
"""


def struck(job: Any, victim: int, number: int, function: str, deadline_s: float = 15) -> list[Any]:
    names = {"VICTIM": victim, "SIGNAL": int(number), "FUNCTION": function, "DEADLINE_S": deadline_s}
    source = CLUSTER + "".join(f"{name} = {value!r}\n" for name, value in names.items()) + STRUCK
    return job(source, world_size=3)


@pytest.mark.nightly
@pytest.mark.parametrize("function", ["_collectives", "_measure"])
def test_a_rank_that_dies_midway_is_named(job: Any, function: str) -> None:
    ranks = struck(job, 1, signal.SIGKILL, function)
    assert ranks[1].code == -signal.SIGKILL
    assert [ranks[0].code, ranks[2].code, ranks[2].output] == [1, 0, ""], [each.output for each in ranks]
    data = report(ranks[0])
    assert only(data, "ranks")["ranks"] == [1]
    assert data["took_s"] < 15 and len(data["ranks"]) == 3


def test_a_rank_that_is_stopped_midway_is_named_before_the_deadline(job: Any) -> None:
    ranks = struck(job, 2, signal.SIGSTOP, "_measure")
    assert [ranks[0].code, ranks[1].code, ranks[1].output] == [1, 0, ""], [each.output for each in ranks]
    data = report(ranks[0])
    assert only(data, "ranks")["ranks"] == [2]
    assert data["took_s"] < 15


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_when_rank_0_goes_midway_the_others_name_it_before_the_deadline(job: Any, number: int) -> None:
    ranks = struck(job, 0, number, "_measure")
    for each in ranks[1:]:
        assert each.code == 1
        assert re.match(r"dtprobe: rank [12].*rank 0", each.output), each.output
        assert each.output.count("\n") == 1
