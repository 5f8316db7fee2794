"""What root runs, writes or takes orders from: nobody else may replace it, in any part of its path, also meanwhile."""

from __future__ import annotations

import grp
import json
import os
import pwd
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpcnode.os import trust
from hpcsched.cli.admin import backup, sync
from hpcsched.cli.admin.rolling import NodeFailedError, Orders, Roll, RollFile
from hpcsched.config.load import load_config
from hpcsched.errors import ConfigError, RequestError

AS_ROOT = os.geteuid() == 0
OTHER = 65534
needs_root = pytest.mark.skipif(not AS_ROOT, reason="needs to run as root: it gives files to another user")


def put(path: Path, data: bytes = b"new\n", *, owner: int = os.geteuid()) -> dict[str, str]:
    """Put a file as `hpcsched node sync` does, by the program that it runs on a node; return the answer."""
    account = pwd.getpwuid(owner)
    group = grp.getgrgid(account.pw_gid).gr_name
    file = sync.SyncFile(path=str(path), data=data, mode=0o600, user=account.pw_name, group=group)
    order = {"write": True, "files": [file.order]}
    program, said = sync._program(sys.executable), json.dumps(order).encode() + b"\n" + data
    done = subprocess.run(["/bin/sh", "-c", program], input=said, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    answers: list[dict[str, str]] = json.loads(done.stdout.decode().partition(sync.MARK)[2])
    return answers[0]


def test_a_file_is_put_where_only_its_owner_and_root_write(tmp_path: Path) -> None:
    assert put(tmp_path / "file") == {"difference": "missing", "error": ""}
    assert (tmp_path / "file").read_bytes() == b"new\n"
    assert put(tmp_path / "file") == {"difference": "", "error": ""}
    assert put(tmp_path / "none" / "file")["error"] == "its directory is missing there"


def test_b4_no_file_is_put_into_a_directory_that_others_may_write(tmp_path: Path) -> None:
    (tmp_path / "open" / "below").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    answer = put(tmp_path / "open" / "below" / "file")
    assert f"others may write {tmp_path / 'open'}, and so replace" in answer["error"]
    assert list((tmp_path / "open" / "below").iterdir()) == []


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("what", ["directory", "link"])
def test_b4_root_puts_no_file_where_a_user_leads_it(tmp_path: Path, what: str) -> None:
    """The file is root's; or it is the user's, whose link leads to a directory of root."""
    (tmp_path / "roots").mkdir()
    place = tmp_path / "users"
    if what == "link":
        place.symlink_to(tmp_path / "roots")
        os.chown(place, OTHER, OTHER, follow_symlinks=False)
    else:
        place.mkdir()
        os.chown(place, OTHER, OTHER)
    answer = put(place / "file", owner=OTHER if what == "link" else 0)
    assert f"user {OTHER}" in answer["error"]
    assert [*(tmp_path / "roots").iterdir(), *place.iterdir()] == []


@pytest.mark.root
@needs_root
def test_b4_a_directory_that_is_exchanged_for_a_link_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, check = tmp_path / "users", trust.check_path
    place.mkdir()
    os.chown(place, OTHER, OTHER)

    def check_then_exchange(path: str, uid: int) -> str:
        found = check(path, uid)
        place.rmdir()
        place.symlink_to("/etc")
        return found

    os.close(trust.open_directory(str(place), OTHER))
    monkeypatch.setattr(trust, "check_path", check_then_exchange)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        trust.open_directory(str(place), OTHER)


@pytest.mark.root
@needs_root
def test_f7_root_installs_no_file_that_others_than_its_owner_may_exchange(tmp_path: Path) -> None:
    source = tmp_path / "open" / "hosts"
    source.parent.mkdir()
    source.write_text("127.0.0.1 localhost\n")
    assert [file.data for file in sync.read_files([f"{source}:/etc/hosts"])] == [b"127.0.0.1 localhost\n"]
    source.parent.chmod(0o777)
    with pytest.raises(RequestError, match=f"cannot sync {source}: others may write {source.parent}"):
        sync.read_files([f"{source}:/etc/hosts"])
    source.parent.chmod(0o755)
    os.chown(source.parent, OTHER, OTHER)
    with pytest.raises(RequestError, match=f"belongs to user {OTHER}"):
        sync.read_files([f"{source}:/etc/hosts"])


def test_f7_a_roll_takes_no_orders_from_a_directory_of_others(tmp_path: Path) -> None:
    """What others write there would run on all nodes: hpcsched rolling --state DIR --continue."""
    file = RollFile(tmp_path / "roll")
    with file.held():
        file.write(Roll(Orders(command=("true",)), {}))
    assert file.read() is not None
    (tmp_path / "roll").chmod(0o777)
    with pytest.raises(RequestError, match="others may write"):
        file.read()
    with pytest.raises(RequestError, match="others may write .*--state DIR"), file.held():
        pass


@pytest.mark.root
@needs_root
def test_f7_a_backup_is_not_left_where_others_may_exchange_it(tmp_path: Path) -> None:
    """Root would restore theirs, with keys and programs of their choice."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "hpcsched.toml").write_text('[cluster]\nname = "lab"\n')
    config, place = load_config(tmp_path / "etc"), tmp_path / "backups"
    place.mkdir()
    backup._check_place(config, place)
    place.chmod(0o777)
    with pytest.raises(RequestError, match="others may write .*--encrypt"):
        backup.back_up_cluster(config, place)
    assert list(place.iterdir()) == []


@pytest.mark.root
@needs_root
def test_f7_root_restores_no_backup_that_others_could_have_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root obeys its configuration. Everybody who has the public key can encrypt one."""
    monkeypatch.setenv("HPCSCHED_CONFIG", str(tmp_path / "etc"))
    made, encrypted = tmp_path / "backups" / "lab-20260102T030405", tmp_path / "backups" / "lab-20260102T030406.tar.age"
    (made / "etc").mkdir(parents=True)
    inner = made / "etc" / "hpcsched.toml"
    for file in (made / backup.MANIFEST, inner, encrypted):
        file.write_text("")
    backup._check_source(made)
    for path, source in ((made.parent, made), (made.parent, encrypted), (encrypted, encrypted), (inner, made)):
        mode = path.stat().st_mode
        path.chmod(0o777)
        with pytest.raises(RequestError, match=rf"cannot restore from {source}: others may write {path}.*cp -r"):
            backup._check_source(source)
        path.chmod(mode)
        os.chown(path, OTHER, OTHER)
        with pytest.raises(RequestError, match=f"{path} belongs to user {OTHER}"):
            backup._check_source(source)
        os.chown(path, 0, 0)
    made.parent.chmod(0o777)
    result = CliRunner().invoke(backup.restore, [str(made), "--drill"])
    assert "others may write" in str(result.exception)


@pytest.mark.root
@needs_root
def test_f7_a_configuration_is_not_read_where_others_may_put_another(tmp_path: Path) -> None:
    config_dir = tmp_path / "above" / "etc"
    config_dir.mkdir(parents=True)
    (config_dir / "hpcsched.toml").write_text('[cluster]\nname = "lab"\n')
    load_config(config_dir)
    above, link = config_dir.parent, tmp_path / "link"
    link.symlink_to(above)
    load_config(link / "etc")
    for path, change, why in (
        (above, lambda: above.chmod(0o757), "everybody may write it"),
        (above, lambda: (above.chmod(0o775), os.chown(above, 0, OTHER)), "its group may write it"),
        (above, lambda: os.chown(above, OTHER, OTHER), f"it belongs to uid {OTHER}"),
        (link, lambda: os.chown(link, OTHER, OTHER, follow_symlinks=False), f"it belongs to uid {OTHER}"),
    ):
        change()
        with pytest.raises(ConfigError, match=f"cannot trust {path}: {why}"):
            load_config(link / "etc")
        os.chown(above, 0, 0)
        above.chmod(0o755)
    os.chown(link, 0, 0, follow_symlinks=False)
    above.chmod(0o1777)  # as /tmp is: what is ours there cannot be renamed by others
    load_config(link / "etc")


class HostileNode:
    """A node that answers the comparison of files with any text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def spec(self, name: str) -> Any:
        return type("Spec", (), {"python": "python3"})

    def run(
        self, name: str, command: str, limit_s: float, output: Path, stop: threading.Event, stdin: bytes = b""
    ) -> int:
        output.write_text(f"$ {command[:20]}\n{self.text}")
        return 0


@pytest.mark.parametrize(
    "answer", ["[" * 100_000, "1", "{}", '[{"difference": 1}]', '["a"]', "null", '[{"difference": "\\ud800"}]']
)
def test_d7_a_node_that_answers_anything_fails_alone(answer: str) -> None:
    file = sync.SyncFile(path="/f", data=b"", mode=0o600, user="root", group="root")
    node: Any = HostileNode(sync.MARK + answer)
    work = sync._Work(node, [file], "", False, 1.0)
    with pytest.raises(NodeFailedError, match="it did not compare its files"):
        work.compare("n1", sync.NodeSync())


def test_d7_what_a_node_says_of_a_file_is_short() -> None:
    file = sync.SyncFile(path="/f", data=b"", mode=0o600, user="root", group="root")
    node: Any = HostileNode(sync.MARK + json.dumps([{"difference": "x" * 20_000, "error": "y" * 20_000}]))
    found = sync.NodeSync()
    sync._Work(node, [file], "", False, 1.0).compare("n1", found)
    assert max(map(len, [*found.differences.values(), *found.errors.values()])) == sync.MOST_WORDS
