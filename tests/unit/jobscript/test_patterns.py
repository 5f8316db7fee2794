"""File-name patterns: what they become, and what they can never become."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.jobscript.patterns import (
    PatternFacts,
    default_output,
    expand_job_pattern,
    expand_task_pattern,
    safe_name,
)

JOB = PatternFacts(job_id=128, name="train", user="ann")
TASK = PatternFacts(job_id=130, name="train", user="ann", array_job_id=128, array_task_id=3)
STEP = PatternFacts(job_id=128, name="train", user="ann", step=2)


def filled(pattern: str, facts: PatternFacts) -> str:
    return expand_task_pattern(expand_job_pattern(pattern, facts), task=4, node_rank=1, node="n2.lab")


@pytest.mark.parametrize(
    ("pattern", "facts", "name"),
    [
        ("slurm-%j.out", JOB, "slurm-128.out"),
        ("%A/%A_%a_%x", TASK, "128/128_3_train"),
        ("%j", TASK, "130"),
        ("%a", JOB, "4294967294"),
        ("%A", JOB, "128"),
        ("%5j_%03a", TASK, "00130_003"),
        ("%20j", JOB, "0000000128"),
        ("%5x", JOB, "train"),
        ("%J %s", JOB, "128 batch"),
        ("%J.%s.%t", STEP, "128.2.2.4"),
        ("%u/%N/%n-%03t", JOB, "ann/n2/1-004"),
        ("100%%-%j", JOB, "100%-128"),
        ("%%j", JOB, "%j"),
        ("%%%j", JOB, "%128"),
        ("a\\%j", JOB, "a%j"),
        ("%q-%", JOB, "%q-%"),
        ("%5", JOB, "%5"),
        ("plain", JOB, "plain"),
    ],
)
def test_a_pattern_is_filled_in(pattern: str, facts: PatternFacts, name: str) -> None:
    assert filled(pattern, facts) == name


def test_what_differs_from_task_to_task_is_left_to_the_node() -> None:
    left = expand_job_pattern("%x-%j-%3t-%n-%N-%%", JOB)
    assert left == "train-128-%3t-%n-%N-%%"


def test_the_default_names_are_slurms() -> None:
    assert (default_output(JOB), default_output(TASK)) == ("slurm-%j.out", "slurm-%A_%a.out")


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "..",
        ".",
        "/abs",
        "a\nb",
        "a\0b",
        "%t",
        "%%%n%s",
        "\x1b[31mred",
        "$(id)",
        "x" * 4096,
        "-rf",
        "",
    ],
)
def test_a_hostile_name_stays_one_part_of_a_path(name: str) -> None:
    facts = PatternFacts(job_id=1, name=name, user=name)
    found = filled("out/%x/%u.log", facts)
    folder, part, file = found.split("/")
    assert folder == "out"
    assert part not in (".", "..")
    assert file.endswith(".log")
    assert len(part) <= 255
    assert not any(char < " " for char in found)
    if "%" in name:
        assert part == name


@given(st.text("%jAaxNntuJs\\05/.\n", max_size=20), st.text(max_size=10))
def test_no_value_is_taken_for_a_pattern_and_none_adds_a_directory(pattern: str, name: str) -> None:
    found = filled(pattern, PatternFacts(job_id=1, name=name, user=name))
    assert found.count("/") == pattern.count("/")
    plain = filled(pattern, PatternFacts(job_id=1, name="x", user="x"))
    if "x" not in plain:
        assert found == plain


def test_safe_names_keep_what_is_harmless() -> None:
    assert safe_name("train v2.1 (caf\u00e9)") == "train v2.1 (caf\u00e9)"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("bit", ["a", "%", "%x", "%1", "%%", "\\"])
def test_long_patterns_need_no_long_work(bit: str) -> None:
    assert filled(bit * (100_000 // len(bit)), JOB)[:1] != "\0"
