"""The options of hrun: one table for the parser and for --help.

The grammar is getopt_long's (`getopt_long`): options end at the first other word (the command) or at ``--``. An optional value
follows ``=``, or a short option directly. Slurm's options without effect here are accepted; unknown options are rejected with
their nearest neighbours.

Sources: srun(1), getopt(3).
"""

from __future__ import annotations

from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from hpcnode.commands import slurm_text
from hpcnode.commands.getopt_long import FLAG, OPTIONAL, VALUE, OptionReader
from hpcnode.os import rlimits

_INPUT = ("SLURM_STDINMODE",)

Values = Dict[str, Union[str, bool]]


class OptionError(Exception):
    """The command line is invalid. `see_help`: an option is unknown, so --help is mentioned."""

    def __init__(self, text: str, see_help: bool = False) -> None:
        super().__init__(text)
        self.see_help = see_help

    def text(self, command: str) -> str:
        """Return the message of the command."""
        if not self.see_help:
            return str(self)
        return "%s%s %s --help" % (self, " See" if str(self).endswith("?") else "; see", command)


class StepOption(NamedTuple):
    name: str
    short: str
    kind: str
    metavar: str
    help: str
    env: Tuple[str, ...] = ()  # variables with its default; the first one that is set counts
    accepted: bool = False  # has no effect here


OPTIONS: Tuple[StepOption, ...] = (
    StepOption("account", "A", VALUE, "NAME", "charge the job to this account", ("SLURM_ACCOUNT",)),
    StepOption("bcast", "", OPTIONAL, "PATH", "copy the program to each node first: to PATH, or into PATH/; default: ./",
               ("SLURM_BCAST",)),
    StepOption("begin", "b", VALUE, "TIME", "do not start the job before this time"),
    StepOption("chdir", "D", VALUE, "DIR", "run the tasks in DIR; default: here", ("SLURM_WORKING_DIR", "SLURM_REMOTE_CWD")),
    StepOption("comment", "", VALUE, "TEXT", "a comment on the job"),
    StepOption("constraint", "C", VALUE, "FEATURES", "features that the job's nodes must have", ("SLURM_CONSTRAINT",)),
    StepOption("contiguous", "", FLAG, "", "consecutive nodes"),
    StepOption("cpus-per-task", "c", VALUE, "N", "cpus for each task", ("HRUN_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK")),
    StepOption("deadline", "", VALUE, "TIME", "the job must have ended by this time"),
    StepOption("dependency", "d", VALUE, "TERMS", "start the job after others: afterok:12:13, singleton", ("SLURM_DEPENDENCY",)),
    StepOption("distribution", "m", VALUE, "TYPE", "task distribution: block, cyclic, plane=N, arbitrary; block:cyclic",
               ("SLURM_DISTRIBUTION",)),
    StepOption("epilog", "", VALUE, "PROGRAM", "run this here after the step, with the command as arguments; none: nothing",
               ("SLURM_EPILOG",)),
    StepOption("error", "e", VALUE, "PATTERN", "standard error: file pattern, none, all or a task's number",
               ("SLURM_STDERRMODE",)),
    StepOption("exact", "", FLAG, "", "use only the requested cpus (always on)", ("SLURM_EXACT",)),
    StepOption("exclude", "x", VALUE, "NODES", "do not use these nodes"),
    StepOption("exclusive", "", OPTIONAL, "", "a job of its own gets whole nodes; a step never shares its cpus",
               ("SLURM_EXCLUSIVE",)),
    StepOption("export", "", VALUE, "LIST", "variables for the tasks: ALL, NONE, names, NAME=VALUE",
               ("SRUN_EXPORT_ENV", "SLURM_EXPORT_ENV")),
    StepOption("gpus", "G", VALUE, "[TYPE:]N", "GPUs for all tasks together", ("SLURM_GPUS",)),
    StepOption("gpus-per-node", "", VALUE, "[TYPE:]N", "GPUs on each node", ("SLURM_GPUS_PER_NODE",)),
    StepOption("gpus-per-task", "", VALUE, "[TYPE:]N", "GPUs for each task", ("SLURM_GPUS_PER_TASK",)),
    StepOption("gres", "", VALUE, "gpu[:TYPE]:N", "GPUs on each node, or none", ("SLURM_STEP_GRES", "SLURM_GRES")),
    StepOption("gid", "", VALUE, "GROUP", "for root: be in this group"),
    StepOption("help", "h", FLAG, "", "show this and exit"),
    StepOption("usage", "", FLAG, "", "show a short list of the options and exit"),
    StepOption("het-group", "", VALUE, "LIST", "components of a heterogeneous job to run in, as 0,2-3; default: 0"),
    StepOption("hint", "", VALUE, "WORDS", "synchronous: nodes of similar speed; comm_bound: no slow links, few switches",
               ("SLURM_HINT",)),
    StepOption("hold", "H", FLAG, "", "submit the job held: it waits for its release"),
    StepOption("immediate", "I", OPTIONAL, "SECONDS", "give up if the step has not started after SECONDS (default 5)",
               ("SLURM_IMMEDIATE",)),
    StepOption("input", "i", VALUE, "PATTERN", "standard input: file pattern, none, all or a task's number; default: task 0",
               _INPUT),
    StepOption("job-name", "J", VALUE, "NAME", "name of the job and the step; default: the command's", ("SLURM_JOB_NAME",)),
    StepOption("jobid", "", VALUE, "ID", "start the step in this job; default: the one that hrun runs in"),
    StepOption("kill-on-bad-exit", "K", OPTIONAL, "0|1", "a task that fails ends the step", ("SLURM_KILL_BAD_EXIT",)),
    StepOption("label", "l", FLAG, "", "begin each line of output with the task's number", ("SLURM_LABELIO",)),
    StepOption("licenses", "L", VALUE, "NAME[:N],...", "licences for the job"),
    StepOption("mem", "", VALUE, "SIZE", "memory on each node", ("SLURM_MEM_PER_NODE",)),
    StepOption("mem-per-cpu", "", VALUE, "SIZE", "memory for each cpu", ("SLURM_MEM_PER_CPU",)),
    StepOption("mincpus", "", VALUE, "N", "nodes with at least N cpus"),
    StepOption("mpi", "", VALUE, "TYPE", "none or list: MPI programs are started with mpirun", ("SLURM_MPI_TYPE",)),
    StepOption("multi-prog", "", FLAG, "", "the command is a file that says which tasks run which program"),
    StepOption("nice", "", OPTIONAL, "N", "lower the job's priority; default of N: 100"),
    StepOption("no-allocate", "Z", FLAG, "", "refused: each step belongs to a job"),
    StepOption("nodelist", "w", VALUE, "NODES", "use these nodes; a path (with a /) is that of a file of them"),
    StepOption("nodes", "N", VALUE, "MIN[-MAX]", "number of nodes", ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")),
    StepOption("ntasks", "n", VALUE, "N", "number of tasks", ("SLURM_NTASKS", "SLURM_NPROCS")),
    StepOption("ntasks-per-node", "", VALUE, "N", "tasks on each node", ("SLURM_NTASKS_PER_NODE",)),
    StepOption("open-mode", "", VALUE, "MODE", "append to output files or truncate them (default)", ("SLURM_OPEN_MODE",)),
    StepOption("output", "o", VALUE, "PATTERN", "standard output: file pattern, none, all or a task's number",
               ("SLURM_STDOUTMODE",)),
    StepOption("overcommit", "O", FLAG, "", "let tasks share cpus", ("SLURM_OVERCOMMIT",)),
    StepOption("overlap", "", FLAG, "", "share the cpus and GPUs of other steps", ("SLURM_OVERLAP",)),
    StepOption("partition", "p", VALUE, "NAME", "partition of the job", ("SLURM_PARTITION",)),
    StepOption("prefer", "", VALUE, "FEATURES", "prefer nodes with these features"),
    StepOption("preserve-env", "E", FLAG, "", "tasks see SLURM_NTASKS and SLURM_JOB_NUM_NODES as they are here"),
    StepOption("priority", "", VALUE, "N", "a fixed priority of the job (0 holds it)"),
    StepOption("prolog", "", VALUE, "PROGRAM", "run this here before the step, with the command as arguments; if it fails, the "
               "step does not start; none: nothing",
               ("SLURM_PROLOG",)),
    StepOption("propagate", "", OPTIONAL, "LIMITS", "resource limits that tasks get: ALL, NONE, NOFILE ...",
               ("SLURM_PROPAGATE",)),
    StepOption("pty", "", FLAG, "", "give task 0 a terminal that is connected to this one"),
    StepOption("qos", "q", VALUE, "NAME", "quality of service of the job", ("SLURM_QOS",)),
    StepOption("quiet", "Q", FLAG, "", "print only errors"),
    StepOption("quit-on-interrupt", "", FLAG, "", "one interrupt ends the step"),
    StepOption("relative", "r", VALUE, "N", "leave out the job's first N nodes"),
    StepOption("reservation", "", VALUE, "NAME", "reservation that the job runs in", ("SLURM_RESERVATION",)),
    StepOption("resize", "", VALUE, "N", "start nothing: have the job give back all but N of its nodes"),
    StepOption("signal", "", VALUE, "SIG[@S]", "send the tasks a signal S (60) seconds before the time limit", ("SLURM_SIGNAL",)),
    StepOption("spread-job", "", FLAG, "", "use as many nodes as allowed, and spread the tasks evenly",
               ("SLURM_SPREAD_JOB",)),
    StepOption("switches", "", VALUE, "N[@TIME]", "nodes on at most N switches; on more after waiting for TIME",
               ("SLURM_REQ_SWITCH",)),
    StepOption("task-epilog", "", VALUE, "PROGRAM", "each task runs this after its program", ("SLURM_TASK_EPILOG",)),
    StepOption("task-prolog", "", VALUE, "PROGRAM", "each task runs this before its program, and reads export NAME=VALUE, unset "
               "NAME and print TEXT from its output; if it fails, the task does not start", ("SLURM_TASK_PROLOG",)),
    StepOption("test-only", "", FLAG, "", "print when and where the job would start; start nothing"),
    StepOption("time", "t", VALUE, "TIME", "time limit of the step, or of the job", ("SLURM_TIMELIMIT",)),
    StepOption("time-min", "", VALUE, "TIME", "the job's time limit may be lowered to this if it then starts earlier"),
    StepOption("tmp", "", VALUE, "SIZE", "nodes with this much disk space for temporary files"),
    StepOption("uid", "", VALUE, "USER", "for root: run the job as this user"),
    StepOption("unbuffered", "u", FLAG, "", "pass on output at once instead of line by line", ("SLURM_UNBUFFEREDIO",)),
    StepOption("verbose", "v", FLAG, "", "print what is done", ("SLURM_DEBUG",)),
    StepOption("version", "V", FLAG, "", "show the version and exit"),
    StepOption("wait", "W", VALUE, "SECONDS", "end the step SECONDS after its first task has ended", ("SLURM_WAIT",)),
    StepOption("wait-for-children", "", FLAG, "", "a task is over when all its processes are", ("SLURM_WAIT_FOR_CHILDREN",)),
    StepOption("x11", "", OPTIONAL, "all|first|last", "refused: use ssh -X NODE, with an account there, while the job runs"),
    StepOption("accel-bind", "", VALUE, "TYPE", "accepted", (), True),
    StepOption("acctg-freq", "", VALUE, "SECONDS", "accepted", (), True),
    StepOption("bcast-exclude", "", VALUE, "LIST", "accepted", (), True),
    StepOption("clusters", "M", VALUE, "NAMES", "accepted: there is one", (), True),
    StepOption("compress", "", OPTIONAL, "TYPE", "accepted", (), True),
    StepOption("core-spec", "S", VALUE, "N", "accepted", (), True),
    StepOption("cores-per-socket", "", VALUE, "N", "accepted", (), True),
    StepOption("cpu-bind", "", OPTIONAL, "TYPE", "accepted; tasks are not bound", ("SLURM_CPU_BIND",), True),
    StepOption("cpu-freq", "", VALUE, "FREQUENCY", "accepted", (), True),
    StepOption("cpus-per-gpu", "", VALUE, "N", "accepted", (), True),
    StepOption("delay-boot", "", VALUE, "MINUTES", "accepted", (), True),
    StepOption("disable-status", "X", FLAG, "", "accepted", (), True),
    StepOption("external-launcher", "", FLAG, "", "accepted", (), True),
    StepOption("extra-node-info", "B", VALUE, "S[:C[:T]]", "accepted", (), True),
    StepOption("gpu-bind", "", VALUE, "TYPE", "accepted", (), True),
    StepOption("gpu-freq", "", VALUE, "FREQUENCY", "accepted", (), True),
    StepOption("gres-flags", "", VALUE, "TYPE", "accepted", (), True),
    StepOption("mail-type", "", VALUE, "EVENTS", "accepted", (), True),
    StepOption("mail-user", "", VALUE, "ADDRESS", "accepted", (), True),
    StepOption("mem-bind", "", VALUE, "TYPE", "accepted", (), True),
    StepOption("mem-per-gpu", "", VALUE, "SIZE", "accepted", (), True),
    StepOption("msg-timeout", "", VALUE, "SECONDS", "accepted", (), True),
    StepOption("network", "", VALUE, "TYPE", "accepted", (), True),
    StepOption("no-kill", "k", OPTIONAL, "", "accepted", (), True),
    StepOption("ntasks-per-core", "", VALUE, "N", "accepted", (), True),
    StepOption("ntasks-per-socket", "", VALUE, "N", "accepted", (), True),
    StepOption("oversubscribe", "s", FLAG, "", "accepted", (), True),
    StepOption("profile", "", VALUE, "TYPE", "accepted", (), True),
    StepOption("reboot", "", FLAG, "", "accepted", (), True),
    StepOption("requeue", "", FLAG, "", "accepted", (), True),
    StepOption("resv-ports", "", OPTIONAL, "N", "accepted", (), True),
    StepOption("send-libs", "", OPTIONAL, "YES", "accepted", (), True),
    StepOption("slurmd-debug", "", VALUE, "LEVEL", "accepted", (), True),
    StepOption("sockets-per-node", "", VALUE, "N", "accepted", (), True),
    StepOption("treewidth", "", VALUE, "N", "accepted", (), True),
    StepOption("threads", "T", VALUE, "N", "accepted", (), True),
    StepOption("threads-per-core", "", VALUE, "N", "accepted", (), True),
    StepOption("use-min-nodes", "", FLAG, "", "accepted", (), True),
    StepOption("wckey", "", VALUE, "KEY", "accepted", (), True),
    StepOption("whole", "", FLAG, "", "accepted", (), True),
)  # fmt: skip

# Options whose variables are set in every job, as facts of the job.
_FACTS = frozenset((
    "gpus", "gpus-per-node", "gpus-per-task", "mem", "mem-per-cpu", "nodes", "ntasks", "ntasks-per-node",
))  # fmt: skip
_MEMORY = frozenset(("mem", "mem-per-cpu"))
# Options that request or name a job; halloc has them, too.
OF_A_JOB = (
    "account", "begin", "comment", "constraint", "contiguous", "cpus-per-task", "deadline", "dependency", "distribution",
    "exclude", "exclusive", "gpus", "gpus-per-node", "gpus-per-task", "gres", "hint", "hold", "immediate", "job-name",
    "licenses", "mem", "mem-per-cpu", "mincpus", "nice", "nodelist", "nodes", "ntasks", "ntasks-per-node", "overcommit",
    "partition", "prefer", "priority", "qos", "reservation", "signal", "spread-job", "switches", "time", "time-min", "tmp",
)  # fmt: skip
_OF_NEW_JOBS = frozenset(("chdir", "exclusive", "job-name", "reservation"))  # their variables are ignored in a job

# Options without effect that would change where tasks run in Slurm.
NOT_HONOURED = (
    "core-spec", "cores-per-socket", "cpus-per-gpu", "extra-node-info", "mem-per-gpu", "ntasks-per-core",
    "ntasks-per-socket", "reboot", "sockets-per-node", "threads-per-core", "use-min-nodes",
)  # fmt: skip

# Options in which components of a heterogeneous job may differ: salloc A : B.
OF_A_COMPONENT = (
    "constraint", "cpus-per-task", "exclude", "exclusive", "gpus", "gpus-per-node", "gpus-per-task", "gres", "hint", "job-name",
    "mem", "mem-per-cpu", "mincpus", "nodelist", "nodes", "ntasks", "ntasks-per-node", "overcommit", "prefer", "tmp",
)  # fmt: skip

_ALIASES = {
    "tasks": "ntasks",
    "tasks-per-node": "ntasks-per-node",
    "cpu_bind": "cpu-bind",
    "mem_bind": "mem-bind",
    "cluster": "clusters",
    "pack-group": "het-group",
    "share": "oversubscribe",
    "tree-width": "treewidth",
}


def parse(words: Sequence[str], options: Sequence[StepOption] = OPTIONS) -> Tuple[Values, List[str]]:
    """Return the options by long name (the last one counts), and the command.

    Raises OptionError.
    """
    reader = _StepWords(options)
    command = reader.read(words)
    return reader.values, command


class _StepWords(OptionReader):
    """The options of a step command, by long name; the last value counts."""

    skips_equals = True

    def __init__(self, options: Sequence[StepOption]) -> None:
        self.values: Values = {}
        self._long_names = {option.name: option for option in options}
        self._by_letter = {option.short: option for option in options if option.short}

    def find(self, name: str) -> StepOption:
        return _find(self._long_names, name)

    def find_letter(self, letter: str) -> StepOption:
        option = self._by_letter.get(letter)
        if option is None:
            known = " ".join(sorted(self._by_letter))
            raise OptionError("unknown option -%s: the short options are %s" % (letter, known), see_help=True)
        return option

    def joins(self, rest: str) -> bool:
        return rest[:1].isdigit()

    def take(self, option: StepOption, value: Optional[str]) -> None:
        self.values[option.name] = True if value is None else value

    def takes_none(self, option: StepOption, value: str) -> OptionError:
        return OptionError("option --%s takes no value" % option.name)

    def needs_value(self, option: StepOption, spelled: str) -> OptionError:
        return OptionError("option %s needs a value: %s" % (spelled, option.metavar))


def with_defaults(values: Values, environ: Mapping[str, str], options: Sequence[StepOption] = OPTIONS) -> Values:
    """Return `values` completed from the environment.

    Variables with numbers of the job are facts that the controller knows, unless the user has changed them: then Slurm's
    variable and ours differ.
    """
    complete = dict(values)
    in_job = bool(environ.get("HPCSCHED_JOB_ID") or environ.get("SLURM_JOB_ID"))
    for option in options:
        if not _has_default(option, complete, in_job):
            continue
        found = next((value for value in _given(option, environ) if value), None)
        if found is not None:
            complete[option.name] = _default_of(option, found)
    switches, wait = complete.get("switches"), environ.get("SLURM_WAIT4SWITCH")
    if "switches" not in values and isinstance(switches, str) and wait and "@" not in switches:
        complete["switches"] = "%s@%s" % (switches, wait)
    return complete


def _has_default(option: StepOption, complete: Values, in_job: bool) -> bool:
    """Return whether the environment may set an option that the other options leave open."""
    if option.name in complete or option.accepted or (in_job and option.name in _OF_NEW_JOBS):
        return False
    if "parts" in complete and option.name in _FACTS:
        return False  # each part sets its own
    return option.name not in _MEMORY or not _MEMORY & set(complete)  # they exclude each other


def _default_of(option: StepOption, text: str) -> Union[str, bool]:
    """Return the value that a variable gives an option."""
    if option.kind == FLAG:
        return text.lower() not in ("0", "no", "false")
    return True if option.name == "exclusive" else text


def _given(option: StepOption, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of an option's variables, by precedence."""
    if option.name in _FACTS:
        for name in option.env:
            value = environ.get(name, "")
            if value != environ.get("HPCSCHED_" + name[len("SLURM_") :]):
                yield value
        return
    for name in option.env:
        if name.startswith("SLURM_"):
            yield environ.get("HPCSCHED_" + name[len("SLURM_") :], "")
    for name in option.env:
        yield environ.get(name, "")


def refuse_windows(values: Values) -> None:
    """Raise OptionError for --x11."""
    if "x11" in values:
        raise OptionError(
            "cannot forward X11: steps have no connection for it. While the job holds a node, 'ssh -X NODE' forwards your "
            "display, if you have an account on the node"
        )


def output_mode(text: str) -> str:
    """Return ``append`` or ``truncate``; the first letter is enough, as in Slurm.

    Raises OptionError.
    """
    mode = {"a": "append", "t": "truncate"}.get(text.strip().lower()[:1])
    if mode is None:
        raise OptionError("Invalid --open-mode specification %r: write append or truncate" % text[:40])
    return mode


def resource_limits(text: str) -> str:
    """Return the given list of resource limits. Raises OptionError."""
    try:
        rlimits.names(text)
    except ValueError as error:
        raise OptionError(
            "--propagate=%s is not valid: %r is not a resource limit; write ALL, NONE, or some of %s"
            % (text[:40], str(error)[:40], ",".join(rlimits.KINDS))
        ) from None
    return text


def usage(command: str, operands: str, what: str, options: Sequence[StepOption] = OPTIONS) -> str:
    """Return the text of --help."""
    lines = ["Usage: %s [OPTIONS] %s" % (command, operands), "", what]
    known = {option.name: option for option in options if not option.accepted}
    for title, names in slurm_text.groups(command, known):
        lines += ["", title + ":"] if title else [""]
        lines += ["  %-34s %s" % (_signature(known[name]), known[name].help) for name in names]
    accepted = ", ".join("--" + option.name for option in options if option.accepted)
    return "\n".join([*lines, "", "Accepted without effect: " + accepted, ""])


def short_usage(name: str, operands: str, options: Sequence[StepOption] = OPTIONS) -> str:
    """Return the text of --usage: each option with its value in brackets."""
    known = {option.name: option for option in options if not option.accepted}
    shown = [known[one] for one in slurm_text.ordered(name, known)]
    words = [slurm_text.usage_word(option.name, option.short, option.metavar) for option in shown]
    return slurm_text.usage_text(name, [*words, operands])


def _signature(option: StepOption) -> str:
    short = "-%s, " % option.short if option.short else "    "
    value = {FLAG: "", VALUE: "=" + option.metavar, OPTIONAL: "[=%s]" % option.metavar}[option.kind]
    return short + "--" + option.name + (value if option.metavar else "")


def _find(options: Mapping[str, StepOption], name: str) -> StepOption:
    exact = options.get(_ALIASES.get(name, name))
    if exact is not None:
        return exact
    longer = sorted(known for known in options if name and known.startswith(name))
    if len(longer) == 1:
        return options[longer[0]]
    if longer:
        raise OptionError("option --%s is ambiguous: --%s" % (name, " --".join(longer)))
    import difflib  # slow to import

    near = difflib.get_close_matches(name, [*options, *_ALIASES], n=3, cutoff=0.5)
    hint = ": did you mean --%s?" % " or --".join(near) if near else ""
    raise OptionError("unknown option --%s%s" % (name[:60], hint), see_help=True)
