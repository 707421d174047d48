"""Chat templates, rendered as transformers renders them.

A template is a Jinja program that comes with the model, so it runs in Jinja's sandbox with values that cannot be
changed. What transformers adds to plain Jinja is added here in the same form: blocks trimmed (`trim_blocks`,
`lstrip_blocks`), `break` and `continue`, `tojson` that keeps `<`, `&` and non-ASCII as they are, `raise_exception`,
`strftime_now`, and the `generation` tag (it marks the assistant's tokens for training; here its body is rendered in
place).
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from edgeqwen.errors import BadRequest, ModelInvalid

FILE = "chat_template.jinja"

# What a template's own code can raise; it is a program of strangers.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _RefusedError(jinja2.TemplateError):
    """The template called `raise_exception`."""


class ChatTemplate:
    """A compiled template.

    `clock` gives the local time for `strftime_now`. The names that transformers takes from tokenizer_config.json
    (`bos_token`, ...) are unknown here: a package's template sets those that it uses. Raises `ModelInvalid` if `source`
    is no valid template.
    """

    def __init__(
        self,
        source: str,
        *,
        clock: Callable[[], dt.datetime] = dt.datetime.now,
    ) -> None:
        self.source = source
        try:
            self._template = _environment(clock).from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise ModelInvalid(f"{FILE}: line {e.lineno}: {_one_line(e.message)}; take the model's own file") from e
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as e:
            raise ModelInvalid(f"{FILE}: cannot be compiled ({type(e).__name__}); take the model's own file") from e

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. `kwargs` are further names for the template.

        Raises `BadRequest` for `messages` if the template cannot render them; its message quotes the template's own
        words at most, never a client's.
        """
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **kwargs,
            )
        except _RefusedError as e:
            words = _one_line(e.message)
            # A message put together at run time may hold text of the conversation.
            said = f": {words}" if words and str(e.message) in self.source else ""
            raise BadRequest(f"the model's chat template refuses these messages{said}", field="messages") from e
        except _RENDER_ERRORS as e:
            kind = type(e).__name__
            raise BadRequest(
                f"the model's chat template cannot render these messages ({kind}); check their roles and order",
                field="messages",
            ) from e


def _environment(clock: Callable[[], dt.datetime]) -> ImmutableSandboxedEnvironment:
    def strftime_now(format: str) -> str:  # noqa: A002 - the name that templates know
        return clock().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_refuse,
        strftime_now=strftime_now,
        namespace=_TemplateNamespace,
        dict=_new_dict,
    )
    return environment


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` renders its body, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        scope = nodes.Scope(lineno=line)
        scope.body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return scope


class _TemplateNamespace(Namespace):
    """Jinja's `namespace()` without attributes that reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no name for self, so that a template may set `self`
        for name in dict(*args[1:], **kwargs):
            _check_attribute(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a template may not set attributes that begin with an underscore")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict(...)` as a function: the class itself has more attributes than a template needs."""
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> NoReturn:
    raise _RefusedError(str(message))


def _one_line(message: str | None) -> str:
    return " ".join((message or "").split())[:200]
