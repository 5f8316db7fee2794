"""``--dependency``: after what a job may start, read from its text and written back.

Knows no jobs. Rules: terms joined by ``,`` must all come true, by ``?`` one of them; ``after:12+5`` is five minutes after the
start of 12. How many jobs are named is bounded. Source: sbatch(1), --dependency.
"""

from __future__ import annotations

from hpcsched.errors import RequestError
from hpcsched.jobscript.values import short
from hpcsched.model.pattern import Pattern
from hpcsched.model.spec import Dependency, DependencyKind, JobSpec
from hpcsched.model.units import MINUTE_S

MAX_DEPENDENCIES = 1_000

_JOB_ID = Pattern(r"([0-9]{1,18})(?:\+([0-9]{1,7}))?\Z")


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


def _dependency_term(term: str, text: str) -> list[Dependency]:
    """Return one term as dependencies: one for each delay that it names."""
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
    by_delay: dict[int, list[int]] = {}
    for word in ids:
        job_id, delay_s = _dependency_id(word, kind, text)
        by_delay.setdefault(delay_s, []).append(job_id)
    return [Dependency(kind=kind, job_ids=tuple(found), delay_s=delay) for delay, found in by_delay.items()]


def _dependency_id(word: str, kind: DependencyKind, text: str) -> tuple[int, int]:
    match = _JOB_ID.match(word.strip())
    if match is None and "_" in word:
        raise RequestError(f"cannot depend on {short(word)}: name the whole array, {short(word.partition('_')[0])}")
    if match is None or int(match.group(1)) == 0:
        raise RequestError(f"cannot read dependency {short(text)}: {short(word)} is no job id")
    if match.group(2) and kind is not DependencyKind.AFTER:
        raise RequestError(f"cannot read dependency {short(text)}: only after takes +minutes")
    return int(match.group(1)), int(match.group(2) or 0) * MINUTE_S


def dependency_text(spec: JobSpec) -> str:
    """Return the dependencies of `spec` as squeue's %E shows them: ``afterok:12:13,after:14+5``; "" for none."""
    return ("?" if spec.dependency_any else ",").join(map(_term_text, spec.dependency))


def _term_text(one: Dependency) -> str:
    delay = f"+{one.delay_s // MINUTE_S}" if one.delay_s else ""
    return ":".join([one.kind.value, *(f"{job_id}{delay}" for job_id in one.job_ids)])
