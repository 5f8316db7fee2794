"""The table of job options, and their sources: words, script lines, variables.

`hsub --help`, the man page, directives and the environment follow the table. It says how an option is spelled and how its value
is parsed, not its effect on a job (`hpcsched.jobscript.build`). An option with a `variable` may also be given as
``HSUB_variable`` or ``SBATCH_variable``.

Rules: the command line wins over the environment, and that over the lines of the script; in the environment, ``HSUB_x`` wins over
``SBATCH_x``. An option in a higher layer replaces the values of lower layers, and options that exclude it (``--mem`` on the
command line removes ``--mem-per-cpu`` of the script). Only mail types add up.

Sources: sbatch(1) of Slurm 22.05 to 25.05, also "INPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from hpcnode.commands.getopt_long import OptionReader, SlurmOption
from hpcsched.errors import RequestError, UsageError
from hpcsched.jobscript import values
from hpcsched.jobscript.values import checked_dependency, parse_export, parse_signal_spec, parse_yes_no, short
from hpcsched.model.units import parse_mem_mib, whole_number


class Use(Enum):
    JOB = "job"  # becomes part of the specification
    COMMAND = "command"  # is for hsub itself; some make sense in a script as well
    NOTED = "noted"  # accepted for Slurm's sake, has no effect here: said in a note
    REFUSED = "refused"  # known to Slurm; without its effect the job would not be what was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOption(SlurmOption):
    """One option.

    `metavar` "" takes no value; `bare` is the value it has without one, None where it must have one.
    """

    name: str
    short: str = ""
    metavar: str = ""
    bare: str | None = None
    help: str = ""  # of a NOTED or REFUSED option: why
    parse: Callable[[str], Any] = values.parse_text
    use: Use = Use.JOB
    variable: str = ""
    aliases: tuple[str, ...] = ()
    sets: str = ""  # the name of the option that this one gives `bare` to: --no-requeue sets requeue
    repeats: bool = False  # every value counts, not only the last
    in_script: bool = True


def _job(name: str, short: str = "", metavar: str = "", *, help: str, **more: Any) -> ScriptOption:
    return ScriptOption(name=name, short=short, metavar=metavar, bare=None if metavar else "", help=help, **more)


def _flag(name: str, short: str = "", *, help: str, **more: Any) -> ScriptOption:
    more.setdefault("parse", values.parse_yes_no)
    return ScriptOption(name=name, short=short, bare="", help=help, **more)


def _own(name: str, short: str = "", metavar: str = "", *, help: str, **more: Any) -> ScriptOption:
    more.setdefault("parse", values.parse_text if metavar else values.parse_yes_no)
    bare = None if metavar else ""
    return ScriptOption(name=name, short=short, metavar=metavar, bare=bare, help=help, use=Use.COMMAND, **more)


# fmt: off
_JOB_OPTIONS = (
    _job("account", "A", "NAME", help="charge the job to this account", variable="ACCOUNT"),
    _job("array", "a", "INDICES", help="submit an array with these task indices: 0-15, 1,3,5-7, 0-15:4; append %N to "
         "run N at a time",
         parse=values.parse_array, variable="ARRAY_INX"),
    _job("begin", "b", "TIME", help="do not start before TIME: 16:00, tomorrow, now+1hour, 2027-01-20T12:34:00"),
    _job("chdir", "D", "DIR", help="run in DIR; default: the current directory", aliases=("workdir",)),
    _job("cheap-by", "", "TIME", help="start when energy is cheap, so that the job ends by TIME: see [cost]"),
    _job("comment", "", "TEXT", help="comment on the job"),
    _job("constraint", "C", "FEATURES", help="nodes with these features: a&b, a|b, a&(b|c); a number of each kind: "
         "[a*2&b*1]; all of one kind: [a|b]", variable="CONSTRAINT"),
    _flag("contiguous", help="consecutive nodes, in configuration order"),
    _job("cpus-per-gpu", "", "N", help="CPUs per GPU", parse=values.parse_count, variable="CPUS_PER_GPU"),
    _job("cpus-per-task", "c", "N", help="CPUs per task; default: 1", parse=values.parse_count),
    _job("deadline", "", "TIME", help="end the job as DEADLINE if it cannot finish before TIME"),
    _job("dependency", "d", "TERMS", help="start after other jobs: afterok:12:13, afterany:12, afternotok:12_3, "
         "after:12+5, aftercorr:12, singleton; join with ',' for all, with '?' for any", parse=checked_dependency),
    _job("distribution", "m", "TYPE", help="distribution of the steps' tasks over nodes: block, cyclic, plane=N, "
         "arbitrary; parts for sockets and cores (block:cyclic) are only displayed",
         parse=values.parse_distribution_text, variable="DISTRIBUTION"),
    _flag("elastic", help="let the job run on any number of --nodes=MIN-MAX: it may be asked to give back nodes (see "
         "hrun --resize), and gets idle ones", variable="ELASTIC"),
    _job("error", "e", "PATTERN", help="file for standard error; default: that of --output", parse=values.parse_path,
         variable="ERROR"),
    _job("exclude", "x", "HOSTS", help="do not use these nodes: n[1-3],m7", parse=values.parse_node_names),
    ScriptOption(name="exclusive", metavar="user", bare="", help="do not share nodes with other jobs", variable="EXCLUSIVE",
           parse=values.parse_exclusive),
    _job("export", "", "LIST", help="export environment variables: ALL (default), NONE, or NAME,NAME=VALUE; "
         "ALL,NAME=VALUE adds",
         parse=parse_export, variable="EXPORT"),
    _job("gpu-power", "", "WATTS", help="limit each GPU of the job to so many watts; the former limit returns at its end",
         parse=values.parse_count),
    _job("gpus", "G", "[TYPE:]N", help="GPUs for the whole job", parse=values.parse_gpus, variable="GPUS"),
    _job("gpus-per-node", "", "[TYPE:]N", help="GPUs on each node", parse=values.parse_gpus, variable="GPUS_PER_NODE"),
    _job("gpus-per-task", "", "[TYPE:]N", help="GPUs per task", parse=values.parse_gpus, variable="GPUS_PER_TASK"),
    _job("gres", "", "gpu[:TYPE][:N]", help="GPUs on each node, in Slurm's other spelling; shard:N: part of a shared "
         "GPU", parse=values.parse_gres, variable="GRES"),
    _job("hint", "", "WORDS", help="synchronous: nodes of similar measured speed; comm_bound: no slow links, few switches",
         parse=values.parse_hints, variable="HINT"),
    _flag("hold", "H", help="submit the job in held state, until hctl release"),
    _job("input", "i", "FILE", help="file for standard input; default: /dev/null", parse=values.parse_path,
         variable="INPUT"),
    _job("job-name", "J", "NAME", help="name of the job; default: name of the script", variable="JOB_NAME"),
    ScriptOption(name="kill-on-invalid-dep", metavar="yes|no", bare="yes", parse=values.parse_yes_no,
           variable="KILL_INVALID_DEPEND", help="cancel the job if its dependency can never be satisfied; default: no"),
    _job("lease", "", "keep|kill", help="what a node without contact to the controller does with the job; default: "
         "keep", parse=values.parse_lease, variable="LEASE"),
    _job("licenses", "L", "NAME[:N],...", help="licences of the cluster for the whole job: matlab:2",
         parse=values.parse_licenses),
    _job("mail-type", "", "EVENTS", help="send mail at BEGIN, END, FAIL, REQUEUE, TIME_LIMIT_80 ...; ALL; NONE: "
         "also no advice. ARRAY_TASKS: for each task of an array",
         parse=values.parse_mail_types, repeats=True),
    _job("mail-user", "", "ADDRESS", help="who gets the mail; default: its user"),
    _job("mem", "", "SIZE", help="memory on each node: 4G, 1500M; 0 is all memory", parse=values.parse_node_memory,
         variable="MEM_PER_NODE"),
    _job("mem-per-cpu", "", "SIZE", help="memory per CPU", parse=parse_mem_mib, variable="MEM_PER_CPU"),
    _job("mem-per-gpu", "", "SIZE", help="memory per GPU", parse=parse_mem_mib, variable="MEM_PER_GPU"),
    _job("mincpus", "", "N", help="nodes with at least N CPUs", parse=values.parse_count),
    ScriptOption(name="nice", metavar="N", bare="100", help="lower the job's priority; default of N: 100",
           parse=values.parse_nice),
    _flag("no-requeue", help="never requeue the job", sets="requeue", variable="NO_REQUEUE"),
    _job("nodelist", "w", "HOSTS", help="use all of these nodes: n[1-3],m7", parse=values.parse_node_names),
    _job("nodes", "N", "MIN[-MAX]", help="number of nodes", parse=values.parse_nodes),
    _job("ntasks", "n", "N", help="number of tasks", parse=values.parse_count, aliases=("tasks",)),
    _job("ntasks-per-node", "", "N", help="tasks on each node", parse=values.parse_count, aliases=("tasks-per-node",)),
    _job("open-mode", "", "append|truncate", help="append to or truncate existing output files; default: truncate, but "
         "append after a requeue", parse=values.parse_open_mode, variable="OPEN_MODE"),
    _job("output", "o", "PATTERN", help="file for standard output; default: slurm-%j.out, for an array slurm-%A_%a.out",
         parse=values.parse_path, variable="OUTPUT"),
    _flag("overcommit", "O", help="let tasks share CPUs: allocate the CPUs of one task on each node",
          variable="OVERCOMMIT"),
    _job("partition", "p", "NAMES", help="partition of the job; of several (a,b) the one that can start it first",
         variable="PARTITION"),
    _job("prefer", "", "FEATURES", help="prefer nodes with these features, if they are free", variable="PREFER"),
    _job("priority", "", "N", help="fixed priority (0 holds the job)", parse=values.parse_priority),
    ScriptOption(name="propagate", metavar="LIMITS", bare="ALL", parse=values.parse_resource_limits, variable="PROPAGATE",
           help="resource limits to copy to the job: ALL, NONE, or names such as NOFILE,STACK; default: as configured"),
    _job("qos", "q", "NAME", help="quality of service", variable="QOS"),
    _flag("requeue", help="requeue the job after a node failure", variable="REQUEUE"),
    _job("reservation", "", "NAME", help="run in this reservation", variable="RESERVATION"),
    _job("signal", "", "[B:]SIG[@S]", help="send a signal S (default 60) seconds before the time limit; B: only to the script",
         parse=parse_signal_spec, variable="SIGNAL"),
    _flag("spread-job", help="use as many nodes as allowed, and spread the tasks evenly", variable="SPREAD_JOB"),
    _job("switches", "", "N[@TIME]", help="use nodes on at most N switches; wait for that at most TIME",
         parse=values.parse_switches, variable="SWITCHES"),
    _job("time", "t", "TIME", help="time limit: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S, 1h30m, UNLIMITED",
         parse=values.parse_limit_s, variable="TIMELIMIT"),
    _job("time-min", "", "TIME", help="the time limit may be lowered to this if the job can then start earlier",
         parse=values.parse_limit_s),
    _job("tmp", "", "SIZE", help="nodes with this much temporary disk space", parse=parse_mem_mib),
)

_COMMAND_OPTIONS = (
    _own("wrap", "", "COMMAND", help="run this shell command instead of a script", in_script=False, parse=str),
    _own("wait", "W", help="wait until the job ends, and exit with its exit code", variable="WAIT"),
    _own("each", help="submit every operand as a script of its own", in_script=False),
    _own("serve", "", "NAME", help="start a service of this name, whose replicas run this script; see hserve"),
    _own("serve-open", "", "WHO", help="with --serve, who may ask the model: owner (default), account or all"),
    _own("serve-replicas", "", "MIN-MAX", help="with --serve, number of replicas, such as 2 or 1-3; default: 1"),
    _own("parsable", help="print only the job's id"),
    _own("test-only", help="do not submit; estimate when and where the job would start"),
    _own("dry-run", help="do not submit; print the request as JSON", in_script=False),
    _own("ignore-pbs", help="ignore #PBS and #BSUB lines in the script", variable="IGNORE_PBS"),
    _own("json", help="print the answer as JSON", in_script=False),
    _own("request-id", "", "ID", help="idempotency key: submit only once per id", in_script=False),
    _own("quiet", "Q", help="print errors only", repeats=True),
    _own("verbose", "v", help="print more; -vv even more", repeats=True, variable="DEBUG", parse=str),
    _own("help", "h", help="show this help", in_script=False, aliases=("usage",)),
    _own("version", "V", help="show the version", in_script=False),
)


def _noted(names: str, why: str, *, value: bool | None = True) -> tuple[ScriptOption, ...]:
    """Return options without effect.

    Each word of `names` is ``name`` or ``name/short``. `value` None: a value is optional.
    """
    made = []
    for word in names.split():
        name, _, short = word.partition("/")
        metavar, bare = ("" if value is False else "VALUE"), (None if value else "")
        made.append(ScriptOption(name=name, short=short, metavar=metavar, bare=bare, help=why, use=Use.NOTED, parse=str))
    return tuple(made)


def _refused(names: str, why: str) -> tuple[ScriptOption, ...]:
    made = []
    for word in names.split():
        name, _, short = word.partition("/")
        made.append(ScriptOption(name=name, short=short, metavar="VALUE", bare="", help=why, use=Use.REFUSED, parse=str))
    return tuple(made)


_OTHER_OPTIONS = (
    *_noted("acctg-freq batch bb bbf cpu-freq delay-boot mcs-label network power profile wckey",
            "it has no meaning here"),
    *_noted("cpu-bind mem-bind gpu-bind gpu-freq gres-flags extra-node-info/B cores-per-socket "
            "sockets-per-node threads-per-core ntasks-per-core ntasks-per-socket core-spec/S thread-spec",
            "cpus of a node are not told apart"),
    *_noted("cluster-constraint", "only --constraint decides about features"),
    *_noted("clusters/M cluster", "there is one cluster"),
    *_noted("wait-all-nodes", "it is not taken into account"),
    *_noted("get-user-env no-kill/k oversubscribe/s", "it is not taken into account", value=None),
    *_noted("reboot share unbuffered use-min-nodes",
            "it is not taken into account", value=False),
    *_refused("uid gid", "a job runs as its submitter"),
    *_refused("export-file", "use --export"),
    *_refused("nodefile/F", "use --nodelist"),
    *_refused("ntasks-per-gpu tres-per-task", "use --gpus-per-task"),
    *_refused("container container-id container-image container-name container-mounts container-workdir container-save "
              "container-entrypoint container-env container-remap-root container-writable environment",
              "containers are started in the script: apptainer exec, podman run"),
)
# fmt: on

OPTIONS: tuple[ScriptOption, ...] = tuple(sorted(_JOB_OPTIONS, key=lambda option: option.name)) + _COMMAND_OPTIONS
"""What `hsub --help` and the man page show, in that order."""

ALL_OPTIONS: tuple[ScriptOption, ...] = OPTIONS + _OTHER_OPTIONS


@cache
def by_name() -> Mapping[str, ScriptOption]:
    """Return the options by their long names, aliases included."""
    return {name: option for option in ALL_OPTIONS for name in (option.name, *option.aliases)}


@cache
def by_short() -> Mapping[str, ScriptOption]:
    """Return the options by their letters."""
    return {option.short: option for option in ALL_OPTIONS if option.short}


@cache
def by_variable() -> Mapping[str, ScriptOption]:
    """Return the options by the variables' names, without HSUB_ or SBATCH_."""
    return {option.variable: option for option in ALL_OPTIONS if option.variable}


def find_option(name: str) -> ScriptOption:
    """Return the option with the long name `name`, which may be abbreviated.

    Raises RequestError, with the nearest known ones.
    """
    known = by_name()
    if name in known:
        return known[name]
    if len(name) <= 40:
        found = {known[full].name: known[full] for full in known if name and full.startswith(name)}
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            some = [f"--{full}" for full in sorted(found)[:6]]
            raise UsageError(
                f"cannot tell which option --{name} is: it could be {', '.join(some)}",
                getopt=f"option '--{name}' is ambiguous; possibilities: " + " ".join(f"'{word}'" for word in some),
            )
        import difflib  # here, because a command that is not mistyped starts faster without it

        offered = [full for full in known if known[full].use in (Use.JOB, Use.COMMAND)]
        near = difflib.get_close_matches(name, offered, n=3, cutoff=0.6)
        if near:
            hint = " or ".join(f"--{full}" for full in near)
            raise UsageError(
                f"cannot understand --{name}: no such option; did you mean {hint}?",
                getopt=f"unrecognized option '--{name}'",
            )
    raise UsageError(
        f"cannot understand {values.short('--' + name)}: no such option; see hsub --help",
        getopt=f"unrecognized option '--{name[:60]}'",
    )


def find_short(letter: str) -> ScriptOption:
    """Return the option with this letter.

    Raises RequestError, with the letter in the other case if that is known.
    """
    known = by_short()
    if letter in known:
        return known[letter]
    other = known.get(letter.swapcase())
    hint = f"did you mean -{other.short} (--{other.name})?" if other else "see hsub --help"
    raise UsageError(f"cannot understand -{letter}: no such option; {hint}", getopt=f"invalid option -- '{letter}'")


def _supported(option: ScriptOption) -> ScriptOption:
    """Return the option.

    Raises RequestError for one that Slurm knows and that cannot be ignored.
    """
    if option.use is Use.REFUSED:
        raise RequestError(f"cannot take --{option.name}: {option.help}")
    return option


# ----- options in words, as getopt_long(3) reads them: of the command line, and of the lines of a script
# ``--name=value``, ``--name value``, ``-N2``, ``-N 2``, clusters (``-HQ``, ``-HN2``), unambiguous beginnings of long names; the
# first word that is not an option ends them, ``--`` as well.


MAX_WORDS = 100_000

Settings = dict[str, list[str]]
"""Options by long name with their values in the order given. A flag has the value ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The parsed words of `hsub`: options, the script's file and its arguments.

    A file of None means standard input.
    """

    options: Settings
    script: str | None
    args: tuple[str, ...]
    further: tuple[Settings, ...] = ()  # the options of the components behind the first one: A : B


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Return the parsed `argv`, which has no command name.

    A word ``:`` divides the components of a heterogeneous job.

    What follows the script belongs to it. Raises RequestError for an unknown option, with the nearest known ones, and
    for a value that is missing, not taken or unreadable.
    """
    options, rest = scan_options(argv)
    further: list[Settings] = []
    while rest[:1] == [":"]:
        more, rest = scan_options(rest[1:])
        for name in [name for name in more if find_option(name).use is Use.COMMAND]:  # in any place it is for all
            options[name] = more.pop(name)
        further.append(more)
    if rest and "wrap" in options:
        raise RequestError(f"cannot take a script and its arguments ({short(rest[0])}) beside --wrap")
    return CommandLine(options=options, script=rest[0] if rest else None, args=tuple(rest[1:]), further=tuple(further))


def scan_options(words: Sequence[str]) -> tuple[Settings, list[str]]:
    """Return the options that `words` begin with, and the words behind them.

    Raises RequestError.
    """
    if len(words) > MAX_WORDS:
        raise RequestError(f"cannot read {len(words)} words: the most is {MAX_WORDS}")
    reader = _JobWords()
    rest = reader.read(words)
    return reader.settings, rest


class _JobWords(OptionReader):
    """The options of a job, before its script."""

    def __init__(self) -> None:
        self.settings: Settings = {}

    def find(self, name: str) -> ScriptOption:
        return _supported(find_option(name))

    def find_letter(self, letter: str) -> ScriptOption:
        return _supported(find_short(letter))

    def joins(self, rest: str) -> bool:
        return False

    def take(self, option: ScriptOption, value: str | None) -> None:
        put(self.settings, option, (option.bare or "") if value is None else value)

    def takes_none(self, option: ScriptOption, value: str) -> RequestError:
        return RequestError(f"cannot give --{option.name} the value {values.short(value)}: it takes none")

    def needs_value(self, option: ScriptOption, spelled: str) -> UsageError:
        is_letter = not spelled.startswith("--")
        return UsageError(
            f"cannot take {spelled} without a value: write {option.spelling}",
            getopt=f"option requires an argument -- '{spelled[1:]}'"
            if is_letter
            else f"option '{spelled}' requires an argument",
        )


def put(settings: Settings, option: ScriptOption, value: str) -> None:
    """Record `value` as the last one of `option`, after its reader has accepted it."""
    option.parse(value)
    if option.sets:
        settings.pop(option.sets, None)
        settings[option.sets] = ["no"]
        return
    given = settings.pop(option.name, [])
    given.append(value)
    settings[option.name] = given


# ----- options in variables, and which place wins


PREFIXES = ("SBATCH_", "HSUB_")  # a later one wins
_EXCLUSIVE = (("mem", "mem-per-cpu", "mem-per-gpu"),)
_ADDS_UP = frozenset({"mail-type"})


def environment_options(environ: Mapping[str, str]) -> Settings:
    """Return the options that ``SBATCH_*`` and ``HSUB_*`` variables give.

    Raises RequestError naming the variable.

    An empty variable is as good as none for an option that needs a value.
    """
    layers = [_with_prefix(prefix, environ) for prefix in PREFIXES]
    return merge_layers(*layers)


def _with_prefix(prefix: str, environ: Mapping[str, str]) -> Settings:
    settings: Settings = {}
    for variable, option in by_variable().items():
        value = environ.get(prefix + variable)
        if value is None or (not value and option.bare is None):
            continue
        try:
            _put_variable(settings, option, value)
        except RequestError as error:
            raise RequestError(f"cannot use {prefix}{variable}={short(value)}: {error}") from None
    return settings


def _put_variable(settings: Settings, option: ScriptOption, value: str) -> None:
    if option.metavar or option.name == "verbose":
        for _ in range(min(whole_number(value), 9) if option.name == "verbose" and value.isdigit() else 1):
            put(settings, option, value)
    elif option.name in ("requeue", "no-requeue") or parse_yes_no(value):  # for these two, to be set is enough
        put(settings, option, "")


def merge_layers(*layers: Mapping[str, Sequence[str]]) -> Settings:
    """Return the options of all `layers`, the lowest first.

    Raises RequestError if one layer contradicts itself.
    """
    merged: Settings = {}
    for layer in layers:
        for group in _EXCLUSIVE:
            _clear_group(group, layer, merged)
        for name, given in layer.items():
            before = merged.pop(name, [])
            merged[name] = [*before, *given] if name in _ADDS_UP else list(given)
    return merged


def _clear_group(group: Sequence[str], layer: Mapping[str, Sequence[str]], merged: Settings) -> None:
    given = [name for name in group if name in layer]
    if len(given) > 1:
        both = " and ".join(f"--{name}" for name in given)
        raise RequestError(f"cannot take both {both}: they exclude each other")
    if given:
        for name in group:
            merged.pop(name, None)


def last(options: Mapping[str, Sequence[str]], name: str) -> str | None:
    """Return the value that counts of an option, None if it was not given."""
    values = options.get(name)
    return values[-1] if values else None


def is_set(options: Mapping[str, Sequence[str]], name: str) -> bool:
    """Say whether a flag is on."""
    value = last(options, name)
    return value is not None and bool(by_name()[name].parse(value))
