"""Completion: bash runs what is printed; each command has all its options; the cluster is asked for jobs and partitions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hpcsched.cli.admin import shell
from hpcsched.commands import queue
from hpcsched.errors import ConfigError
from hpcsched.jobscript.options import OPTIONS


@pytest.fixture
def bash(tmp_path: Path):
    """Return a function that completes a line in bash; hqueue and hinfo say what they are asked."""
    (tmp_path / "script").write_text(shell.text_for("bash"))
    for name in ("hqueue", "hinfo"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "12 10_3 {name}:$*" | tr " " "\\n"\n')
        (tmp_path / name).chmod(0o755)

    def complete(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        code = f". ./script; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _hpcsched_complete; "
        code += "printf '%s\n' \"${COMPREPLY[@]}\""
        done = subprocess.run(
            ["bash", "-c", code], cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True,
            timeout=60, check=True,
        )  # fmt: skip
        assert done.stderr == ""
        return done.stdout.split()

    return complete


def test_bash_completes_options_of_each_command(bash) -> None:
    assert bash("hqueue", "--sta") == ["--start", "--states"]
    assert bash("/usr/bin/hqueue", "--noh") == ["--noheader"]
    assert set(bash("sbatch", "--")) >= {f"--{option.name}" for option in OPTIONS}
    assert bash("squeue", "--only") == ["--only-job-state"]


def test_bash_asks_for_jobs_partitions_and_nodes(bash) -> None:
    assert bash("hcancel", "1") == ["12", "10_3"]
    assert bash("hqueue", "-j", "10") == ["10_3"]
    assert "hinfo:-h" in bash("hsub", "--partition", "=", "h")
    assert "hinfo:-h" in bash("hsub", "-p", "")
    assert "hinfo:-hN" in bash("sinfo", "-n", "hi")
    assert bash("hsub", "scr") == ["script"]


def test_bash_completes_steps_and_first_words(bash) -> None:
    assert bash("srun", "--kill") == ["--kill-on-bad-exit"]
    assert "hinfo:-h" in bash("hrun", "-p", "")
    assert bash("sattach", "1") == ["12", "10_3"]
    assert bash("hctl", "susp") == ["suspend"]
    assert bash("hctl", "suspend", "1") == ["12", "10_3"]
    assert bash("hpcsched", "compl") == ["completion"]


def test_a_value_joined_to_its_option_is_completed_as_zsh_has_it(bash) -> None:
    assert bash("hqueue", "--jobs=10") == ["--jobs=10_3"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_takes_the_functions_of_bash(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(shell.text_for("zsh"))
    code = "source ./script && print $_comps[squeue] && whence -w _hpcsched_complete"
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["zsh", "-fc", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == [
        "_bash_complete -o bashdefault -F _hpcsched_complete",
        "_hpcsched_complete: function",
    ]


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish_completes_options_jobs_and_first_words(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(shell.text_for("fish"))
    (tmp_path / "hqueue").write_text("#!/bin/sh\necho 12 10_3 | tr ' ' '\\n'\n")
    (tmp_path / "hqueue").chmod(0o755)
    lines = ("hqueue --sta", "hcancel 1", "hctl susp", "srun --kill")
    code = "source ./script; " + "; ".join(f"complete -C '{line}'" for line in lines)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["fish", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True
    )
    words = {line.split("\t")[0] for line in done.stdout.splitlines()}
    assert words == {"--start", "--states", "10_3", "12", "suspend", "--kill-on-bad-exit"}


def test_fish_has_every_option_of_a_command() -> None:
    lines = shell.text_for("fish").splitlines()
    mine = [line for line in lines if line.startswith("complete -c hqueue ")]
    assert {line.split(" -l ")[1].split()[0] for line in mine if " -l " in line} == {
        one.name for one in queue.HQUEUE.options
    }
    assert all(line.count("'") % 2 == line.count("\\'") % 2 for line in lines if line.startswith("complete"))


def test_it_is_written_where_the_shell_looks(tmp_path: Path) -> None:
    assert shell.install_for("bash", {"HOME": str(tmp_path)}) == tmp_path / ".local/share/bash-completion/completions"
    assert (tmp_path / ".local/share/bash-completion/completions/hsub").read_text() == shell.text_for("bash")
    assert shell.install_for("fish", {"HOME": str(tmp_path)}) == tmp_path / ".config/fish/completions"
    assert (tmp_path / ".config/fish/completions/squeue.fish").exists()
    with pytest.raises(ConfigError, match=r"source <\(hpcsched completion zsh\)"):
        shell.install_for("zsh", {"HOME": str(tmp_path)})
