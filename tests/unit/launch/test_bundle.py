"""hpcnode.pyz: the same from the same sources, and all that a node needs."""

from __future__ import annotations

import hashlib
import io
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hpcsched.launch.bundle import MARK, bootstrap_argv, bootstrap_command, build_bundle


def test_the_same_sources_give_the_same_bytes() -> None:
    sources = {"hpcnode/b.py": b"1", "hpcnode/a.py": b"2"}
    bundle = build_bundle(sources)
    assert bundle.data == build_bundle(dict(reversed(sources.items()))).data
    assert bundle.sha256 == hashlib.sha256(bundle.data).hexdigest()
    assert build_bundle(sources | {"hpcnode/a.py": b"3"}).sha256 != bundle.sha256


def test_the_package_is_in_it_and_nothing_else() -> None:
    with zipfile.ZipFile(io.BytesIO(build_bundle().data)) as pyz:
        names = pyz.namelist()
        assert {info.date_time for info in pyz.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert {"__main__.py", "hpcnode/__init__.py", "hpcnode/wire/protocol.py"} <= set(names)
    assert names == sorted(names)
    assert all(name.endswith(".py") for name in names)


def test_no_shell_finds_anything_in_the_command() -> None:
    command = bootstrap_command("/opt/my python/bin/python3")
    assert shlex.split(command) == ["exec", *bootstrap_argv("/opt/my python/bin/python3")]
    source = bootstrap_argv("python3")[-1]
    assert "\n" not in command  # csh
    assert not set(source) & set("'!$`\\")
    assert len(command) < 4000


@pytest.mark.parametrize("python", [sys.executable, "/usr/bin/python3"])
def test_the_command_takes_no_module_of_the_current_directory(tmp_path: Path, python: str) -> None:
    if not Path(python).exists():
        pytest.skip(f"{python} is not installed")
    planted = "open('planted', 'w').close()\n"
    for name in ("base64", "zlib", "errno", "json", "hashlib"):
        (tmp_path / f"{name}.py").write_text(planted)
    subprocess.run(bootstrap_argv(python), cwd=tmp_path, input=b"{}\n", capture_output=True, timeout=60, check=False)
    assert not (tmp_path / "planted").exists()


def test_the_mark_is_the_bootstrap_s() -> None:
    from importlib.resources import files

    source = files("hpcsched.launch").joinpath("bootstrap.py").read_text(encoding="utf-8")
    (line,) = [line for line in source.splitlines() if line.startswith("MARK = ")]
    assert eval(line.partition(" = ")[2]).encode() == MARK  # noqa: S307
