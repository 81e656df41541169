from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtprobe import armrun
from dtprobe.armrun import ArmPlan, Workload
from dtprobe.clock import SystemClock
from dtprobe.confine import Confinement
from dtprobe.inject.inrank import HOOK
from dtprobe.launch.local import Local
from dtprobe.scenario import Arm, Scenario

SCENARIO = Scenario(
    name="quick",
    failure_mode="rank-killed",
    title="t",
    claim="c",
    source="s",
    layer="code",
    certifies_not="all",
    control=Arm("worker.py"),
    fault=Arm("worker.py"),
    no_cure_because="none",
    folder=Path("/nowhere"),
)


@pytest.fixture
def start(tmp_path):
    """Run Python code as a rank of a scenario would be run, beside a module `torch` of the given text; answers its output."""

    def run(code: str, torch: str) -> str:
        (tmp_path / "torch.py").write_text(torch)
        own = Workload.of(SCENARIO, SCENARIO.control).environ(0)
        done = subprocess.run(
            (sys.executable, "-c", code),
            env={**os.environ, **own, "PYTHONPATH": f"{own['PYTHONPATH']}:{tmp_path}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert not done.stderr
        return done.stdout

    return run


def test_torch_is_imported_uncollected_and_then_left_out_of_collections(start):
    torch = "import gc; made = [[] for _ in range(1000)]; print('within', gc.isenabled())"
    out = start("import gc; print(gc.isenabled()); import torch; print(gc.isenabled(), gc.get_freeze_count() > 1000)", torch)
    assert out == "True\nwithin False\nTrue True\n"


def test_what_a_program_makes_after_the_import_is_collected(start):
    code = "import gc, torch; mine = []; mine.append(mine); del mine; print(gc.collect() > 0)"
    assert start(code, "") == "True\n"


def test_a_program_that_wants_no_collector_keeps_it_off(start):
    assert start("import gc; gc.disable(); import torch; print(gc.isenabled())", "") == "False\n"


def test_a_torch_that_cannot_be_imported_leaves_the_collector_on(start):
    code = "import gc\ntry: import torch\nexcept ZeroDivisionError: print(gc.isenabled())"
    assert start(code, "1 / 0") == "True\n"


def test_a_process_that_imports_no_torch_is_left_alone(start):
    assert start("import gc; print(gc.isenabled(), gc.get_freeze_count())", "") == "True 0\n"


def test_a_job_of_somebody_s_own_is_run_as_it_is():
    assert Workload((sys.executable, "train.py"), Path("/nowhere"), 60.0, 2).environ(0) == {}


def test_the_plug_in_is_where_it_is_named():
    assert all((HOOK / "plugins" / name).is_file() for name in Workload.of(SCENARIO, SCENARIO.control).hooks)


@pytest.mark.parametrize("probed", [True, False])
def test_a_scenario_s_ranks_have_it_with_recorders_and_without(tmp_path, probed):
    (tmp_path / "torch.py").write_text("import gc; print('within', gc.isenabled())")
    work = Workload((sys.executable, "-c", "import torch"), tmp_path, 60.0, 2, hooks=("quick_import.py",))
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    with Confinement.open(f"test-quick-{os.getpid()}-{probed}", environ=environ) as box:
        record = armrun.execute(
            box,
            ArmPlan("control", work, 0, traced=False, probed=probed),
            folder=tmp_path / "arm",
            probes=(),
            launcher=Local(),
            seed=0,
            environ=environ,
            clock=SystemClock(),
        )
    assert [one.exit_code for one in record.exits] == [0, 0]
    assert [(tmp_path / f"arm/rank{rank}/stdout.log").read_text() for rank in (0, 1)] == ["within False\n"] * 2
