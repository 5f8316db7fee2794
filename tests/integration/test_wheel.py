"""What `pip install` puts beside the code: manual pages, examples, the systemd unit, the cron file, the commented settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this tree, to build from."""
    copy = tmp_path_factory.mktemp("wheel") / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("hpcsched", "workers", "man", "etc", "systemd"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def unpacked(source: Path, env: dict[str, str]) -> Path:
    """Build the wheel in `env`, and return the directory that it is unpacked in."""
    base = source.parent / f"out{len(list(source.parent.iterdir()))}"
    base.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(base)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | env,
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(base / done.stdout.split()[-1]) as wheel:
        wheel.extractall(base / "wheel")
    return base / "wheel"


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """What the wheel of this tree has in it."""
    return unpacked(source, {})


def test_the_wheel_has_the_files_of_the_web_pages(wheel: Path) -> None:
    folder = ROOT / "hpcsched" / "web"
    files = {path.relative_to(ROOT) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert len(files) > 10
    assert not [str(path) for path in files if not (wheel / path).is_file()]


@pytest.fixture(scope="module")
def prefix(wheel: Path) -> Path:
    """What an installer puts below the prefix of an environment."""
    (data,) = wheel.glob("*.data/data")
    return data


def console_scripts(wheel: Path) -> set[str]:
    """Return the names of the programs that an installer writes in Python."""
    (file,) = wheel.glob("*.dist-info/entry_points.txt")
    return {line.partition(" ")[0] for line in file.read_text().splitlines() if " = " in line}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_with_a_compiler_the_thin_clients_are_programs(wheel: Path) -> None:
    (scripts,) = wheel.glob("*.data/scripts")
    assert {path.name for path in scripts.iterdir()} == {"hsub", "hqueue", "hcancel"}
    assert all(path.read_bytes().startswith(b"\x7fELF") for path in scripts.iterdir())
    assert console_scripts(wheel).isdisjoint({"hsub", "hqueue", "hcancel"})
    assert "hpcsched-command" in console_scripts(wheel)


def test_without_a_compiler_the_thin_clients_are_python(source: Path) -> None:
    wheel = unpacked(source, {"CC": "/nonexistent"})
    assert list(wheel.glob("*.data/scripts")) == []
    assert {"hsub", "hqueue", "hcancel"} <= console_scripts(wheel)


def test_every_manual_page_is_where_man_looks(prefix: Path) -> None:
    pages = [path for path in (ROOT / "man").iterdir() if path.is_file()]
    assert pages
    for page in pages:
        installed = prefix / "share" / "man" / f"man{page.suffix[1:]}" / page.name
        assert installed.read_bytes() == page.read_bytes()
    if shutil.which("man"):
        found = subprocess.run(
            ["man", "-M", str(prefix / "share" / "man"), "-w", "hsub"], capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == str(prefix / "share" / "man" / "man1" / "hsub.1")


@pytest.mark.parametrize(
    ("kept", "installed"),
    [
        ("etc/examples", "examples"),
        ("etc/cron.d", "cron.d"),
        ("etc/templates", "templates"),
        ("systemd", "systemd"),
        ("systemd/sysusers.d", "systemd/sysusers.d"),
        ("systemd/tmpfiles.d", "systemd/tmpfiles.d"),
    ],
)
def test_examples_units_and_cron_file_come_along(prefix: Path, kept: str, installed: str) -> None:
    names = {path.name for path in (ROOT / kept).iterdir() if path.is_file()}
    assert names
    found = prefix / "share" / "hpcsched" / installed
    assert {path.name for path in found.iterdir() if path.is_file()} == names


@pytest.mark.parametrize("package", ["hpcsched", "hpcnode", "hpctrain"])
def test_type_checkers_find_the_packages_types(prefix: Path, package: str) -> None:
    assert (prefix.parents[1] / package / "py.typed").exists()


def test_the_commented_settings_come_along(prefix: Path) -> None:
    assert (prefix / "share/hpcsched/hpcsched.toml").read_bytes() == (ROOT / "etc/hpcsched.toml").read_bytes()
