"""nsys is 600 MB: where it is absent a stand-in of the same command line shows what the recorder does with it."""

from __future__ import annotations

import sys

import pytest

from dtprobe import doctor
from dtprobe.probes.nsys import Nsys, NsysRecorder

STAND_IN = """#!{python}
import pathlib, subprocess, sys
verb, *rest = sys.argv[1:]
if verb == "profile":
    at = rest.index("-o")
    code = subprocess.run(rest[at + 2:]).returncode
    pathlib.Path(rest[at + 1] + ".nsys-rep").write_text("report")
    sys.exit(code)
output = next(word for word in rest if word.startswith("--output=")).removeprefix("--output=")
if "broken" in rest[-1]:
    sys.exit("the report is broken")
pathlib.Path(output).write_text("tables of " + pathlib.Path(rest[-1]).read_text())
"""


@pytest.fixture
def stand_in(tmp_path):
    program = tmp_path / "nsys-stand-in"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    return program


def test_the_rank_runs_inside_and_the_report_is_exported_to_tables(ranks, stand_in):
    job = ranks(1)
    job.recorders.append(NsysRecorder(job.where, ("osrt",), program=stand_in))
    job.run("print('ran')\nraise SystemExit(3)")
    assert job.wait() == [3]
    recorded = job.stop()
    assert recorded.files == (job.rank(0) / "nsys.nsys-rep", job.rank(0) / "nsys.sqlite")
    assert (job.rank(0) / "nsys.sqlite").read_text() == "tables of report"
    assert (job.rank(0) / "stdout.log").read_text() == "ran\n"


def test_no_report_and_a_failed_export_are_said(ranks, stand_in):
    job = ranks(2)
    recorder = NsysRecorder(job.where, ("osrt",), program=stand_in)
    recorder.wrap(0, ("true",))
    (job.folder / "rank1broken").mkdir()
    recorder._outputs.append(job.folder / "rank1broken" / "nsys")
    (job.folder / "rank1broken" / "nsys.nsys-rep").touch()
    problems = recorder.stop().problems
    assert problems[0].startswith("rank0: nsys left no report")
    assert problems[1].endswith("nsys export: the report is broken")


def test_where_it_is_absent_the_reason_and_the_remedy_are_exact():
    if doctor.here().machine.which("nsys"):
        pytest.skip("nsys is installed")
    why = Nsys().probe()
    assert why.reason == "nsys is not installed" and "nsight-systems" in why.remedy
