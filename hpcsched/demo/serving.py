"""The story of `hpcsched demo --serve`: a model on three nodes, one of which is lost.

The model fits on no node; it answers while a node loses power. Read `ServeStory.play` from top to bottom. The weights are
random, so its answers are words without sense; with a seed they are always the same words, so that a lost or doubled one would
show. Memory is limited for each rank (RLIMIT_DATA), because all nodes are this machine. Knows neither terminals (`show`) nor
processes (`keeper`), nor how a model is split.
"""

from __future__ import annotations

import http.client
import json
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcsched.demo.picture import clock
from hpcsched.demo.story import BAD_ENDS, START_S, SmallJob, Story, StoryPlan, read_end
from hpcsched.errors import UnavailableError
from hpcsched.listing.text import clean

SERVE_NAME = "serve"
SOCKET = "serve.sock"
LAYERS, WIDTH, MEMORY_MIB = 12, 512, 440
ANSWER_TOKENS = 260
LOST_AT = 60  # tokens
LINE_WIDTH = 84
MAKE_S, READY_S, ANSWER_S = 120.0, 300.0, 120.0
PACKAGES = ("torch", "safetensors", "tokenizers", "starlette", "uvicorn", "jinja2", "llguidance")
SERVE_SCRIPT = """\
#!/bin/bash
#HSUB --job-name={name}
#HSUB --nodes=2-3 --elastic --exclusive --ntasks-per-node=1
#HSUB --time=00:30:00
#HSUB --output={name}-%j.out

export OMP_NUM_THREADS=1   # all three nodes have the cores of this machine
exec {python} -P -m hpcserve run model --name demo --ranks 3 \\
    --kind fp32 --memory {memory} --context 512 --streams 1 --listen unix:{socket}
"""


@dataclass(slots=True)
class ServeResult:
    """The figures of the closing table."""

    job_id: int = 0
    lost_node: str = ""
    weights: int = 0
    ready_s: float = 0.0  # from submission
    tokens_s: float = 0.0  # undisturbed
    pause_s: float = 0.0  # of the answer, while a node was lost
    is_same: bool = False
    total_s: float = 0.0
    plans: list[str] = field(default_factory=list)


class ServeStory(Story):
    """One run of the story. Each `_act` method is an act."""

    served = ServeResult()

    def play(self) -> ServeResult:
        """Play all acts. Raises UnavailableError if something does not happen in time."""
        self.served = ServeResult()
        self._start_cluster()
        self._make_model()
        self._serve()
        disturbed = self._answer_while_a_node_is_lost()
        self._answer_again(disturbed)
        self.served.total_s = self.elapsed_s()
        return self.served

    # ----- acts

    def _make_model(self) -> None:
        self._begin("a model for which no node has enough memory")
        command = [sys.executable, "-P", "-m", "hpcserve.random_model", str(self._cluster.share / "model")]
        made = self.meanwhile(lambda: run(command + [f"--layers={LAYERS}", f"--width={WIDTH}"], MAKE_S))
        self.served.weights = int(made.split()[0])
        size_mib = self.served.weights * 4 / 2**20
        self.say("note", f"{self.served.weights / 1e6:.0f} million random weights: {size_mib:.0f} MiB in float32")
        self.say("note", f"each rank may use {MEMORY_MIB} MiB, 286 of them for Python and torch")
        plan = [sys.executable, "-P", "-m", "hpcserve", "plan", str(self._cluster.share / "model")]
        plan += ["--quantize=fp32", f"--nodes=n1:free={MEMORY_MIB / 1024:.2f}"]
        refused = self.meanwhile(lambda: run(plan, MAKE_S, may_fail=True))
        self.say("bad", refused.strip().splitlines()[-1] if refused.strip() else "one node is not enough")

    def _serve(self) -> None:
        self._begin("the model as a job on three nodes")
        script = SERVE_SCRIPT.format(
            name=SERVE_NAME, python=shlex.quote(self._plan.python), memory=MEMORY_MIB, socket=SOCKET
        )
        self._stage.show(script.rstrip().splitlines())
        began_s = time.monotonic()
        job_id = self._hsub(SmallJob(file=f"{SERVE_NAME}.sh", script=script, what="the model"))
        self.result.job_id = self.served.job_id = job_id
        self._pause(self._plan.read_s)
        self.until(self._runs, "the job to start", START_S)
        self._wait_for_log("is ready", 1, READY_S)
        self.served.ready_s = time.monotonic() - began_s
        self.say("good", f"ready after {self.served.ready_s:.1f} s: {self._groups()[-1]}")

    def _answer_while_a_node_is_lost(self) -> str:
        node = self._job(self.look())["nodes"][-1]
        self.served.lost_node = node
        self._begin(f"it answers, and {node} loses power")
        answer = StreamedAnswer(self._cluster.share / SOCKET)
        self._follow(answer, until_tokens=LOST_AT)
        count = self._keeper.ask("power_off", node)["killed"]
        self.say("bad", f"{count} processes on {node} are gone, one of three ranks among them")
        self._follow(answer)
        self.served.pause_s = answer.longest_pause_s
        self.say("good", f"the answer continued after {answer.longest_pause_s:.1f} s: {self._groups()[-1]}")
        return answer.text

    def _answer_again(self, disturbed: str) -> None:
        self._begin("the same question again, undisturbed")
        began_s = time.monotonic()
        answer = StreamedAnswer(self._cluster.share / SOCKET)
        self._follow(answer, shown=False)
        self.served.tokens_s = answer.tokens / (time.monotonic() - began_s)
        self.served.is_same = answer.text == disturbed
        if not self.served.is_same:
            raise UnavailableError("the answer to the same question is another one: tokens were lost or doubled")
        self.say("good", f"the same {answer.tokens} tokens: none was lost or doubled")

    # ----- waiting

    def _follow(self, answer: StreamedAnswer, until_tokens: int | None = None, *, shown: bool = True) -> None:
        """Show an answer as it comes, up to its end or so many tokens."""
        deadline_s = time.monotonic() + ANSWER_S
        while not answer.is_over and (until_tokens is None or answer.tokens < until_tokens):
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"waited {ANSWER_S:g} s for an answer; {self._log_end()}")
            for line in answer.new_lines() if shown else ():
                self._stage.show([line])
            time.sleep(0.02)
        if answer.error:
            raise UnavailableError(f"cannot read the answer: {answer.error}; {self._log_end()}")
        if shown and answer.is_over:
            self._stage.show(answer.new_lines(whole=True))

    def _wait_for_log(self, text: str, times: int, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while read_end(self._log_path(), 1 << 20).count(text) < times:
            state = self._job(self.show())["state"]
            if state in BAD_ENDS or time.monotonic() > deadline_s:
                raise UnavailableError(f"the model is not served: {self._log_end()}")
            time.sleep(0.1)

    def _groups(self) -> list[str]:
        """Return the generations of ranks that the job's log names."""
        lines = read_end(self._log_path(), 1 << 20).splitlines()
        return [line.removeprefix("hpcserve: ") for line in lines if "members, in slots" in line] or ["no generation"]

    def _log_path(self) -> Path:
        return self._cluster.share / f"{SERVE_NAME}-{self.served.job_id}.out"

    def _log_end(self) -> str:
        return "its log ends: " + " / ".join(read_end(self._log_path()).splitlines()[-3:])


class StreamedAnswer:
    """An answer of the model, which a thread reads token by token."""

    def __init__(self, path: Path) -> None:
        self.text, self.tokens, self.longest_pause_s = "", 0, 0.0
        self.is_over, self.error = False, ""
        self._shown = 0
        self._path = path
        threading.Thread(target=self._read, name="answer", daemon=True).start()

    def new_lines(self, *, whole: bool = False) -> list[str]:
        """Return the lines that have not been shown; `whole`: also one that may become longer."""
        lines = []
        words = " ".join(clean(self.text).split())
        while len(words) - self._shown > LINE_WIDTH or (whole and self._shown < len(words)):
            end = words.rfind(" ", self._shown, self._shown + LINE_WIDTH) + 1 or self._shown + LINE_WIDTH
            if len(words) - self._shown <= LINE_WIDTH:
                end = len(words)
            lines.append(words[self._shown : end].strip())
            self._shown = end
        return lines

    def _read(self) -> None:
        try:
            last_s = time.monotonic()
            for event in self._events():
                now_s = time.monotonic()
                if self.tokens:
                    self.longest_pause_s = max(self.longest_pause_s, now_s - last_s)
                last_s = now_s
                self.text += event["choices"][0]["text"]
                self.tokens += 1
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            self.error = str(error) or type(error).__name__
        self.is_over = True

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream of server-sent events."""
        connection = http.client.HTTPConnection("demo", timeout=ANSWER_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(ANSWER_S)
        connection.sock.connect(str(self._path))
        request = {
            "model": "demo",
            "prompt": "What is a cluster?",
            "max_tokens": ANSWER_TOKENS,
            "stream": True,
            "seed": 7,
        }
        bytes_of_no_word = {str(token): -100 for token in range(260)}
        request |= {"temperature": 1.0, "logit_bias": bytes_of_no_word}
        connection.request("POST", "/v1/completions", json.dumps(request), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {answer.read(500).decode(errors='replace')}")
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise ValueError(str(event["error"]))
                yield event


def run(command: list[str], limit_s: float, *, may_fail: bool = False) -> str:
    """Run a command and return its output. Raises UnavailableError if it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"cannot run {shlex.join(command[3:])}: it takes over {limit_s:g} s") from None
    if done.returncode and not may_fail:
        raise UnavailableError(f"cannot run {shlex.join(command[3:])}: {done.stderr.strip()[-500:]}")
    return done.stdout + done.stderr


def serving_plan(python: str, read_s: float) -> StoryPlan:
    """Return the plan of a story without a training."""
    return StoryPlan(python=python, training_options=(), small_tasks=0, checkpoint_every=1, read_s=read_s)


def closing_rows(result: ServeResult) -> list[tuple[str, str]]:
    """Return name and value of each figure."""
    return [
        ("model", f"{result.weights / 1e6:.0f} million weights on three nodes, {MEMORY_MIB} MiB for each"),
        ("ready", f"{result.ready_s:.1f} s after it was submitted"),
        ("node lost", f"{result.lost_node}, in the middle of an answer"),
        ("pause", f"{result.pause_s:.1f} s, then the two other nodes continued"),
        ("answer", "the same as an undisturbed one" if result.is_same else "another one"),
        ("speed", f"{result.tokens_s:.1f} tokens/s on the nodes that are left"),
        ("the whole story", clock(result.total_s)),
    ]
