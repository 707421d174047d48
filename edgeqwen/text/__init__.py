"""Text: tokenizer, chat template, prompt, and the way back from token ids to streamed text."""

from edgeqwen.text.detokenizer import IncrementalDetokenizer
from edgeqwen.text.guard import TextGuard
from edgeqwen.text.prompt import Prompt, PromptBuilder
from edgeqwen.text.reasoning import ThinkTokens, find_think_tokens
from edgeqwen.text.stops import StopMatcher
from edgeqwen.text.stream import TextDelta, TextStep, TextStream
from edgeqwen.text.template import ChatTemplate
from edgeqwen.text.tokenizer import AddedToken, Tokenizer

__all__ = [
    "AddedToken",
    "ChatTemplate",
    "IncrementalDetokenizer",
    "Prompt",
    "PromptBuilder",
    "StopMatcher",
    "TextDelta",
    "TextGuard",
    "TextStep",
    "TextStream",
    "ThinkTokens",
    "Tokenizer",
    "find_think_tokens",
]
