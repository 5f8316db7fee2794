"""What the fuzzer says: valid requests and messages, each changed in a few places. Everything follows from a random.Random."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, quote_from_bytes

from hpcnode.wire import protocol
from hpcsched.commands.queue import HQUEUE, SQUEUE
from hpcsched.controller.requests.reservations import KEYS
from hpcsched.controller.requests.update import CHANGES, OPTIONS
from hpcsched.jobscript.options import ALL_OPTIONS
from hpcsched.model.codec import spec_to_json
from hpcsched.model.spec import JobSpec
from hpcsched.steps.request import KNOWN_OPTIONS

COMMAND_OPTIONS = {
    "submit": [option.name for option in ALL_OPTIONS],
    "queue": [option.name for option in (*HQUEUE.options, *SQUEUE.command.options)],
    "cancel": ["signal", "batch", "full", "quiet", "verbose", "clusters", "interactive"],
}
NUMBERS: list[Any] = [
    0, 1, -1, 2, 255, 256, 65_536, 2**31, 2**53, 10**18 - 1, -(10**18) + 1, 0.5, -0.0, 1e-320, 1e15, 1e17, 1e300, -1e300,
]  # fmt: skip
TEXTS = [
    "", " ", "0", "-1", "+1", "1", "07", "1.5", "1e5", "inf", "nan", "²", "٣", "0x10", "9" * 18, "9" * 19, "9" * 5000, "1-3",
    "3-1",
    "1_[0-99999999999999999999]", "1_[1-3,7]", "1_2", "1+1", "1+99", "[1-5]", "n[1-3]", "n[0-99999999999]", "n[1-9][1-9][1-9]",
    "n1", "n9", "all", "last", "1,2,,3", ",", "=", "a=b", ":", "::", "a100:2", "gpu:a100:-1", "2@30", "now",
    "now+9999999999days",
    "2026-02-30", "12:61", "16:00", "99999-23:59:59", "UNLIMITED", "-0", "1G", "999999P", "%j", "%99999j", "%t%n%%",
    "/nonexistent/x",
    "../../x", "/dev/null", "/proc/self/mem", "\x1b[31m", "\u202e", "\u2028", "é", "\U0001f600", "x" * 70_000, "SIGKILL",
    "B:USR1@9",
    "afterok:1", "afterok:1:2?afterany:3", "after:1+9999999", "singleton", "(gpu|big)&!x", "[a*2&b*3]", "{}", "[]", "null",
    '[{"nodes":"1","ntasks":"2"}]', "[" * 5000, "0-15:4%2", "0-99999999:1", "1:2:3:4:5", "main", "main,main", "normal", "\t",
    "\n", "#",
]  # fmt: skip
ODD: list[Any] = [None, True, False, [], {}, [[]], [{}], {"": ""}, [None], ["1", 2]]
RAW = [  # not what json.dumps writes
    '"\\ud800"', '"\\udcff"', '"a\\u0000b"', "1" * 400, "1e400", "NaN", "-Infinity", "[" * 40 + "]" * 40, "[" * 3000,
    '{"a":1,"a":2}',
    '"\xff"', "01", "'x'", "", "tru",
]  # fmt: skip
_MARK = "raw-value-"


class Grammar:
    """Draws requests. `jobs`: ids, as text, of jobs that are worth naming; `tokens`: of launches that there are."""

    def __init__(
        self, seed: int, jobs: list[str] | None = None, tokens: list[str] | None = None, work_dir: str = "/tmp"
    ) -> None:
        self.work_dir = work_dir
        self.broken = 1.0  # how often, compared with usual, what it says is not JSON at all
        self.random = random.Random(seed)
        self.jobs = jobs or ["1", "2"]
        self.tokens = tokens or ["0123456789abcdef.1.0.0.n1." + "0" * 32]

    def pick(self, values: Any) -> Any:
        return self.random.choice(list(values))

    def value(self) -> Any:
        kind = self.random.random()
        if kind < 0.55:
            return self.pick(TEXTS)
        if kind < 0.8:
            return self.pick(NUMBERS)
        if kind < 0.9:
            return self.pick(ODD)
        is_raw = self.random.random() < self.broken
        return f"{_MARK}{self.random.randrange(len(RAW))}" if is_raw else self.pick(TEXTS)

    def text(self) -> str:
        return self.pick(TEXTS)

    def reference(self) -> str:
        job = self.pick(self.jobs)
        return self.pick([job, job, f"{job}_1", f"{job}_[0-3]", f"{job}+1", f"{job}.0", f"{job}.batch", self.text()])

    # ----- changes

    def changed(self, value: Any) -> Any:
        """Return `value`, JSON, changed in none to three places."""
        for _ in range(self.random.choice([0, 1, 1, 1, 2, 3])):
            value = self._changed_once(value)
        return value

    def _changed_once(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, dict) and value and self.random.random() < 0.9 - depth / 10:
            name = self.pick(value)
            what = self.random.random()
            if what < 0.1:
                return {key: item for key, item in value.items() if key != name}
            if what < 0.15:
                return {**value, self.text(): self.value()}
            return {**value, name: self._changed_once(value[name], depth + 1)}
        if isinstance(value, list) and value and self.random.random() < 0.7:
            at = self.random.randrange(len(value))
            what = self.random.random()
            if what < 0.2:
                return value[:at] + value[at + 1 :]
            if what < 0.3:
                return value * self.pick([2, 50])
            return [*value[:at], self._changed_once(value[at], depth + 1), *value[at + 1 :]]
        if isinstance(value, str) and value and self.random.random() < 0.2:
            at = self.random.randrange(len(value))
            return (
                value[:at]
                + self.pick(["", "\0", "-", ",", "9", "[", "é", " "])
                + value[at + self.random.randrange(2) :]
            )
        return self.value()

    def json(self, value: Any) -> bytes:
        """Return JSON text, now and then broken."""
        text = json.dumps(value, ensure_ascii=self.random.random() < 0.5)
        for number, raw in enumerate(RAW):
            text = text.replace(f'"{_MARK}{number}"', raw)
        data = text.encode("utf-8", "surrogatepass")
        if self.random.random() < 0.02 * self.broken:
            data = data[: self.random.randrange(len(data) + 1)]
        if self.random.random() < 0.01 * self.broken:
            at = self.random.randrange(len(data) + 1)
            data = data[:at] + bytes([self.random.randrange(256)]) + data[at + 1 :]
        return data

    # ----- the API

    def call(self) -> tuple[str, str, bytes]:
        """Return method, path and body of a request."""
        make: Callable[[], tuple[str, str, bytes]] = self.pick(
            [self._get] * 6
            + [self._submit] * 4
            + [self._command] * 4
            + [self._act] * 5
            + [self._update] * 5
            + [self._admins] * 2
            + [self._odd_path]
        )
        return make()

    def http(self) -> tuple[bytes, bool]:
        """Return the bytes of a request, and whether it is HTTP that is answered on a connection that stays."""
        method, path, body = self.call()
        head = f"{method} {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode("latin-1", "replace")
        if self.random.random() > 0.02:
            return head + b"\r\n" + body, True
        odd = [
            head + b"Content-Length: 5\r\n\r\n" + body,
            head + b"Transfer-Encoding: chunked\r\n\r\n" + body,
            head.replace(b"HTTP/1.1", b"HTTP/9.9") + b"\r\n",
            head + b"X: " + b"y" * 70_000 + b"\r\n\r\n",
            head + b"Expect: 100-continue\r\n\r\n" + body,
            head + b"Upgrade: h2c\r\nConnection: upgrade\r\n\r\n" + body,
            b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n",
            f"{method} {path} HTTP/1.1\r\nContent-Length: {'9' * self.pick([3, 19, 400])}\r\n\r\n".encode(
                "latin-1", "replace"
            ),
            f"{method} {path} HTTP/1.1\r\nContent-Length: -1\r\n\r\n".encode("latin-1", "replace"),
            b"POST /v1/submit HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n{}\r\n0\r\n\r\n",
            bytes(self.random.randrange(256) for _ in range(self.random.randrange(200))),
            head[: self.random.randrange(len(head))],
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\r\n" * 100 + head + b"\r\n",
        ]
        return self.pick(odd), False

    def _query(self, names: list[str]) -> str:
        chosen = self.random.sample(names, self.random.randrange(min(4, len(names)) + 1))
        parts = []
        for name in chosen:
            value = self.pick([self.reference(), self.text(), self.text()])
            shown = quote(value[:8000], safe=",")
            if self.random.random() < 0.05:
                shown = quote_from_bytes(bytes(self.random.randrange(256) for _ in range(5)))
            parts.append(f"{name}={shown}")
        return "?" + "&".join(parts) if parts else ""

    def _get(self) -> tuple[str, str, bytes]:
        filters = [
            "user",
            "state",
            "name",
            "partition",
            "id",
            "nodes",
            "account",
            "qos",
            "reservation",
            "strict",
            "expected",
            "sort",
        ]
        layout = ["format", "long", "order", "array", "noheader", "dated", "fit", "colour", "time_format", "others"]
        reference = quote(self.reference()[:6000], safe="")
        path = self.pick([
            "/v1/ping", "/v1/partitions", "/v1/shares", "/v1/licenses", "/v1/reservations", "/v1/config", "/v1/strays",
            "/v1/snapshot", "/v1/alerts", "/v1/services",
            f"/v1/job/{reference}", f"/v1/job/{reference}/story", f"/v1/job/{reference}/why", f"/v1/job/{reference}/slow",
            "/v1/jobs" + self._query(filters), "/v1/queue" + self._query(filters + layout),
            "/v1/priorities" + self._query(filters),
            "/v1/outages" + self._query(["start_s", "end_s", "kinds"]),
            "/v1/tariff" + self._query(["start_s", "end_s"]),
            "/v1/history" + self._query(["id", "user", "state", "name", "start_s", "end_s", "limit", "attempts", "energy"]),
            "/v1/events" + self._query(["after", "about", "node"]),
            "/v1/nodes" + self._query(["share_file", "file", "sha256", "uid"]),
            "/v1/log" + self._query(["job", "stream", "offset", "limit"]),
            "/v1/files" + self._query(["job", "path", "after", "limit"]),
            "/v1/file" + self._query(["job", "path", "offset", "limit"]),
        ])  # fmt: skip
        return "GET", path, b""

    def spec(self) -> dict[str, Any]:
        spec = JobSpec(
            name="fuzz",
            script="#!/bin/sh\ntrue\n",
            work_dir=self.work_dir,
            stdout="/dev/null",
            time_limit_s=60,
            hold=self.random.random() < 0.5,
        )
        value = spec_to_json(spec)
        if self.random.random() < 0.2:
            value["array"] = {"indices": list(range(self.random.randrange(1, 20))), "limit": 2}
        if self.random.random() < 0.1:
            value["components"] = [spec_to_json(JobSpec(name="b", script="", work_dir=self.work_dir))]
        return value

    def _submit(self) -> tuple[str, str, bytes]:
        specs = [self.spec() for _ in range(self.pick([1, 1, 1, 2]))]
        if self.random.random() < 0.15:
            return "POST", "/v1/test", self.json(self.changed({"job": specs[0]}))
        body = {"request_id": self.pick(["", f"r{self.random.randrange(50)}", self.text()]), "jobs": specs}
        if self.random.random() < 0.85:  # deep: one field of one job
            at = self.random.randrange(len(specs))
            name = self.pick(specs[at])
            specs[at][name] = self._changed_once(specs[at][name], 1)
            return "POST", "/v1/submit", self.json(body)
        return "POST", "/v1/submit", self.json(self.changed(body))

    def _command(self) -> tuple[str, str, bytes]:
        """Return the words of a command; none of hcancel's ends jobs by a filter."""
        name = self.pick(["hsub", "sbatch", "hqueue", "squeue", "hcancel", "scancel", self.text()])
        words = [self.reference()] if "cancel" in name else []
        for _ in range(self.random.randrange(5)):
            option = self.pick(
                COMMAND_OPTIONS["cancel" if "cancel" in name else "queue" if "queue" in name else "submit"]
            )
            words.append(f"--{option}" + self.pick(["", f"={self.text()}"]))
        body: dict[str, Any] = {
            "command": name,
            "argv": [*words, *self.pick([[], ["--wrap", self.text()], ["job.sh", self.text()]])],
            "environ": [
                f"{self.pick(['SBATCH_TIMELIMIT', 'SQUEUE_SORT', 'TZ', self.text()])}={self.text()}",
                "LANG=C",
                self.text(),
            ],
            "work_dir": self.work_dir,
            "host": "h",
            "request_id": self.pick(["", self.text()]),
            "width": self.pick([0, 80, *NUMBERS]),
            "out_is_terminal": self.pick([True, False]),
            "err_is_terminal": self.pick([True, False]),
            "utc_offset_s": 0,
        }
        if self.random.random() < 0.6:
            body |= {"script": f"#!/bin/sh\n#SBATCH --hold --{self.text()}\n", "script_at": len(words)}
        return "POST", "/v1/command", self.json(body if self.random.random() < 0.7 else self.changed(body))

    def _act(self) -> tuple[str, str, bytes]:
        verb = self.pick(["cancel", "hold", "release", "requeue", "suspend", "resume"])
        body: dict[str, Any] = {"jobs": [self.reference() for _ in range(self.pick([1, 1, 2, 0]))]}
        if verb == "cancel":
            if self.random.random() < 0.5:
                names = ["user", "name", "state", "partition", "account", "qos", "reservation", "node"]
                body["filters"] = {self.pick(names): self.text()}
            if self.random.random() < 0.5:
                body["signal"] = self.pick(["USR1", "10", self.text()])
            body |= {"batch": self.pick([True, False]), "full": self.pick([True, False])}
        return "POST", f"/v1/{verb}", self.json(self.changed(body))

    def _update(self) -> tuple[str, str, bytes]:
        names = self.random.sample(sorted(CHANGES | OPTIONS.keys()), self.pick([1, 1, 1, 2]))
        body = {"jobs": [self.reference()], "changes": {name: self.text() for name in names}}
        return "POST", "/v1/update", self.json(body if self.random.random() < 0.8 else self.changed(body))

    def _admins(self) -> tuple[str, str, bytes]:
        kind = self.random.randrange(7)
        if kind == 0:
            verb = self.pick(["drain", "resume", "power-down", "power-up"])
            node = self.pick(["n8", "n[8-9]", self.text()]).replace("all", "n8").replace("n1", "n8")  # n1 is to go on
            return "POST", f"/v1/nodes/{verb}", self.json(self.changed({"nodes": node, "why": self.text(), "by": "x"}))
        if kind == 1:
            verb = self.pick(["create", "update", "delete"])
            changes = {self.pick(KEYS): self.text() for _ in range(self.random.randrange(5))}
            changes |= self.pick([{}, {"starttime": "now+1day", "duration": "60", "nodes": "n1", "users": "root"}])
            name = self.pick(["r1", "r2", "", self.text()])
            return "POST", f"/v1/reservations/{verb}", self.json(self.changed({"name": name, "changes": changes}))
        if kind == 2:
            return (
                "POST",
                "/v1/usage/reset",
                self.json(self.changed({"accounts": [self.text()], "users": [self.text()]})),
            )
        if kind == 3:
            labels = self.pick(["rule", "node", "mount", "job", self.text()])
            made = {"matchers": {labels: self.text()}, "until_s": self.pick([0, 1e300, 2e9]), "why": self.text()}
            path = self.pick(["/v1/silences/create", "/v1/silences/end", "/v1/alerts/test"])
            return "POST", path, self.json(self.changed(made | {"id": 1, "receiver": self.text()}))
        if kind == 4:
            made = {"job": self.reference(), "terminal": self.pick([True, False]), "node": self.pick(["", self.text()])}
            return "POST", "/v1/reach", self.json(self.changed(made | {"rows": self.pick(NUMBERS), "columns": 80}))
        if kind == 5:
            verb = self.pick(["start", "scale", "stop", "use", "sync", "reach"])
            made = {
                "name": self.pick(["s1", "s2", self.text()]),
                "model": self.text(),
                "job": self.spec(),
                "services": {},
            }
            counts = {
                "least": self.pick(NUMBERS),
                "most": self.pick([1, 2, *NUMBERS]),
                "audience": self.pick(["all", self.text()]),
            }
            return "POST", f"/v1/services/{verb}", self.json(self.changed(made | counts))
        return "POST", f"/v1/strays/{self.pick(['adopt', 'end'])}", self.json(self.changed({"tokens": [self.text()]}))

    def _odd_path(self) -> tuple[str, str, bytes]:
        path = "/" + quote(self.text()[:5000], safe="/%")
        return self.pick(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]), path, self.json(self.value())

    # ----- frames

    def frame(self, message: dict[str, Any], blob: bytes = b"") -> bytes:
        """Return the frame of a message that is JSON, now and then with a wrong head."""
        text = self.json(message)
        sizes = len(text), len(blob)
        if self.random.random() < 0.01 * self.broken:
            sizes = self.pick([(2**32 - 1, 0), (0, 2**32 - 1), (0, 0), (len(text) + 1, 0), (9 << 20, 0)])
        return struct.pack("!II", *sizes) + text + blob

    def step_message(self, job_id: int) -> dict[str, Any]:
        """Return what a step command may say."""
        token = self.pick(self.tokens)
        words: list[protocol.Message] = [
            protocol.StepAsked(),
            protocol.PreparedStep(key=self.text()),
            protocol.StepBack(started=self.pick([True, False])),
            protocol.StepSignal(signum=self.pick([2, 10, 15, 99])),
            protocol.Input(token=token, task=0, offset=0, eof=False),
            protocol.OutputAck(token=token, task=0, fd=1, offset=5, again=self.pick([True, False])),
            protocol.Ping(request=1),
            protocol.Progress(job_id=job_id, step=5, loss=0.5, note="n"),
            protocol.Failure(job_id=job_id, rank=0, ranks=2, text="why"),
            protocol.ApiRequest(job_id=job_id, method="GET", path="/v1/ping"),
        ]
        if self.random.random() < 0.65:
            return self.changed(self.step_request(job_id))
        said = protocol.to_json(self.pick(words))
        if said["type"] == "ApiRequest" and self.random.random() < 0.8:
            said["method"], said["path"], _ = self.call()
        if self.random.random() < 0.05:
            said["type"] = self.pick([*(cls.__name__ for cls in protocol._MESSAGES), [], {}, None, self.text()])
        return self.changed(said)

    def step_request(self, job_id: int) -> dict[str, Any]:
        names = self.random.sample(sorted(KNOWN_OPTIONS), self.random.randrange(4))
        options: dict[str, Any] = {name: self.pick([self.text(), self.text(), True, self.value()]) for name in names}
        if self.random.random() < 0.05:
            options[self.pick(["attach", "resize", "shell"])] = self.text()
        request = protocol.StepRequest(
            version=protocol.VERSION,
            job_id=self.pick([job_id, job_id, job_id, 0, 999]),
            options=options,
            argv=self.pick([["true"], ["/nonexistent"], ["sleep", "0"], []]),
            work_dir=self.work_dir,
            env={"A": "1"},
        )
        return protocol.to_json(request)

    def node_message(self, node: str, tokens: list[str]) -> dict[str, Any]:
        """Return what a node may say, of launches that it was given, of others' and of none."""
        token = self.pick(tokens or self.tokens)
        parts = token.split(".")
        job_id = int(parts[1])
        to = protocol.Address(node=self.pick([node, "", "n1"]), stream=self.random.randrange(4))
        status = self.pick([
            protocol.CLAIMED, protocol.READY, protocol.STARTED, protocol.ENDED, protocol.REVOKED, protocol.REFUSED,
            protocol.LOST, "x",
        ])  # fmt: skip
        report = protocol.Report(
            seq=self.random.randrange(100),
            token=token,
            status=status,
            at_s=1e9,
            codes=self.pick([[0], [3], [256], [-1], []]),
            signals=self.pick([[0], [9], []]),
            why=self.text()[:500],
            usage=self.pick([{}, {"cpu_user_s": 1.0, "max_rss_kib": 5.0}, {"max_rss_kib": -1e300}]),
            ran_s=self.pick([None, 1.0, -1e300, 1e300]),
            ago_s=self.pick([None, 0.0, -1e300, 1e300]),
            node_fault=self.random.random() < 0.05,
        )
        inner = self.step_message(job_id)
        words: list[protocol.Message] = [
            report, report, report,
            protocol.Condition(why=self.pick(["", "disk full", self.text()[:500]])),
            protocol.ScriptFailed(seq=self.random.randrange(100), job_id=job_id, why=self.text()[:500]),
            protocol.JobGone(incarnation=parts[0], job_id=job_id, attempt=self.random.randrange(3), stay=0),
            protocol.Facts(request=self.random.randrange(5), facts={"fault": self.text()}),
            protocol.Sample(
                columns=self.pick([[], ["node_load1", f"node_filesystem_size_bytes:{self.text()}", self.text()], ["x"] * 2000]),
                values=[self.value() for _ in range(3)],
                job_columns=["job_processes"],
                jobs=[[self.value(), 0, 1], [job_id, 0, self.value()], []],
            ),
            protocol.FileData(request=self.random.randrange(5), offset=0, size=5),
            protocol.FileList(request=self.random.randrange(5), files=[("a", "file", 1, 1.0)], more=True),
            protocol.Output(to=to, token=token, task=0, fd=1, offset=0, eof=False),
            protocol.InputAck(to=to, token=token, task=0, offset=0),
            protocol.FromStream(stream=1, uid=0, job_id=job_id, attempt=0, message=inner),
            protocol.FromStream(stream=2, uid=0, job_id=job_id, attempt=0, message=inner),
            protocol.CloseStream(stream=1), protocol.Ping(request=1), protocol.Pong(request=1),
        ]  # fmt: skip
        said = protocol.to_json(self.pick(words))
        return self.changed(said) if self.random.random() < 0.6 else said

    def welcome(self, node: str, epoch: int, inventory: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the first word of a node, in half of the cases a good one."""
        facts = {"machine_id": "m", "fault": "", "is_root": True, "cpus": 4, "mem_mib": 4096, "samples": True}
        said = protocol.to_json(
            protocol.Welcome(
                version=protocol.VERSION, node=node, boot_id=self.pick(["b1", "b2"]), agent_version="x", pid=1, epoch=epoch,
                inventory=inventory, facts=facts,
            )
        )  # fmt: skip
        return said if self.random.random() < 0.5 else self.changed(said)
