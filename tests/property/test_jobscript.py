"""Lines, words and variables: what is quoted is read back, and what is read is a job or a refusal in words."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.errors import RequestError
from hpcsched.jobscript.build import build_spec, check_spec
from hpcsched.jobscript.options import ALL_OPTIONS, environment_options, merge_layers, parse_command_line
from hpcsched.jobscript.script import read_script, split_directive
from hpcsched.model.codec import spec_from_json, spec_to_json
from hpcsched.model.spec import JobSpec

WORDS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\0"), max_size=8), max_size=5)
VALUES = st.sampled_from(
    [
        "",
        "1",
        "2-4",
        "4G",
        "0",
        "a",
        "a:2",
        "gpu:1",
        "gpu:a100:2",
        "1-9%3",
        "afterok:1",
        "1:00:00",
        "n[1-3]",
        "USR1@9",
        "a&b",
    ]
)
GIVEN = st.lists(st.tuples(st.sampled_from([option.name for option in ALL_OPTIONS]), VALUES), max_size=5)


def quoted(word: str, style: int) -> str:
    if style == 0:
        return "".join("\\" + char for char in word) or "''"
    mark = "'\""[style - 1]
    return mark + word.replace("\\", "\\\\").replace(mark, "\\" + mark) + mark


@given(WORDS, st.integers(0, 2))
def test_quoted_words_are_read_back(words: list[str], style: int) -> None:
    assert split_directive(" ".join(quoted(word, style) for word in words) + " # done") == words


@given(st.text("#SBATCHU -=N1\n'\"\\x", max_size=60))
def test_any_script_is_read_or_refused(text: str) -> None:
    refusal = refusal_of_script(text)
    assert refusal == "" or refusal.startswith("cannot ")


def refusal_of_script(text: str) -> str:
    try:
        read_script(text)
    except RequestError as refused:
        return str(refused)
    return ""


def built(given: list[tuple[str, str]]) -> JobSpec | str:
    try:
        words = [f"--{name}={value}" if value else f"--{name}" for name, value in given]
        options = merge_layers(environment_options({}), parse_command_line(words).options)
        return build_spec(
            options, script="#!/bin/sh\n", default_name="x", work_dir="/w", environ={"A": "1"}, now_s=1_800_000_000.0
        ).spec
    except RequestError as refused:
        return str(refused)


@settings(max_examples=300)
@given(GIVEN)
def test_any_options_make_a_sound_job_or_a_refusal(given: list[tuple[str, str]]) -> None:
    made = built(given)
    if isinstance(made, str):
        assert made.startswith("cannot ")
    else:
        check_spec(made)
        assert spec_from_json(spec_to_json(made)) == made


@given(st.lists(st.tuples(st.sampled_from(["time", "mem", "qos", "nodes"]), st.sampled_from("123")), max_size=6))
def test_the_last_of_an_option_counts_wherever_it_stands(given: list[tuple[str, str]]) -> None:
    lines = "".join(f"#SBATCH --{name}={value}\n" for name, value in given[:3])
    words = parse_command_line([f"--{name}={value}" for name, value in given[3:]]).options
    merged = merge_layers(read_script("#!/bin/sh\n" + lines).options, words)
    assert {name: values[-1] for name, values in merged.items()} == dict(given)
