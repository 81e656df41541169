"""Cut into however many shares, a case is answered to the letter as it is whole."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from flight_jobs import Look, changed, ddp, edited, exchanged, frozen, fsdp, hsdp, mesh, moe, run, without, write
from hypothesis import given, settings
from hypothesis import strategies as st

from dtprobe.diagnose import diagnose
from dtprobe.diagnose.cut import OnEngine

from .conftest import Inside, everything, in_shares, told

CORPUS = Path(__file__).resolve().parents[2] / "corpus" / "logs"
CASES = sorted(one.parent.name for one in CORPUS.glob("*/truth.toml"))
PIECES = (1, 2, 3, 7)


def compared(name: str, folder: Path, pieces: tuple[int, ...]) -> None:
    job = folder / "job"
    shutil.copytree(CORPUS / name, job, ignore=shutil.ignore_patterns("truth.toml"))
    whole = told(diagnose([job]))
    for count in pieces:
        assert told(in_shares([job], folder, count)) == whole, f"{name} in {count} shares"
    assert [one.name for one in folder.iterdir()] == ["job"]


@pytest.mark.parametrize("at", range(0, len(CASES), 5))
def test_logs_in_shares(at: int, tmp_path: Path) -> None:
    compared(CASES[at], tmp_path, (PIECES[at % 4],))


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_all_logs_in_shares_of_each_number(name: str, tmp_path: Path) -> None:
    compared(name, tmp_path, PIECES)


def test_whatever_lies_in_two_folders_is_read_in_shares_as_it_is_whole(mixed: list[Path], tmp_path: Path) -> None:
    whole, answer = everything(mixed), told(diagnose(mixed))
    assert len(whole["calls"]) >= 5 and len(whole["lines"]) > 300 and len(whole["problems"]) >= 4
    for count in (1, 3, None, 40):
        reader = OnEngine(engine=Inside(), roots=mixed, base=tmp_path, pieces=count)
        shares = everything(mixed, reader=reader)
        for what, value in whole.items():
            assert shares[what] == value, f"{what} in {count} shares"
        assert told(diagnose(mixed, reader=reader)) == answer


FAULTS = st.sampled_from([without, frozen, exchanged, lambda place: changed(place, elements=77), lambda _: list])
LAYOUTS = st.sampled_from(
    [
        lambda: ddp(8, 5),
        lambda: fsdp(4, 4),
        lambda: moe(4, 5),
        lambda: hsdp(2, 3, 4),
        lambda: mesh(2, 2, 2, 3),
        lambda: mesh(4, 1, 1, 3),
    ]
)
LOOKS = st.builds(
    Look,
    version=st.sampled_from(["2.3", "2.5", "2.9", "2.10"]),
    backend=st.sampled_from(["nccl", "gloo", "xccl"]),
    timed=st.booleans(),
    ring=st.sampled_from([2000, 9]),
    as_json=st.booleans(),
    only_active=st.booleans(),
    prefix=st.sampled_from(["nccl_trace_rank_", "job7_"]),
    missing=st.sampled_from([(), (1,)]),
    cut=st.sampled_from([(), (2,)]),
)


@settings(max_examples=12)
@given(LAYOUTS, FAULTS, LOOKS, st.integers(0, 7), st.integers(0, 11), st.sampled_from((*PIECES, 40)))
def test_dumps_in_shares(layout, fault, look, rank, place, pieces):  # type: ignore[no-untyped-def]
    job = layout()
    job = edited(job, rank % job.world, fault(place))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "job")
        write(folder, job, run(job), look)
        (folder / f"{look.prefix}{job.world}").write_bytes(b"")
        assert everything(
            [folder], reader=OnEngine(engine=Inside(), roots=[folder], base=Path(name), pieces=pieces)
        ) == everything([folder])
        assert told(in_shares([folder], Path(name), pieces)) == told(diagnose([folder]))
