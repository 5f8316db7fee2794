"""The options of hrun: one table, read by the parser, by --help and by whoever compares the man page with it.

The grammar is getopt_long's: options end at the first other word (the command) or at ``--``; short ones may be joined
(``-N2 -n4``, ``-lu``), long ones cut short as long as that is unambiguous. An optional value stands after ``=`` or, for a short
option, joined to it. What is harmless and means nothing here is accepted; anything unknown is refused with its neighbours.

Sources: srun(1), getopt(3).
"""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple, Union

FLAG, VALUE, OPTIONAL = "flag", "value", "optional"

_INPUT = ("SLURM_STDINMODE",)

Values = Dict[str, Union[str, bool]]


class UsageError(Exception):
    """The command line cannot be read."""


class Option(NamedTuple):
    name: str
    short: str
    kind: str
    metavar: str
    help: str
    env: Tuple[str, ...] = ()  # variables that give its default, the first that is set
    accepted: bool = False  # has no effect, and never will


OPTIONS: Tuple[Option, ...] = (
    Option("account", "A", VALUE, "NAME", "charge the job to this account", ("SLURM_ACCOUNT",)),
    Option("begin", "b", VALUE, "TIME", "do not start the job before this time"),
    Option("chdir", "D", VALUE, "DIR", "run the tasks in DIR; default: here"),
    Option("comment", "", VALUE, "TEXT", "a comment on the job"),
    Option("constraint", "C", VALUE, "FEATURES", "features that the job's nodes must have"),
    Option("cpus-per-task", "c", VALUE, "N", "cpus for each task", ("HRUN_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK")),
    Option("distribution", "m", VALUE, "TYPE", "task distribution: block, cyclic, plane=N, arbitrary", ("SLURM_DISTRIBUTION",)),
    Option("error", "e", VALUE, "PATTERN", "standard error: file pattern, none, all or a task's number", ("SLURM_STDERRMODE",)),
    Option("exact", "", FLAG, "", "use only the cpus asked for (always so)", ("SLURM_EXACT",)),
    Option("exclude", "x", VALUE, "NODES", "do not use these nodes"),
    Option("exclusive", "", OPTIONAL, "", "a job of its own gets whole nodes; a step never shares its cpus"),
    Option("export", "", VALUE, "LIST", "variables for the tasks: ALL, NONE, names, NAME=VALUE", ("SLURM_EXPORT_ENV",)),
    Option("gpus", "G", VALUE, "[TYPE:]N", "GPUs for all tasks together"),
    Option("gpus-per-node", "", VALUE, "[TYPE:]N", "GPUs on each node"),
    Option("gpus-per-task", "", VALUE, "[TYPE:]N", "GPUs for each task"),
    Option("gres", "", VALUE, "gpu[:TYPE]:N", "GPUs on each node, or none"),
    Option("help", "h", FLAG, "", "show this and exit"),
    Option("het-group", "", VALUE, "LIST", "components of a heterogeneous job to run in, as 0,2-3; default: 0"),
    Option("hint", "", VALUE, "WORDS", "synchronous: nodes of like speed; comm_bound: no slow links, few switches"),
    Option("immediate", "I", OPTIONAL, "SECONDS", "give up if the step has not started after SECONDS (default 5)"),
    Option("input", "i", VALUE, "PATTERN", "standard input: file pattern, none, all or a task's number; default: task 0", _INPUT),
    Option("job-name", "J", VALUE, "NAME", "name of the job and the step; default: the command's"),
    Option("jobid", "", VALUE, "ID", "start the step in this job; default: the one that hrun runs in"),
    Option("kill-on-bad-exit", "K", OPTIONAL, "0|1", "a task that fails ends the step", ("SLURM_KILL_BAD_EXIT",)),
    Option("label", "l", FLAG, "", "begin each line of output with the task's number", ("SLURM_LABELIO",)),
    Option("mem", "", VALUE, "SIZE", "memory on each node"),
    Option("mem-per-cpu", "", VALUE, "SIZE", "memory for each cpu"),
    Option("mincpus", "", VALUE, "N", "nodes that have at least so many cpus"),
    Option("mpi", "", VALUE, "TYPE", "none or list: MPI programs are started with mpirun", ("SLURM_MPI_TYPE",)),
    Option("multi-prog", "", FLAG, "", "the command is a file that says which tasks run which program"),
    Option("nodelist", "w", VALUE, "NODES", "use these nodes; a path (with a /) is that of a file of them"),
    Option("nodes", "N", VALUE, "MIN[-MAX]", "number of nodes"),
    Option("ntasks", "n", VALUE, "N", "number of tasks"),
    Option("ntasks-per-node", "", VALUE, "N", "tasks on each node"),
    Option("open-mode", "", VALUE, "MODE", "append to output files or truncate them (default)", ("SLURM_OPEN_MODE",)),
    Option("output", "o", VALUE, "PATTERN", "standard output: file pattern, none, all or a task's number", ("SLURM_STDOUTMODE",)),
    Option("overcommit", "O", FLAG, "", "let tasks share cpus", ("SLURM_OVERCOMMIT",)),
    Option("overlap", "", FLAG, "", "share the cpus and GPUs of other steps", ("SLURM_OVERLAP",)),
    Option("partition", "p", VALUE, "NAME", "partition of the job", ("SLURM_PARTITION",)),
    Option("prefer", "", VALUE, "FEATURES", "rather nodes with these features, if they are free"),
    Option("pty", "", FLAG, "", "give task 0 a terminal, and be it here"),
    Option("qos", "q", VALUE, "NAME", "quality of service of the job", ("SLURM_QOS",)),
    Option("quiet", "Q", FLAG, "", "say nothing but errors"),
    Option("relative", "r", VALUE, "N", "leave out the job's first N nodes"),
    Option("reservation", "", VALUE, "NAME", "reservation that the job runs in"),
    Option("resize", "", VALUE, "N", "start nothing: have the job give back all but N of its nodes"),
    Option("switches", "", VALUE, "N[@TIME]", "nodes on so many switches at most; after TIME of waiting, on more"),
    Option("time", "t", VALUE, "TIME", "time limit of the step, or of the job", ("SLURM_TIMELIMIT",)),
    Option("tmp", "", VALUE, "SIZE", "nodes that have so much disk for temporary files"),
    Option("unbuffered", "u", FLAG, "", "pass output on at once, not line by line", ("SLURM_UNBUFFEREDIO",)),
    Option("verbose", "v", FLAG, "", "say what is done"),
    Option("version", "V", FLAG, "", "show the version and exit"),
    Option("wait", "W", VALUE, "SECONDS", "end the step so long after its first task ended", ("SLURM_WAIT",)),
    Option("accel-bind", "", VALUE, "TYPE", "accepted", (), True),
    Option("acctg-freq", "", VALUE, "SECONDS", "accepted", (), True),
    Option("clusters", "M", VALUE, "NAMES", "accepted: there is one", (), True),
    Option("compress", "", OPTIONAL, "TYPE", "accepted", (), True),
    Option("contiguous", "", FLAG, "", "accepted", (), True),
    Option("core-spec", "S", VALUE, "N", "accepted", (), True),
    Option("cores-per-socket", "", VALUE, "N", "accepted", (), True),
    Option("cpu-bind", "", OPTIONAL, "TYPE", "accepted; tasks are not bound", ("SLURM_CPU_BIND",), True),
    Option("cpu-freq", "", VALUE, "FREQUENCY", "accepted", (), True),
    Option("cpus-per-gpu", "", VALUE, "N", "accepted", (), True),
    Option("delay-boot", "", VALUE, "MINUTES", "accepted", (), True),
    Option("disable-status", "X", FLAG, "", "accepted", (), True),
    Option("external-launcher", "", FLAG, "", "accepted", (), True),
    Option("extra-node-info", "B", VALUE, "S[:C[:T]]", "accepted", (), True),
    Option("gpu-bind", "", VALUE, "TYPE", "accepted", (), True),
    Option("gpu-freq", "", VALUE, "FREQUENCY", "accepted", (), True),
    Option("gres-flags", "", VALUE, "TYPE", "accepted", (), True),
    Option("mail-type", "", VALUE, "EVENTS", "accepted", (), True),
    Option("mail-user", "", VALUE, "ADDRESS", "accepted", (), True),
    Option("mem-bind", "", VALUE, "TYPE", "accepted", (), True),
    Option("mem-per-gpu", "", VALUE, "SIZE", "accepted", (), True),
    Option("msg-timeout", "", VALUE, "SECONDS", "accepted", (), True),
    Option("network", "", VALUE, "TYPE", "accepted", (), True),
    Option("no-kill", "k", OPTIONAL, "", "accepted", (), True),
    Option("ntasks-per-core", "", VALUE, "N", "accepted", (), True),
    Option("ntasks-per-socket", "", VALUE, "N", "accepted", (), True),
    Option("oversubscribe", "s", FLAG, "", "accepted", (), True),
    Option("preserve-env", "E", FLAG, "", "accepted", (), True),
    Option("profile", "", VALUE, "TYPE", "accepted", (), True),
    Option("propagate", "", OPTIONAL, "LIMITS", "accepted", (), True),
    Option("resv-ports", "", OPTIONAL, "N", "accepted", (), True),
    Option("slurmd-debug", "", VALUE, "LEVEL", "accepted", (), True),
    Option("sockets-per-node", "", VALUE, "N", "accepted", (), True),
    Option("spread-job", "", FLAG, "", "accepted", (), True),
    Option("threads", "T", VALUE, "N", "accepted", (), True),
    Option("threads-per-core", "", VALUE, "N", "accepted", (), True),
    Option("use-min-nodes", "", FLAG, "", "accepted", (), True),
    Option("wckey", "", VALUE, "KEY", "accepted", (), True),
    Option("whole", "", FLAG, "", "accepted", (), True),
)  # fmt: skip

# What the components of a heterogeneous job may differ in: salloc A : B.
OF_A_COMPONENT = (
    "constraint", "cpus-per-task", "exclude", "exclusive", "gpus", "gpus-per-node", "gpus-per-task", "gres", "hint", "job-name",
    "mem", "mem-per-cpu", "mincpus", "nodelist", "nodes", "ntasks", "ntasks-per-node", "prefer", "tmp",
)  # fmt: skip

_ALIASES = {
    "tasks": "ntasks",
    "tasks-per-node": "ntasks-per-node",
    "cpu_bind": "cpu-bind",
    "mem_bind": "mem-bind",
    "cluster": "clusters",
    "pack-group": "het-group",
    "share": "oversubscribe",
}


def parse(words: Sequence[str], options: Sequence[Option] = OPTIONS) -> Tuple[Values, List[str]]:
    """Return the options by long name (a later one wins), and the command. Raises UsageError."""
    values: Values = {}
    long = {option.name: option for option in options}
    short = {option.short: option for option in options if option.short}
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            at += 1
            break
        if word == "-" or not word.startswith("-"):
            break
        following = words[at + 1] if at + 1 < len(words) else None
        at += (
            _long(long, word[2:], following, values)
            if word.startswith("--")
            else _cluster(short, word[1:], following, values)
        )
    return values, list(words[at:])


def with_defaults(values: Values, environ: Mapping[str, str], options: Sequence[Option] = OPTIONS) -> Values:
    """Return `values` completed from the environment."""
    complete = dict(values)
    for option in options:
        if option.name in complete or option.accepted:
            continue
        natives = ["HPCSCHED_" + name[len("SLURM_") :] for name in option.env if name.startswith("SLURM_")]
        found = next((environ[name] for name in (*natives, *option.env) if environ.get(name)), None)
        if found is None:
            continue
        if option.kind == FLAG:
            complete[option.name] = found.lower() not in ("0", "no", "false")
        else:
            complete[option.name] = found
    return complete


def usage(usage_line: str, what: str, options: Sequence[Option] = OPTIONS) -> str:
    """Return the text of --help."""
    lines = ["Usage: " + usage_line, "", what, ""]
    for option in options:
        if not option.accepted:
            lines.append("  %-34s %s" % (_signature(option), option.help))
    accepted = ", ".join("--" + option.name for option in options if option.accepted)
    return "\n".join([*lines, "", "Accepted without effect: " + accepted, ""])


def _signature(option: Option) -> str:
    short = "-%s, " % option.short if option.short else "    "
    value = {FLAG: "", VALUE: "=" + option.metavar, OPTIONAL: "[=%s]" % option.metavar}[option.kind]
    return short + "--" + option.name + (value if option.metavar else "")


def _long(known: Mapping[str, Option], text: str, following: Union[str, None], values: Values) -> int:
    """Take the option ``--text`` and return how many words that were."""
    name, equals, value = text.partition("=")
    option = _find(known, name)
    if option.kind == FLAG:
        if equals:
            raise UsageError("option --%s takes no value" % option.name)
        values[option.name] = True
        return 1
    if equals or option.kind == OPTIONAL:
        values[option.name] = value if equals else True
        return 1
    return 1 + _following(option, "--" + option.name, following, values)


def _cluster(known: Mapping[str, Option], letters: str, following: Union[str, None], values: Values) -> int:
    for at, letter in enumerate(letters):
        option = known.get(letter)
        if option is None:
            raise UsageError("unknown option -%s: the short options are %s" % (letter, " ".join(sorted(known))))
        rest = letters[at + 1 :]
        if option.kind == FLAG or (option.kind == OPTIONAL and not rest[:1].isdigit()):
            values[option.name] = True
            continue
        if rest:
            values[option.name] = rest[1:] if rest.startswith("=") else rest
            return 1
        return 1 + _following(option, "-" + letter, following, values)
    return 1


def _following(option: Option, shown: str, following: Union[str, None], values: Values) -> int:
    if following is None:
        raise UsageError("option %s needs a value: %s" % (shown, option.metavar))
    values[option.name] = following
    return 1


def _find(options: Mapping[str, Option], name: str) -> Option:
    exact = options.get(_ALIASES.get(name, name))
    if exact is not None:
        return exact
    longer = sorted(known for known in options if name and known.startswith(name))
    if len(longer) == 1:
        return options[longer[0]]
    if longer:
        raise UsageError("option --%s is ambiguous: --%s" % (name, " --".join(longer)))
    import difflib  # only where somebody mistyped

    near = difflib.get_close_matches(name, [*options, *_ALIASES], n=3, cutoff=0.5)
    hint = ": did you mean --%s?" % " or --".join(near) if near else ": see hrun --help"
    raise UsageError("unknown option --%s%s" % (name[:60], hint))
