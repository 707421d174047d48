"""Ten everyday questions and three code tasks, each with its budget of new tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and how many tokens the answer has on both sides."""

    name: str
    text: str
    num_tokens: int


QUESTIONS: Final = (
    Question("bread", "How do I keep bread fresh for several days without a freezer?", 96),
    Question("sleep", "I wake up tired although I sleep eight hours. What could be the reasons?", 128),
    Question("letter", "Write a short letter to my neighbours: I will renovate my kitchen next week.", 128),
    Question("capital", "What is the capital of Portugal, and what is it known for?", 64),
    Question("bicycle", "The chain of my bicycle keeps jumping off. What should I check first?", 96),
    Question("rain", "Explain in simple words why it rains.", 96),
    Question("budget", "Give me five ideas for saving money on groceries for a family of four.", 128),
    Question("email", "Make this sentence more polite: Send me the report today.", 48),
    Question("plants", "Which house plants grow well in a room with little light?", 96),
    Question("story", "Tell me a very short story about a lighthouse keeper and a lost dog.", 160),
    Question("palindrome", "Write a Python function that checks whether a string is a palindrome.", 128),
    Question("sql", "Write an SQL query that lists the three customers with the most orders.", 96),
    Question(
        "bug",
        "What is wrong with this code, and how is it fixed?\n\nfor i in range(len(a)):\n    a.remove(a[i])\n",
        128,
    ),
)

TOGETHER: Final = ("sleep", "budget", "palindrome")
"""The three that are asked at once, of one length."""
