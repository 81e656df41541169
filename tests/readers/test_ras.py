"""Answers of NCCL's RAS subsystem, text and JSON."""

from __future__ import annotations

from dtprobe.readers.ras import from_json, from_text

TEXT = """\
NCCL version 2.26.2 compiled with CUDA 12.6

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  INCOMPLETE,MISMATCH

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 910 on node 198.51.100.4 managing GPU 5

#0-0 (00fa93daea854b06) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 29 -- GPU 5 managed by process 910 on node 198.51.100.4

Warnings
========

#0-0 (00fa93daea854b06) MISMATCH
  Communicator ranks have different AllGather operation counts
  29 ranks have launched up to operation 641
  2 ranks have launched up to operation 640
  Rank 12 -- GPU 4 managed by process 320 on node 198.51.100.2
  Rank 13 -- GPU 5 (NVML 6) managed by process 321 on node 198.51.100.2
  Communicator ranks have different Broadcast operation counts
  30 ranks have not launched any operations
  Rank 0 has launched up to operation 3 -- GPU 0 managed by process 100 on node 198.51.100.1
"""
JSON = """\
SERVER PROTOCOL 2
OK
{
  "nccl_version": "2.28.9",
  "timestamp": "2026-03-01 10:00:00",
  "communicators_count": 1,
  "communicators": [
    {
      "hash": "0xfa93daea854b06",
      "size": 2,
      "ranks": [
        {
          "rank": 1,
          "host": "198.51.100.1",
          "pid": 21,
          "status": {"init_state": 0, "async_error": 6, "abort_flag": true},
          "collective_counts": {"AllReduce": 9, "Broadcast": 0}
        }
      ],
      "missing_ranks": [
        {
          "rank": 0,
          "pid": 20,
          "nvml_dev": 0
          "status": {
            "unresponsive": true,
            "considered_dead": false
          }
        }
      ]
    }
  ]
}
"""


def test_the_text_form_names_the_odd_ranks_and_counts_the_others() -> None:
    (report,) = from_text(enumerate(TEXT.splitlines(), 1))
    assert report.errors == {"INCOMPLETE", "MISMATCH"}
    assert [(one.pid, one.problem) for one in report.lost] == [(910, "unresponsive")]
    (comm,) = report.communicators
    assert comm.many == {"AllGather": {641: 29, 640: 2}, "Broadcast": {0: 30}}
    assert {rank: peer.counts for rank, peer in comm.peers.items()} == {
        29: {},
        12: {"AllGather": 640},
        13: {"AllGather": 640},
        0: {"Broadcast": 3},
    }
    assert comm.peers[29].problem == "unresponsive"
    assert (comm.peers[13].pid, comm.peers[13].line) == (321, 26)


def test_several_answers_in_one_file_stay_apart() -> None:
    found = list(from_text(enumerate((TEXT + TEXT).splitlines(), 1)))
    assert len(found) == 2 and found[1].line > found[0].line


def test_json_is_read_although_this_release_leaves_out_a_comma() -> None:
    (report,) = from_json(JSON)
    assert report.errors == {"INCOMPLETE"}
    (comm,) = report.communicators
    assert (comm.id, comm.size) == ("fa93daea854b06", 2)
    assert (comm.peers[1].counts["AllReduce"], comm.peers[1].async_error, comm.peers[1].aborted) == (9, 6, True)
    assert (comm.peers[0].problem, comm.peers[0].pid) == ("unresponsive", 20)


def test_what_is_no_answer_gives_none() -> None:
    assert list(from_json('{"communicators": 3} {"a": [1}')) == []
    assert list(from_text(enumerate(["nothing", "#0-0 (ab) MISMATCH"], 1))) == []
