"""hserve: serve models from jobs of the queue.

``start``, ``ls``, ``scale`` and ``stop`` are requests to the controller, ``test`` is one to the gateway. A replica's job is built
with the options of hsub. ``plan``, ``quantize``, ``prune`` and ``perplexity`` are commands of hpcserve, which runs as a child, so
that this command does not load torch. ``plan`` gets what the controller knows of the nodes, unless the user describes nodes.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcsched import client, paths
from hpcsched.cli.output import guarded, print_json, run_command
from hpcsched.cli.process import work_dir
from hpcsched.client import Json
from hpcsched.client.protocol import Send
from hpcsched.commands.options import HELP, VERSION, Command, Option, UsageError, Words, nearest
from hpcsched.config.load import load_gateway
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.jobscript.build import SubmissionWords, build_submission, read_layers
from hpcsched.jobscript.options import parse_command_line
from hpcsched.listing.text import clean, columns
from hpcsched.metrics.bench import run_from_json
from hpcsched.metrics.links import link_from_json
from hpcsched.model import frozen
from hpcsched.model.accounting import Accounting
from hpcsched.model.codec import spec_to_json, value_from_json
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.service import Audience, check_service_name, read_replicas
from hpcsched.model.spec import JobSpec
from hpcsched.planner.serving import chosen, serving_document, why_no_jobs

COMMAND = Command(
    "hserve",
    (
        "start MODEL --name=NAME [--replicas=MIN-MAX] [--open=WHO] [OPTIONS OF HSUB] [-- OPTIONS OF THE SERVER]",
        "ls [NAME...] [--json]",
        "scale NAME MIN-MAX",
        "roll NAME --to=MODEL [--canary=PERCENT] [--check=FILE] [--max-errors=PERCENT] [--max-ttft=FACTOR] [OPTIONS OF HSUB]",
        "roll NAME --back",
        "stop NAME...",
        "test NAME [PROMPT]",
        "usage [--days=N]",
        "plan | quantize | prune | perplexity MODEL [OPTION...]",
    ),
    "Serve models to OpenAI's clients. 'start' makes a service: one job or several, as the load needs, that answer under one "
    "name at the gateway. 'ls' shows services, 'scale' changes the number of replicas, 'stop' ends a service and its jobs. "
    "'roll' brings in another model beside the present one, gives it a part of the requests, and takes it or goes back by "
    "itself. 'test' asks a model through the gateway. 'usage' shows what users asked. 'plan' shows how a model would be split "
    "over nodes; 'quantize', 'prune' and 'perplexity' make and judge smaller models.",
    (
        Option("name", metavar="NAME", help="name of the service: lower-case letters, digits, '.', '_' and '-'"),
        Option(
            "replicas", metavar="MIN-MAX", help="number of replicas, such as 2 or 1-3; 0-3: none while it is not asked"
        ),
        Option("open", metavar="WHO", help="who may ask the model: owner (default), account or all"),
        Option(
            "script",
            metavar="FILE",
            help="job script of a replica instead of hpcserve; it serves at the socket of htun",
        ),
        Option("to", metavar="MODEL", help="roll: the new model"),
        Option(
            "canary", metavar="PERCENT", help="roll: the part of the requests for the new model at first; default: 10%"
        ),
        Option(
            "check", metavar="FILE", help="roll: requests for the new model before users' ones, one JSON object a line"
        ),
        Option("max-errors", metavar="PERCENT", help="roll: the most errors among the answers; default: 1%"),
        Option(
            "max-ttft", metavar="FACTOR", help="roll: how many times as long the first token may take; default: 1.3x"
        ),
        Option("back", help="roll: end the rollout, and take the new model back"),
        Option("days", metavar="N", help="usage: of the last N days; default: 30"),
        Option("json", help="print the answer as JSON, version 1"),
        HELP,
        VERSION,
    ),
    notes=(
        "A replica is a job of yours: it takes the options of hsub (--nodes, --gpus, --time, --partition, --mem ...). Without "
        "--export it gets PATH, VIRTUAL_ENV and a few more variables of yours.",
    ),
)
# Variables that find programs and models. Others may be secrets, and the service is kept for a long time.
EXPORTED = (
    "CONDA_PREFIX", "HF_HOME", "HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH", "SHELL", "USER", "VIRTUAL_ENV",
)  # fmt: skip
CHILDREN = ("plan", "quantize", "prune", "perplexity", "hash")
TEST_PROMPT = "Say hello."
TEST_S = 120.0
SCRIPT = """\
#!/bin/sh
# Only its user can enter the directory of this socket; the gateway reaches it through the job.
socket=$(htun socket) || exit 1
rm -f "$socket"
exec python3 -m hpcserve run {model} --name {name} --listen "unix:$socket"{options}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] == "plan":
        return guarded(COMMAND.name, plan, words[1:])
    if words and words[0] in CHILDREN:
        return run_child(words)
    own, job_options, served = split_words(words) if words and words[0] in JOB_VERBS else (words, [], [])
    return run_command(COMMAND, lambda read: _work(read, job_options, served), own)


def split_words(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the words that are hserve's, those that are hsub's, and those of the server."""
    known = {f"--{option.name}": bool(option.metavar) for option in COMMAND.options}
    words = list(words)
    own: list[str] = []
    others: list[str] = []
    served = words[words.index("--") + 1 :] if "--" in words else []
    words = words[: words.index("--")] if "--" in words else words
    own += words[:1]
    at = 1
    if len(words) > 1 and not words[1].startswith("-"):
        own.append(words[1])
        at = 2
    while at < len(words):
        name, equals, _ = words[at].partition("=")
        takes_value = known.get(name, False) and not equals
        mine = own if name in known or words[at] in ("-h", "-V") else others
        mine += words[at : at + 1 + takes_value]
        at += 1 + takes_value
    return own, others, served


def _work(words: Words, job_options: Sequence[str], served: Sequence[str]) -> int:
    verbs = (*JOB_VERBS, *VERBS, *CHILDREN)
    if not words.operands:
        raise UsageError(f"cannot tell what to do: name one of {', '.join(verbs)}; see hserve --help")
    verb, *rest = words.operands
    if verb in JOB_VERBS:
        return JOB_VERBS[verb](rest, words, job_options, served)
    if verb in VERBS:
        return VERBS[verb](rest, words)
    near = nearest(verb, verbs)
    raise UsageError(f"cannot understand {verb[:60]!r}: no such verb; did you mean {near[0] if near else 'ls'}?")


# ----- start


def _start(rest: Sequence[str], words: Words, job_options: Sequence[str], served: Sequence[str]) -> int:
    if len(rest) != 1:
        raise UsageError("cannot start a service: write hserve start MODEL --name=NAME, options behind the model")
    name, model = check_service_name(words.last("name")), _model(rest[0])
    if words.has("script") and served:
        raise UsageError("cannot take options of the server with --script: write them into the script")
    job = job_of(name, model, job_options, served, words.last("script"))
    answer = start_service(name, model, words.last("replicas"), words.last("open"), job)
    if words.has("json"):
        print_json(answer)
    else:
        print(started_text(name))
    return 0


def start_service(name: str, model: str, replicas: str | None, audience: str | None, job: Json) -> Json:
    """Start a service, and return the controller's answer. Raises HpcschedError."""
    least, most = read_replicas(replicas or "1")
    body = {"name": name, "model": model, "least": least, "most": most, "job": job}
    return client.call("POST", "/v1/services/start", body | {"audience": audience or Audience.OWNER.value})


def started_text(name: str) -> str:
    """Return what a user is told about a new service."""
    return f"Started service {name}: 'hserve ls {name}' shows when it is ready"


def replica_of(name: str, spec: JobSpec, *, is_named: bool, exports: bool) -> JobSpec:
    """Return the job of a replica from a submitted one: few variables, unless it exports."""
    kept = spec.env if exports else tuple(pair for pair in spec.env if pair[0] in EXPORTED)
    return frozen.replace(spec, env=kept, name=spec.name if is_named else name)


def _roll(rest: Sequence[str], words: Words, job_options: Sequence[str], served: Sequence[str]) -> int:
    if len(rest) != 1:
        raise UsageError("cannot roll: write hserve roll NAME --to=MODEL, options behind the name")
    name = check_service_name(rest[0])
    if words.has("back"):
        body: Json = {"name": name, "back": True}
    else:
        if not words.has("to"):
            raise UsageError("cannot roll: name the new model with --to=MODEL")
        model = _model(words.last("to"))
        has_job = bool(job_options or served or words.has("script"))
        body = {
            "name": name,
            "model": model,
            **({"job": job_of(name, model, job_options, served, words.last("script"))} if has_job else {}),
            "canary": round(100 * percent_of("canary", words.last("canary") or "10%")),
            "max_errors": percent_of("max-errors", words.last("max-errors") or "1%"),
            "max_ttft": factor_of(words.last("max-ttft") or "1.3x"),
            "checks": checks_of(words.last("check")) if words.has("check") else [],
        }
    answer = client.call("POST", "/v1/services/roll", body)
    if words.has("json"):
        print_json(answer)
    elif words.has("back"):
        print(f"Service {name} stays at {answer['service']['current']}")
    else:
        print(
            f"Rolling {name} to version {answer['service']['rollout']['label']}: 'hserve ls {name}' shows how far it is"
        )
    return 0


def percent_of(name: str, text: str) -> float:
    """Return a text such as ``10%`` as a part of 1. Raises UsageError."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise UsageError(f"cannot take --{name} {text[:40]!r}: write a percentage, such as 10%")
    return value


def factor_of(text: str) -> float:
    """Return a text such as ``1.3x`` as a number. Raises UsageError."""
    try:
        value = float(text.removesuffix("x"))
    except ValueError:
        value = 0.0
    if not 1 <= value <= 100:
        raise UsageError(f"cannot take --max-ttft {text[:40]!r}: write a factor of at least 1, such as 1.3x")
    return value


def checks_of(path: str) -> list[Json]:
    """Return the requests in a file, one JSON object on each line. Raises RequestError."""
    found = []
    for number, line in enumerate(_text_of(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            check = json.loads(line)
        except (ValueError, RecursionError):
            check = None
        if not isinstance(check, dict) or not ("messages" in check or "prompt" in check):
            raise RequestError(
                f"cannot read {clean(path)} line {number}: it must be a JSON object with messages or prompt"
            )
        found.append(check)
    return found


def _model(text: str) -> str:
    """Return the absolute path of a model's directory."""
    return text if client.is_remote() else os.path.normpath(os.path.join(os.getcwd(), text))


def job_of(
    name: str,
    model: str,
    options: Sequence[str],
    served: Sequence[str],
    script: str,
    environ: Mapping[str, str] | None = None,
) -> Json:
    """Return the job of a replica as JSON. Raises RequestError."""
    environ = os.environ if environ is None else environ
    kept = {key: value for key, value in environ.items() if key in EXPORTED}
    words = SubmissionWords(
        command="hsub",
        argv=(f"--job-name={name}", *options, f"{name}.sh"),
        script=_text_of(script) if script else server_script(name, model, served),
        script_path="",
        environ=dict(environ) if any(word.startswith("--export") for word in options) else kept,
        work_dir=work_dir(),
        host=os.uname().nodename,
    )
    line = parse_command_line(words.argv)
    return spec_to_json(build_submission(words, line, read_layers(words, line), time.time()).spec)


def server_script(name: str, model: str, served: Sequence[str]) -> str:
    """Return the job script of a replica that hpcserve serves."""
    options = "".join(f" {shlex.quote(word)}" for word in served)
    return SCRIPT.format(model=shlex.quote(model), name=shlex.quote(name), options=options)


def _text_of(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise RequestError(f"cannot read {clean(path)}: {error.strerror}") from None


# ----- ls, scale, stop


def _ls(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", "/v1/services")
    by_name = {service["name"]: service for service in answer["services"]}
    for name in rest:
        if name not in by_name:
            raise NotFoundError(f"cannot find service {clean(name[:80])!r}: there are {', '.join(by_name) or 'none'}")
    shown = [service for service in answer["services"] if not rest or service["name"] in rest]
    if words.has("json"):
        print_json(answer | {"services": shown})
        return 0
    sys.stdout.write(table(shown))
    for service in shown:
        for text in (_rollout_words(service["rollout"]), service["last_rollout"]):
            if text:
                print(f"{service['name']}: {clean(text)}")
        if service["problem"]:
            print(f"hserve: {service['name']}: {clean(service['problem'])}", file=sys.stderr)
    return 0


def _rollout_words(rollout: Json | None) -> str:
    if rollout is None:
        return ""
    return f"version {rollout['label']} comes in beside {rollout['before']}: it is {rollout['stage']}"


def table(services: Sequence[Json]) -> str:
    """Return the services as lines, each followed by its replicas."""
    rows = []
    for service in services:
        wanted = (
            f"{service['least']}-{service['most']}" if service["least"] != service["most"] else f"{service['most']}"
        )
        ready = f"{service['ready']}/{service['wanted']}"
        models = [version["model"] for version in service["versions"] if version["label"] == service["current"]]
        rows.append(
            [
                service["name"],
                service["user"],
                service["current"],
                ready,
                wanted,
                service["audience"],
                "",
                "",
                clean(models[0] or "-"),
            ]
        )
        for one in service["replicas"]:
            state = "drained" if one["drained"] else "ready" if one["ready"] else one["state"].lower()
            load = f"{one['active']} active, {one['kv_used']:.0%} cache" if one["ready"] else ""
            where = ",".join(one["nodes"]) or "-"
            rows.append(["", "", one["version"], state, "", "", str(one["job"]), load, clean(where)])
    return columns(["NAME", "USER", "VERSION", "READY", "REPLICAS", "OPEN", "JOB", "LOAD", "MODEL/NODES"], rows)


def _scale(rest: Sequence[str], words: Words) -> int:
    if len(rest) != 2:
        raise UsageError("cannot scale: write hserve scale NAME 2, or NAME 1-3")
    least, most = read_replicas(rest[1])
    answer = client.call("POST", "/v1/services/scale", {"name": rest[0], "least": least, "most": most})
    if words.has("json"):
        print_json(answer)
    return 0


def _stop(rest: Sequence[str], words: Words) -> int:
    if not rest:
        raise UsageError("cannot stop: name a service")
    for name in rest:
        answer = client.call("POST", "/v1/services/stop", {"name": name})
        if words.has("json"):
            print_json(answer)
    return 0


def _usage(rest: Sequence[str], words: Words) -> int:
    answer = client.call("GET", client.query("/v1/services/usage", days=words.last("days") or None))
    if words.has("json"):
        print_json(answer)
        return 0
    sums: dict[tuple[str, str, str], list[float]] = {}
    for row in answer["usage"]:
        if not rest or row["service"] in rest:
            total = sums.setdefault((row["service"], row["user"], row["account"]), [0.0] * 4)
            for at, kind in enumerate(("requests", "prompt_tokens", "completion_tokens", "charged_s")):
                total[at] += row[kind]
    rows = [[*map(clean, whose), *(f"{count:.0f}" for count in total)] for whose, total in sorted(sums.items())]
    head = ["NAME", "USER", "ACCOUNT", "REQUESTS", "PROMPT", "GENERATED", "CHARGED"]
    sys.stdout.write(columns(head, rows, right=range(3, 7)))
    return 0


# ----- test


def _test(rest: Sequence[str], words: Words) -> int:
    """Ask the model through the gateway, as a client would, and print the answer."""
    if not rest:
        raise UsageError("cannot test: name a service")
    prompt = " ".join(rest[1:]) or TEST_PROMPT
    body = {"model": rest[0], "messages": [{"role": "user", "content": prompt}], "max_tokens": 64}
    answer = ask_model(body)
    if words.has("json"):
        print_json(answer)
    else:
        print(clean(str(answer["choices"][0]["message"]["content"])))
    return 0


def ask_model(body: Json) -> Json:
    """Return the answer to a chat request at the gateway. Raises HpcschedError."""
    from hpcsched.client import https  # ssl takes longer to import than all else

    endpoint = https.find_endpoint(os.environ.get(https.URL, "") or gateway_url())._replace(prefix="")
    reply = https.perform(endpoint, Send("POST", "/v1/chat/completions", body, TEST_S))
    try:
        answer: Json = json.loads(reply.body)
        if reply.status == 200:
            return answer
        why = str(answer["error"]["message"])
    except (ValueError, KeyError, TypeError):
        why = f"the gateway answers with status {reply.status}"
    raise RequestError(f"cannot ask model {clean(body['model'])}: {clean(why)}")


def gateway_url() -> str:
    """Return the gateway's address: its url, or where it listens on this host."""
    if url := str(client.call("GET", "/v1/config")["gateway"]["url"]):
        return url
    from hpcsched.cli.admin.daemon import gateway_address  # brings the whole controller along

    settings = load_gateway(paths.find_config_dir(os.environ, os.getuid()))
    return gateway_address(settings.address, settings.port, {})[0]


def run_child(words: Sequence[str], given: str | None = None) -> int:
    """Run a command of hpcserve, which needs torch, and return its exit status.

    `given`: what it reads from its standard input.
    """
    import subprocess

    command = [sys.executable, "-P", "-m", "hpcserve", *words]
    content = None if given is None else given.encode()
    return subprocess.run(command, input=content, check=False).returncode


# ----- plan


def plan(words: Sequence[str]) -> int:
    """Run hpcserve's planner with the controller's facts, and return its exit status.

    Nodes that the user describes need no controller. Without one this machine is measured.
    """
    others, named = split_nodes(words)
    if not {"-h", "--help"}.isdisjoint(words) or any(is_description(word) for word in named):
        return run_child(["plan", *words])
    names = expand_hostlist(",".join(named)) if named else []
    try:
        document = cluster_document(names)
    except client.NoControllerError as error:
        if names:
            raise
        print(f"{COMMAND.name}: no nodes of a cluster, only this machine: {clean(str(error))}", file=sys.stderr)
        return run_child(["plan", *words])
    return run_child(["plan", *others, "--nodes", "-"], json.dumps(document))


def split_nodes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words without ``--nodes`` and its values, and these values."""
    others: list[str] = []
    named: list[str] = []
    takes = False
    for word in words:
        if word.startswith("-") and word != "-":
            name, equals, value = word.partition("=")
            takes = name == "--nodes" and not equals
            if name != "--nodes":
                others.append(word)
            elif equals:
                named.append(value)
        else:
            (named if takes else others).append(word)
    return others, named


def is_description(word: str) -> bool:
    """Return whether a value of ``--nodes`` describes nodes, or is a file that does."""
    return word == "-" or ":" in word or "/" in word or os.path.isfile(word)


def cluster_document(names: Sequence[str]) -> Json:
    """Return what the controller knows of these nodes; none: of all that the user may use.

    Raises HpcschedError.
    """
    views = chosen(client.call("GET", client.query("/v1/nodes", probe=1))["nodes"], names)
    partitions = client.call("GET", "/v1/partitions")["partitions"]
    accounting = value_from_json(Accounting, client.call("GET", "/v1/config")["accounting"])
    user = str(client.call("GET", "/v1/me")["user"])
    runs = [run_from_json(run) for run in client.call("GET", "/v1/benches")["benches"]]
    links = [link_from_json(run) for run in client.call("GET", "/v1/links")["links"]]
    why_not = why_no_jobs(views, partitions, accounting, user)
    return serving_document(views, runs, links, why_not, named=bool(names))


JOB_VERBS = {"start": _start, "roll": _roll}  # with options of hsub and of the server
VERBS = {"ls": _ls, "scale": _scale, "stop": _stop, "test": _test, "usage": _usage}
