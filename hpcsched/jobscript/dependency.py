"""``--dependency``: the jobs that a job waits for, parsed and formatted.

Knows no jobs. Rules: of terms joined by ``,`` all must be satisfied, of terms joined by ``?`` one; ``after:12+5`` is five
minutes after the start of 12, ``afterok:12_3`` is about that task of array 12 alone. The number of jobs is bounded. Source:
sbatch(1), --dependency.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from hpcsched.errors import RequestError
from hpcsched.jobscript.values import short
from hpcsched.model.spec import Dependency, DependencyKind, JobSpec
from hpcsched.model.text import whole_number
from hpcsched.model.units import MINUTE_S

MAX_DEPENDENCIES = 1_000

_JOB_ID = re.compile(r"([0-9]{1,18})(?:_([0-9]{1,9}))?(?:\+([0-9]{1,7}))?\Z")


def parse_dependency(text: str) -> tuple[tuple[Dependency, ...], bool]:
    """Return the terms of ``afterok:12:13,after:14+5``, and whether one of them is enough (joined by ``?``)."""
    any_one = "?" in text
    if any_one and "," in text:
        raise RequestError(f"cannot read dependency {short(text)}: join terms by ',' (all) or by '?' (any), not both")
    terms = [term.strip() for term in text.split("?" if any_one else ",")]
    if terms == [""]:
        return (), False
    if text.count(":") + len(terms) > 2 * MAX_DEPENDENCIES:
        raise RequestError(f"cannot make a job depend on more than {MAX_DEPENDENCIES} others")
    dependencies = [dependency for term in terms for dependency in _dependency_term(term, text)]
    if sum(len(one.job_ids) or 1 for one in dependencies) > MAX_DEPENDENCIES:
        raise RequestError(f"cannot make a job depend on more than {MAX_DEPENDENCIES} others")
    return tuple(dependencies), any_one


def with_job_ids(text: str, find: Callable[[str], int]) -> str:
    """Return a dependency's `text` with the names of jobs, and ``last``, replaced by the ids that `find` returns."""
    parts = re.split(r"([,?:+])", text)
    for at in range(2, len(parts), 2):
        word = parts[at].strip()
        if parts[at - 1] == ":" and word and not _JOB_ID.match(word):
            parts[at] = str(find(word))
    return "".join(parts)


def checked_dependency(text: str) -> str:
    """Return `text` if it reads as a dependency, whichever job a name in it means. Raises RequestError."""
    parse_dependency(with_job_ids(text, lambda name: 1))
    return text


def _dependency_term(term: str, text: str) -> list[Dependency]:
    """Return one term as dependencies: one for each delay and task that it names."""
    word, *ids = term.split(":")
    try:
        kind = DependencyKind(word.strip().lower())
    except ValueError:
        known = ", ".join(DependencyKind)
        raise RequestError(f"cannot read dependency {short(text)}: {short(word)} is none of {known}") from None
    if kind is DependencyKind.SINGLETON:
        if ids:
            raise RequestError(f"cannot read dependency {short(text)}: singleton takes no job ids")
        return [Dependency(kind=kind)]
    if not ids:
        raise RequestError(f"cannot read dependency {short(text)}: {word} needs job ids, as {word}:12:13")
    alike: dict[tuple[int, int | None], list[int]] = {}
    for word in ids:
        job_id, task, delay_s = _dependency_id(word, kind, text)
        alike.setdefault((delay_s, task), []).append(job_id)
    return [
        Dependency(kind=kind, job_ids=tuple(found), delay_s=delay, task=task) for (delay, task), found in alike.items()
    ]


def _dependency_id(word: str, kind: DependencyKind, text: str) -> tuple[int, int | None, int]:
    """Return job (or array) id, task and delay of ``12_3+5``."""
    match = _JOB_ID.match(word.strip())
    if match is None or whole_number(match.group(1)) == 0:
        raise RequestError(f"cannot read dependency {short(text)}: {short(word)} is not a job id, as 12 or 12_3")
    if match.group(3) and kind is not DependencyKind.AFTER:
        raise RequestError(f"cannot read dependency {short(text)}: only after takes +minutes")
    task = whole_number(match.group(2)) if match.group(2) else None
    return whole_number(match.group(1)), task, whole_number(match.group(3) or "0") * MINUTE_S


def dependency_text(spec: JobSpec) -> str:
    """Return the dependencies of `spec` as squeue's %E shows them: ``afterok:12:13,after:14+5``; "" for none."""
    return terms_text(spec.dependency, any_one=spec.dependency_any)


def terms_text(terms: Iterable[Dependency], *, any_one: bool) -> str:
    """Return the terms as they are written: joined by ``?`` if any one of them is enough."""
    return ("?" if any_one else ",").join(map(_term_text, terms))


def _term_text(one: Dependency) -> str:
    task = f"_{one.task}" if one.task is not None else ""
    delay = f"+{one.delay_s // MINUTE_S}" if one.delay_s else ""
    return ":".join([one.kind.value, *(f"{job_id}{task}{delay}" for job_id in one.job_ids)])
