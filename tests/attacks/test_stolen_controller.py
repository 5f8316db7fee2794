"""Who has the controller's key and speaks its language to an agent of root, on a node whose administrator allows less."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from unit.hpcnode.nodeworld import INCARNATION, World

from hpcnode.agent import bench
from hpcnode.os import account, program
from hpcnode.shepherd import environment
from hpcnode.wire import protocol

AS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not AS_ROOT, reason="needs to run as root: the policy is that of an agent of root")


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "node.json"
    monkeypatch.setattr(account, "POLICY_PATH", str(path))
    return path


@pytest.mark.root
@needs_root
def test_c6_d8_root_runs_no_program_that_the_node_does_not_name(policy: Path) -> None:
    """A prolog runs as root, and the controller says which program that is."""
    assert account.why_not_as_root("/sbin/poweroff") == ""
    policy.write_text('{"allow_root": false, "programs": ["/etc/prolog"]}')
    assert account.why_not_as_root("/etc/prolog") == ""
    assert "does not name /sbin/poweroff in programs" in account.why_not_as_root("/sbin/poweroff")
    policy.write_text('{"allow_root": false}')
    assert "in programs" in account.why_not_as_root("/etc/prolog")
    policy.write_text('{"programs": []}')
    assert "in programs" in account.why_not_as_root("/etc/prolog")
    policy.chmod(0o666)
    assert "cannot trust" in account.why_not_as_root("/etc/prolog")


@pytest.mark.root
@needs_root
def test_d8_nobody_measures_for_root_if_the_node_does_not_allow_nobody(policy: Path) -> None:
    policy.write_text('{"deny_users": ["nobody"]}')
    notes: dict[str, str] = {}
    assert bench._products("/bin/true", 1, notes) == {}
    assert "does not allow it" in notes["gemm"]


@pytest.mark.parametrize(
    ("says", "why"),
    [("head -c 1000000 /dev/zero && echo whole >&2", "exit status"), (f"echo '{'[' * 50_000}'", "recursion")],
    ids=["long", "deep"],
)
def test_d8_a_program_of_users_fills_no_disk_while_it_is_measured(says: str, why: str) -> None:
    notes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        python = Path(directory) / "python"
        python.write_text(f"#!/bin/sh\n{says}\n")
        for path in (python.parent, python):  # root runs it as nobody
            path.chmod(0o755)
        assert bench._products(str(python), 1, notes) == {}
    assert why in notes["gemm"]
    assert "whole" not in notes["gemm"]


def test_c1_a_prolog_has_only_variables_of_the_scheduler(tmp_path: Path) -> None:
    script, seen = tmp_path / "prolog", tmp_path / "seen"
    script.write_text(f"#!/bin/sh\nenv > {seen}\n")
    script.chmod(0o755)
    env = {"LD_PRELOAD": "/nonexistent.so", "BASH_ENV": "/evil", "PATH": "/evil", "PYTHONPATH": "/evil"}
    child = os.fork()  # it becomes a subreaper
    if child == 0:
        os._exit(bool(program.run(str(script), {**env, "SLURM_JOB_ID": "7", "HPCSCHED_JOB_ID": "7"}, 60.0)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    names = {line.partition("=")[0] for line in seen.read_text().splitlines()}
    assert names - {"PWD", "OLDPWD", "SHLVL", "_"} == {"PATH", "SLURM_JOB_ID", "HPCSCHED_JOB_ID"}
    assert f"PATH={program.PATH}\n" in seen.read_text()


@pytest.mark.parametrize(
    "incarnation", ["../../escaped", "/tmp/x", "", "a\nt feedc0de.1.0.batch.n1." + "0" * 32, "A" * 16]
)
def test_d8_what_is_no_incarnation_becomes_no_file_and_no_line(tmp_path: Path, incarnation: str) -> None:
    root = tmp_path / "a" / "root"
    root.mkdir(parents=True)
    order = protocol.Allocation(incarnation, 1, 0, 1, ["n1"], [])
    with pytest.raises(protocol.WireError, match="there is no incarnation"):
        environment.write_allocation(str(root), order)
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "root"]
    world = World()
    world.ledger.end_job(protocol.EndJob(incarnation, 1, 0, 5.0))
    assert not any(isinstance(message, protocol.JobGone) for message in world.sent)
    assert environment.write_allocation(str(root), protocol.changed(order, incarnation=INCARNATION))
