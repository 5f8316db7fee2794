"""Programs that the controller starts for triggers: few at once, and none that another user could replace.

They are the only thing that a user can have the controller start. Mail goes to allowed domains, by the administrator's server;
no request goes to an address of a user.
"""

from __future__ import annotations

import ast
import asyncio
import os
import pwd
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcnode.os.trust import check_path
from hpcsched.controller.requests import triggers
from hpcsched.controller.requests.triggers import TriggerPrograms
from hpcsched.model.trigger import Trigger, TriggerEvent

ROOT = Path(__file__).parents[2]
UID = os.geteuid()
FETCHERS = {"aiohttp", "ftplib", "http.client", "httpx", "requests", "smtplib", "urllib.request", "urllib3"}
# Logins ask the OpenID provider, the recorder writes to the server, and alerts go to the receivers, that the administrator has
# configured; the demo asks its own service at a socket.
OF_ADMINISTRATORS = [
    ("hpcsched/alerts/sending.py", "http.client"),
    ("hpcsched/alerts/sending.py", "smtplib"),
    ("hpcsched/controller/credentials.py", "http.client"),
    ("hpcsched/demo/serving.py", "http.client"),
    ("hpcsched/gateway/app.py", "httpx"),
    ("hpcsched/recorder/remote_write.py", "http.client"),
]
MAILERS = {"mail", "mailx", "sendmail", "/usr/sbin/sendmail", "/usr/bin/mail"}


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every account can write."""
    made = Path(tempfile.mkdtemp(prefix="triggers-", dir="/tmp"))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


def shell(script: str, uid: int = UID) -> Trigger:
    """Return a trigger that has come, with a script of the shell as its program."""
    user = pwd.getpwuid(uid).pw_name
    return Trigger(
        id=1, uid=uid, user=user, event=TriggerEvent.NODE_DOWN, target="*", program=("/bin/sh", "-c", script)
    )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # the timeout of the suite ends it
        await asyncio.sleep(0.01)


def test_e7_a_user_has_few_programs_at_once(place: Path) -> None:
    script = f"mkdir {place}/run-$$; ls -d {place}/run-* | wc -l >> {place}/counts; sleep 0.05; rmdir {place}/run-$$"

    async def run_all() -> None:
        programs = TriggerPrograms()
        for _ in range(12):
            programs.run(shell(script))
        await until(lambda: not programs._tasks)

    asyncio.run(run_all())
    counts = [int(line) for line in (place / "counts").read_text().split()]
    assert (len(counts), max(counts)) == (12, triggers.AT_ONCE_OF_USER)


def test_e7_a_user_has_few_programs_in_line(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run_all() -> int:
        programs = TriggerPrograms()
        for _ in range(triggers.QUEUED_OF_USER + 50):
            programs.run(shell(f"echo >> {place}/ran"))
        waiting = len(programs._tasks)
        await until(lambda: not programs._tasks)
        return waiting

    assert asyncio.run(run_all()) == triggers.QUEUED_OF_USER
    assert len((place / "ran").read_text().split("\n")) - 1 == triggers.QUEUED_OF_USER
    assert "wait or run already" in caplog.text


@pytest.mark.root
@pytest.mark.skipif(UID != 0, reason="needs to run as root: it starts programs as two users")
def test_e7_programs_of_one_user_do_not_hold_up_those_of_another(place: Path) -> None:
    (place / "hold").touch()

    async def run_all() -> None:
        programs = TriggerPrograms()
        for _ in range(100):
            programs.run(shell(f"while [ -e {place}/hold ]; do sleep 0.05; done", uid=1))
        programs.run(shell(f"touch {place}/ran", uid=2))
        await until((place / "ran").exists)
        (place / "hold").unlink()
        await until(lambda: not programs._tasks)

    asyncio.run(run_all())


def test_e7_only_what_the_administrator_has_configured_is_asked_over_the_network() -> None:
    """No option of a user takes the address of a server; tests/integration/test_alert_service.py bounds --mail-user."""
    found = []
    for path in [path for top in ("hpcsched", "workers/hpcnode") for path in (ROOT / top).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = {name.name for name in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom):
                names = {str(node.module), *(f"{node.module}.{name.name}" for name in node.names)}
            if isinstance(node, ast.Constant) and node.value in MAILERS - {"mail"}:
                names = {"smtplib"}
            found += [(str(path.relative_to(ROOT)), name) for name in names & FETCHERS]
    assert sorted(found) == OF_ADMINISTRATORS


@pytest.fixture
def program(tmp_path: Path) -> Path:
    made = tmp_path / "a" / "b" / "program"
    made.parent.mkdir(parents=True)
    made.write_text("#!/bin/sh\n")
    made.chmod(0o755)
    return made


def test_f7_a_program_that_is_safe_is_run(program: Path) -> None:
    link = program.parent / "link"
    link.symlink_to("../b/program")
    for path in (program, link, Path("/bin/sh")):
        check_path(path, UID)


@pytest.mark.parametrize("mode", [0o777, 0o775])
@pytest.mark.parametrize("up", [0, 1, 2])
def test_f7_a_program_that_others_may_replace_is_not_run(program: Path, up: int, mode: int) -> None:
    part = [program, *program.parents][up]
    part.chmod(mode)
    with pytest.raises(PermissionError, match=f"others may write {part}, .*chmod go-w"):
        check_path(program, UID)


def test_f7_what_a_link_leads_through_is_checked(program: Path) -> None:
    link = program.parents[1] / "link"
    link.symlink_to("b/program")
    program.parent.chmod(0o777)
    with pytest.raises(PermissionError, match=f"others may write {program.parent},"):
        check_path(link, UID)


@pytest.mark.root
@pytest.mark.skipif(UID != 0, reason="needs to run as root: it gives files to another user")
def test_f7_a_program_of_another_user_below_a_sticky_directory_is_not_run(program: Path) -> None:
    program.parent.chmod(0o1777)
    check_path(program, UID)
    link = program.parent / "link"
    link.symlink_to("program")
    for theirs in (link, program):
        os.chown(theirs, 65534, 65534, follow_symlinks=False)
        with pytest.raises(PermissionError, match="belongs to user 65534"):
            check_path(theirs, 0)
        with pytest.raises(PermissionError, match="belongs to user 65534"):
            check_path(theirs, 1)
        os.chown(theirs, 0, 0, follow_symlinks=False)


def test_f7_a_circle_of_links_ends(program: Path) -> None:
    (program.parent / "one").symlink_to("two")
    (program.parent / "two").symlink_to("one")
    with pytest.raises(PermissionError, match="more than"):
        check_path(program.parent / "one", UID)
