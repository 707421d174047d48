"""Chat templates: rendered as recorded from transformers, and errors in one line."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from edgeqwen.errors import BadRequest, ModelInvalid
from edgeqwen.text import ChatTemplate
from tests.qwen_files import DATA, golden, qwen_template


def named(name: str) -> pytest.MarkDecorator:
    cases = golden(name)
    return pytest.mark.parametrize("case", cases, ids=[case["name"] for case in cases])


USER = [{"role": "user", "content": "a SECRET"}]


@named("qwen3_chat")
def test_qwen3_text_is_what_transformers_renders(case: dict[str, Any]) -> None:
    text = qwen_template().render(case["messages"], tools=case["tools"], **case["kwargs"])
    assert text == case["text"]


@named("smollm2_chat")
def test_smollm2_text_is_what_transformers_renders(case: dict[str, Any]) -> None:
    template = ChatTemplate((DATA / "smollm2_chat_template.jinja").read_text(encoding="utf-8"))
    assert template.render(case["messages"]) == case["text"]


@named("template_features")
def test_features_render_as_in_transformers(case: dict[str, Any]) -> None:
    template = ChatTemplate(case["source"])
    assert template.render([{"role": "user", "content": "Hi"}], **case["kwargs"]) == case["text"]


def test_time_comes_from_the_clock_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", clock=lambda: dt.datetime(2026, 2, 3, tzinfo=dt.UTC))
    assert template.render(USER) == "03 Feb 2026"


def test_names_set_ahead_of_a_template_leave_its_text_alone() -> None:
    assert ChatTemplate("{% set bos_token = '<s>' %}\n  {{ bos_token }}\n").render(USER) == "  <s>"


def test_the_generation_prompt_can_be_left_out() -> None:
    assert not qwen_template().render(USER, add_generation_prompt=False).endswith("assistant\n")


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ x | no_such_filter }}",
        "{% for m in messages %}",
        "{% generation %}never closed",
        "{{ 'unclosed }}",
        "line one\n{% break %}",
    ],
)
def test_a_broken_template_is_a_bad_model_that_names_the_file(source: str) -> None:
    with pytest.raises(ModelInvalid) as caught:
        ChatTemplate(source)
    assert "chat_template.jinja" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ nothing.at.all }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content + 'x' }}",
        "{{ 1 // 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(**{'_x': 1}) }}",
        "{{ raise_exception('cannot say ' + messages[0].content) }}",
        "{{ strftime_now(1) }}",
        "{{ range(10000000) | length }}",
    ],
)
def test_what_fails_while_rendering_is_one_clear_line_without_the_prompt(source: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(source).render(USER)
    assert caught.value.field == "messages"
    assert "chat template" in caught.value.message
    assert "SECRET" not in caught.value.message
    assert "\n" not in caught.value.message


def test_the_templates_own_refusal_is_quoted() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must\n alternate.') }}")
    with pytest.raises(BadRequest, match=r"refuses these messages: Roles must alternate\.$"):
        template.render(USER)
