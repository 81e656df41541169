"""Shares: ranges of files, about equally long to read, told as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtprobe.diagnose.case import Artifact
from dtprobe.diagnose.cut import shares
from dtprobe.diagnose.cut.task import work
from dtprobe.diagnose.lines import planned
from dtprobe.errors import DtprobeError, UsageError
from dtprobe.readers.hosts import Host, Reading

ROOT = Path("/srv/job")


def dump(rank: int, size: int = 1 << 20, name: str = "nccl_trace_rank_{}") -> Artifact:
    return Artifact(name=name.format(rank), path=ROOT / name.format(rank), kind="flight-recorder", size=size, rank=rank)


def log(rank: int, size: int = 1 << 20) -> Artifact:
    return Artifact(
        name=f"rank{rank}.log", path=ROOT / f"rank{rank}.log", kind="text", size=size, rank=rank, near_ns=2**62 + rank
    )


def test_shares_are_ranges_that_take_about_equally_long_and_together_hold_all() -> None:
    dumps = [dump(rank, (1 + rank % 5) << 20) for rank in range(200)]
    found = shares.cut(dumps, [ROOT], 7)
    assert [one for share in found for one in share.dumps] == dumps and len(found) == 7
    costs = [one.cost_s for one in found]
    assert max(costs) - min(costs) <= 2 * max(map(shares.cost_s, dumps))


def test_their_number_follows_from_what_there_is_to_read() -> None:
    def count(ranks: int, size: int) -> int:
        return len(shares.cut([dump(rank, size) for rank in range(ranks)], [ROOT]))

    assert count(8, 1 << 10) == 1  # not worth a second process
    assert count(8, 128 << 20) == shares.FEW
    assert count(2000, 10 << 20) == 63 and count(100, 640 << 20) == 100  # a file is never cut
    assert count(1000, 1 << 30) == shares.MOST


def test_a_share_is_told_as_text_and_is_the_same_again() -> None:
    reading = Reading(t_ns=1, offset_ns=-(2**62), uncertainty_ns=3)
    host = Host(name="n0", node=0, ranks=(0, 2), address="a", before=reading, after=reading, lost="gone", lost_ns=7)
    odd = Artifact(
        name="b\\udcff", path=ROOT / "b\udcff", kind="json", size=9, local_rank=2, host="n0", dated_ns=5, measured=host
    )
    share = shares.Share(roots=(ROOT,), texts=tuple(planned([log(0), log(1, 9 << 20), odd])), dumps=(dump(0), dump(1)))
    text = shares.packed(share)
    assert shares.unpacked(text) == share and text.isascii() and text.replace("-", "").replace("_", "").rstrip("=").isalnum()
    assert shares.mark(text) != shares.mark(shares.packed(shares.Share(roots=(ROOT,), texts=(), dumps=(dump(1),))))


def test_a_share_of_very_many_files_is_several_that_each_fit_on_a_command_line() -> None:
    dumps = [dump(rank * 7919 % 1_000_003, rank * rank, f"{rank:x}" * 20 + "-{}") for rank in range(6000)]
    found = shares.cut(dumps, [ROOT], 1)
    assert len(found) > 1 and [one for share in found for one in share.dumps] == dumps
    assert all(len(shares.packed(one)) <= shares.LONGEST_TEXT for one in found)


@pytest.mark.parametrize("text", ["", "nonsense", "eJyrrgUAAXUA-Q==", "\u00e4"])
def test_other_text_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no share of a postmortem"):
        work(text, tmp_path / "part")


def test_another_version_is_refused_with_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shares.packed(shares.Share(roots=(ROOT,), texts=(), dumps=(dump(0),)))
    monkeypatch.setattr(shares, "__version__", "9.9")
    with pytest.raises(DtprobeError, match=r"runs dtprobe [\d.]+ .*this node has 9\.9.*install the same version"):
        shares.unpacked(text)


def test_a_folder_that_the_node_does_not_see_is_said_with_the_node(tmp_path: Path) -> None:
    share = shares.Share(roots=(tmp_path / "dumps",), texts=(), dumps=(dump(0),))
    with pytest.raises(UsageError, match=r"dumps is not there on .*; put the artifacts where all nodes see them"):
        work(shares.packed(share), tmp_path / "part")
    (tmp_path / "dumps").mkdir()  # the same name on another disk
    with pytest.raises(UsageError, match="nccl_trace_rank_0 is not there on"):
        work(shares.packed(share), tmp_path / "part")
    assert not (tmp_path / "part").exists()
