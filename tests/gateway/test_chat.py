"""Chat templates: the same text as transformers, the golden prompts, and refusals."""

from datetime import UTC, datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.chat import ChatMessage, ChatTemplate
from service.errors import InvalidRequest
from service.model_source import ModelFilesError

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    ChatMessage(role="system", content='Be <brief> & "kind".'),
    ChatMessage(role="user", content="  What's 東京?\n"),
    ChatMessage(role="assistant", content="A city."),
    ChatMessage(role="user", content="Why?"),
]
LLAMA2 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
BLOCKS = """{% for message in messages %}
    {% if message.role == "system" %}
    {% continue %}
    {% endif %}
<|{{ message.role }}|>
{% generation %}{{ message.content }}{% endgeneration %}
{% if loop.index > 3 %}{% break %}{% endif %}

{% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
FILTERS = """{% set ns = namespace(found=false) %}{% for m in messages %}{% if m.role == 'user' %}
{% set ns.found = true %}{% endif %}{% endfor %}{{ ns.found }}{{ messages | tojson(indent=2) }}
{{ messages[0] | tojson }}{{ tools is none }}{{ messages[0].content.split(' ')[0] | upper }}
{{ dict(a=1) | tojson }}{{ messages | map(attribute='role') | join(',') }}"""


def render(source, messages=MESSAGES, *, add_generation_prompt=True, characters_max=10_000):
    return ChatTemplate(source, TOKENS).render(
        messages, add_generation_prompt=add_generation_prompt, now=NOW, characters_max=characters_max
    )


@pytest.mark.parametrize("source", [LLAMA2, BLOCKS, FILTERS], ids=["llama2", "blocks", "filters"])
@pytest.mark.parametrize("opens", [True, False])
def test_templates_render_as_in_transformers(source, opens):
    conversation = [{"role": message.role, "content": message.content} for message in MESSAGES]
    theirs, _ = render_jinja_template(
        [conversation], chat_template=source, add_generation_prompt=opens, **TOKENS
    )
    assert render(source, add_generation_prompt=opens) == theirs[0]


def test_golden_conversations_render_to_the_golden_prompts(tokenizer, golden):
    cases = [case for case in golden if case["kind"] == "chat"]
    assert cases
    for case in cases:
        text = tokenizer.chat.render(
            [ChatMessage(**message) for message in case["messages"]],
            add_generation_prompt=True,
            now=NOW,
            characters_max=10_000,
        )
        assert text == tokenizer.decode(case["prompt_ids"], include_special=True)


def test_the_date_is_the_given_one():
    assert render("{{ strftime_now('%d %b %Y') }}") == "02 Jan 2030"


def test_what_the_template_refuses_is_an_invalid_request_without_contents():
    twice = [ChatMessage(role="user", content="secret")] * 2
    with pytest.raises(InvalidRequest) as refused:
        render(LLAMA2, twice)
    (violation,) = refused.value.violations
    assert violation.field == "chat.messages" and "secret" not in violation.description


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**12) %}x{% endfor %}",
        "{{ messages[9].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ undefined_function() }}",
    ],
)
def test_a_hostile_or_broken_template_is_refused_and_reaches_nothing(source):
    with pytest.raises(InvalidRequest):
        render(source)


def test_an_endless_text_is_cut_off_at_the_limit():
    source = "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="at most 100 characters") as refused:
        render(source, characters_max=100)
    assert refused.value.reason == "CONTEXT_LENGTH_EXCEEDED"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro two(n) %}{% if n %}{{ two(n - 1) }}{{ two(n - 1) }}{% endif %}{% endmacro %}{{ two(60) }}",
        "{% for i in range(999) recursive %}{{ loop(range(999)) }}{% endfor %}",
        "{% for m in messages %}{% for i in range(99999) if i < 0 %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_does_much_and_says_nothing_is_ended_too(source):
    with pytest.raises(InvalidRequest, match="does not take this conversation"):
        render(source)


def test_the_longest_conversation_has_its_turns():
    source = "{% for m in messages %}{{ m.content.strip().lower()[:1] }}{% endfor %}"
    messages = [ChatMessage(role="user", content="A")] * 20_000
    assert render(source, messages, characters_max=20_000) == "a" * 20_000


def test_a_text_of_exactly_the_limit_is_taken():
    assert render("{{ 'x' * 100 }}", characters_max=100) == "x" * 100


def test_a_template_that_does_not_compile_stops_the_start():
    with pytest.raises(ModelFilesError, match="does not compile"):
        ChatTemplate("{% for %}", {})
