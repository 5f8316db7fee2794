"""A : B and ``#SBATCH hetjob``: what each component of a heterogeneous job asks for."""

from __future__ import annotations

import pytest
from submitted_words import built

from hpcsched.errors import RequestError
from hpcsched.jobscript.options import parse_command_line
from hpcsched.model.codec import spec_from_json, spec_to_json
from hpcsched.model.spec import JobSpec


def made(*argv: str, lines: str = "") -> JobSpec:
    script = "#!/bin/sh\n" + "".join(f"#SBATCH {line}\n" for line in lines.split(";") if line) + "true\n"
    return built(argv=(*argv, "job.sh", "an argument"), script=script).spec


def counts(spec: JobSpec) -> list[tuple[str, int, int | None, int]]:
    return [(one.name, one.nodes_min, one.ntasks, one.cpus_per_task) for one in (spec, *spec.components)]


def test_components_stand_between_colons() -> None:
    spec = made("-N2", "-c3", ":", "-n4", ":", "-Jlast", "-N3")
    assert counts(spec) == [("job.sh", 2, None, 3), ("job.sh", 1, 4, 1), ("last", 3, None, 1)]
    assert spec.script_args == ("an argument",)
    assert spec_from_json(spec_to_json(spec)) == spec


def test_what_the_command_does_may_stand_behind_any_colon() -> None:
    line = parse_command_line(["-N1", ":", "-N2", "--parsable", "--wait", ":", "--wrap", "hostname"])
    assert line.options == {"nodes": ["1"], "parsable": [""], "wait": [""], "wrap": ["hostname"]}
    assert line.further == ({"nodes": ["2"]}, {})


@pytest.mark.parametrize("word", ["hetjob", "packjob"])
def test_components_stand_below_lines_of_the_script(word: str) -> None:
    spec = made(lines=f"-Jone -N2;{word};-n4;-c2;{word};-N3 -Jthree")
    assert counts(spec) == [("one", 2, None, 1), ("one", 1, 4, 2), ("three", 3, None, 1)]


def test_the_command_line_wins_component_by_component() -> None:
    assert counts(made("-Jx", ":", "-n8", lines="-N2;hetjob;-n4 -c2")) == [("x", 2, None, 1), ("x", 1, 8, 2)]


def test_what_concerns_the_whole_job_is_said_once() -> None:
    lines = "-t5 -p a --output=x;hetjob;-t5 -p a --output=y --comment=z"
    spec = made(lines=lines)
    assert (spec.time_limit_s, spec.partition, spec.stdout) == (300, "a", "x")
    assert spec.components[0] == made(lines="hetjob").components[0]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("-t5;hetjob;-t6", "component 1 of the job: cannot give it its own --time"),
        ("hetjob;hetjob;-p a", "component 2 of the job: cannot give it its own --partition"),
        ("hetjob;-n4 -N0", "line 3 of the script"),
        ("hetjob;-L matlab", "its own --licenses"),
        ("-a 1-3;hetjob", "cannot submit an array of heterogeneous jobs"),
        ("--elastic -N1-2;hetjob", "leave out --elastic"),
        ("--switches=1;hetjob", "cannot keep component 0 within switches"),
        ("hetjob;" * 128, "the most is 128"),
        ("hetjob;-w n1 -x n1", "cannot use node n1"),
    ],
)
def test_what_a_component_cannot_have_is_refused(lines: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        made(lines=lines)
