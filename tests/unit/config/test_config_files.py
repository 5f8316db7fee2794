"""Pasted snippets: a table said twice in hpcsched.toml, and the files of conf.d."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched.config.load import load_config, render_config
from hpcsched.errors import ConfigError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A configuration directory as `hpcsched init` makes it."""
    (tmp_path / "hpcsched.toml").write_text(render_config({"cluster": {"name": "lab"}}))
    (tmp_path / "conf.d").mkdir()
    tmp_path.chmod(0o755)
    return tmp_path


def test_a_table_that_is_pasted_behind_the_file_is_named_with_both_lines(directory: Path) -> None:
    path = directory / "hpcsched.toml"
    text = path.read_text()
    first = text.splitlines().index("[scheduler]") + 1
    second = len(text.splitlines()) + 2
    path.write_text(text + '\n[scheduler]\npreempt_type = "qos"\n')
    with pytest.raises(ConfigError) as caught:
        load_config(directory)
    said = str(caught.value)
    assert f"line {second} has [scheduler], and line {first} has it already" in said
    assert f"put the keys that follow line {second} below line {first}, or into a file of conf.d/" in said


def test_a_key_that_is_set_twice_is_named_with_both_lines(directory: Path) -> None:
    path = directory / "hpcsched.toml"
    path.write_text('[cluster]\nname = "a"\n[scheduler]\nmax_jobs = 5\n# more\nmax_jobs = 6\n')
    with pytest.raises(ConfigError, match="line 6 sets max_jobs, and line 4 sets it already; remove one of the two"):
        load_config(directory)


def test_another_mistake_is_told_as_it_is(directory: Path) -> None:
    (directory / "hpcsched.toml").write_text("[cluster\n")
    with pytest.raises(ConfigError, match="at line 1"):
        load_config(directory)


def test_files_of_conf_d_are_read_as_if_they_were_part_of_the_file(directory: Path) -> None:
    (directory / "conf.d" / "preempt.toml").write_text('[scheduler]\npreempt_type = "qos"\n')
    (directory / "conf.d" / "night.toml").write_text("[scheduler]\nmax_jobs = 7\n[partitions.night]\nup = false\n")
    (directory / "conf.d" / "README").write_text("not TOML")
    config = load_config(directory)
    assert (config.scheduler.preempt_type, config.scheduler.max_jobs, config.name) == ("qos", 7, "lab")
    assert "night" in [partition.name for partition in config.partitions]


def test_two_files_that_set_the_same_key_are_refused(directory: Path) -> None:
    (directory / "conf.d" / "name.toml").write_text('[cluster]\nname = "other"\n')
    with pytest.raises(ConfigError) as caught:
        load_config(directory)
    assert str(caught.value) == (
        f"cannot use {directory}/conf.d/name.toml: [cluster] name is set in {directory}/hpcsched.toml already; "
        "remove one of the two"
    )


def test_a_mistake_in_conf_d_is_told_with_its_file(directory: Path) -> None:
    (directory / "conf.d" / "a.toml").write_text("[scheduler]\nmax_jobs = 7\n")
    (directory / "conf.d" / "b.toml").write_text("[scheduler]\nmax_array_size = 'many'\n")
    with pytest.raises(ConfigError, match=r"conf.d/b.toml: \[scheduler\] max_array_size"):
        load_config(directory)


def test_where_the_controller_is_stands_in_the_main_file(directory: Path) -> None:
    (directory / "conf.d" / "a.toml").write_text('[controller]\nrun_dir = "/tmp/x"\n')
    with pytest.raises(ConfigError, match="must be in hpcsched.toml, where commands look for it"):
        load_config(directory)


def test_a_directory_that_others_may_write_is_not_trusted(directory: Path) -> None:
    (directory / "conf.d").chmod(0o777)
    with pytest.raises(ConfigError, match="everybody may write it"):
        load_config(directory)
