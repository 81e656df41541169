"""The schedules: each accepted by its own tool where one is here, each calling `dtprobe nightly` with options that exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import typer
import yaml

from dtprobe.launch import slurm

REPO = Path(__file__).resolve().parents[2]
FILES = ("github-actions.yml", "dtprobe-nightly.service", "dtprobe.cron", "dtprobe-nightly.sbatch", "kubernetes.yml")


@pytest.fixture
def pipelines(reports):
    return reports / "pipelines"


def ran(*command, **more):
    return subprocess.run(
        [str(one) for one in command], capture_output=True, text=True, check=False, **{"timeout": 120, **more}
    )


def tool(name):
    """A command of this environment's packages."""
    return Path(sys.executable).with_name(name)


def nights(text):
    """The words of each `dtprobe nightly` in a file, variables replaced by a word that any option takes as text."""
    for line in re.findall(r"^(?![ \t]*#).*/dtprobe nightly (.*)$", text, re.MULTILINE):
        bare = re.sub(r"\$\{\w+:\+([^}]*)\}", r"\1", line.split(" > ")[0])
        bare = re.sub(r"\$\{?DTPROBE_ARGS(:-)?\}?", "", bare)
        yield shlex.split(re.sub(r"\$\{?\w+\}?", "http://variable", bare))


@pytest.mark.parametrize("name", FILES)
def test_each_calls_the_night_with_options_that_exist_keeps_the_history_and_bounds_its_time(pipelines, name):
    from dtprobe.cli import app

    command = typer.main.get_command(app).commands["nightly"]
    found = list(nights((pipelines / name).read_text()))
    assert len(found) == 1
    given = command.make_context("nightly", list(found[0])).params
    assert given["budget"] and given["out"] is not None
    with pytest.raises(Exception, match="--no-such-option"):
        command.make_context("nightly", [*found[0], "--no-such-option"])


def test_the_table_names_every_file(pipelines):
    text = (pipelines / "README.md").read_text()
    for file in pipelines.iterdir():
        assert file.name == "README.md" or f"`{file.name}`" in text or f"`{file.suffix}`" in text, file.name


@pytest.mark.needs("package:check-jsonschema")
def test_github_s_schema_accepts_the_workflow_and_refuses_one_with_a_slip(pipelines, tmp_path):
    def checked(file):
        return ran(tool("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", file)

    file = pipelines / "github-actions.yml"
    done = checked(file)
    assert done.returncode == 0, done.stdout + done.stderr
    slip = tmp_path / "slip.yml"
    slip.write_text(file.read_text().replace("timeout-minutes", "timeout-minuets"))
    assert checked(slip).returncode == 1


def test_the_workflow_s_steps_are_bash_and_its_uploads_outlive_a_night_that_was_not_as_expected(pipelines):
    steps = yaml.safe_load((pipelines / "github-actions.yml").read_text())["jobs"]["nightly"]["steps"]
    names = [step.get("name") for step in steps]
    night = names.index("Night")
    for step in steps:
        if "run" in step:
            bare = re.sub(r"\$\{\{.*?\}\}", "expression", step["run"])
            assert ran("bash", "-n", "-c", bare).returncode == 0, step["run"]
    for step in steps[night + 1 :]:
        assert "always()" in step["if"] or "!cancelled()" in step["if"], step
    kept = [step["with"]["path"] for step in steps if "actions/cache/" in step.get("uses", "")]
    assert len(set(kept)) == 1 and "runs/history" in kept[0], "what is restored is what is saved"
    assert names.index("History of earlier nights") < night < names.index("Keep the history")


@pytest.mark.needs("command:systemd-analyze")
def test_systemd_accepts_the_service_and_its_timer(pipelines, tmp_path):
    """The program must exist for the check, so the units are read with /opt as a folder of the test's."""
    program = tmp_path / "opt" / "dtprobe" / ".venv" / "bin" / "dtprobe"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)

    def verify(change=str):
        for name in ("dtprobe-nightly.service", "dtprobe-nightly.timer"):
            text = (pipelines / name).read_text().replace("/opt/dtprobe", str(program.parents[2]))
            (tmp_path / name).write_text(change(text))
        return ran(
            "systemd-analyze", "verify", *(tmp_path / name for name in ("dtprobe-nightly.timer", "dtprobe-nightly.service"))
        )

    done = verify()
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "Unknown key" in verify(lambda text: text.replace("KillMode", "KilMode")).stderr


@pytest.mark.needs("command:flock", "command:timeout")
def test_the_line_for_cron_is_silent_after_a_good_night_and_mails_a_bad_one_and_two_do_not_overlap(pipelines, tmp_path):
    lines = [line for line in (pipelines / "dtprobe.cron").read_text().splitlines() if line and not line.startswith("#")]
    settings, (entry,) = lines[:-1], lines[-1:]
    assert all(re.fullmatch(r"[A-Z]+=\S+", line) for line in settings)
    *when, user, command = entry.split(None, 6)
    bounds = [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)]
    assert all(field == "*" or low <= int(field) <= high for field, (low, high) in zip(when, bounds, strict=True))
    assert user == "dtprobe" and "%" not in command, "cron turns % into a new line"
    here = command.replace("/opt/dtprobe", str(tmp_path)).replace("/var/lib/dtprobe", str(tmp_path / "state"))
    program = tmp_path / ".venv" / "bin" / "dtprobe"
    program.parent.mkdir(parents=True)
    (tmp_path / "state").mkdir()
    program.write_text('#!/bin/sh\necho "said $1"\nexit "$CODE"\n')
    program.chmod(0o755)
    said = {code: ran("bash", "-c", here, env={**os.environ, "CODE": code}).stdout for code in ("0", "1")}
    assert said == {"0": "", "1": "said nightly\n"}
    program.write_text("#!/bin/sh\ntouch overlapped\n")
    ran("flock", tmp_path / "state" / "lock", "bash", "-c", here)
    assert not (tmp_path / "overlapped").exists()
    ran("bash", "-c", here)
    assert (tmp_path / "overlapped").exists(), "the lock was the only hindrance"


@pytest.mark.needs("package:kubernetes-validate")
def test_kubernetes_schemas_accept_the_manifests_and_refuse_a_slip(pipelines, tmp_path):
    file = pipelines / "kubernetes.yml"
    done = ran(tool("kubernetes-validate"), "--strict", file)
    assert done.returncode == 0, done.stdout + done.stderr
    slip = tmp_path / "slip.yml"
    slip.write_text(file.read_text().replace("backoffLimit", "backofLimit"))
    assert ran(tool("kubernetes-validate"), "--strict", slip).returncode != 0


def test_the_pod_s_program_goes_from_a_fresh_clone_to_a_night_and_takes_up_the_next_one(pipelines, tmp_path):
    claim, job = yaml.safe_load_all((pipelines / "kubernetes.yml").read_text())
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    assert {one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"] if "persistentVolumeClaim" in one} == {
        claim["metadata"]["name"]
    }
    origin, data = tmp_path / "origin", tmp_path / "data"
    origin.mkdir()
    data.mkdir()
    setup = "\tmkdir -p .venv/bin\n\tprintf '#!/bin/sh\\necho \"$$$$ $$*\" >> ../said' > .venv/bin/dtprobe\n\tchmod +x .venv/bin/dtprobe\n"
    (origin / "Makefile").write_text(f"setup:\n\techo '$(TORCH)' >> ../said\n{setup}")
    git = ("git", "-C", origin, "-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        assert ran(*git, *words).returncode == 0
    (script,) = container["args"]
    environ = {**os.environ, "REPOSITORY": str(origin), "TORCH": "torch==2.13.0", "DTPROBE_WEBHOOK": "https://example.org/a b"}
    for _ in range(2):
        program = [*container["command"], script.replace("/data", str(data))]
        done = ran(*program, env=environ)
        assert done.returncode == 0, done.stderr
    said = [re.sub(r"^\d+ ", "", line) for line in (data / "said").read_text().splitlines()]
    assert said[:3] == said[3:] and said[:2] == ["torch==2.13.0", "doctor"]
    assert said[2].startswith(f"nightly --out {data}/runs") and said[2].endswith("--webhook https://example.org/a b")


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.needs("slurm", "root")
def test_a_real_slurm_accepts_the_script_and_runs_a_night_with_it(pipelines, tmp_path):
    script = pipelines / "dtprobe-nightly.sbatch"
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    (home / ".venv").symlink_to(Path(sys.prefix))
    words = f"--path {REPO / 'tests' / 'content'} --only quick:plain --repeats 1 --jobs 1"
    with slurm.cluster(tmp_path / "slurm") as told:
        environ = {**os.environ, **told, "DTPROBE_HOME": str(home), "DTPROBE_OUT": str(out), "DTPROBE_ARGS": words}
        tested = ran("sbatch", "--test-only", script, env=environ, cwd=tmp_path)
        assert tested.returncode == 0 and "to start at" in tested.stderr, tested.stderr
        refused = ran("sbatch", "--test-only", "--partition=none", script, env=environ, cwd=tmp_path)
        assert refused.returncode != 0, "no such partition"
        sent = ran("sbatch", "--parsable", script, env=environ, cwd=tmp_path)
        assert sent.returncode == 0, sent.stderr
        job = sent.stdout.strip()
        deadline = time.monotonic() + 240
        while (state := _state(job, environ)) in (
            "PENDING",
            "RUNNING",
            "COMPLETING",
            "CONFIGURING",
        ) and time.monotonic() < deadline:
            time.sleep(0.5)
        log = (tmp_path / f"dtprobe-nightly-{job}.log").read_text()
        assert state == "COMPLETED", f"{state}\n{log}"
    (folder,) = (out / "suites").iterdir()
    assert {"summary.json", "summary.md", "summary.html", "junit.xml"} <= {one.name for one in folder.iterdir()}
    assert "1 of 1 scenarios as expected" in (folder / "summary.md").read_text()
    assert any((out / "history").iterdir())


def _state(job, environ):
    said = ran("scontrol", "show", "job", job, env=environ).stdout
    return (re.search(r"JobState=(\w+)", said) or ["", "gone"])[1]


def test_the_versions_in_the_schedules_are_those_of_the_package(pipelines):
    makefile = (REPO / "Makefile").read_text()
    pinned = re.search(r"^TORCH \?= (\S+)$", makefile, re.MULTILINE)[1]
    for name in ("github-actions.yml", "kubernetes.yml", "README.md"):
        assert pinned in (pipelines / name).read_text(), name
    wanted = metadata.metadata("dtprobe")["Requires-Python"].removeprefix(">=")
    assert f'python-version: "{wanted}"' in (pipelines / "github-actions.yml").read_text()
    assert f"image: python:{wanted}-" in (pipelines / "kubernetes.yml").read_text()
