"""The wait-for graph: who is drawn where, cycles, ranks that wait alike, bounds."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtprobe.diagnose.diagnosis import Waiting
from dtprobe.report.postmortem import wait_picture
from dtprobe.report.postmortem.waits import NODES, Graph, graph


def made(
    edges: list[tuple[int, int]], suspects: tuple[int, ...] = (), operation: str = "all_reduce", group: str | None = "dp"
) -> Graph:
    found = graph([Waiting(rank=a, awaits=b, operation=operation, group=group) for a, b in edges], suspects)
    assert found is not None
    return found


def names(found: Graph) -> list[str]:
    return [node.name for node in found.nodes]


def test_nobody_waits_for_another_and_there_is_no_graph() -> None:
    assert graph([]) is None
    assert graph([Waiting(rank=3, awaits=3, operation="recv")]) is None


def test_few_ranks_are_drawn_each_and_those_waited_for_come_first() -> None:
    found = made([(0, 3), (1, 3), (2, 3)], (3,))
    assert names(found) == ["rank 3", "rank 0", "rank 1", "rank 2"]
    assert [node.column for node in found.nodes] == [0, 1, 1, 1]
    assert [node.suspect for node in found.nodes] == [True, False, False, False]
    assert found.cycles == ()
    assert found.sentences == ("ranks 0-2 wait in all_reduce of dp for rank 3",)


def test_a_cycle_is_found_with_those_who_wait_behind_it_outside() -> None:
    found = made([(0, 1), (1, 2), (2, 0), (3, 0), (4, 3)])
    assert [set(cycle) for cycle in found.cycles] == [{0, 1, 2}]
    assert {node.name: (node.cycle, node.column) for node in found.nodes} == {
        "rank 0": (True, 0), "rank 1": (True, 0), "rank 2": (True, 0), "rank 3": (False, 1), "rank 4": (False, 2)
    }  # fmt: skip
    assert sum(link.cycle for link in found.links) == 3


def test_of_many_ranks_those_that_wait_alike_are_one_box() -> None:
    found = made([(rank, 777) for rank in range(4096) if rank != 777], (777,))
    assert names(found) == ["rank 777", "ranks 0-776, 778-4095"]
    assert len(found.links) == 1
    drawn = wait_picture.draw(found)
    assert "4,095 ranks" in drawn and "ranks 0-776, 778-4095" in drawn


def test_ranks_that_all_wait_for_one_another_are_one_box_and_one_sentence() -> None:
    found = made([(a, b) for a in range(32) for b in range(32) if a != b])
    assert names(found) == ["ranks 0-31"]
    assert found.nodes[0].cycle
    assert found.sentences == ("ranks 0-31 wait in all_reduce of dp for one another",)
    assert "for one another" in wait_picture.draw(found)


def test_alike_means_the_same_operation_too() -> None:
    waits = [Waiting(rank=rank, awaits=20, operation="all_reduce" if rank < 10 else "broadcast") for rank in range(20)]
    found = graph(waits)
    assert found is not None
    assert names(found) == ["rank 20", "ranks 0-9", "ranks 10-19"]


def test_a_long_cycle_is_drawn_with_its_middle_as_one_and_said_whole() -> None:
    found = made([(rank, (rank + 1) % 4096) for rank in range(4096)])
    assert len(found.nodes) == 8
    assert sum(len(node.ranks) for node in found.nodes) == 4096
    assert len(found.cycles[0]) == 4096
    assert all(node.cycle for node in found.nodes)


def test_a_chain_as_long_as_a_cluster_is_walked_without_recursion_and_drawn_within_bounds() -> None:
    found = made([(rank, rank + 1) for rank in range(4000)], (4000,))
    assert len(found.nodes) == NODES
    assert found.nodes[0].name == "rank 4000"
    assert sum(len(node.ranks) for node in found.nodes) == 4001


@given(
    edges=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=200),
    suspects=st.sets(st.integers(0, 60), max_size=3),
)
def test_every_rank_is_in_exactly_one_box_and_the_picture_is_well_formed(
    edges: list[tuple[int, int]], suspects: set[int]
) -> None:
    found = graph([Waiting(rank=a, awaits=b, operation="recv") for a, b in edges], suspects)
    wanted = {rank for a, b in edges if a != b for rank in (a, b)}
    if found is None:
        assert not wanted
        return
    drawn = [rank for node in found.nodes for rank in node.ranks]
    assert sorted(drawn) == sorted(wanted)
    assert len(found.nodes) <= NODES
    columns = [node.column for node in found.nodes]
    assert columns == sorted(columns)
    assert all(link.cycle or columns[link.source] > columns[link.target] for link in found.links)
    root = ElementTree.fromstring(wait_picture.draw(found))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    boxes = [
        (float(box.attrib["x"]), float(box.attrib["y"]), float(box.attrib["width"]), float(box.attrib["height"]))
        for box in root.iter("rect")
    ]
    assert len(boxes) == len(found.nodes)
    assert all(x >= 0 and y >= 0 and x + w <= width + 0.1 and y + h <= height + 0.1 for x, y, w, h in boxes)
    for number, (x, y, w, h) in enumerate(boxes):
        assert not any(x < u + p and u < x + w and y < v + q and v < y + h for u, v, p, q in boxes[number + 1 :]), (
            "boxes lie on each other"
        )


@pytest.mark.parametrize("group", ["a<b>&\"'", "\u202e\u05d0", "x" * 500, "\x00\ud800"])
def test_a_hostile_name_leaves_the_picture_well_formed(group: str) -> None:
    drawn = wait_picture.draw(made([(0, 1)], operation=group, group=group))
    root = ElementTree.fromstring(drawn)
    assert {element.tag for element in root.iter()} <= {"svg", "title", "desc", "defs", "marker", "path", "rect", "text"}
    assert not re.search("[\x00-\x08\u202e\ud800]", drawn)
