"""What `pip install` puts beside the code: manual pages, examples, the systemd unit, the cron file, the commented settings."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment's prefix with the wheel of this tree in it, built from a copy."""
    base = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("hpcsched", "workers", "man", "etc", "systemd"):
        shutil.copytree(ROOT / name, base / "source" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, base / "source")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(base)], cwd=base / "source", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(base / done.stdout.split()[-1]) as wheel:
        wheel.extractall(base / "wheel")
    (data,) = (base / "wheel").glob("*.data/data")  # what an installer puts below the prefix
    return data


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
    ("kept", "installed"), [("etc/examples", "examples"), ("etc/cron.d", "cron.d"), ("systemd", "systemd")]
)
def test_examples_unit_and_cron_file_come_along(prefix: Path, kept: str, installed: str) -> None:
    names = {path.name for path in (ROOT / kept).iterdir() if path.is_file()}
    assert names
    assert {path.name for path in (prefix / "share" / "hpcsched" / installed).iterdir()} == names


@pytest.mark.parametrize("package", ["hpcsched", "hpcnode", "hpctrain"])
def test_type_checkers_find_the_packages_types(prefix: Path, package: str) -> None:
    assert (prefix.parents[1] / package / "py.typed").exists()


def test_the_commented_settings_come_along(prefix: Path) -> None:
    assert (prefix / "share/hpcsched/hpcsched.toml").read_bytes() == (ROOT / "etc/hpcsched.toml").read_bytes()
