"""A conversation as the text of a prompt, by the model's own chat template.

A template is a program that came with the model. It runs in Jinja's sandbox, in a process of its own (`python -m hpcserve.chat`)
with little memory and processor time, without environment or files of ours: a hostile one costs its own request.
Does not know HTTP. Rules: what a template sees is plain JSON; one rendering at a time; a process that is over its limits is
killed, and the next rendering starts another.

Sources: https://huggingface.co/docs/transformers/chat_templating
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from jinja2 import TemplateError, ext, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpcserve.errors import InvalidRequest, ModelFileError
from hpcserve.tokens import read_json, word_of

MOST_TEMPLATE_BYTES = 1 << 20
MOST_TEXT_BYTES = 32 << 20
MOST_MEMORY_BYTES = 768 << 20
MOST_CPU_S = 2
MOST_WAIT_S = 60.0
SIZE = struct.Struct("<I")
SPECIAL_WORDS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """The chat template of a model, and the process that renders it."""

    def __init__(self, source: str | None, words: Mapping[str, str]) -> None:
        self.source = source
        self.words = dict(words)  # `bos_token` and such
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """Return the template of a model directory.

        Raises:
            ModelFileError: a file is damaged or too large.
        """
        settings = read_json(directory / "tokenizer_config.json")
        words = {name: word_of(settings[name]) for name in SPECIAL_WORDS if word_of(settings.get(name))}
        return cls(_source(directory, settings.get("chat_template")), words)

    @property
    def reads_tools(self) -> bool:
        """Whether the template shows the model the tools of a request."""
        return self.source is not None and "tools" in self.source

    async def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = (), values: Mapping[str, Any] = {}
    ) -> str:
        """Return the prompt of a conversation, which ends where the model's answer begins.

        `values` are further variables of the template.

        Raises:
            InvalidRequest: the model has no template, or the template refuses the messages.
        """
        if self.source is None:
            raise InvalidRequest(
                "cannot render the messages: the model has no chat template; use /v1/completions", param="messages"
            )
        asked = {
            "add_generation_prompt": True,
            **self.words,
            **values,
            "messages": [*messages],
            "tools": [*tools] if tools else None,
        }
        async with self._lock:
            try:
                async with asyncio.timeout(MOST_WAIT_S):
                    answer = await self._exchange(json.dumps(asked).encode())
            except (TimeoutError, OSError, asyncio.IncompleteReadError):
                self._kill()
                raise InvalidRequest(
                    "cannot render the messages: the chat template takes too much time or memory", param="messages"
                ) from None
            except asyncio.CancelledError:
                self._kill()  # half an answer may be in the pipe
                raise
        if "error" in answer:
            raise InvalidRequest(f"cannot render the messages: {answer['error']}", param="messages")
        return str(answer["text"])

    async def _exchange(self, asked: bytes) -> dict[str, Any]:
        """Send a rendering to the process, and return its answer.

        The process is started if there is none.
        """
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "hpcserve.chat"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"},
                cwd="/",
            )
            await _send(process, str(self.source).encode())
        await _send(process, asked)
        assert process.stdout is not None
        (size,) = SIZE.unpack(await process.stdout.readexactly(SIZE.size))
        if size > MOST_TEXT_BYTES:
            raise OSError("the text is too long")
        answer: dict[str, Any] = json.loads(await process.stdout.readexactly(size))
        return answer

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def close(self) -> None:
        """End the process."""
        process = self._process
        self._kill()
        if process is not None:
            await process.wait()


async def _send(process: asyncio.subprocess.Process, content: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(SIZE.pack(len(content)) + content)
    await process.stdin.drain()


def _source(directory: Path, setting: Any) -> str | None:
    """Return the source of a model's template.

    It is a file of its own, or a setting that may have several by name.
    """
    path = directory / "chat_template.jinja"
    try:
        if path.stat().st_size > MOST_TEMPLATE_BYTES:
            raise ModelFileError(f"cannot read '{path}': it has more than {MOST_TEMPLATE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"cannot read '{path}': {error}") from None
    if isinstance(setting, list):
        named = {item.get("name"): item.get("template") for item in setting if isinstance(item, dict)}
        setting = named.get("default")
    if isinstance(setting, str) and len(setting) > MOST_TEMPLATE_BYTES:
        raise ModelFileError(f"cannot use the chat template: it has more than {MOST_TEMPLATE_BYTES} bytes")
    return setting if isinstance(setting, str) else None


class GenerationMark(ext.Extension):
    """The tag `generation` of templates for training: its body is text as any other."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox that templates of Hugging Face expect."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMark, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = _now
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def serve_renderings(asked: BinaryIO, answers: BinaryIO) -> None:
    """Read a template and then its values, one after the other.

    Write each text, or why there is none.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source = (_receive(asked) or b"").decode()
    made = environment()
    while (content := _receive(asked)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        until = int(used.ru_utime + used.ru_stime) + MOST_CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
        try:
            answer = {"text": made.from_string(source).render(json.loads(content))}
        except Exception as error:  # a template may raise anything
            answer = {"error": f"the chat template says: {str(error)[:300] or type(error).__name__}"}
        packed = json.dumps(answer).encode()
        answers.write(SIZE.pack(len(packed)) + packed)
        answers.flush()


def _receive(source: BinaryIO) -> bytes | None:
    head = source.read(SIZE.size)
    return source.read(SIZE.unpack(head)[0]) if len(head) == SIZE.size else None


if __name__ == "__main__":
    serve_renderings(sys.stdin.buffer, sys.stdout.buffer)
