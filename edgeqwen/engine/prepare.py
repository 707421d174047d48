"""The text thread: templates, tokenizer and detokenizer work here, so that the longest prompt never stops the loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.resolve import check_ids
from edgeqwen.engine.settings import ModelFiles
from edgeqwen.errors import EdgeqwenError
from edgeqwen.kvcache.blocks import common_length
from edgeqwen.text import Prompt, PromptBuilder

T = TypeVar("T")

FIRST_PROMPT: Final = "Hello, world!"
NEXT_TURNS: Final = ("Go on.", "1")
"""Two turns of a user that begin with different tokens."""


class TextThread:
    """One thread for all text; jobs run in order of arrival. Methods may raise what `text` raises."""

    def __init__(self, files: ModelFiles) -> None:
        self._tokenizer = files.tokenizer
        self._builder = None if files.template is None else PromptBuilder(files.tokenizer, files.template)
        self._executor = _new_executor()
        self._is_closed = False

    def warm_up(self) -> None:
        """Have a prompt made, so that the first request does not wait for what is done only once."""
        self._executor.submit(self._make_first_prompt)

    def _make_first_prompt(self) -> None:
        self._tokenizer.encode(FIRST_PROMPT, special=True)
        if self._builder is not None:
            with contextlib.suppress(EdgeqwenError):  # a template may ask for more than one message of a user
                self._builder.build([{"role": "user", "content": FIRST_PROMPT}])

    async def prompt(self, given: GenerationInput) -> Prompt:
        """The tokens of a checked input's prompt."""
        return await self._run(lambda: self._prompt(given))

    async def history_ids(self, given: GenerationInput) -> tuple[int, ...]:
        """The ids with which every prompt begins that continues the conversation with one more turn of the user."""
        return await self._run(lambda: self._history_ids(given))

    def _history_ids(self, given: GenerationInput) -> tuple[int, ...]:
        # A template may render a past turn unlike the last one, so the past is what prompts have in common.
        assert given.messages is not None
        first, second = (
            self._prompt(replace(given, messages=(*given.messages, {"role": "user", "content": text}))).ids
            for text in NEXT_TURNS
        )
        return first[: common_length(first, second)]

    def _prompt(self, given: GenerationInput) -> Prompt:
        if given.messages is not None:
            assert self._builder is not None
            tools = () if given.tool_choice == "none" else given.tools
            return self._builder.build(
                given.messages, tools=tools, think=given.think, template_kwargs=given.template_kwargs
            )
        if given.tokens is not None:
            return Prompt(tuple(given.tokens))
        assert given.prompt is not None
        # A raw prompt is the caller's own template: the model's markers in it mean what they say.
        return Prompt(tuple(self._tokenizer.encode(given.prompt, special=True)))

    async def prompt_text(self, given: GenerationInput) -> str:
        """The text of a `generate` prompt, for `echo`."""
        if given.prompt is not None:
            return given.prompt
        data = await self.detokenize(given.tokens or ())
        return data.decode("utf-8", "replace")

    async def embedded_ids(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The ids of texts that are to be vectors, text by text, so that others are served in between."""
        return tuple([await self._run(partial(self._embedded_ids, text)) for text in texts])

    def _embedded_ids(self, text: str) -> tuple[int, ...]:
        before, after = self._tokenizer.affixes
        return (*before, *self._tokenizer.encode(text, special=False), *after)

    async def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`; markers in it become their own ids only if `special`."""
        return await self._run(lambda: self._tokenizer.encode(text, special=special))

    async def detokenize(self, tokens: Sequence[int]) -> bytes:
        """The bytes of `tokens`, markers included. Raises `BadRequest` for ids without a text."""
        return await self._run(lambda: self._detokenize(tokens))

    def _detokenize(self, tokens: Sequence[int]) -> bytes:
        check_ids(tokens, self._tokenizer.num_tokens)
        return self._tokenizer.decode_bytes(tokens, skip_special=False)

    async def _run(self, job: Callable[[], T]) -> T:
        if self._is_closed:
            raise EdgeqwenError("the daemon is shutting down", code="draining")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, job)
        except asyncio.CancelledError:
            if self._is_closed and not _is_being_cancelled():
                raise EdgeqwenError("the daemon is shutting down", code="draining") from None
            raise

    def let_go(self) -> None:
        """End the thread after what was given to it; the next job begins another. The tokenizers library keeps up to
        10,000 words of each tokenizer that a thread has used in memory of that thread's own, which nothing else frees.
        """
        executor, self._executor = self._executor, _new_executor()
        executor.shutdown(wait=False)

    def close(self) -> None:
        """Drop what waits (`draining`); a job that runs is left to end by itself."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)


def _new_executor() -> ThreadPoolExecutor:
    """Its thread begins with the first job."""
    return ThreadPoolExecutor(1, thread_name_prefix="text")


def _is_being_cancelled() -> bool:
    """The running task was itself cancelled, not just what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
