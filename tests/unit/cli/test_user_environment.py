"""The environment of a login shell, which `salloc --get-user-env` takes."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from hpcsched.cli import halloc


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    account = pwd.struct_passwd(("ada", "x", 1, 1, "", str(tmp_path), "/bin/bash"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: account)
    return tmp_path


def test_it_is_what_the_profile_exports(home: Path) -> None:
    (home / ".bash_profile").write_text("export FROM_PROFILE='two words'\n")
    found = halloc._login_environment("60L")
    assert (found["FROM_PROFILE"], found["HOME"]) == ("two words", str(home))
    assert "FROM_PROFILE" not in halloc._login_environment("60S")


def test_a_profile_that_takes_too_long_is_named_with_the_option_to_wait(home: Path) -> None:
    (home / ".bash_profile").write_text("while :; do :; done\n")
    with pytest.raises(halloc.HallocError, match=r"allow its profile more than 1 s: --get-user-env=60L$"):
        halloc._login_environment("1L")


def test_a_profile_that_fails_is_an_error(home: Path) -> None:
    (home / ".bash_profile").write_text("exit 3\n")
    with pytest.raises(halloc.HallocError, match="ada's login shell: .*exit status 3"):
        halloc._login_environment(True)
