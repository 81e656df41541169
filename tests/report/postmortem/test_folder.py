"""The folder of a postmortem and the verbs that make and show it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dtprobe.diagnose.diagnosis import parsed
from dtprobe.errors import DtprobeError
from dtprobe.report import postmortem
from dtprobe.report.postmortem import folder
from dtprobe.store import Store

FILES = ["diagnosis.json", "report.html", "report.md", "timeline.json"]
LOG = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()\nValueError: shapes differ\n'


def _run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dtprobe", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """What a small job left, beside an empty working directory."""
    (tmp_path / "job").mkdir()
    (tmp_path / "cwd").mkdir()
    (tmp_path / "job" / "rank1.log").write_text(LOG, encoding="utf-8")
    return tmp_path / "job"


def test_the_folder_holds_four_files_and_the_json_is_the_diagnosis(tmp_path: Path, diagnoses: ModuleType) -> None:
    made = diagnoses.lost_gpu()
    path = postmortem.write(made, tmp_path, now_ns=diagnoses.T0, token="0123abcd")
    assert path == tmp_path / "postmortem" / "20260921T141320Z-0123abcd"
    assert sorted(file.name for file in path.iterdir()) == FILES
    data = json.loads((path / "diagnosis.json").read_text(encoding="utf-8"))
    assert data == json.loads(json.dumps(made.json))
    assert data["schema"] == "dtprobe.diagnosis/1"


@pytest.mark.parametrize("name", ["lost_gpu", "deadlock", "undetermined", "healthy", "bare", "hostile"])
def test_every_diagnosis_is_written_and_comes_back_as_it_was(tmp_path: Path, diagnoses: ModuleType, name: str) -> None:
    made = diagnoses.ALL[name]()
    path = postmortem.write(made, tmp_path, now_ns=diagnoses.T0)
    assert folder.read(path).json == json.loads((path / "diagnosis.json").read_text(encoding="utf-8"))
    assert folder.find(path.name, tmp_path) == folder.find(path.name[-8:], tmp_path) == folder.find(str(path), tmp_path) == path


def test_an_interrupt_between_files_leaves_nothing(
    tmp_path: Path, diagnoses: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = Path.write_text

    def interrupted(self: Path, text: str, **how: str) -> int:
        if self.name == "report.md":
            raise KeyboardInterrupt
        return write_text(self, text, **how)

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        postmortem.write(diagnoses.lost_gpu(), tmp_path, now_ns=diagnoses.T0)
    assert list((tmp_path / "postmortem").iterdir()) == []


def test_a_postmortem_is_no_run(tmp_path: Path, diagnoses: ModuleType) -> None:
    postmortem.write(diagnoses.lost_gpu(), tmp_path, now_ns=diagnoses.T0)
    assert Store(tmp_path).runs() == []


def test_another_schema_or_a_cut_diagnosis_is_an_error_in_a_line(diagnoses: ModuleType) -> None:
    data = diagnoses.lost_gpu().json
    with pytest.raises(DtprobeError, match=r"dtprobe\.diagnosis/9"):
        parsed(data | {"schema": "dtprobe.diagnosis/9"})
    for name in set(data) - {"schema"}:
        with pytest.raises(DtprobeError, match=name):
            parsed({key: value for key, value in data.items() if key != name})


def test_json_alone_litters_nothing_and_with_out_the_folder_is_made_too(job: Path, tmp_path: Path) -> None:
    cwd = tmp_path / "cwd"
    done = _run("postmortem", "--json", str(job), cwd=cwd)
    assert (done.returncode, done.stderr) == (1, "")
    data = json.loads(done.stdout)
    assert data["schema"] == "dtprobe.diagnosis/1"
    assert list(cwd.iterdir()) == []
    done = _run("postmortem", "--json", "--out", "kept", str(job), cwd=cwd)
    assert json.loads(done.stdout) == data
    (made,) = (cwd / "kept" / "postmortem").iterdir()
    assert sorted(file.name for file in made.iterdir()) == FILES
    assert json.loads((made / "diagnosis.json").read_text(encoding="utf-8")) == data


def test_by_default_the_report_lies_in_runs_and_show_tells_it_again(job: Path, tmp_path: Path) -> None:
    cwd = tmp_path / "cwd"
    done = _run("postmortem", str(job), cwd=cwd)
    assert done.returncode == 1
    (made,) = (cwd / "runs" / "postmortem").iterdir()
    assert f"runs/postmortem/{made.name}/report.html" in done.stdout
    again = _run("show", made.name, cwd=cwd)
    assert (again.returncode, again.stdout) == (0, done.stdout)


def test_a_folder_that_cannot_be_written_is_said_before_the_work_or_beside_the_answer(job: Path, tmp_path: Path) -> None:
    cwd = tmp_path / "cwd"
    (cwd / "runs").write_text("no folder")
    asked = _run("postmortem", "--out", "runs", str(job), cwd=cwd)
    assert (asked.returncode, asked.stdout) == (2, "")
    assert "--out runs" in asked.stderr and asked.stderr.count("\n") == 1
    answered = _run("postmortem", str(job), cwd=cwd)
    assert answered.returncode == 1 and answered.stdout
    assert "no report was written" in answered.stderr and "--out" in answered.stderr and answered.stderr.count("\n") == 1


def test_a_path_that_does_not_exist_is_a_usage_error(tmp_path: Path) -> None:
    done = _run("postmortem", "nothing/here", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_report_needs_neither_pandas_nor_matplotlib_nor_numpy() -> None:
    code = (
        "import sys; from dtprobe import cli; from dtprobe.report import postmortem; from dtprobe.report.postmortem import folder, terminal; "
        "print([name for name in ('pandas', 'numpy', 'matplotlib', 'pyarrow', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
