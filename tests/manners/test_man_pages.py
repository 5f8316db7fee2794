"""Every command has a man page, and page and --help cannot drift apart.

For all commands: the page has exactly the options that --help shows (--help itself may be left out). For those whose
options are a table: it spells each as the table does, and what it says of it begins with the table's words.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hpcsched.cli import hacct, hcancel, hctl, hinfo, hlogs, hprio, hqueue, hreport, hshare, hsim, htunnel, hwhy
from hpcsched.cli.admin import hserve
from hpcsched.jobscript.options import OPTIONS
from hpcsched.listing.queue import FIELDS
from hpctrain.elastic.__main__ import make_parser
from hpctrain.options import add_options

ROOT = Path(__file__).parents[2]
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
TABLES = {
    module.COMMAND.name: [(option.spelling, option.help) for option in module.COMMAND.options]
    for module in (hacct, hcancel, hctl, hinfo, hlogs, hprio, hqueue, hreport, hserve, hshare, hsim, htunnel, hwhy)
} | {"hsub": [(option.spelling, option.help) for option in OPTIONS]}

_TOKEN = re.compile(r"(?<![\w-])(?:--[A-Za-z][\w-]*|-[A-Za-z](?![\w-]))")
_HELP_LINE = re.compile(r" {2,8}(?=-)(.*)")


def exists(target: str) -> bool:
    """Say whether the module of an entry point is there yet."""
    try:
        return importlib.util.find_spec(target.partition(":")[0]) is not None
    except ModuleNotFoundError:
        return False


# Users do not type hpcsched-command: the compiled clients execute it.
COMMANDS = [name for name, target in SCRIPTS.items() if exists(target) and name != "hpcsched-command"]


def page_of(name: str) -> Path:
    """Return the file of a command's man page."""
    found = [ROOT / "man" / f"{name}.{section}" for section in (1, 8)]
    pages = [path for path in found if path.exists()]
    assert pages, f"{name} has no man page: {' or '.join(path.name for path in found)}"
    return pages[0]


HELP = """
import io, json, sys
from contextlib import redirect_stdout
from {module} import {function}
texts = []
for words in json.loads(sys.stdin.read()):
    sys.argv[:] = [{name!r}, *words, "--help"]
    with redirect_stdout(io.StringIO()) as text:
        try:
            status = {function}()
        except SystemExit as end:
            status = end.code
    assert not status, (words, status)
    texts.append(text.getvalue())
print(json.dumps(texts))
"""


def helps_of(name: str, calls: list[list[str]]) -> list[str]:
    """Return what the command prints for --help behind each of these words; one process prints all."""
    module, _, function = SCRIPTS[name].partition(":")
    code = HELP.format(module=module, function=function, name=name)
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(calls), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return list(json.loads(done.stdout))


def options_in(entries: list[str]) -> set[str]:
    """Return the options that the entries name, but for --help and its letter."""
    return {token for entry in entries if "--help" not in entry for token in _TOKEN.findall(entry)}


def help_options(name: str) -> set[str]:
    """Return the options that --help shows, those of sub-commands included."""
    options: set[str] = set()
    calls: list[list[str]] = [[]]
    while calls:
        below = []
        for words, text in zip(calls, helps_of(name, calls), strict=True):
            # Behind two spaces (or a line's end) stands what an option does, where others may be named.
            entries = [re.split(r" {2,}", match[1])[0] for match in map(_HELP_LINE.match, text.splitlines()) if match]
            options |= options_in(entries)
            listed = re.search(r"^Commands:\n((?:  .*\n?)+)", text, re.MULTILINE)
            lines = listed[1].splitlines() if listed else ()
            below += [[*words, match[1]] for line in lines if (match := re.match(r"  (\w[\w-]*)", line))]
        calls = below
    return options


def plain(roff: str) -> str:
    r"""Return a line of man macros as it is read: ``.BI \-\-share " DIR"`` is ``--share DIR``."""
    text = roff
    if match := re.match(r"\.(B|I|BR|BI|RB|RI|IR|IB|SM)\s+(.*)", text):
        words = re.findall(r'"((?:[^"]|"")*)"|(\S+)', match[2])
        text = ("" if len(match[1]) == 2 else " ").join(quoted or bare for quoted, bare in words)
    text = re.sub(r"\\f[BIRP]|\\&", "", text)
    return (
        text.replace(r"\-", "-").replace(r"\(aq", "'").replace(r"\e", "\\").replace(r"\(ti", "~").replace(r"\(ha", "^")
    )


def tagged(path: Path) -> list[tuple[str, str]]:
    """Return the tagged paragraphs of a page: tag, and text as one line."""
    found: list[tuple[str, list[str]]] = []
    lines = iter(path.read_text().splitlines())
    inside = False
    for line in lines:
        if line.startswith(".TP"):
            found.append((plain(next(lines)), []))
            inside = True
        elif line.startswith((".SH", ".SS", ".PP")):
            inside = False
        elif inside and not line.startswith(('.\\"', ".RS", ".RE", ".IP")):
            found[-1][1].append(plain(line))
    return [(tag, " ".join(" ".join(texts).split())) for tag, texts in found]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_has_exactly_the_options_of_the_help(name: str) -> None:
    page = options_in([tag for tag, _ in tagged(page_of(name)) if tag.startswith("-")])
    shown = help_options(name)
    assert (page - shown, shown - page) == (set(), set())


@pytest.mark.parametrize("name", ["hpctrain", "hpctrain-elastic"])
def test_the_page_of_training_scripts_has_exactly_their_options(name: str) -> None:
    parser = argparse.ArgumentParser()
    if name == "hpctrain":
        add_options(parser)
    else:
        parser = make_parser()
    shown = {spelling for action in parser._actions for spelling in action.option_strings} - {"-h", "--help"}
    page = options_in([tag for tag, _ in tagged(ROOT / "man" / f"{name}.1") if tag.startswith("-")])
    assert (page - shown, shown - page) == (set(), set())


@pytest.mark.parametrize("name", TABLES)
def test_the_page_says_of_each_option_what_the_table_says(name: str) -> None:
    entries = [(tag, text) for tag, text in tagged(page_of(name)) if tag.startswith("-")]
    assert [tag for tag, _ in entries] == [spelling for spelling, _ in TABLES[name]]
    for (tag, text), (_, says) in zip(entries, TABLES[name], strict=True):
        begins = text[: len(says)].lower()
        assert begins == says.lower(), f"{tag} in the page of {name} begins otherwise than in --help"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_has_the_customary_sections(name: str) -> None:
    sections = re.findall(r"^\.SH (.*)$", page_of(name).read_text(), re.MULTILINE)
    assert sections[:3] == ["NAME", "SYNOPSIS", "DESCRIPTION"]
    if name in TABLES:
        assert sections[3:] == ["OPTIONS", "EXAMPLES", "EXIT STATUS", "ENVIRONMENT", "FILES", "SEE ALSO"]


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_is_sound_roff(name: str) -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z", str(page_of(name))],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_lists_within_the_pages_are_complete() -> None:
    columns = plain(re.sub(r"\n\.\w+ ", " ", page_of("hqueue").read_text()))
    names = " ".join(field.name for field in FIELDS)
    assert f'"{names}"' in columns
    letters = re.findall(r"%([A-Za-z])(?=[ \"])", columns)
    assert sorted(set(letters)) == sorted(field.letter for field in FIELDS if field.letter)
    variables = " ".join(sorted(option.variable for option in OPTIONS if option.variable))
    assert f'"{variables}"' in page_of("hsub").read_text()
