"""perftest's, ibstat's and iperf3's own words, and counters of a device, as frames."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtprobe.readers import iperf, rdma
from dtprobe.readers.artifact import Problem, ReaderError
from dtprobe.readers.folder import read_folder

CORPUS = Path(__file__).parents[1] / "corpus" / "rdma"
FIGURES = """\
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : mlx5_0
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      5000             11000.50            10950.25\t\t   0.175204
"""


def test_perftest_s_figures_and_whose_they_are():
    [row] = rdma.read_perftest(CORPUS / "ib_write_bw.txt").to_dict("records")

    assert (row["kind"], row["test"], row["device"], row["bytes"], row["iterations"]) == (
        "bandwidth",
        "RDMA_Write",
        "rx0",
        16384,
        240,
    )
    assert row["average_gbits"] == pytest.approx(0.010007)
    assert row["messages_per_s"] == pytest.approx(76)


def test_perftest_in_mebibytes_gives_gigabits_too(tmp_path):
    file = tmp_path / "ib_write_bw.txt"
    file.write_text(FIGURES)

    [row] = rdma.read_perftest(file).to_dict("records")

    assert row["average_gbits"] == pytest.approx(10950.25 * 8 * 2**20 / 1e9)


def test_perftest_s_failure_has_its_status():
    problems: list[Problem] = []

    rows = rdma.read_perftest(CORPUS / "ib_write_bw-lost.txt", problems=problems)

    assert set(rows["kind"]) == {"failure"}
    assert rows["status"].dropna().tolist() == [12]
    assert [one.kind for one in problems] == ["incomplete"]


def test_counters_by_device_and_moment():
    before, after = (rdma.read_counters(CORPUS / f"hw_counters-{moment}.txt") for moment in ("before", "after"))

    assert set(before["device"]) == {"rx0", "rx1"} and set(before["moment"]) == {"before"}
    both = before.merge(after, on=["device", "port", "counter"], suffixes=("_then", "_now"))
    grown = (both["value_now"] - both["value_then"]).set_axis(both["device"] + "." + both["counter"])
    assert grown["rx1.out_of_seq_request"] == 34 and grown["rx0.rcvd_seq_err"] == 26
    assert grown["rx0.out_of_seq_request"] == 0


def test_ibstat_port_by_port_and_what_soft_roce_leaves_empty_is_null():
    rows = rdma.read_ibstat(CORPUS / "ibstat.txt")

    assert rows["device"].tolist() == ["rx0", "rx1"]
    assert rows["state"].tolist() == ["Active", "Active"] and rows["link_layer"].tolist() == ["Ethernet", "Ethernet"]
    assert rows["rate_gbits"].tolist() == [10.0, 10.0]
    assert rows["firmware"].isna().all() and rows["type"].isna().all()


def test_iperf_s_intervals_of_tcp():
    rows = iperf.read_iperf(CORPUS / "iperf3-tcp.json")

    assert set(rows["protocol"]) == {"tcp"} and set(rows["flows"]) == {4}
    assert rows["start_s"].is_monotonic_increasing and not rows["sender"].any()
    assert rows["t_ns"].iloc[1] > rows["t_ns"].iloc[0] > 1_700_000_000 * 10**9
    assert rows["lost"].isna().all()


def test_iperf_s_losses_of_udp_and_an_interval_printed_twice_counts_once():
    problems: list[Problem] = []

    rows = iperf.read_iperf(CORPUS / "iperf3-udp.json", problems=problems)

    assert rows["packets"].notna().all() and (rows["lost"] <= rows["packets"]).all()
    assert not rows.duplicated(["start_s", "end_s"]).any() and len(rows) == 5
    assert [one.text for one in problems] == ["the client has terminated"]


@pytest.mark.parametrize("read", [rdma.read_perftest, rdma.read_counters, rdma.read_ibstat, iperf.read_iperf])
def test_other_text_is_refused_in_one_line(read, tmp_path):
    file = tmp_path / "other.txt"
    file.write_text("nothing of the kind\nat all\n")

    with pytest.raises(ReaderError) as caught:
        read(file)

    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_a_folder_of_them_is_read_by_their_names(tmp_path):
    case = tmp_path / "rank0" / "vm" / "case0"
    case.mkdir(parents=True)
    for file in CORPUS.iterdir():
        (case / file.name).write_bytes(file.read_bytes())

    frames = read_folder(tmp_path)

    assert {
        name: len(frames[name]) > 0 for name in ("rdma_bandwidth", "rdma_counters", "rdma_ports", "iperf")
    } == dict.fromkeys(("rdma_bandwidth", "rdma_counters", "rdma_ports", "iperf"), True)
