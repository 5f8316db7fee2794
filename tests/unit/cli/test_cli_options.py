"""The words of a command line, as getopt_long reads them."""

from __future__ import annotations

import pytest

from hpcsched.commands.options import HELP, Command, Option, UsageError, help_text, read_words, split_list

COMMAND = Command(
    "hx",
    ("[OPTIONS]",),
    "Do x.",
    (
        Option("format", "o", "FORMAT", "the columns"),
        Option("noheader", "h", help="no headers"),
        Option("nodes", "n", "LIST", "the nodes"),
        Option("watch", "w", "SECONDS", "again and again", bare="2"),
        Option("name", "", "NAME", "a name", aliases=("jobname",)),
        HELP._replace(short=""),
    ),
)


@pytest.mark.parametrize(
    ("argv", "given", "operands"),
    [
        (["12", "-o", "%i", "13"], {"format": ["%i"]}, ["12", "13"]),
        (["-ho%i %t"], {"noheader": [""], "format": ["%i %t"]}, []),
        (["-o %A|%T"], {"format": [" %A|%T"]}, []),
        (["--format=a", "--form", "b"], {"format": ["a", "b"]}, []),
        (["--format="], {"format": [""]}, []),
        (["--jobname", "x"], {"name": ["x"]}, []),
        (["--watch", "12"], {"watch": ["2"]}, ["12"]),
        (["--watch=5", "-w3"], {"watch": ["5", "3"]}, []),
        (["-h", "--", "-o", "--format"], {"noheader": [""]}, ["-o", "--format"]),
        (["-", "10_[1-3]"], {}, ["-", "10_[1-3]"]),
    ],
)
def test_words_are_read_as_getopt_long_reads_them(
    argv: list[str], given: dict[str, list[str]], operands: list[str]
) -> None:
    assert read_words(COMMAND, argv) == (given, operands)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--fromat=x"], "did you mean --format?"),
        (["--no"], "it could be --noheader, --nodes"),
        (["--noheader=1"], "it takes none"),
        (["-O"], "did you mean -o (--format)?"),
        (["-z"], "see hx --help"),
        (["-o"], "write -o, --format=FORMAT"),
        (["--\x1b[31m"], r"'--\x1b[31m'"),
    ],
)
def test_what_is_not_understood_is_refused_with_what_is_near(argv: list[str], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_words(COMMAND, argv)
    assert says in str(refused.value)


def test_help_shows_every_option() -> None:
    text = help_text(COMMAND)
    for option in COMMAND.options:
        assert f"{option.spelling} " in text.replace("\n", " ")
    assert "--watch[=SECONDS]" in text


def test_commas_in_brackets_do_not_separate() -> None:
    assert split_list("1, 10_[1,3-5] ,,n[1-2,4]") == ["1", "10_[1,3-5]", "n[1-2,4]"]


@pytest.mark.parametrize("text", ["x", "-1", "nan", "inf", "0.01"])
def test_a_number_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="at least 0.1"):
        read_words(COMMAND, [f"--watch={text}"]).number("watch", 2, at_least=0.1)
