"""The spool on a real disk: claims, tombstones, the done log, files cut off."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_client import launch_of

from hpcnode.os import account
from hpcnode.os.durable import MAX_OBJECT_BYTES, read_object, write_durably
from hpcnode.os.faults import CrashPoints, crash_points
from hpcnode.spool import DoneLog, Epochs, Found, Spool
from hpcnode.wire.protocol import Token, read_token


def token(job: int = 1, attempt: int | str = 0, step: str = "batch") -> str:
    return f"feedc0de.{job}.{attempt}.{step}.n1.{secrets.token_hex(16)}"


def key(text: str) -> Token:
    found = read_token(text)
    assert found is not None
    return found


def test_what_is_over_is_known_after_a_restart(tmp_path: Path) -> None:
    done = DoneLog(str(tmp_path), CrashPoints())
    texts = [token(job=number, step="0") for number in range(5)]
    done.add(texts[:3])
    done.end_attempts(("feedc0de", 9), (4, 0))
    done.end_attempts(("feedc0de", 8), (4, 1))
    for log in (done, DoneLog(str(tmp_path), CrashPoints())):
        assert [log.is_over(key(text)) for text in texts] == [True, True, True, False, False]
        assert log.is_over(key(token(job=9, attempt=4, step="7")))
        assert not log.is_over(key(token(job=9, attempt=5)))
        assert not log.is_over(key(token(job=9, attempt="4-1", step="7"))), "the node was given to it again"
        assert log.is_over(key(token(job=8, attempt="4-1", step="7")))
        assert not log.is_over(key(token(job=8, attempt="4-2", step="7")))
        assert not log.is_over(key(token(job=0, step="1")))


def test_two_claims_of_an_attempt_differ_by_their_stay_alone(tmp_path: Path) -> None:
    done = DoneLog(str(tmp_path), CrashPoints())
    first = token(attempt=2, step="alloc")
    second = first.replace(".2.", ".2-1.")
    done.add([first])
    for log in (done, DoneLog(str(tmp_path), CrashPoints())):
        assert (log.is_noted(first), log.is_noted(second)) == (True, False)
        assert (log.is_over(key(first)), log.is_over(key(second))) == (True, False)


def test_an_ended_batch_step_ends_its_attempt(tmp_path: Path) -> None:
    done = DoneLog(str(tmp_path), CrashPoints())
    done.add([token(job=3, attempt=2)])
    assert done.is_over(key(token(job=3, attempt=2, step="5")))
    assert done.is_over(key(token(job=3, attempt=1)))
    assert not done.is_over(key(token(job=3, attempt=3)))


def test_the_log_is_bounded_and_keeps_the_last_ones(tmp_path: Path) -> None:
    done = DoneLog(str(tmp_path), CrashPoints(), lines=10)
    texts = [token(job=number, step="0") for number in range(100)]
    for text in texts:
        done.add([text])
    again = DoneLog(str(tmp_path), CrashPoints(), lines=10)
    for log in (done, again):
        known = [log.is_over(key(text)) for text in texts]
        assert all(known[-10:])
        assert sum(known) <= 20
    assert sum(len(path.read_text()) for path in tmp_path.iterdir()) < 3000


def test_a_line_cut_off_by_a_power_failure_is_ignored(tmp_path: Path) -> None:
    first, second, third = token(step="1"), token(step="2"), token(step="3")
    done = DoneLog(str(tmp_path), CrashPoints())
    done.add([first, second])
    path = tmp_path / "done_log"
    path.write_bytes(path.read_bytes()[:-20])
    again = DoneLog(str(tmp_path), CrashPoints())
    again.add([third])
    last = DoneLog(str(tmp_path), CrashPoints())
    assert [last.is_over(key(text)) for text in (first, second, third)] == [True, False, True]


def test_epochs_and_numbers_survive(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), CrashPoints())
    assert spool.epochs() == Epochs("", 0, ())
    spool.store_epochs(Epochs("feedc0de", 7, ("0ld00000",)))
    again = Spool(str(tmp_path), CrashPoints())
    assert again.epochs() == Epochs("feedc0de", 7, ("0ld00000",))
    first = spool.reserve_seqs()
    second = again.reserve_seqs()
    assert first[1] <= second[0]
    assert again.reserve_seqs(second[1] + 5)[0] == second[1] + 5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0" * 20,
        '{"end": "x"}',
        '{"end": -1}',
        '{"end": 1e999}',
        '{"end": null}',
        "[1]",
        "{}",
        '{"end": 1' + "0" * 400 + "}",
    ],
)
def test_a_damaged_file_of_report_numbers_gives_numbers_that_were_not_used(text: str, tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), crash_points({}))
    used = spool.reserve_seqs()
    (tmp_path / "seq").write_text(text)
    first, end = Spool(str(tmp_path), crash_points({})).reserve_seqs()
    assert used[1] <= first < end
    assert Spool(str(tmp_path), crash_points({})).reserve_seqs()[0] == end


def test_a_tombstone_is_exclusive_with_a_claim(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), CrashPoints())
    text = token()
    assert spool.revoke(text, {"status": "revoked"})
    assert not spool.revoke(text, {"status": "other"})
    found = spool.read(text)
    assert (found.final, found.launch) == ({"status": "revoked"}, None)
    spool.write_final(text, {"status": "ended"})
    assert spool.read(text).final == {"status": "revoked"}


def test_b5_a_claim_is_exclusive(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), CrashPoints())
    text, revoked = token(), token()
    owner = (os.geteuid(), os.getegid())
    assert spool.claim(launch_of(text, argv=["first"]), b"#!/bin/sh\n", "boot", owner)
    assert not spool.claim(launch_of(text, argv=["second"]), b"#!/bin/other\n", "boot", owner)
    launch = spool.read(text).launch
    assert launch is not None
    assert (launch.argv, Path(spool.script(text)).read_text()) == (["first"], "#!/bin/sh\n")
    assert os.stat(spool.script(text)).st_mode & 0o777 == 0o500
    spool.revoke(revoked, {"status": "revoked"})
    assert not spool.claim(launch_of(revoked), b"#!/bin/sh\n", "boot", owner)
    assert not Path(spool.script(revoked)).exists()


def test_b10_entries_are_private_and_half_made_ones_are_cleared_away(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), CrashPoints())
    text, half, over = token(), token(), token()
    spool.revoke(text, {"status": "revoked"})
    os.mkdir(spool.entry(half))
    (Path(spool.entry(half)) / "spec.new").write_text("{")
    spool.revoke(over, {"status": "ended"})
    spool.note_finished([over])
    assert [found.token for found in spool.load()] == [text]
    assert sorted(os.listdir(spool.path)) == sorted([text, "done_log"])
    assert os.stat(spool.path).st_mode & 0o777 == 0o700
    assert os.stat(Path(spool.entry(text)) / "final").st_mode & 0o777 == 0o600


def test_a_file_cut_off_is_no_record(tmp_path: Path) -> None:
    write_durably(str(tmp_path), "record", b'{"status": "en')
    assert read_object(str(tmp_path / "record")) is None
    assert read_object(str(tmp_path / "missing")) is None


def test_crash_points_need_the_test_environment() -> None:
    crash_points({"HPCNODE_CRASH_AT": "here"}).reached("here")  # survives: not simulated


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a9_an_administrator_narrows_who_may_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "node.json"
    monkeypatch.setattr(account, "POLICY_PATH", str(policy))
    assert account.find_account("nobody", 0).uid == 65534
    policy.write_text('{"allow_root": false, "min_uid": 1000, "deny_users": ["nobody"]}')
    for name, why in (("root", "forbids"), ("daemon", "min_uid"), ("nobody", "does not allow"), ("", "as root")):
        with pytest.raises(account.UserError, match=why):
            account.find_account(name, 0)
    policy.chmod(0o666)
    with pytest.raises(account.UserError, match="cannot trust"):
        account.find_account("nobody", 0)
    policy.chmod(0o600)
    policy.write_text("not json")
    with pytest.raises(account.UserError, match="cannot read"):
        account.find_account("nobody", 0)


def test_a_script_whose_entry_a_power_failure_took_goes(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), CrashPoints())
    lost, kept = launch_of(token(job=1)), launch_of(token(job=2))
    for launch in (lost, kept):
        assert spool.claim(launch, b"#!/bin/sh\n", "boot", (os.getuid(), os.getgid()))
    for name in os.listdir(spool.entry(lost.token)):
        os.unlink(os.path.join(spool.entry(lost.token), name))
    os.rmdir(spool.entry(lost.token))
    assert [found.token for found in spool.load()] == [kept.token]
    assert os.listdir(spool.jobs) == [kept.token]


def test_an_invalidated_entry_starts_nothing(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), CrashPoints())
    launch = launch_of(token())
    spool.invalidate(launch.token)
    assert spool.claim(launch, b"#!/bin/sh\n", "boot", (os.getuid(), os.getgid()))
    spool.invalidate(launch.token)
    assert spool.read(launch.token).launch is None
    assert not spool.claim(launch, b"#!/bin/sh\n", "boot", (os.getuid(), os.getgid()))


def test_the_lock_is_one_file_with_the_spec(tmp_path: Path) -> None:
    spool, text = Spool(str(tmp_path), CrashPoints()), token()
    assert spool.claim(launch_of(text), b"", "boot", (os.getuid(), os.getgid()))
    held = spool.open_lock(text)
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert os.path.samefile(os.path.join(spool.entry(text), "lock"), os.path.join(spool.entry(text), "spec"))
    # An agent before this one opens it by its name alone.
    other = os.open(os.path.join(spool.entry(text), "lock"), os.O_RDWR | os.O_CREAT)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    again = spool.open_lock(text)
    with pytest.raises(BlockingIOError):
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    spool.invalidate(text)
    with pytest.raises(BlockingIOError):
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for fd in (held, other, again):
        os.close(fd)
    assert spool.read(text).launch is None


def test_a_file_system_without_hard_links_has_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_args: object, **_options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    spool, text = Spool(str(tmp_path), CrashPoints()), token()
    assert spool.claim(launch_of(text), b"", "boot", (os.getuid(), os.getgid()))
    held, again = spool.open_lock(text), spool.open_lock(text)
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(BlockingIOError):
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(held)
    os.close(again)
    assert spool.read(text).launch is not None


def test_a_removed_entry_is_used_again_with_its_files_written_anew(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), CrashPoints())
    first, second, third = (launch_of(token(job=job)) for job in (1, 2, 3))
    owner = (os.getuid(), os.getgid())

    def inode(text: str, name: str) -> int:
        return os.stat(os.path.join(spool.entry(text), name)).st_ino

    assert spool.claim(first, b"#!/bin/sh\n", "boot", owner)
    spool.write_started(first.token, {"status": "started", "long": "x" * 5000})
    spool.write_final(first.token, {"status": "ended"})
    used = [inode(first.token, name) for name in ("", "spec", "started", "final")]
    spool.remove([first.token])
    assert spool.claim(second, b"#!/bin/sh\n", "boot", owner)
    assert (spool.read(second.token).started, spool.read(second.token).final) == (None, None)
    spool.write_started(second.token, {"status": "started"})
    assert (spool.read(second.token).started, spool.read(second.token).final) == ({"status": "started"}, None)
    spool.write_final(second.token, {"status": "ended", "why": "by itself"})
    assert spool.read(second.token).final == {"status": "ended", "why": "by itself"}
    assert [inode(second.token, name) for name in ("", "spec", "started", "final")] == used
    assert spool.read(second.token).launch == second
    spool.remove([second.token])
    again = Spool(str(tmp_path), CrashPoints())
    assert again.load() == []
    assert os.listdir(again.spare) == []  # after a power failure they might still be somebody's
    assert again.claim(third, b"#!/bin/sh\n", "boot", owner)
    assert sorted(os.listdir(again.entry(third.token))) == ["spec"]


def test_files_of_the_token_that_had_the_entry_before_count_as_missing(tmp_path: Path) -> None:
    """As after a power failure that took a rename of `remove`, but not the new name of the entry."""
    spool = Spool(str(tmp_path), CrashPoints())
    first, second = (launch_of(token(job=job)) for job in (1, 2))
    assert spool.claim(first, b"", "boot", (os.getuid(), os.getgid()))
    spool.write_started(first.token, {"status": "started"})
    spool.write_final(first.token, {"status": "ended"})
    os.rename(spool.entry(first.token), spool.entry(second.token))
    assert spool.read(second.token) == Found(second.token, None, "", None, None)


def script_inodes(spool: Spool, *owners: int) -> list[int]:
    """Claim and remove a token with a script for each owner; return the inodes of the scripts."""
    inodes = []
    for owner in owners:
        launch = launch_of(token(job=len(os.listdir(spool.spare)) + 1000 + owner))
        assert spool.claim(launch, b"#!/bin/sh\n# %d\n" % owner, "boot", (owner, owner))
        about = os.stat(spool.script(launch.token))
        assert (about.st_uid, about.st_mode & 0o7777) == (owner, 0o500)
        assert Path(spool.script(launch.token)).read_text() == f"#!/bin/sh\n# {owner}\n"
        inodes.append(about.st_ino)
        spool.remove([launch.token])
    return inodes


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to users")
def test_b5_a_script_is_written_into_a_file_of_the_same_user_only(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), CrashPoints())
    first, again = script_inodes(spool, 1001, 1001)
    assert first == again
    with open(next((tmp_path / "spare").glob("1001.*/script"))) as old:
        (other,) = script_inodes(spool, 1002)
        assert other != first
        assert old.read() == "#!/bin/sh\n# 1001\n"  # whoever holds it sees nothing of the other user


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to users")
def test_a_spare_entry_that_has_lost_its_script_serves_another_user(tmp_path: Path) -> None:
    """As after a claim that took the script out and then found the disk full."""
    spool = Spool(str(tmp_path), CrashPoints())
    script_inodes(spool, 1001)
    os.unlink(next((tmp_path / "spare").glob("1001.*/script")))
    script_inodes(spool, 1002)


@pytest.mark.parametrize("change", ["link", "attribute"])
def test_b8_a_script_that_its_user_has_given_another_name_is_not_reused(tmp_path: Path, change: str) -> None:
    spool = Spool(str(tmp_path), CrashPoints())
    launch, later = (launch_of(token(job=job)) for job in (1, 2))
    owner = (os.getuid(), os.getgid())
    assert spool.claim(launch, b"#!/bin/sh\n", "boot", owner)
    path = spool.script(launch.token)
    if change == "link":
        os.link(path, tmp_path / "mine")
    else:
        os.chmod(path, 0o700)
        try:
            os.setxattr(path, "user.mine", b"1")
        except OSError:
            pytest.skip("this file system has no attributes")
    spool.remove([launch.token])
    assert os.listdir(spool.spare)[0].startswith("-1.")
    assert spool.claim(later, b"#!/bin/sh\n# later\n", "boot", owner)
    if change == "link":
        assert (tmp_path / "mine").read_bytes() == b"#!/bin/sh\n"


@pytest.mark.parametrize("changed", [b"#!/bin/sh\n", b"#!/bin/sh\necho b\n", b"#!/bin/sh\necho a\necho b\n", b""])
def test_b8_a_script_that_its_user_has_changed_is_written_anew(tmp_path: Path, changed: bytes) -> None:
    spool, script = Spool(str(tmp_path), CrashPoints()), b"#!/bin/sh\necho a\n"
    launch, later = (launch_of(token(job=job)) for job in (1, 2))
    owner = (os.getuid(), os.getgid())
    assert spool.claim(launch, script, "boot", owner)
    path = Path(spool.script(launch.token))
    inode = path.stat().st_ino
    path.chmod(0o700)
    path.write_bytes(changed)
    spool.remove([launch.token])
    assert spool.claim(later, script, "boot", owner)
    assert Path(spool.script(later.token)).read_bytes() == script
    assert Path(spool.script(later.token)).stat().st_ino == inode


def test_a_script_on_which_its_user_holds_a_lease_is_not_waited_for(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), CrashPoints())
    launch, later = (launch_of(token(job=job)) for job in (1, 2))
    owner = (os.getuid(), os.getgid())
    assert spool.claim(launch, b"#!/bin/sh\n", "boot", owner)
    fd = os.open(spool.script(launch.token), os.O_RDONLY)
    handler = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        spool.remove([launch.token])
        assert spool.claim(later, b"#!/bin/sh\n# later\n", "boot", owner)
        assert Path(spool.script(later.token)).read_bytes() == b"#!/bin/sh\n# later\n"
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, handler)


def test_a_token_with_an_entry_is_not_claimed_again_from_a_spare_one(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), CrashPoints())
    first, second, third = (launch_of(token(job=job)) for job in (1, 2, 3))
    owner = (os.getuid(), os.getgid())
    assert spool.claim(first, b"", "boot", owner)
    spool.remove([first.token])
    assert spool.revoke(second.token, {"status": "revoked"})
    assert not spool.claim(second, b"", "boot", owner)
    assert spool.read(second.token).final == {"status": "revoked"}
    assert spool.claim(third, b"", "boot", owner)
    assert os.listdir(spool.spare) == []


def test_few_entries_are_kept_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcnode.spool.MAX_SPARE", 2)
    spool = Spool(str(tmp_path), CrashPoints())
    tokens = [token(job=job) for job in (1, 2, 3)]
    for text in tokens:
        assert spool.claim(launch_of(text), b"", "boot", (os.getuid(), os.getgid()))
        spool.write_started(text, {"status": "started"})
        spool.write_final(text, {"status": "ended"})
    spool.remove(tokens)
    assert len(os.listdir(spool.spare)) == 2
    assert os.listdir(spool.path) == []


def test_a_power_failure_takes_a_state_of_scripts_and_never_their_record(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), CrashPoints())
    token = f"feedc0de.1.0.batch.n1.{'0' * 32}"
    spool.note_scripts("one", {"token": token, "state": "prolog"}, durably=True)
    spool.note_scripts("one", {"token": token, "state": "ready"}, durably=False)
    assert newest(spool) == "ready"
    (tmp_path / "scripts" / "one.state").write_text("")
    assert newest(spool) == "prolog"
    spool.note_scripts("one", {"token": token, "state": "epilog"}, durably=False)
    spool.note_scripts("one", {"token": token, "state": "prolog"}, durably=True)
    assert newest(spool) == "prolog"
    spool.forget_scripts("one")
    assert list((tmp_path / "scripts").iterdir()) == []


def newest(spool: Spool) -> str:
    ((name, records),) = spool.script_records()
    assert name == "one"
    return str(records[0]["state"])


def make_huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(MAX_OBJECT_BYTES + 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text('{"token": '),
        lambda path: path.write_text("[5]"),
        lambda path: path.write_bytes(b"[" * 100_000),
        make_huge,
        Path.mkdir,
        lambda path: (path.mkdir(), (path / "inside").write_text("x")),
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path.name),
    ],
    ids=["cut off", "a list", "deep", "huge", "a directory", "a full directory", "a FIFO", "a link", "a loop"],
)
def test_a_damaged_record_of_scripts_is_told_and_can_be_removed(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    spool = Spool(str(tmp_path), CrashPoints())
    spool.note_scripts("one", {"state": "prolog"}, durably=True)
    path = tmp_path / "scripts" / "one"
    path.unlink()
    spoil(path)
    assert spool.script_records() == [("one", [])]
    spool.forget_scripts("one")
    assert spool.script_records() == []
