"""scontrol on a node: it reads host lists as the head does."""

from __future__ import annotations

import pytest

from hpcnode.commands import scontrol, srun
from hpcsched.commands.options import SLURM_VERSION
from hpcsched.model.hostlist import expand_hostlist


@pytest.mark.parametrize("text", ["n1", "n[1-3,07]", "a,b-[09-11]", "r[1-2]n[1-2]x, z", "n[3,1]", "a[1-2].lan"])
def test_host_lists(text: str) -> None:
    assert scontrol.expand(text) == expand_hostlist(text)


@pytest.mark.parametrize("text", ["n[1", "n1]", "n[a-b]", "n[1-999999]", "n[]"])
def test_what_is_no_host_list(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert scontrol.main(["show", "hostnames", text]) == 1
    assert capsys.readouterr().err.startswith("scontrol: error: cannot ")


def test_both_sides_announce_one_version() -> None:
    assert srun.SLURM_VERSION == SLURM_VERSION
