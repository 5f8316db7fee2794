"""Compiles the thin client (hpcsched/cli/thin.c) if there is a C compiler; without one, its commands are Python.

The compiled program takes the place of the console scripts of `COMPILED` in the environment's bin directory; all else is in
pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.egg_info import egg_info
from setuptools.dist import Distribution

COMPILED = ("hsub", "hqueue", "hcancel")
SOURCE = Path("hpcsched/cli/thin.c")
BUILT = Path("build/thin")


def compile_client() -> bool:
    """Put the program below `BUILT` under all its names; return whether that could be done."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or not sys.platform.startswith("linux") or not SOURCE.exists():
        return False
    BUILT.mkdir(parents=True, exist_ok=True)
    program = BUILT / COMPILED[0]
    done = subprocess.run(
        [compiler, "-O2", "-o", str(program), str(SOURCE)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"hsub, hqueue and hcancel stay in Python: {SOURCE} does not compile:\n{done.stderr}", file=sys.stderr)
        return False
    for name in COMPILED[1:]:
        shutil.copy2(program, BUILT / name)
    return True


class WithoutScripts(egg_info):
    """Metadata without the console scripts that are compiled."""

    def finalize_options(self) -> None:
        entry_points = self.distribution.entry_points
        scripts = entry_points["console_scripts"]
        entry_points["console_scripts"] = [one for one in scripts if one.partition("=")[0].strip() not in COMPILED]
        super().finalize_options()


class LinuxWheel(bdist_wheel):
    """A wheel for any Python 3, on this machine's platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class Programs(Distribution().get_command_class("build_scripts")):
    """The compiled programs as scripts; setuptools would read each as a text."""

    def run(self) -> None:
        self.mkpath(self.build_dir)
        for script in self.scripts:
            shutil.copy2(script, self.build_dir)


class OfOnePlatform(Distribution):
    """A distribution that is built for one platform."""

    def has_ext_modules(self) -> bool:
        return True


if compile_client():
    setup(
        distclass=OfOnePlatform,
        scripts=[str(BUILT / name) for name in COMPILED],
        cmdclass={"egg_info": WithoutScripts, "bdist_wheel": LinuxWheel, "build_scripts": Programs},
    )
else:
    setup()
