"""Trees are deleted while their owner swaps directories with links: nothing outside is deleted.

A swap comes before each call of the deletion in turn, and then from a process that swaps without pause.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcnode import paths

NOBODY = 65534
ROUNDS = 300
MOST_CALLS = 200
RENAME_EXCHANGE = 2
CALLS = ("os.scandir", "os.listdir", "os.remove", "os.rmdir", "os.rename", "open")
SWAPPED = ("a", "a/b", "a/b/c", "d")
LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A directory with the names that the tree has, too."""
    made = tmp_path / "victim"
    fill(made)
    yield made
    assert names_below(made) == names_below(fill(tmp_path / "as_before"))


def fill(top: Path) -> Path:
    for folder in ("a/b/c", "b/c", "c", "d"):
        (top / folder).mkdir(parents=True, exist_ok=True)
        (top / folder / "file").write_text("kept")
    (top / "file").write_text("kept")
    return top


def names_below(top: Path) -> list[str]:
    return sorted(str(path.relative_to(top)) for path in top.rglob("*"))


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step, as renameat2(2) can."""
    return LIBC.renameat2(-100, os.fsencode(first), -100, os.fsencode(second), RENAME_EXCHANGE) == 0


def calls_of_a_deletion(top: Path, before_call: Callable[[int], None]) -> int:
    """Delete the tree in a child that calls `before_call(number)` before each of its calls; return their number."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        made = 0
        in_hook = False

        def hook(event: str, _: object) -> None:
            nonlocal made, in_hook
            if event in CALLS and not in_hook:
                in_hook = True
                made += 1
                before_call(made)
                in_hook = False

        sys.addaudithook(hook)
        try:
            paths.remove_tree(str(top))
        finally:
            os.write(write_end, str(made).encode())
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as stream:
        count = int(stream.read())
    os.waitpid(child, 0)
    return count


@pytest.mark.parametrize("name", SWAPPED)
def test_b4_a_directory_that_becomes_a_link_takes_nothing_along(tmp_path: Path, victim: Path, name: str) -> None:
    before, count = names_below(victim), MOST_CALLS
    number = 0
    while number < count:
        number += 1
        top, link = fill(tmp_path / f"tree-{number}"), tmp_path / f"link-{number}"
        link.symlink_to(victim)

        def swap(call: int, top: Path = top, link: Path = link, number: int = number) -> None:
            if call == number:
                exchange(top / name, link)

        count = calls_of_a_deletion(top, swap)
        assert names_below(victim) == before, f"call {number}"
    assert 10 < count < MOST_CALLS


FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def exchange_below(top: Path, name: str, link: Path) -> None:
    """Swap a directory of the tree with a link, if all directories above it are directories now."""
    folder = os.open(top.parent, FOLDER)
    *above, last = (top.name, *name.split("/"))
    try:
        for each in above:
            inner = os.open(each, FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        LIBC.renameat2(folder, os.fsencode(last), -100, os.fsencode(link), RENAME_EXCHANGE)
    except OSError:
        pass  # deleted, or a link now
    finally:
        os.close(folder)


@contextmanager
def swapping(base: Path, links: Path, uid: int) -> Iterator[None]:
    """Swap each directory of each tree in `base` with a link, back and forth, in a process of this user."""
    child = os.fork()
    if child == 0:
        if uid != os.geteuid():
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        while True:
            for tree in os.listdir(base):
                for name in SWAPPED:
                    exchange_below(base / tree, name, links / name.replace("/", "-"))
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def open_for(path: Path, uid: int) -> None:
    """Let this user have a tree, and all above it be entered."""
    for each in (path, *path.rglob("*")):
        os.chown(each, uid, uid, follow_symlinks=False)


def test_b4_swaps_without_pause_take_nothing_along(tmp_path: Path, victim: Path) -> None:
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    base, links = tmp_path / "trees", tmp_path / "links"
    base.mkdir()
    links.mkdir()
    for above in tmp_path.parents:
        if above.stat().st_uid == os.geteuid() and above != Path("/") and above != Path("/tmp"):
            above.chmod(above.stat().st_mode | 0o011)
    for name in SWAPPED:
        (links / name.replace("/", "-")).symlink_to(victim)
    for each in (tmp_path, base, links):
        each.chmod(0o755)
    open_for(links, uid)
    before = names_below(victim)
    with swapping(base, links, uid):
        for number in range(ROUNDS):
            made = fill(tmp_path / "new")
            open_for(made, uid)
            os.rename(made, base / str(number))
            paths.remove_tree(str(base / str(number)))
            assert names_below(victim) == before, f"round {number}"


def test_b4_a_tree_that_is_deeper_than_any_path_is_deleted(tmp_path: Path) -> None:
    top = tmp_path / "tree"
    top.mkdir()
    folder = os.open(top, FOLDER)
    for number in range(1500):
        for each in range(2):
            os.mkdir(f"{number}-{each}", dir_fd=folder)
        inner = os.open(f"{number}-0", FOLDER, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    paths.remove_tree(str(top))
    assert not top.exists()
