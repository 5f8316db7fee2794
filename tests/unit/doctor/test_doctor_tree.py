"""The tree of `hpcsched doctor`: its remedies can be typed, its pages are complete, and hostile facts do no harm."""

from __future__ import annotations

import os
import re
import shlex
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hpcnode.os.surroundings import accounts, hash_of, network_mounts, states_of
from hpcsched.cli.admin import COMMANDS
from hpcsched.cli.output import print_findings
from hpcsched.doctor import facts as collectors
from hpcsched.doctor.tree import CAUSES, Fact, Severity, Walk, of_cluster, of_job, of_node, table_text
from hpcsched.model.node import JOB_SCRIPTS, LAUNCH_CHECK
from hpcsched.model.probation import LINK_CHECK

ROOT = Path(__file__).parents[3]
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
CHECKS = ("hhealth", "hpcschedd", LINK_CHECK, LAUNCH_CHECK, JOB_SCRIPTS)  # they drain nodes
NOW_S = 1_800_000_000.0
# Commands of Linux distributions.
SYSTEM_WORDS = (
    "apt-get awk cat chmod chown command df dmesg du echo export findmnt getent grep head id ip kill ldconfig ldd ls lscpu mount "
    "mpirun nc nvidia-smi ping pip ps python3 quota resolvectl sed sort ss ssh ssh-keygen sshd systemctl tail timedatectl ufw "
    "umount useradd usermod"
)


def commands_of(fix: str) -> list[list[str]]:
    """Return the commands of a remedy: those before the comment, and those that the comment names after a colon."""
    before, _, comment = fix.partition("   # ")
    called = re.findall(r"(?:^|[:;,] )((?:hpcsched|h[a-z]+) [^;,]*)", comment)
    found: list[list[str]] = [[]]
    for text in (before, *called):
        lexer = shlex.shlex(text, posix=True, punctuation_chars=";|&")
        lexer.whitespace_split = True
        for word in lexer:
            if set(word) <= set(";|&"):
                found.append([])
            else:
                found[-1].append(word)
        found.append([])
    return [words for words in found if words]


def page_text(name: str) -> str:
    pages = [ROOT / "man" / f"{name}.{section}" for section in (1, 8)]
    return "".join(page.read_text() for page in pages if page.exists()).replace("\\-", "-")


@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_a_remedy_names_commands_and_options_that_exist(cause: Any) -> None:
    called = commands_of(re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), cause.fix))
    assert called
    for words in called:
        name, *rest = words
        if name in SYSTEM_WORDS.split():
            continue
        assert name in SCRIPTS, words
        options = [word.partition("=")[0] for word in rest if word.startswith("--")]
        if name == "hpcsched":
            assert rest[0] in COMMANDS
        page = page_text(name)
        assert [option for option in options if option not in page] == []
        if name in ("hctl", "hpcsched"):
            assert rest[0] in page


def test_no_word_of_a_remedy_is_filled_in_between_quotes() -> None:
    """There its own quotes would end those around it, and a shell would run what it says."""
    for cause in CAUSES.values():
        outside = re.sub(r"'[^']*'|\"[^\"]*\"", "", cause.fix)
        assert re.findall(r"\{\w+\}", outside) == re.findall(r"\{\w+\}", cause.fix)


def test_texts_of_causes_read_well() -> None:
    for cause in CAUSES.values():
        assert re.fullmatch(r"HD-\d{3}", cause.id)
        assert (
            cause.title[0].islower()
            or cause.title.split()[0].isupper()
            or cause.title[:3] in ("GPU", "MPI", "SSH", "Pyt", "Win")
        )
        assert cause.why.endswith(".")
        assert not cause.title.endswith(".")


def test_the_man_page_has_the_list_of_causes() -> None:
    page = (ROOT / "man" / "hpcsched-doctor.8").read_text()
    listed = page.partition('.\\" causes\n.EX\n')[2].partition(".EE\n")[0].replace("\\-", "-")
    assert listed == table_text()


def test_the_guide_to_troubleshooting_uses_the_same_ids() -> None:
    named = re.findall(r"HD-\d{3}", (ROOT / "docs" / "troubleshooting.md").read_text())
    assert len(set(named)) >= 30
    assert set(named) <= CAUSES.keys()


# ----- known errors that no machine here can produce, as other programs print them


PRINTED = {
    "HD-604": "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
    "HD-605": "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
    "HD-608": "OSError: [Errno 122] Disk quota exceeded: '/home/ann/x'",
    "HD-610": "./prog: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.34' not found (required by ./prog)",
    "HD-612": "RuntimeError: Found no NVIDIA driver on your system.",
    "HD-615": "There are not enough slots available in the system to satisfy the 8 slots",
    "HD-616": "CondaError: Run 'conda init' before 'conda activate'",
}
REFUSED = {
    "HD-531": "cannot run as ann: this node has no such account",
    "HD-533": "cannot write to the spool /var/lib/x: No space left on device",
    "HD-535": "cannot execute /spool/script: No such file or directory: its interpreter /bin/bash\r is not on this node",
    "HD-541": "it was on fire",
    "HD-543": "cannot run as ann: the agent of this node runs as bob and is not root",
}


def job(**changes: Any) -> dict[str, Fact]:
    made = {"display_id": "12", "state": "FAILED", "exit_code": 1, "nodes": ["n1"], "user": "ann", "uid": 1001}
    errors = changes.pop("errors", "")
    return {"job": Fact(value={**made, **changes}), "errors": Fact(value=errors)}


def ids(walk: Walk) -> list[str]:
    return [finding.rule.id for finding in walk.findings]


@pytest.mark.parametrize("cause", PRINTED)
def test_an_error_that_is_known_is_named(cause: str) -> None:
    assert ids(of_job(job(errors=f"step 1\n{PRINTED[cause]}\n"), NOW_S)) == [cause]


@pytest.mark.parametrize("cause", REFUSED)
def test_a_refusal_that_is_known_is_named(cause: str) -> None:
    walk = of_job(job(reason="JobLaunchFailure", reason_detail=REFUSED[cause]), NOW_S)
    assert ids(walk) == [cause]
    if cause == "HD-531":
        assert walk.findings[0].fix.startswith("useradd -m -u 1001 ann")


def view(**changes: Any) -> dict[str, Any]:
    seen = changes.pop("seen", {})
    return {"name": "n1", "link": "up", "state": "IDLE", "facts": {"cpus": 2, **seen}, **changes}


@pytest.mark.parametrize(
    ("cause", "node"),
    [
        ("HD-261", view(link="down", link_why="it fell from the table")),
        ("HD-413", view(seen={"load": [9.0, 8.0, 1.0]})),
        ("HD-415", view(launch_failures=3, launch_failure="cannot enter /x")),
        ("HD-418", view(agent_version="abc", own_agent="def0")),
        ("HD-262", view(drained=True, drained_by="ada", drained_why="new disk")),
        ("HD-262", view(drained=True, drained_by="hpcscheddx", drained_why="an account of a similar name")),
        *[("HD-263", view(drained=True, drained_by=check, drained_why="it failed")) for check in CHECKS],
    ],
)
def test_a_node_is_judged_by_what_the_controller_says(cause: str, node: dict[str, Any]) -> None:
    facts = {"config": Fact(value={"nodes": ["n1"], "share": ""}), "nodes": Fact(value=[node])}
    facts["controller"] = Fact(value={"took_s": 0.1, "hpcsched": "1", "own_version": "1"})
    assert ids(of_cluster(facts, NOW_S)) == [cause]


def test_a_failed_connection_and_a_broken_agent_of_unknown_cause_are_named() -> None:
    target = {"config": Fact(value={"nodes": ["n1"]}), "target": Fact(value={"name": "n1", "host": "local"})}
    known = {"target": target["target"], "config": target["config"]}
    assert ids(of_node(known | {"visit": Fact(kind="LinkError", error="it fell")}, NOW_S)) == ["HD-325"]
    answered = Fact(parts={"facts": {"cpus": 1}, "view": {"fault": "cannot write to the spool /x: No space left"}})
    assert ids(of_node(known | {"visit": answered}, NOW_S)) == ["HD-419"]


def test_jobs_that_end_run_out_of_time_or_lost_their_account_are_judged() -> None:
    assert ids(of_job(job(state="COMPLETING", ended_at_s=NOW_S - 500), NOW_S)) == ["HD-512"]
    assert ids(of_job(job(state="RUNNING", started_at_s=NOW_S - 590, time_limit_s=600), NOW_S)) == ["HD-513"]
    assert ids(of_job(job(state="PENDING", reason="InvalidAccount"), NOW_S)) == ["HD-509"]
    noted = Fact(value={"took_s": 0.1, "hpcsched": "1", "own_version": "1", "not_taken": ["n9 holds job 3"]})
    assert "HD-237" in ids(of_cluster({"config": Fact(value={"nodes": ["n1"]}), "controller": noted}, NOW_S))


def test_the_chain_ends_at_its_first_broken_link() -> None:
    late = {"config": Fact(is_late=True, parts={"path": "/etc/hpcsched/hpcsched.toml"})}
    assert ids(of_cluster(late, NOW_S)) == ids(of_node(late, NOW_S)) == ["HD-204"]
    down = [view(name=f"n{at}", link="down", link_why="cannot find host") for at in range(20)]
    facts = {"config": Fact(value={"nodes": ["n1"]}), "nodes": Fact(value=down), "names": Fact(is_late=True)}
    assert ids(of_cluster(facts, NOW_S)) == ["HD-302"]


@pytest.mark.parametrize(
    "backup",
    [
        None,
        5,
        {"newest_at_s": "x", "every_s": None, "to": 5, "why": 5},
        {"newest_at_s": 1e300, "every_s": -1, "to": [None], "why": None},
        {"newest_at_s": NOW_S - 100, "every_s": 21600, "to": ["/a"], "why": ""},
        {"newest_at_s": NOW_S + 1e5, "every_s": 21600, "to": ["/a"], "why": ""},
    ],
    ids=str,
)
def test_a_good_backup_and_hostile_words_about_one_are_no_fault(backup: object) -> None:
    said = {"took_s": 0.1, "hpcsched": "1", "own_version": "1", "backup": backup, "now_s": NOW_S, "started_at_s": NOW_S}
    facts = {"config": Fact(value={"nodes": ["n1"]}), "controller": Fact(value=said)}
    assert not [each for each in ids(of_cluster(facts, NOW_S)) if each.startswith("HD-25")]


# ----- hostile facts


def test_hostile_text_of_jobs_is_quoted_cut_and_printed_as_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "/tmp/$(reboot)`id`\x1b]0;x\x07\n;rm -rf ~"
    walk = of_job(
        job(reason="JobLaunchFailure", reason_detail=f"cannot enter the job's directory {evil}: No such file"), NOW_S
    )
    assert ids(walk) == ["HD-530"]
    # What is to be copied is one word for a shell, on one line.
    fix = walk.findings[0].fix
    assert shlex.quote(re.sub(r"[\x1b\x07\n]", "?", evil)) in fix
    assert fix.isprintable()
    print_findings(walk.findings, walk.unseen, as_json=False, well=walk.steps)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert len(printed.splitlines()) == 6


def test_a_long_error_output_is_judged_in_time() -> None:
    for line in ("x" * (10 << 20), ("a:" * 900 + "\n") * 6000, ("/" * 1999 + "\n") * 5000, "\n" * (10 << 20)):
        began_s = time.monotonic()
        of_job(job(errors=line), NOW_S)
        assert time.monotonic() - began_s < 5.0


@pytest.mark.parametrize(
    "seen",
    [
        None, [], "text", {"cpus": "many"}, {"cpus": True, "mem_mib": -1e300}, {"load": ["a", None, {}]},
        {"leftovers": [1, "x", {}]},
        {"surroundings": []}, {"surroundings": {"mounts": {"a": 1}, "accounts": ["x"], "zone_s": "x", "mpi": 7, "inodes": "y"}},
        {"gpus": [1, {"mig": 3}], "time_s": float("nan"), "asked_at_s": 1, "answered_at_s": 2}, {"security": 1, "root": {}},
    ],
)  # fmt: skip
def test_a_hostile_node_does_no_harm(seen: Any) -> None:
    node = view(gpus=[{"index": 0}], cpus=4, mem_mib=100) | {"facts": seen}
    facts = {"config": Fact(value={"nodes": ["n1"]}), "nodes": Fact(value=[node]), "here": Fact(value={"zone_s": 0})}
    facts["accounts"] = Fact(value={"k": ("ann", 1)})
    for walk in (
        of_cluster(facts, NOW_S),
        of_node({**facts, "target": Fact(value={"name": "n1", "host": "local"}), "view": Fact(value=node)}, NOW_S),
    ):
        assert all(finding.rule.severity in Severity for finding in walk.findings)


# ----- children with deadlines


def test_a_question_that_hangs_is_late_and_keeps_what_was_noted() -> None:
    def hangs(note: Any) -> None:
        note(stage="first", at=1)
        note(stage="second")
        time.sleep(60)

    def fails(_note: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", "x")

    def prints(_note: Any) -> int:
        os.write(1, b"to nobody")
        return 7

    began_s = time.monotonic()
    found = collectors.ask({
        "hangs": (0.3, hangs), "fails": (5.0, fails), "prints": (5.0, prints), "dies": (5.0, lambda _note: os._exit(1)),
    })  # fmt: skip
    assert time.monotonic() - began_s < 4.0
    assert (found["hangs"].is_late, found["hangs"].parts) == (True, {"stage": "second", "at": 1})
    assert (found["fails"].kind, found["fails"].error) == ("FileNotFoundError", "No such file or directory")
    assert found["prints"] == Fact(value=7)
    assert found["dies"].is_late


def test_accounts_leave_a_machine_as_hashes(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text(
        "root:x:0:0::/:/bin/sh\nann:x:1001:1:::\nbroken\nnobody:x:65534:1:::\nbob:x:x:::\n"
    )
    assert accounts(str(tmp_path / "passwd")) == {"ann": 1001}
    assert "ann" not in hash_of("ann")


def test_only_mounts_of_other_machines_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text(f"none /proc proc rw 0 0\nsrv:/x {tmp_path}/a\\040b nfs4 rw 0 0\nx\n")
    assert network_mounts(str(tmp_path / "mounts")) == [{"point": f"{tmp_path}/a b", "kind": "nfs4", "state": "stale"}]
    assert states_of([str(tmp_path), str(tmp_path / "gone")]) == ["ok", "stale"]
