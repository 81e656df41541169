from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtprobe.probes.flight_recorder import HOOK

PLUGIN = """
import os, sys
def install(hook):
    with open(hook.folder + "/log", "a") as file: file.write(f"installed in {os.getpid()}\\n")
    hook.after_import("json.decoder", lambda module: print("after", module.__name__, module.JSONDecoder.__name__))
"""


@pytest.fixture
def start(tmp_path):
    """Run Python code under the hook with a plug-in, in a rank's environment; answers its output."""

    def run(code: str, *arguments: str, plugin: str = PLUGIN, paths: tuple[Path, ...] = (), **environ: str) -> str:
        (tmp_path / "plugin.py").write_text(plugin)
        done = subprocess.run(
            (sys.executable, *arguments, "-c", code),
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith(("DTPROBE_", "RANK"))},
                "PYTHONPATH": os.pathsep.join(map(str, (HOOK, *paths))),
                "DTPROBE_HOOKS": str(tmp_path / "plugin.py"),
                "DTPROBE_RANK_FOLDER": str(tmp_path),
                **environ,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert not done.stderr
        return done.stdout

    return run


def test_a_plug_in_acts_once_the_module_has_been_imported_whole(start, tmp_path):
    out = start("print('begin'); import json.decoder; import json.decoder; print('end')")
    assert out == "begin\nafter json.decoder JSONDecoder\nend\n"
    assert (tmp_path / "log").read_text().startswith("installed in ")


def test_a_look_whether_a_module_is_there_does_not_use_the_plug_in_up(start):
    plugin = "def install(hook): hook.after_import('colorsys', lambda module: print('after', module.__name__))"
    out = start("from importlib.util import find_spec; find_spec('colorsys'); print('begin'); import colorsys", plugin=plugin)
    assert out == "begin\nafter colorsys\n"


def test_children_of_a_rank_are_left_alone(start, tmp_path):
    start("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import json.decoder'], check=True)")
    assert (tmp_path / "log").read_text().count("\n") == 1


def test_a_process_that_is_no_rank_is_left_alone(start, tmp_path):
    assert start("import json.decoder", DTPROBE_RANK_FOLDER="") == ""
    assert start("import json.decoder", DTPROBE_RANK_FOLDER="", DTPROBE_FOLDER=str(tmp_path)) == "", "torchrun's agent"
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"])
def test_under_a_foreign_launcher_the_rank_finds_its_own_folder(start, tmp_path, name):
    (tmp_path / "rank3").mkdir()
    start("pass", DTPROBE_RANK_FOLDER="", DTPROBE_FOLDER=str(tmp_path), **{name: "3"})
    assert (tmp_path / "rank3" / "log").exists()


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"])
def test_torchrun_s_agent_under_another_launcher_is_no_rank(start, tmp_path, name):
    (tmp_path / "torchrun").write_text("pass\n")
    (tmp_path / "rank0").mkdir()
    start("pass", str(tmp_path / "torchrun"), DTPROBE_RANK_FOLDER="", DTPROBE_FOLDER=str(tmp_path), **{name: "0"})
    assert not (tmp_path / "rank0" / "log").exists()


def test_the_sitecustomize_that_it_hides_runs_and_is_the_one_to_be_seen(start, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text("print('theirs')\nMINE = 1\n")
    out = start("import sitecustomize; print(sitecustomize.MINE)", paths=(tmp_path / "theirs",))
    assert out == "theirs\n1\n"
    assert (tmp_path / "log").exists()


def test_what_goes_wrong_in_a_plug_in_is_in_the_log_and_the_program_runs(start, tmp_path):
    failing = "def install(hook):\n    hook.after_import('json.decoder', lambda module: 1 / 0)\n    raise OSError('no luck')\n"
    assert start("import json.decoder; print('ran')", plugin=failing) == "ran\n"
    said = (tmp_path / "hook.log").read_text().splitlines()
    assert len(said) == 2 and said[0].endswith("OSError: no luck") and said[1].endswith("ZeroDivisionError: division by zero")


def test_nothing_of_the_hook_stays_in_the_way_of_later_imports(start):
    out = start("import json.decoder, sys; print([type(one).__name__ for one in sys.meta_path if type(one) is not type])")
    assert "Hook" not in out.splitlines()[-1]


AROUND = """
class Around:
    def __enter__(self): print("enter")
    def __exit__(self, kind, *_): print("exit", kind.__name__ if kind else None)
def install(hook): hook.around_import("{name}", Around())
"""


def test_a_plug_in_is_around_the_one_import_of_a_module(start):
    look = "from importlib.util import find_spec; find_spec('colorsys'); print('begin'); import colorsys; import colorsys; print('end')"
    assert start(look, plugin=AROUND.format(name="colorsys")) == "begin\nenter\nexit None\nend\n"
    assert start("import json", plugin=AROUND.format(name="os")) == "", "it has been imported"


def test_what_is_around_an_import_is_left_when_that_fails(start, tmp_path):
    (tmp_path / "broken.py").write_text("print('within')\n1 / 0\n")
    out = start(
        "try: import broken\nexcept ZeroDivisionError: print('end')", plugin=AROUND.format(name="broken"), paths=(tmp_path,)
    )
    assert out == "enter\nwithin\nexit ZeroDivisionError\nend\n"


def test_plug_ins_for_everywhere_act_in_children_and_where_no_rank_is(start, tmp_path):
    (tmp_path / "everywhere.py").write_text("def install(hook): print('here', hook.folder is not None)\n")
    code = "import subprocess, sys; sys.stdout.flush(); subprocess.run([sys.executable, '-c', 'pass'], check=True)"
    here = {"DTPROBE_HOOKS_EVERYWHERE": str(tmp_path / "everywhere.py")}
    assert start(code, **here) == "here True\nhere True\n"
    assert (tmp_path / "log").read_text().count("\n") == 1, "the others act in the rank alone"
    assert start(code, DTPROBE_HOOKS="", DTPROBE_RANK_FOLDER="", **here) == "here False\nhere False\n"
