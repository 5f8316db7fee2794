"""Checked requests of the API as `GenerateRequest`s, one for each choice.

Knows the tokenizer, the chat template and the length of the model's context; no HTTP. Rule: what the schema cannot say about a
request (lengths in tokens, token ids, fields that depend on each other) is checked here.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcserve.api import tools as calls
from hpcserve.api.guard import ApiError, beside_loop
from hpcserve.api.schema import MOST_LOGPROBS
from hpcserve.chat import ChatTemplate
from hpcserve.errors import InvalidRequest
from hpcserve.grammar import within_depth
from hpcserve.requests import GenerateRequest, SamplingSettings
from hpcserve.tokens import TextTokenizer

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
MOST_ARGUMENTS_DEPTH = 64  # of the JSON of a call


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A sequence to continue, and what its text needs."""

    generate: GenerateRequest
    index: int
    stops: tuple[str, ...] = ()
    echo: str | None = None  # the text of the prompt, which the answer repeats
    is_first: bool = True  # of its prompt, whose tokens count once
    keep: bool = True  # False: only the prompt was asked for; the engine's one token is dropped
    tools: tuple[str, ...] = ()  # names of the tools whose calls are read
    is_begun: bool = False  # the client has the beginning: the text of `generate.sent`
    is_over: bool = False  # the client has all of it

    def salted(self, salt: str) -> TextRequest:
        """Return the request with what it shares cached prefixes by."""
        return dataclasses.replace(self, generate=dataclasses.replace(self.generate, cache_salt=salt))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMaker:
    """The model, as far as requests depend on it."""

    tokenizer: TextTokenizer
    template: ChatTemplate
    context_tokens: int
    vocabulary: int
    most_choices: int

    async def chat(self, body: Mapping[str, Any]) -> list[TextRequest]:
        """Return the choices of a chat completion.

        Raises:
            InvalidRequest: the model cannot carry it out.
        """
        if body.get("top_logprobs") is not None and not body.get("logprobs"):
            raise InvalidRequest("cannot report 'top_logprobs': set 'logprobs' to true", param="top_logprobs")
        tools = [] if body.get("tool_choice") == "none" else body.get("tools") or []
        messages = [self._message(index, message) for index, message in enumerate(body["messages"])]
        if tools and not self.template.reads_tools:
            messages = _with_system_text(messages, calls.description(tools))
        text = await self.template.render(messages, tools=tools, values=body.get("chat_template_kwargs") or {})
        prompt = await beside_loop(len(text), self._encoded, text, "messages", self.tokenizer.encode_cut)
        wanted = body.get("max_completion_tokens") or body.get("max_tokens")
        request = self._request(
            body,
            prompt,
            wanted,
            param="messages",
            logprobs=body.get("top_logprobs") or 0 if body.get("logprobs") else None,
        )
        request = dataclasses.replace(request, grammar=answer_schema(body, tools))
        names = tuple(tool["function"]["name"] for tool in tools)
        text_request = TextRequest(generate=request, index=0, stops=_stops(body), tools=names)
        return _choices(text_request, int(body.get("n") or 1), 0)

    async def completion(self, body: Mapping[str, Any]) -> list[TextRequest]:
        """Return the choices of a completion: `n` for each of its prompts.

        Raises:
            InvalidRequest: the model cannot carry it out.
        """
        if body.get("suffix"):
            raise InvalidRequest("cannot insert text before a suffix: the model continues text only", param="suffix")
        count = int(body.get("n") or 1)
        if body.get("best_of") not in (None, count):
            raise InvalidRequest("cannot choose the best of several: 'best_of' must equal 'n'", param="best_of")
        prompts = self._prompts(body["prompt"], "prompt", count)
        echo, wanted = bool(body.get("echo")), body.get("max_tokens")
        wanted = DEFAULT_COMPLETION_TOKENS if wanted is None else int(wanted)
        if not wanted and not echo:
            raise InvalidRequest("cannot generate 0 tokens: only 'echo' allows it", param="max_tokens")
        made: list[TextRequest] = []
        for prompt in prompts:
            tokens = await self._tokens(prompt, "prompt")
            request = self._request(body, tokens, max(1, wanted), param="prompt", logprobs=body.get("logprobs"))
            request = dataclasses.replace(request, prompt_logprobs=echo and request.logprobs is not None)
            shown = None
            if echo:
                shown = prompt if isinstance(prompt, str) else self.tokenizer.decode(tokens)
            text_request = TextRequest(generate=request, index=0, stops=_stops(body), echo=shown, keep=wanted > 0)
            made += _choices(text_request, count, len(made))
        return made

    async def embeddings(self, body: Mapping[str, Any]) -> list[GenerateRequest]:
        """Return a request for each input.

        Raises:
            InvalidRequest: the model cannot carry it out.
        """
        if body.get("dimensions") is not None:
            raise InvalidRequest("cannot shorten embeddings: leave 'dimensions' out", param="dimensions")
        made = []
        for text in self._prompts(body["input"], "input", 1):
            tokens = await self._tokens(text, "input")
            self._room(tokens, 0, "input")
            made.append(GenerateRequest(id=_new_id(), prompt=tuple(tokens), max_tokens=1, embed=True))
        return made

    def _prompts(self, value: Any, param: str, count: int) -> list[Any]:
        """Return the prompts of a field that may be a text, texts, token ids or several of these."""
        prompts = value if isinstance(value, list) and isinstance(value[0], str | list) else [value]
        if len(prompts) * count > self.most_choices:
            message = f"cannot make {len(prompts) * count} answers: a request may have {self.most_choices}"
            raise InvalidRequest(message, param=param)
        return prompts

    def _message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as chat templates expect it.

        Its text is harmless and in one piece, arguments of calls are objects.
        """
        made = {key: value for key, value in message.items() if value is not None}
        if made["role"] == "developer":
            made["role"] = "system"
        content = made.get("content", "")
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        made["content"] = self.tokenizer.harmless(text)
        if "tool_calls" in made:
            made["tool_calls"] = [_past_call(index, call) for call in made["tool_calls"]]
        return made

    async def _tokens(self, prompt: Any, param: str) -> list[int]:
        """Return the tokens of a prompt, which is a text or token ids."""
        if isinstance(prompt, str):
            return await beside_loop(len(prompt), self._encoded, prompt, param, self.tokenizer.encode)
        return await beside_loop(len(prompt), self._ids, prompt, param)

    def _encoded(self, text: str, param: str, encode: Callable[[str], list[int]]) -> list[int]:
        if len(text) > self.context_tokens * self.tokenizer.longest:
            raise self._too_long(f"more than {self.context_tokens}", param)
        tokens = encode(text)
        if not tokens:  # a text that begins with nothing begins after the end of another
            tokens = sorted(self.tokenizer.end_tokens)[:1]
        return self._ids(tokens, param)

    def _ids(self, tokens: Sequence[Any], param: str) -> list[int]:
        ids = [int(token) for token in tokens]
        if not ids:
            raise InvalidRequest("cannot continue an empty prompt: this model needs at least one token", param=param)
        if (most := max(ids)) >= self.vocabulary:
            raise InvalidRequest(f"cannot read token {most}: the vocabulary has {self.vocabulary}", param=param)
        return ids

    def _room(self, prompt: Sequence[int], wanted: int | None, param: str) -> int:
        """Return how many tokens may be generated after a prompt."""
        least = 1 if wanted is None else wanted
        if len(prompt) + least > self.context_tokens:
            raise self._too_long(f"{len(prompt)} in the prompt and {least} to generate", param)
        return self.context_tokens - len(prompt) if wanted is None else wanted

    def _too_long(self, what: str, param: str) -> ApiError:
        message = f"cannot fit the request: the context has {self.context_tokens} tokens; it needs {what}"
        return ApiError(400, message, code="context_length_exceeded", param=param)

    def _request(
        self, body: Mapping[str, Any], prompt: list[int], wanted: int | None, *, param: str, logprobs: int | None
    ) -> GenerateRequest:
        ignore_eos = bool(body.get("ignore_eos"))
        return GenerateRequest(
            id=_new_id(),
            prompt=tuple(prompt),
            max_tokens=self._room(prompt, None if wanted is None else int(wanted), param),
            sampling=self._sampling(body),
            stop_tokens=frozenset() if ignore_eos else self.tokenizer.end_tokens,
            ignore_eos=ignore_eos,
            logprobs=None if logprobs is None else min(int(logprobs), MOST_LOGPROBS),
        )

    def _sampling(self, body: Mapping[str, Any]) -> SamplingSettings:
        bias = {int(token): float(value) for token, value in (body.get("logit_bias") or {}).items()}
        if bias and (most := max(bias)) >= self.vocabulary:
            message = f"cannot bias token {most}: the vocabulary has {self.vocabulary}"
            raise InvalidRequest(message, param="logit_bias")

        def number(name: str, default: float) -> float:
            value = body.get(name)
            return default if value is None else float(value)

        seed = body.get("seed")
        return SamplingSettings(
            temperature=number("temperature", 1.0),
            top_p=number("top_p", 1.0),
            top_k=max(0, int(number("top_k", 0))),
            min_p=number("min_p", 0.0),
            seed=None if seed is None else int(seed) % 2**63,
            presence_penalty=number("presence_penalty", 0.0),
            frequency_penalty=number("frequency_penalty", 0.0),
            repetition_penalty=number("repetition_penalty", 1.0),
            logit_bias=bias,
        )


def answer_schema(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the JSON schema that the text of a chat's answer must satisfy.

    None if it is free.

    Raises:
        InvalidRequest: it names a tool that the request does not have.
    """
    choice = body.get("tool_choice")
    several = body.get("parallel_tool_calls") is True
    if isinstance(choice, Mapping):
        name = choice["function"]["name"]
        named = [tool for tool in tools if tool["function"]["name"] == name]
        if not named:
            raise InvalidRequest(f"cannot call '{name}': 'tools' has no such function", param="tool_choice")
        return calls.call_schema(named[:1], several=False)
    if choice == "required":
        if not tools:
            raise InvalidRequest("cannot call a tool: 'tools' is empty", param="tool_choice")
        return calls.call_schema(tools, several=several)
    form = body.get("response_format") or {"type": "text"}
    if form["type"] == "text":
        return None
    schema: Mapping[str, Any] = form["json_schema"]["schema"] if form["type"] == "json_schema" else {"type": "object"}
    return calls.either(schema, calls.call_schema(tools, several=several)) if tools else schema


def _new_id() -> str:
    return uuid.uuid4().hex


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _choices(first: TextRequest, count: int, index: int) -> list[TextRequest]:
    """Return `count` requests that differ by their numbers, and by their seeds."""
    made = []
    for number in range(count):
        generate, sampling = first.generate, first.generate.sampling
        if sampling.seed is not None:
            sampling = dataclasses.replace(sampling, seed=(sampling.seed + number) % 2**63)
        generate = dataclasses.replace(generate, id=_new_id(), sampling=sampling)
        made.append(dataclasses.replace(first, generate=generate, index=index + number, is_first=number == 0))
    return made


def _past_call(index: int, call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
        if not within_depth(arguments, MOST_ARGUMENTS_DEPTH):
            raise ValueError("nested too deep")
    except (ValueError, RecursionError):
        path = f"messages[{index}].tool_calls"
        wanted = f"'arguments' must be JSON, nested at most {MOST_ARGUMENTS_DEPTH} deep"
        raise InvalidRequest(f"cannot read '{path}': {wanted}", param=path) from None
    function = {"name": call["function"]["name"], "arguments": arguments}
    return {**call, "type": "function", "function": function}


def _with_system_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return messages whose system message ends with this text."""
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
