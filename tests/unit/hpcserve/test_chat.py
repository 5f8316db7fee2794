"""Chat templates: the same text as transformers', and hostile ones cost only their own request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

from waiting import played

from hpcserve import chat
from hpcserve.chat import ChatTemplate, environment
from hpcserve.errors import InvalidRequest, ModelFileError

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "grüße \U0001f389"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"place": "Ålesund"}}}],
    },
    {"role": "tool", "content": '{"degrees": 3}'},
]
# In the ways that models use: loop controls, namespaces, macros, JSON, marks for training, control of white space.
TEMPLATES = {
    "chatml": (
        "{%- if tools %}{{ '<|im_start|>system\n' }}{%- for tool in tools %}{{ tool | tojson }}{% endfor %}"
        "<|im_end|>{% endif %}\n"
        "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
        "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson(indent=2) }}</tool_call>{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama": (
        "{{ bos_token }}{% set ns = namespace(seen=0) %}\n{% for message in messages if message.role != 'tool' %}\n"
        "    {% set ns.seen = ns.seen + 1 %}\n{% if ns.seen > 2 %}{% break %}{% endif %}\n"
        "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    ),
    "mistral": (
        "{% macro shown(message) %}[INST] {{ message['content'] }} [/INST]{% endmacro %}{{ bos_token }}"
        "{% for message in messages %}{% if loop.index0 % 2 == 1 %}{{ shown(message) }}"
        "{% elif message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
        "{% endif %}{% endfor %}"
    ),
}
WORDS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["plain", "tools"])
def test_a_template_gives_the_text_that_transformers_gives(name: str, tools: list[Any] | None) -> None:
    templates = pytest.importorskip("transformers.utils.chat_template_utils")
    (expected,), _ = templates.render_jinja_template(
        [MESSAGES], tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=True, **WORDS
    )
    values = {"messages": MESSAGES, "tools": tools, "add_generation_prompt": True, **WORDS}
    assert environment().from_string(TEMPLATES[name]).render(values) == expected


@played
async def test_texts_are_rendered_one_after_the_other_by_one_process() -> None:
    template = ChatTemplate("{{ bos_token }}{% for m in messages %}{{ m.content }};{% endfor %}", WORDS)
    try:
        assert await template.render([{"content": "a"}, {"content": "b"}]) == "<s>a;b;"
        assert await template.render([{"content": "\u20ac"}]) == "<s>\u20ac;"
        with pytest.raises(InvalidRequest, match="the chat template says: 'list object' has no attribute 'x'"):
            await ChatTemplate("{{ messages.x.y }}", {}).render([{"content": "a"}])
    finally:
        await template.close()


HOSTILE = {
    "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{{ ('x' * 1000000000) * 100 }}",
    "python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "import": "{{ self._TemplateReference__context.environment.from_string('x') }}",
    "file": "{% include '/etc/passwd' %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "syntax": "{% if %}",
    "refusal": "{{ raise_exception('roles must alternate') }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
@played
async def test_a_hostile_template_costs_only_its_own_request(source: str) -> None:
    template = ChatTemplate("{% if messages[0].content == 'bad' %}" + source + "{% endif %}good", {})
    if "if %}" in source:
        template = ChatTemplate(source, {})
    try:
        with pytest.raises(InvalidRequest, match="cannot render the messages: the chat template"):
            await template.render([{"content": "bad"}])
        if "if %}" not in source:
            assert await template.render([{"content": "fine"}]) == "good"
    finally:
        await template.close()


@played
async def test_a_model_without_a_template_is_named() -> None:
    with pytest.raises(InvalidRequest, match="has no chat template; use /v1/completions"):
        await ChatTemplate(None, {}).render([{"content": "a"}])


def test_a_template_is_read_from_its_file_or_the_settings(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path).source is None
    settings: dict[str, Any] = {"chat_template": "plain", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert (ChatTemplate.load(tmp_path).source, ChatTemplate.load(tmp_path).words) == ("plain", WORDS)
    settings["chat_template"] = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ChatTemplate.load(tmp_path).source == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(tmp_path).source == "file"
    (tmp_path / "chat_template.jinja").write_text("x" * (chat.MOST_TEMPLATE_BYTES + 1))
    with pytest.raises(ModelFileError, match="more than"):
        ChatTemplate.load(tmp_path)
