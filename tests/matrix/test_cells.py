"""What a matrix is asked for: combinations, exclusions, and one clear line for whatever is wrong."""

from __future__ import annotations

import pytest

from dtprobe.errors import UsageError
from dtprobe.matrix import cells
from dtprobe.matrix.cells import NONE, Axes, Spec

DEFAULT = {"python": "3.11", "torch": "2.13.0", "build": "cpu"}


def test_options_multiply_and_what_is_not_given_is_not_varied():
    spec = cells.from_options("3.11,3.12", None, "2,4", "local,torchrun").spec(**DEFAULT)
    assert len(spec.cells) == 8
    assert spec.cells[-1].id == "python3.12-torch2.13.0-ranks4-torchrun"
    assert spec.cells[-1].words == ["--world-size", "4", "--launcher", "torchrun"]
    plain = cells.from_options(None, f"{NONE},2.9.1", None, None).spec(**DEFAULT).cells
    assert [one.id for one in plain] == ["python3.11-no-torch", "python3.11-torch2.9.1"]
    assert plain[0].words == []


def test_a_matrix_comes_back_whole_from_its_json():
    spec = cells.from_options("3.11", "2.9.1", "2", "hosts:2").spec(**DEFAULT)
    assert Spec.of(spec.as_json()) == spec


def test_the_documented_example_can_be_read_and_options_go_before_it(tmp_path):
    file = tmp_path / "nights.toml"
    file.write_text(
        (cells.__doc__ or "").partition("```toml\n")[2].partition("```")[0].replace("https://...", "https://cpu.test")
    )
    found = cells.from_file(file)
    spec = found.spec(**DEFAULT)
    assert len(spec.cells) == 2 * 3 * 2 * 2, "nothing matches the exclusion: there is no 3.13"
    assert spec.install.find_links == (str(tmp_path / "wheels"),), "folders are relative to the file"
    assert (spec.install.index, spec.install.installer, spec.install.extras) == ("https://cpu.test", "uv", ("network", "fuse"))
    narrowed = cells.merged(found, cells.from_options("3.13", "2.9.1,2.10.0", None, None)).spec(**DEFAULT)
    assert {(one.python, one.torch) for one in narrowed.cells} == {("3.13", "2.10.0")}, "3.13 with 2.9.1 is excluded"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("python = [3.12]", "python = [3.12]"),
        ('python = "3.12"', "python = '3.12'"),
        ('python = ["2.7"]', "'2.7' is no version of Python"),
        ('torch = ["2.13"]', "'2.13' is no version of torch"),
        ('torch = ["newest"]', "'newest' is no version of torch"),
        ("world_size = [0]", "0 is no number of ranks"),
        ("world_size = [true]", "world_size = [True]"),
        ('launcher = ["mpirun"]', "no launcher 'mpirun'"),
        ('pythons = ["3.12"]', "no such entry: 'pythons'"),
        ('[install]\nbuild = "gpu"', "install.build = 'gpu'"),
        ("[install]\nindex = 7", "install.index = 7"),
        ('install = "uv"', "install = 'uv'"),
        ("[[exclude]]", "an empty [[exclude]]"),
        ("[[exclude]]\nrank = 1", "no such entry: 'rank'"),
        ("python = [", "is not TOML"),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_file(tmp_path, text, said):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        cells.from_file(file)
    assert said in str(raised.value) and "bad.toml" in str(raised.value) and "\n" not in str(raised.value)
    assert raised.value.remedy


def test_a_file_that_is_none_and_a_matrix_of_nothing_are_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        cells.from_file(tmp_path / "absent.toml")
    with pytest.raises(UsageError, match="all 1 are excluded"):
        Axes(exclude=({"python": "3.11"},)).spec(**DEFAULT)
    with pytest.raises(UsageError, match="of 300 cells"):
        Axes(world_size=tuple(range(1, 301))).spec(**DEFAULT)
