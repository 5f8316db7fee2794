"""hsub's words, its environment, and which of them wins over a script's lines."""

from __future__ import annotations

import pytest

from hpcsched.errors import RequestError
from hpcsched.jobscript.options import (
    ALL_OPTIONS,
    OPTIONS,
    Use,
    by_name,
    by_short,
    environment_options,
    find_option,
    is_set,
    last,
    merge_layers,
    parse_command_line,
)


@pytest.mark.parametrize(
    ("words", "options", "script", "args"),
    [
        ([], {}, None, ()),
        (["job.sh"], {}, "job.sh", ()),
        (["-N2", "-n", "4", "job.sh", "-n", "8", "--x"], {"nodes": ["2"], "ntasks": ["4"]}, "job.sh", ("-n", "8", "--x")),
        (["--nodes", "2-4", "--time=5", "a.sh"], {"nodes": ["2-4"], "time": ["5"]}, "a.sh", ()),
        (["-HQ", "-HN2"], {"quiet": [""], "hold": ["", ""], "nodes": ["2"]}, None, ()),
        (["-vvW", "j"], {"verbose": ["", ""], "wait": [""]}, "j", ()),
        (["--", "-n"], {}, "-n", ()),
        (["-"], {}, "-", ()),
        (["--wrap=echo -n"], {"wrap": ["echo -n"]}, None, ()),
        (["--wrap", "--help me"], {"wrap": ["--help me"]}, None, ()),
        (["--dep", "afterok:1", "--part=x"], {"dependency": ["afterok:1"], "partition": ["x"]}, None, ()),
        (["--exclusive", "a"], {"exclusive": [""]}, "a", ()),
        (["--nice", "5"], {"nice": ["100"]}, "5", ()),
        (["--nice=5"], {"nice": ["5"]}, None, ()),
        (["--requeue", "--no-requeue"], {"requeue": ["no"]}, None, ()),
        (["--tasks=3"], {"ntasks": ["3"]}, None, ()),
        (["--comment="], {"comment": [""]}, None, ()),
    ],
)  # fmt: skip
def test_words_are_read_as_getopt_reads_them(
    words: list[str], options: dict[str, list[str]], script: str | None, args: tuple[str, ...]
) -> None:
    found = parse_command_line(words)
    assert (found.options, found.script, found.args) == (options, script, args)


def test_of_requeue_and_its_opposite_the_last_wins() -> None:
    assert not is_set(parse_command_line(["--requeue", "--no-requeue"]).options, "requeue")
    assert is_set(parse_command_line(["--no-requeue", "--requeue"]).options, "requeue")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--nodse=3"], "cannot understand --nodse: no such option; did you mean --nodes"),
        (["--partiton", "x"], "did you mean --partition"),
        (["--colour"], "no such option"),
        (["-Z"], "cannot understand -Z: no such option"),
        (["-j"], "did you mean -J (--job-name)?"),
        (["--n=3"], "cannot tell which option --n is: it could be"),
        (["--exclu"], "it could be --exclude, --exclusive"),
        (["--time"], "without a value: write -t, --time=TIME"),
        (["-Nt"], "cannot read node count 't'"),
        (["-N"], "cannot take -N without a value"),
        (["--hold=yes"], "cannot give --hold the value 'yes'"),
        (["--uid=x"], "a job runs as its submitter"),
        (["-L", "x:0"], "must be 1 to"),
        (["-L", "x,x:2"], "names x twice"),
        (["-L", "a/b"], "write NAME or NAME:COUNT"),
        (["--wrap=ls", "job.sh"], "beside --wrap"),
        (["--="], "no such option"),
        (["--job-name=a\nb"], "control characters"),
    ],
)
def test_wrong_words_are_refused_with_a_way_out(words: list[str], why: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_command_line(words)
    assert str(refused.value).startswith("cannot ")
    assert why in str(refused.value)


def test_the_command_line_wins_over_the_environment_and_that_over_the_script() -> None:
    script = {"time": ["1"], "partition": ["script"], "nodes": ["1"], "account": ["script"]}
    environ = {
        "SBATCH_TIMELIMIT": "2", "SBATCH_PARTITION": "slurms", "HSUB_PARTITION": "ours", "SBATCH_ACCOUNT": "slurms",
        "SBATCH_NODES": "7", "SBATCH_QOS": "",
    }  # fmt: skip
    words = parse_command_line(["--time=3"]).options
    merged = merge_layers(script, environment_options(environ), words)
    assert merged == {"time": ["3"], "partition": ["ours"], "nodes": ["1"], "account": ["slurms"]}


@pytest.mark.parametrize(
    ("environ", "options"),
    [
        ({"SBATCH_REQUEUE": ""}, {"requeue": [""]}),
        ({"SBATCH_NO_REQUEUE": "0"}, {"requeue": ["no"]}),
        ({"SBATCH_EXCLUSIVE": ""}, {"exclusive": [""]}),
        ({"SBATCH_WAIT": "1"}, {"wait": [""]}),
        ({"SBATCH_WAIT": "0"}, {}),
        ({"SBATCH_MEM_PER_NODE": "4G"}, {"mem": ["4G"]}),
        ({"HSUB_LEASE": "kill"}, {"lease": ["kill"]}),
        ({"SBATCH_ARRAY_INX": "1-3"}, {"array": ["1-3"]}),
        ({"SLURM_TIMELIMIT": "5", "HSUB_NONSENSE": "1", "HSUB_HELP": "1"}, {}),
    ],
)
def test_variables_give_options(environ: dict[str, str], options: dict[str, list[str]]) -> None:
    assert environment_options(environ) == options


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(RequestError, match="cannot use SBATCH_TIMELIMIT='soon': cannot read time"):
        environment_options({"SBATCH_TIMELIMIT": "soon"})


def test_memory_options_exclude_each_other_within_a_layer_and_replace_across() -> None:
    assert merge_layers({"mem-per-cpu": ["1G"]}, {"mem": ["4G"]}) == {"mem": ["4G"]}
    with pytest.raises(RequestError, match="cannot take both --mem and --mem-per-cpu"):
        merge_layers({"mem": ["1"], "mem-per-cpu": ["1"]})


def test_only_mail_types_add_up() -> None:
    merged = merge_layers({"mail-type": ["END"], "time": ["1"]}, {"mail-type": ["FAIL"], "time": ["2"]})
    assert merged == {"mail-type": ["END", "FAIL"], "time": ["2"]}
    assert last(merged, "time") == "2"
    assert last(merged, "qos") is None


def test_the_table_is_sound() -> None:
    names = [name for option in ALL_OPTIONS for name in (option.name, *option.aliases)]
    letters = [option.short for option in ALL_OPTIONS if option.short]
    assert len(names) == len(set(names))
    assert len(letters) == len(set(letters))
    for option in ALL_OPTIONS:
        assert option.help, option.name
        assert not option.sets or option.sets in names
        if option.bare is not None and option.use is Use.JOB:
            option.parse(option.bare)
    assert by_short()["N"] is by_name()["nodes"] is find_option("nodes")
    assert [option.name for option in OPTIONS if option.use in (Use.NOTED, Use.REFUSED)] == []


USED = (
    "parsable", "wrap", "W", "wait", "J", "job-name", "o", "output", "e", "error", "i", "input", "p", "partition",
    "A", "account", "t", "time", "N", "nodes", "n", "ntasks", "c", "cpus-per-task", "ntasks-per-node",
    "tasks-per-node", "mem", "mem-per-cpu", "gres", "gpus", "G", "gpus-per-node", "gpus-per-task", "a", "array",
    "d", "dependency", "D", "chdir", "export", "signal", "requeue", "no-requeue", "open-mode", "w", "nodelist", "x",
    "exclude", "C", "constraint", "exclusive", "comment", "mail-type", "mail-user", "H", "hold", "b", "begin",
    "nice", "qos", "q", "wckey", "cpu-bind", "hint", "mem-per-gpu", "cpus-per-gpu", "threads-per-core",
    "get-user-env", "clusters", "M", "wait-all-nodes", "overcommit", "distribution", "propagate", "unbuffered",
    "spread-job", "switches", "profile", "acctg-freq", "core-spec", "kill-on-invalid-dep",
)  # fmt: skip


def test_what_slurm_users_write_most_is_known() -> None:
    """The options that sbatch must have, and those that may have no effect, with their letters."""
    for word in USED:
        option = by_short()[word] if len(word) == 1 else by_name()[word]
        assert option.use is not Use.REFUSED


@pytest.mark.timeout(30)
def test_long_words_need_no_long_work() -> None:
    for word in ("a" * 100_000, "--" + "a" * 100_000, "-" + "Q" * 100_000, "-" + "a" * 100_000, "--" + "=" * 100_000):
        try:
            parse_command_line([word])
        except RequestError as refused:
            if len(str(refused)) > 1000:
                raise
