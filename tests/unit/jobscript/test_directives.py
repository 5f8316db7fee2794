"""Where #HSUB and #SBATCH lines count, and what may stand on them: by sbatch's rule."""

from __future__ import annotations

import pytest

from hpcsched.errors import RequestError
from hpcsched.jobscript.script import MAX_SCRIPT_BYTES, check_script, read_script, split_directive, wrap_script

# Lines found in people's scripts: the line, and what it asks for.
LINES = {
    "#SBATCH --nodes=2": {"nodes": ["2"]},
    "#SBATCH --nodes 2": {"nodes": ["2"]},
    "#SBATCH -N1": {"nodes": ["1"]},
    "#SBATCH -N 1": {"nodes": ["1"]},
    "#SBATCH--time=20:00:00": {"time": ["20:00:00"]},
    "#SBATCH\t--time=1-00:00:00   # a day": {"time": ["1-00:00:00"]},
    "#SBATCH --time=10:00#ten": {"time": ["10:00"]},
    "#SBATCH -o 'x-%j.out'": {"output": ["x-%j.out"]},
    '#SBATCH -J "a b"': {"job-name": ["a b"]},
    '#SBATCH --job-name="a # b"': {"job-name": ["a # b"]},
    '#SBATCH --job-name=a" "b': {"job-name": ["a b"]},
    "#SBATCH -o /tmp/a\\ b/%j.out": {"output": ["/tmp/a b/%j.out"]},
    '#SBATCH --comment="say \\"hi\\""': {"comment": ['say "hi"']},
    '#SBATCH --comment ""': {"comment": [""]},
    "#SBATCH --array               3-11": {"array": ["3-11"]},
    "#SBATCH -N2 -n 4 --mem=0": {"nodes": ["2"], "ntasks": ["4"], "mem": ["0"]},
    "#SBATCH --gres=gpu:h100:4": {"gres": ["gpu:h100:4"]},
    "#SBATCH --gpus-per-node=A40:1": {"gpus-per-node": ["A40:1"]},
    "#SBATCH --gpus 4": {"gpus": ["4"]},
    "#SBATCH --mem 190GB": {"mem": ["190GB"]},
    "#SBATCH --mem=10Gb": {"mem": ["10Gb"]},
    "#SBATCH --time=INFINITE": {"time": ["INFINITE"]},
    "#SBATCH -t 2-00:00": {"time": ["2-00:00"]},
    "#SBATCH -p big,batch": {"partition": ["big,batch"]},
    "#SBATCH --array=8,18,28": {"array": ["8,18,28"]},
    "#SBATCH --nodelist=c06b06n[01-02]": {"nodelist": ["c06b06n[01-02]"]},
    "#SBATCH --exclude=a,b-12": {"exclude": ["a,b-12"]},
    '#SBATCH --constraint="a|b"': {"constraint": ["a|b"]},
    "#SBATCH --signal=B:TERM@300": {"signal": ["B:TERM@300"]},
    "#SBATCH --mail-type=END --mail-type=FAIL": {"mail-type": ["END", "FAIL"]},
    "#SBATCH --tasks-per-node=4": {"ntasks-per-node": ["4"]},
    "#SBATCH --exclusive": {"exclusive": [""]},
    "#SBATCH --exclusive=user": {"exclusive": ["user"]},
    "#SBATCH --no-requeue": {"requeue": ["no"]},
    "#SBATCH --hint=nomultithread": {"hint": ["nomultithread"]},
    "#SBATCH -m block:block": {"distribution": ["block:block"]},
    "#HSUB -n4": {"ntasks": ["4"]},
    "##SBATCH --nodes=2": {},
    "# SBATCH --nodes=2": {},
    " #SBATCH --nodes=2": {},
    "#sbatch --nodes=2": {},
    "#SBATCH": {},
    "#SBATCH # --nodes=2": {},
}


@pytest.mark.parametrize(("line", "options"), LINES.items())
def test_a_line_asks_for(line: str, options: dict[str, list[str]]) -> None:
    assert read_script(f"#!/bin/sh\n{line}\necho\n").options == options


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("#SBATCH --nodse=2", "did you mean --nodes"),
        ("#SBATCH -Z", "cannot understand -Z"),
        ("#SBATCH 2 nodes", "'2': it is neither an option"),
        ("#SBATCHES", "'ES': it is neither an option"),
        ("#SBATCH nodes=2", "neither an option"),
        ("#SBATCH --nodes", "without a value"),
        ("#SBATCH --nodes=two", "cannot read node count 'two'"),
        ("#SBATCH --time=soon", "cannot read time 'soon'"),
        ("#SBATCH -J 'a b", "second ' of a pair"),
        ("#SBATCH --wrap=ls", "for the command line"),
        ("#SBATCH hetjob -n2", "neither an option"),
        ("#SBATCH --gres=fpga:2", "the only generic resources are gpu and shard"),
        ("#SBATCH --gres=gpu:2,VramPerGpu:24GB", "the only generic resources are gpu and shard"),
        ("#SBATCH --container-image=x", "containers are started in the script"),
        ("#SBATCH -F nodes.txt", "use --nodelist"),
        ("#SBATCH --hold=yes please", "takes none"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(line: str, why: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_script(f"#!/bin/sh\n\n{line}\n")
    assert str(refused.value).startswith("cannot read line 3 of the script, ")
    assert why in str(refused.value)


def test_lines_count_up_to_the_first_command() -> None:
    script = "#!/bin/bash\n# a comment\n#SBATCH -n1\n\n  # more\n#HSUB -N2\nset -e\n#SBATCH -n3\necho\n#HSUB --time=1\n#SBATCHY\n"
    found = read_script(script)
    assert found.options == {"ntasks": ["1"], "nodes": ["2"]}
    assert found.late_lines == (8, 10)


@pytest.mark.parametrize(
    ("line", "is_like_one"),
    [
        ("#SBTACH --nodes=2", True),
        ("# SBATCH -N2", True),
        ("#sbatch -N 2", True),
        ("#HSBU -N2", True),
        ("#SBATC\t--nodes=2", True),
        ("##SBATCH --nodes=2", False),  # the usual way to switch a line off
        ("#SBATCH --nodes=2", False),
        ("# patch -p1", False),
        ("# Note - a remark", False),
        ("# hsub -N2 is how I start this", True),
    ],
)
def test_a_comment_that_looks_like_a_directive_is_named(line: str, is_like_one: bool) -> None:
    assert read_script(f"#!/bin/sh\n{line}\nhostname\n{line}\n").misspelled_lines == ((2,) if is_like_one else ())


def test_a_later_line_wins_whichever_word_it_begins_with() -> None:
    found = read_script("#!/bin/sh\n#HSUB --time=1\n#SBATCH --time=2\n#HSUB --time=3\n")
    assert found.options == {"time": ["1", "2", "3"]}


def test_merge_markers_end_the_lines_that_count() -> None:
    found = read_script("#!/bin/sh\n#SBATCH -n1\n<<<<<<< HEAD\n#SBATCH -n2\n=======\n#SBATCH -n3\n")
    assert found.options == {"ntasks": ["1"]}
    assert found.late_lines == (4, 6)


def test_a_polyglots_comment_is_a_comment() -> None:
    assert read_script("#!/bin/bash\n#=\n#SBATCH -n1\nsrun julia $0\n=#\n").options == {"ntasks": ["1"]}


def test_a_script_may_end_within_its_lines() -> None:
    assert read_script("#!/bin/sh\n#SBATCH -n1").options == {"ntasks": ["1"]}
    assert read_script("").options == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" a  b ", ["a", "b"]),
        ("a'b c'd", ["ab cd"]),
        ("'' \"\"", ["", ""]),
        ("a\\#b '#' c#d e", ["a#b", "#", "c"]),
        ("'a\"b' \"c'd\"", ['a"b', "c'd"]),
        ("'it\\'s'", ["it's"]),
        ("a\\", ["a"]),
    ],
)
def test_words_are_split_as_sbatch_does(text: str, words: list[str]) -> None:
    assert split_directive(text) == words


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        (" \n\n", "it is empty"),
        ("echo hello\n", "This does not look like a batch script. The first line must start with #!"),
        ("\n#!/bin/sh\n", "This does not look like a batch script"),
        ("#!/bin/sh\r\necho\r\n", "DOS line breaks"),
        ("#!/bin/sh\necho \0\n", "NUL"),
        ("#!/bin/sh\n\n# caf\udce9\n", "line 3 is not UTF-8"),
        ("#!" + "x" * MAX_SCRIPT_BYTES, "the most is 4194304"),
    ],
)
def test_what_can_be_no_script_is_refused(text: str, why: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_script(text)
    assert str(refused.value).startswith("cannot submit the script: ")
    assert why in str(refused.value)


def test_scripts_that_can_be_pass() -> None:
    check_script("#!/bin/sh\n# caf\u00e9\necho 'a\rb'\n")
    check_script("#!" + "x" * (MAX_SCRIPT_BYTES - 2))
    check_script(wrap_script("echo $HOME && ls"))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("bit", ["a", " ", "#", "\\", "'", '"a" ', "--time=1 ", "-", "-Q", "\n", "#SBATCH\n", "#\n"])
def test_long_lines_need_no_long_work(bit: str) -> None:
    text = bit * (100_000 // len(bit))
    for script in ("#!/bin/sh\n#SBATCH " + text, "#!/bin/sh\n" + text, "#!/bin/sh\nx\n#SBATCH -" + text):
        try:
            read_script(script)
        except RequestError as refused:
            if len(str(refused)) > 1000:
                raise
