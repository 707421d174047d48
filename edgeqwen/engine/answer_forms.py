"""What the form of an answer and its thought need beside a request's members: a compiler, and the model's markers."""

from __future__ import annotations

from dataclasses import replace

from edgeqwen.constrain.compiler import Compiler
from edgeqwen.constrain.form import Form, read_form
from edgeqwen.core.constraint import Constraint
from edgeqwen.core.request import Thinking
from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.settings import ModelFiles
from edgeqwen.errors import BadRequest
from edgeqwen.text import Prompt
from edgeqwen.text.reasoning import find_thinking


class AnswerForms:
    """Of one model."""

    def __init__(self, files: ModelFiles) -> None:
        self._thinking = find_thinking(files.tokenizer)
        self._compiler = Compiler(files.tokenizer, files.eos_token_ids)

    def read(self, given: GenerationInput) -> Form | None:
        """The form that is asked for, if any. Raises `BadRequest` with the field at fault, also for what contradicts
        the form, and for a thought's budget where there are no thoughts.
        """
        if given.think_budget is not None and self._thinking is None:
            message = "think_budget: this model has no markers around a thought, so none can be closed"
            raise BadRequest(message, field="think_budget")
        form = read_form(
            response_format=given.response_format,
            tools=given.tools,
            tool_choice=given.tool_choice,
            parallel_tool_calls=given.parallel_tool_calls,
        )
        if form is not None and given.ignore_eos:
            message = f"ignore_eos goes on after an answer is complete, which {form.field} does not let it"
            raise BadRequest(message, field="ignore_eos")
        return form

    async def constraint(self, form: Form | None) -> Constraint | None:
        """The compiled form. Raises what `Compiler.compile` raises."""
        return None if form is None else await self._compiler.compile(form)

    def let_go(self) -> None:
        """Give memory back that the next form needs again."""
        self._compiler.let_go()

    def thinking(self, given: GenerationInput, prompt: Prompt) -> Thinking | None:
        """How the answer to `prompt` thinks; None where no thought is told from it."""
        if self._thinking is None or not prompt.splits_reasoning:
            return None
        return replace(self._thinking, budget=given.think_budget, may_open=given.think is not False)
