"""Parse the values of single options: node counts, arrays, GPUs, mail types.

Every parser is linear in its text, bounded in its result, and raises RequestError with the text, the reason and a valid example.
Sources: sbatch(1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from hpcnode.os import rlimits
from hpcsched.errors import RequestError
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.ids import NODE_NAME, NodeName
from hpcsched.model.node import ANY_GPU, GpuRequest
from hpcsched.model.spec import ArraySpec, Dependency, DependencyKind, SignalSpec
from hpcsched.model.units import MINUTE_S, UNLIMITED_S, parse_mem_mib, parse_signal, parse_time_s, whole_number

MAX_COUNT = 1_000_000  # of nodes, tasks, cpus
MAX_ARRAY_TASKS = 100_000
MAX_ARRAY_INDEX = 4_000_000
MAX_LICENSES = 100
HINTS = ("synchronous", "comm_bound")
_SLURM_HINTS = ("compute_bound", "memory_bound", "multithread", "nomultithread")
MAX_NICE = 2_147_483_645
MAX_PRIORITY = 4_294_967_294

_NODES = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?\Z")
_ARRAY_PART = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12})(?::([0-9]{1,12}))?)?\Z")
GPU_TYPE = re.compile(r"(?=[0-9_.-]*[A-Za-z])[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")  # a100, or MIG's 1g.10gb
_LICENSE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,62})(?::([0-9]{1,9}))?\Z")
_LEVEL = r"(?:block|cyclic|fcyclic|\*)"
_DISTRIBUTION = re.compile(rf"(?:(block|cyclic|\*)|plane=([0-9]{{1,9}}))(?::{_LEVEL}){{0,2}}(?:,(?:pack|nopack))?\Z")
_SIGNAL = re.compile(r"(?:([rbRB]{1,2}):)?([A-Za-z0-9]{1,12})(?:@([0-9]{1,6}))?\Z")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}\Z")

# fmt: off
MAIL_TYPES = (
    "NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT", "TIME_LIMIT_90",
    "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS",
)
# fmt: on


def parse_signal_spec(text: str) -> SignalSpec:
    """Return the value of ``--signal=[B:]SIG[@seconds]``.

    The default is 60 s before the limit. Raises RequestError.
    """
    match = _SIGNAL.match(text.strip())
    if match is None:
        raise RequestError(f"cannot read --signal={short(text)}: write [B:]SIGNAL[@seconds], as B:USR1@120")
    flags, name, before = match.groups()
    before_s = 60 if before is None else int(before)  # int: bounded
    if before_s > 65_535:
        raise RequestError(f"cannot send a signal {before_s} seconds before the limit: the most is 65535")
    return SignalSpec(signum=parse_signal(name), before_s=before_s, batch_only="B" in (flags or "").upper())


def parse_distribution(text: str) -> int | None:
    """Return how many tasks ``--distribution`` deals to each node in turn; None: blocks."""
    found = _DISTRIBUTION.match(text.strip().lower())
    if found is None:
        raise RequestError(
            f"cannot read --distribution={short(text)}: write block, cyclic or plane=N, and those of sockets and cores "
            "behind it: block:cyclic:fcyclic"
        )
    if found[2]:
        return parse_count(found[2])
    return 1 if found[1] == "cyclic" else None


def parse_distribution_text(text: str) -> str:
    """Return a ``--distribution``: block, cyclic:block, plane=N or arbitrary.

    This is the value of its variable.

    Tasks are not bound to sockets and cores, so the levels behind the first only show.
    """
    if text.strip().lower().partition(":")[0].partition(",")[0] == "arbitrary":
        return "arbitrary"
    plane = parse_distribution(text)
    kinds = text.strip().lower().partition(",")[0].split(":")[1:]
    levels = [{"*": "cyclic"}.get(kind, kind) for kind in kinds]
    return ":".join(["block" if plane is None else "cyclic", *levels]) if plane in (None, 1) else f"plane={plane}"


def parse_count(text: str) -> int:
    """Return a number of tasks, cpus or the like: 1 to `MAX_COUNT`."""
    number = parse_integer(text)
    if not 1 <= number <= MAX_COUNT:
        raise RequestError(f"cannot take {text.strip()}: it must be 1 to {MAX_COUNT}")
    return number


def parse_integer(text: str) -> int:
    """Return the whole number that `text` is."""
    if _INTEGER.match(text.strip()) is None:
        raise RequestError(f"cannot read {short(text)}: it is not a whole number")
    return whole_number(text.strip())


def parse_nodes(text: str) -> tuple[int, int]:
    """Return the fewest and the most nodes of ``--nodes=4`` or ``--nodes=2-4``."""
    match = _NODES.match(text.strip())
    if match is None:
        raise RequestError(f"cannot read node count {short(text)}: write 4 or 2-4")
    low, high = whole_number(match.group(1)), whole_number(match.group(2) or match.group(1))
    if not 1 <= low <= high <= MAX_COUNT:
        raise RequestError(f"cannot give a job {text.strip()} nodes: write 4 or 2-4, from 1 up")
    return low, high


def parse_limit_s(text: str) -> int:
    """Return a job's time limit in seconds; 0 and UNLIMITED are `UNLIMITED_S`."""
    return parse_time_s(text) or UNLIMITED_S


def parse_node_memory(text: str) -> int:
    """Return MiB; 0 is all of a node's memory."""
    return parse_mem_mib(text)


def parse_node_names(text: str) -> tuple[NodeName, ...]:
    """Return the nodes of a host list, each once.

    Which of them exist is for the controller to say.
    """
    names = tuple(dict.fromkeys(expand_hostlist(text)))
    for name in names:
        if NODE_NAME.match(name) is None:
            raise RequestError(f"cannot read node list {short(text)}: {short(name)} cannot be a node's name")
    return tuple(NodeName(name) for name in names)


def parse_array(text: str) -> ArraySpec:
    """Return the tasks of ``0-15``, ``1,3,5-7`` or ``0-15:4``.

    ``%2`` at the end runs two at a time.

    The number of tasks is known, and refused if it is too large, before they are made.
    """
    indices_text, percent, limit_text = text.strip().partition("%")
    limit = parse_integer(limit_text) if percent else 0
    if not 0 <= limit <= MAX_COUNT:
        raise RequestError(f"cannot run {limit} array tasks at a time: it must be 1 to {MAX_COUNT}")
    if indices_text.startswith("[") and indices_text.endswith("]"):
        indices_text = indices_text[1:-1]
    if len(indices_text) > 1 << 20:
        raise RequestError(f"cannot read array {short(text)}: it is {len(indices_text)} characters long")
    ranges = [_array_range(part, text) for part in indices_text.split(",")]
    count = sum(map(len, ranges))
    if count > MAX_ARRAY_TASKS:
        raise RequestError(f"cannot make array {short(text)}: it has {count} tasks, the most is {MAX_ARRAY_TASKS}")
    return ArraySpec(indices=tuple(sorted(set(chain.from_iterable(ranges)))), limit=limit)


def _array_range(part: str, text: str) -> range:
    match = _ARRAY_PART.match(part.strip())
    if match is None:
        raise RequestError(
            f"cannot read array {short(text)}: {short(part)} is not an index, write 0-15, 1,3,5 or 0-15:4%2"
        )
    first, last, step = match.groups()
    low, high, stride = whole_number(first), whole_number(last or first), whole_number(step or "1")
    if high < low or stride < 1:
        raise RequestError(f"cannot read array {short(text)}: {short(part)} has no tasks")
    if high > MAX_ARRAY_INDEX:
        raise RequestError(f"cannot make array {short(text)}: index {high} is above the largest, {MAX_ARRAY_INDEX}")
    return range(low, high + 1, stride)


def parse_gpus(text: str) -> tuple[GpuRequest, ...]:
    """Return the GPUs of ``2``, ``a100:2`` or ``a100:1,v100:2``."""
    requests = []
    for item in text.strip().split(","):
        kind, colon, count = item.strip().rpartition(":")
        if not colon and not count.isdigit():
            kind, colon, count = count, ":", "1"
        if colon and not kind:
            raise RequestError(f"cannot read GPUs {short(text)}: write 2, a100 or a100:2")
        requests.append(_gpu_request(kind, count, text))
    return _summed(requests, text)


class Gres(NamedTuple):
    """What ``--gres`` asks of each node: whole GPUs, or shards of one."""

    gpus: tuple[GpuRequest, ...] = ()
    shards: tuple[GpuRequest, ...] = ()


def parse_gres(text: str) -> Gres:
    """Return the GPUs per node of ``gpu``, ``gpu:a100:2``, ``shard:2``; ``none`` is none.

    There are no other generic resources: one is refused by its name.
    """
    if text.strip().lower() in ("none", ""):
        return Gres()
    asked: dict[str, list[GpuRequest]] = {"gpu": [], "shard": []}
    for item in text.strip().split(","):
        name, *parts = item.strip().removeprefix("gres/").removeprefix("gres:").split(":")
        if name.lower() not in asked:
            raise RequestError(
                f"cannot give a job {short(item.strip())}: the only generic resources are gpu and shard (a part of a GPU)"
            )
        count = parts.pop() if parts and parts[-1].isdigit() else "1"
        if len(parts) > 1 or parts == [""]:
            raise RequestError(f"cannot read {short(item)}: write {name}:2, {name}:a100 or {name}:a100:2")
        asked[name.lower()].append(_gpu_request(parts[0] if parts else ANY_GPU, count, text))
    if asked["gpu"] and asked["shard"]:
        raise RequestError(f"cannot give a job {short(text)}: whole GPUs and shards of one exclude each other")
    if len(asked["shard"]) > 1:
        raise RequestError(f"cannot give a job {short(text)}: shards come from one GPU of a node, so of one type")
    return Gres(_summed(asked["gpu"], text), _summed(asked["shard"], text))


def _gpu_request(kind: str, count: str, text: str) -> GpuRequest:
    if kind != ANY_GPU and GPU_TYPE.match(kind) is None:
        raise RequestError(f"cannot read GPUs {short(text)}: {short(kind)} is not a GPU type; write 2 or a100:2")
    if not (count.isascii() and count.isdigit()) or len(count) > 6:
        raise RequestError(f"cannot read GPUs {short(text)}: {short(count)} is not a number; write 2 or a100:2")
    return GpuRequest(count=whole_number(count), type=kind)


def _summed(requests: list[GpuRequest], text: str) -> tuple[GpuRequest, ...]:
    """Return `requests` without those for none of a type; each type may be named once."""
    if len({request.type for request in requests}) < len(requests):
        raise RequestError(f"cannot read GPUs {short(text)}: a type is named twice")
    return tuple(request for request in requests if request.count)


def parse_licenses(text: str) -> tuple[tuple[str, int], ...]:
    """Return the licences of ``--licenses=matlab:2,stata``; the default count is 1."""
    found: dict[str, int] = {}
    for part in text.split(","):
        match = _LICENSE.match(part.strip())
        if match is None or len(found) >= MAX_LICENSES:
            raise RequestError(f"cannot read --licenses={short(text)}: write NAME or NAME:COUNT, joined by commas")
        name, count = match.group(1), whole_number(match.group(2) or "1")
        if not 1 <= count <= MAX_COUNT:
            raise RequestError(f"cannot read --licenses={short(text)}: the count of {name} must be 1 to {MAX_COUNT}")
        if name in found:
            raise RequestError(f"cannot read --licenses={short(text)}: it names {name} twice")
        found[name] = count
    return tuple(found.items())


def parse_switches(text: str) -> tuple[int, int | None]:
    """Return the maximum number of switches, and of seconds to wait, of ``2@30:00``.

    None: no wait is given.
    """
    count, at, limit = text.partition("@")
    return parse_count(count), parse_time_s(limit, whole_minutes=False) or UNLIMITED_S if at else None


def parse_hints(text: str) -> tuple[str, ...]:
    """Return the hints that have an effect; Slurm's own hints are about cores."""
    hints = tuple(dict.fromkeys(word.strip().lower() for word in text.split(",")))
    for hint in hints:
        if hint not in (*HINTS, *_SLURM_HINTS):
            raise RequestError(f"cannot take hint {short(hint)}: write {' or '.join(HINTS)} (or one of Slurm's)")
    return tuple([hint for hint in hints if hint in HINTS])


def parse_mail_types(text: str) -> tuple[str, ...]:
    """Return the events of which to send mail."""
    types = [word.strip().upper() for word in text.split(",")]
    for word in types:
        if word not in MAIL_TYPES:
            raise RequestError(f"cannot send mail of {short(word)}: write one of {', '.join(MAIL_TYPES)}")
    return tuple(dict.fromkeys(types))


def parse_nice(text: str) -> int:
    """Return how much to lower the priority by; without a number, 100."""
    nice = parse_integer(text or "100")
    if abs(nice) > MAX_NICE:
        raise RequestError(f"cannot set nice to {nice}: it must be within +/- {MAX_NICE}")
    return nice


def parse_priority(text: str) -> int:
    """Return a fixed priority, or the highest one for TOP."""
    priority = MAX_PRIORITY if text.strip().upper() == "TOP" else parse_integer(text)
    if not 0 <= priority <= MAX_PRIORITY:
        raise RequestError(f"cannot set the priority to {priority}: it must be 0 to {MAX_PRIORITY}")
    return priority


def parse_open_mode(text: str) -> str:
    """Return ``append`` or ``truncate``; the first letter is enough, as in Slurm."""
    mode = {"a": "append", "t": "truncate"}.get(text.strip().lower()[:1])
    if mode is None:
        raise RequestError(f"cannot open output with {short(text)}: write append or truncate")
    return mode


def parse_resource_limits(text: str) -> str:
    """Return a list of resource limits, ALL or NONE as it was given."""
    try:
        rlimits.names(text)
    except ValueError as error:
        raise RequestError(
            f"cannot read --propagate={short(text)}: {short(str(error))} is not a resource limit; write ALL, NONE, or some of "
            + ",".join(rlimits.KINDS)
        ) from None
    return text


def parse_exclusive(text: str) -> bool:
    """Return True: whole nodes.

    ``user``, ``mcs`` and ``topo`` ask for less than that and get it as well.
    """
    if text.strip().lower() not in ("", "user", "mcs", "topo"):
        raise RequestError(f"cannot read --exclusive={short(text)}: write it without a value")
    return True


def parse_yes_no(text: str) -> bool:
    """Return whether a flag's value is true: empty, ``yes``, ``true`` or not 0."""
    word = text.strip().lower()
    if word in ("", "yes", "true", "on") or (word.isdigit() and word.strip("0")):
        return True
    if word in ("no", "false", "off") or word.isdigit():
        return False
    raise RequestError(f"cannot read {short(text)}: write yes or no")


def parse_lease(text: str) -> str:
    """Return the fate of a job on a node without contact to the controller: keep or kill."""
    if text.strip().lower() not in ("keep", "kill"):
        raise RequestError(f"cannot read --lease={short(text)}: write keep or kill")
    return text.strip().lower()


def parse_path(text: str) -> str:
    """Return a file name (or pattern); Slurm's ``none`` is /dev/null."""
    return "/dev/null" if text.lower() == "none" else parse_text(text)


def parse_text(text: str) -> str:
    """Return `text` without characters that could forge a line or a terminal's state."""
    if any(char < " " or char == "\x7f" for char in text):
        raise RequestError(f"cannot take {short(text)}: it has control characters")
    return text


def short(text: str) -> str:
    """Return `text` quoted for a message, cut if it is long."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


# ----- ``--dependency``: the jobs that a job waits for, parsed and formatted
# Of terms joined by ``,`` all must be satisfied, of terms joined by ``?`` one; ``after:12+5`` is five minutes after the start of
# 12, ``afterok:12_3`` is about that task of array 12 alone. The number of jobs is bounded.


MAX_DEPENDENCIES = 1_000

_JOB_ID = re.compile(r"([0-9]{1,18})(?:_([0-9]{1,9}))?(?:\+([0-9]{1,7}))?\Z")


def parse_dependency(text: str) -> tuple[tuple[Dependency, ...], bool]:
    """Return the terms of ``afterok:12:13,after:14+5``, and whether one is enough.

    One is enough if they are joined by ``?``.
    """
    any_one = "?" in text
    if any_one and "," in text:
        raise RequestError(f"cannot read dependency {short(text)}: join terms by ',' (all) or by '?' (any), not both")
    terms = [term.strip() for term in text.split("?" if any_one else ",")]
    if terms == [""]:
        return (), False
    if text.count(":") + len(terms) > 2 * MAX_DEPENDENCIES:
        raise RequestError(f"cannot make a job depend on more than {MAX_DEPENDENCIES} others")
    dependencies = [dependency for term in terms for dependency in _dependency_term(term, text)]
    if sum(len(dependency.job_ids) or 1 for dependency in dependencies) > MAX_DEPENDENCIES:
        raise RequestError(f"cannot make a job depend on more than {MAX_DEPENDENCIES} others")
    return tuple(dependencies), any_one


def with_job_ids(text: str, find: Callable[[str], int]) -> str:
    """Return a dependency's `text` with job names and ``last`` replaced by ids from `find`."""
    parts = re.split(r"([,?:+])", text)
    for at in range(2, len(parts), 2):
        word = parts[at].strip()
        if parts[at - 1] == ":" and word and not _JOB_ID.match(word):
            parts[at] = str(find(word))
    return "".join(parts)


def checked_dependency(text: str) -> str:
    """Return `text` if it reads as a dependency, whichever job a name in it means.

    Raises RequestError.
    """
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


def terms_text(terms: Iterable[Dependency], *, any_one: bool) -> str:
    """Return the terms as they are written: joined by ``?`` if any one of them is enough."""
    return ("?" if any_one else ",").join(map(_term_text, terms))


def _term_text(dependency: Dependency) -> str:
    task = f"_{dependency.task}" if dependency.task is not None else ""
    delay = f"+{dependency.delay_s // MINUTE_S}" if dependency.delay_s else ""
    return ":".join([dependency.kind.value, *(f"{job_id}{task}{delay}" for job_id in dependency.job_ids)])


# ----- ``--export``: the variables of the submitter's environment that a job gets
# Rules: ``ALL`` (the default) takes all, ``NONE`` and ``NIL`` none, a list the names in it; ``NAME=value`` sets one,
# ``ALL,NAME=value`` does both. Variables that describe a job in which `hsub` itself runs are not taken, and values that cannot be
# variables of a job are left out with a note. The submitter's umask and resource limits are always taken. Without the
# submitter's PATH, a job has the PATH of the node, with the directories of Slurm's commands in front if the submitter has them.
# Knows nothing of what the scheduler adds later (`hpcsched.steps.environment`). Source: execve(2), "Limits".


MAX_VARIABLES = 10_000
MAX_ENV_BYTES = 1 << 20
MAX_STRING_BYTES = 128 << 10  # NAME=value and its NUL: what Linux lets one string of an environment have

UMASK = "SLURM_UMASK"
NODE_PATH = "/usr/local/bin:/usr/bin:/bin"
_SLURM_PATH = re.compile(r"/hpcsched/slurm(-[0-9a-f]{12})?/?\Z")  # what `hpcsched slurm-path` prints

_NAME = re.compile(r"[^=\x00-\x20\x7f]+\Z")

# What a job sets for itself says nothing of the jobs that are submitted from within it.
_OF_A_JOB = re.compile(
    r"SLURM_(?!TIME_FORMAT\Z|CONF\Z)|SLURMD_|HPCSCHED_(?!CONFIG\Z|API\Z)|SRUN_|PMIX?_|PRTE_|OMPI_|HYDRA_(?!FULL_ERROR\Z)"
)
# fmt: off
_OF_A_TASK = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
})
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What ``--export`` asks for: everything, or `names`; and what it sets itself."""

    everything: bool
    names: tuple[str, ...] = ()
    values: tuple[tuple[str, str], ...] = ()


def parse_export(text: str) -> Export:
    """Return what the text of ``--export`` asks for. Quotes keep commas in a value.

    Raises RequestError.
    """
    everything, nothing = False, False
    names: list[str] = []
    values: dict[str, str] = {}
    for item in _items(text):
        name, equals, value = item.partition("=")
        if not equals and name.upper() == "ALL":
            everything = True
        elif not equals and name.upper() in ("NONE", "NIL"):
            nothing = True
        elif _NAME.match(name) is None:
            raise RequestError(f"cannot export {short(name)}: it cannot be a variable's name")
        elif equals:
            values[name] = value
        else:
            names.append(name)
    if nothing and everything:
        raise RequestError(f"cannot read --export={short(text)}: it asks for both ALL and NONE")
    return Export(everything=everything, names=tuple(names), values=tuple(values.items()))


def _items(text: str) -> list[str]:
    """Return the parts of `text` between commas outside quotes, without the quotes."""
    items: list[str] = []
    current: list[str] = []
    quote = ""
    for char in text:
        if quote and char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote = char
        elif not quote and char == ",":
            items.append("".join(current).strip())
            current = []
        else:
            current.append(char)
    if quote:
        raise RequestError(f"cannot read --export={short(text)}: it has a {quote} without its second one")
    items.append("".join(current).strip())
    return [item for item in items if item]


# Of a client of the gateway: a job must not have its user's token, and asks its own controller.
CREDENTIALS = frozenset({"HPCSCHED_TOKEN", "HPCSCHED_TOKEN_FILE", "HPCSCHED_URL", "HPCSCHED_CA_FILE"})


def _names_to_take(export: Export, environ: Mapping[str, str]) -> list[str]:
    """Return the names in `environ` that `export` asks for.

    Within a job, its own variables are left out.
    """
    if not export.everything:
        return [name for name in export.names if name in environ and name != "_"]
    within_job = "HPCSCHED_JOB_ID" in environ or "SLURM_JOB_ID" in environ
    # bash's $_ names the command that ran hsub.
    return [
        name for name in environ if name != "_" and name not in CREDENTIALS and not (within_job and _is_of_a_job(name))
    ]


def exported(export: Export, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that the job gets, and notes on those that it cannot get."""
    taken: dict[str, str] = {}
    left_out: list[str] = []
    for name in _names_to_take(export, environ):
        value = environ[name]
        if why_not_a_variable(name, value):
            left_out.append(name)
        else:
            taken[name] = value
    taken.update(export.values)
    for name in (UMASK, rlimits.VARIABLE):
        if name in environ:
            taken[name] = environ[name]
    slurm = [path for path in environ.get("PATH", "").split(":") if _SLURM_PATH.search(path)]
    if slurm and "PATH" not in taken:
        taken["PATH"] = ":".join([*slurm, NODE_PATH])
    return taken, [f"left out of the environment: {short(name)} is not UTF-8, or too long" for name in left_out]


def _is_of_a_job(name: str) -> bool:
    return name in _OF_A_TASK or _OF_A_JOB.match(name) is not None


def why_not_a_variable(name: str, value: str) -> str:
    """Return why no program can be given ``name=value``, or "" if one can."""
    if not name or "=" in name or "\0" in name or "\n" in name:
        return f"{short(name)} cannot be a variable's name"
    if "\0" in value:
        return f"the value of {short(name)} has a NUL"
    try:
        size = len(name.encode()) + len(value.encode()) + 2
    except UnicodeEncodeError:
        return f"{short(name)} is not UTF-8"
    if size > MAX_STRING_BYTES:
        return f"{short(name)} has {size} bytes, the most is {MAX_STRING_BYTES}"
    return ""
