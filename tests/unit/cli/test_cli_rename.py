"""`hpcsched node rename` on files: what it changes in them, and that it finishes what was interrupted."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hpcsched.cli.admin import hpcsched_command, run
from hpcsched.cli.admin.rename import plan_rename, steps_of, with_node_renamed
from hpcsched.config.load import load_config, render_node

MAIN = """\
[cluster]
name = "lab"  # nodes = "n1"

[partitions.main]
nodes = "n[1-3]"  # all of them
default = true

[partitions.few]
nodes = [
    'n1',  # the old one
    "n3",
]

[topology.switches.s1]
nodes = "n1,n2"
"""
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHVZF4l5bhNmVmZVp3ym9tR0pXoV4cRyEGQf8NUZzr3H"
STEPS = 3  # the node's file, hpcsched.toml, the new name of the node's file


@pytest.fixture
def config_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "etc"
    (directory / "nodes.d").mkdir(parents=True)
    state = f'\n[controller]\nstate_dir = "{tmp_path}/state"\n'
    (directory / "hpcsched.toml").write_text(MAIN + state)
    for name in ("n1", "n2", "n3"):
        values = {"host": name, "host_key": HOST_KEY, "cpus": 2, "memory": "2G", "root": "/var/x"}
        (directory / "nodes.d" / f"{name}.toml").write_text(render_node(name, values))
    monkeypatch.setenv("HPCSCHED_CONFIG", str(directory))
    return directory


def test_the_name_changes_where_nodes_are_listed_and_nowhere_else() -> None:
    after = with_node_renamed(MAIN, "n1", "m1")
    assert '# nodes = "n1"' in after
    assert 'nodes = "m1,n[2-3]"  # all of them' in after
    assert '    "m1",  # the old one\n' in after
    assert tomllib.loads(after)["topology"]["switches"]["s1"]["nodes"] == "m1,n2"
    assert with_node_renamed(after, "n1", "m1") == after


@pytest.mark.parametrize("done", range(STEPS + 1))
def test_a_rename_that_was_interrupted_is_finished_by_the_next(config_dir: Path, done: int) -> None:
    steps = steps_of(plan_rename(config_dir, "n1", "m1"))
    assert len(steps) == STEPS
    for step in steps[:done]:
        step()
    assert run(hpcsched_command, "hpcsched", ["node", "rename", "n1", "m1"]) == 0
    config = load_config(config_dir)
    assert [(spec.name, spec.host, spec.formerly) for spec in config.nodes] == [
        ("m1", "n1", ("n1",)), ("n2", "n2", ()), ("n3", "n3", ())
    ]  # fmt: skip
    assert {partition.name: partition.nodes for partition in config.partitions} == {
        "main": ("m1", "n2", "n3"), "few": ("m1", "n3")
    }  # fmt: skip
    assert config.nodes[0].switch == "s1"
    assert "# The node m1 of hpcsched" in (config_dir / "nodes.d" / "m1.toml").read_text()


def test_a_name_that_was_changed_back_is_not_an_earlier_one(config_dir: Path) -> None:
    for words in (("n1", "m1"), ("m1", "n1")):
        assert run(hpcsched_command, "hpcsched", ["node", "rename", *words]) == 0
    assert load_config(config_dir).nodes[0].formerly == ("m1",)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("n9", "m1", "there is no node of that name"),
        ("n1", "n2", "there is a node n2 already"),
        ("n1", "a/b", "letters, digits"),
        ("../hpcsched", "m1", "there is no node of that name"),
    ],
)
def test_a_rename_that_cannot_be_changes_nothing(
    config_dir: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, why: str
) -> None:
    before = {path: path.read_bytes() for path in config_dir.rglob("*.toml")}
    assert run(hpcsched_command, "hpcsched", ["node", "rename", old, new]) == 1
    assert why in capsys.readouterr().err
    assert {path: path.read_bytes() for path in config_dir.rglob("*.toml")} == before


def test_a_form_of_the_list_that_cannot_be_edited_is_refused(
    config_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_dir / "hpcsched.toml"
    text = path.read_text().replace("[partitions.few]\nnodes = [\n    'n1',  # the old one\n    \"n3\",\n]\n", "")
    path.write_text('partitions.few = {nodes = "n1"}\n' + text)
    assert run(hpcsched_command, "hpcsched", ["node", "rename", "n1", "m1"]) == 1
    assert "names the node 'n1'" in capsys.readouterr().err
    assert (config_dir / "nodes.d" / "n1.toml").exists()
