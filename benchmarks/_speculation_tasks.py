"""What the speculation benchmark asks: tasks whose answers repeat their prompt, and tasks whose answers do not.

The copying tasks are of three kinds that people bring to small local models: change something in a text, pull lines
out of one, sum one up in its own words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["edit", "extract", "quote", "free"]


@dataclass(frozen=True, slots=True)
class Task:
    """One question; `kind` is `free` where nothing is to be copied."""

    name: str
    kind: Kind
    prompt: str

    @property
    def is_copying(self) -> bool:
        return self.kind != "free"


_HARBOUR: Final = """\
The old harbour of Velmar was built in 1842, when ships still came under sail. Its eastern wall is made of grey \
granite that was carried down the river on flat barges, and its western wall of the softer yellow stone that the \
town itself is built of. For sixty years the harbour was the busiest on the coast. Then the railway reached the \
northern port, and within ten years most of the trade had moved away. Today the harbour holds forty fishing boats, a \
small ferry to the islands, and a boatyard where three generations of the Orlen family have repaired wooden hulls. \
The lighthouse at the end of the eastern wall was switched to electric light in 1931 and has been unmanned since \
1974."""

_MINUTES: Final = """\
The committee met on Tuesday evening in the library. Mrs Hale reported that the roof of the reading room had been \
repaired for 4,200 pounds, which was 300 pounds less than planned. Mr Osei proposed to spend the remainder on new \
lamps for the staircase, because visitors had complained that the steps were hard to see in winter. The proposal was \
accepted with five votes against two. Mr Lind then spoke about the opening hours. He suggested that the library \
should stay open until eight on Thursdays, as many people could not come before six. The committee asked him to find \
out what this would cost and to report at the next meeting, which will take place on the third of March."""

_LOG: Final = """\
09:14:02 INFO worker 3 started
09:14:07 INFO connected to store at 10.0.4.17
09:15:31 ERROR worker 3 could not write block 8812: no space left on device
09:15:32 WARN worker 3 will try again in 30 seconds
09:16:02 INFO worker 3 removed 14 temporary files
09:16:03 INFO worker 3 wrote block 8812
09:20:45 ERROR worker 1 lost its connection to 10.0.4.17 after 300 seconds
09:20:46 INFO worker 1 connects again
09:20:49 INFO connected to store at 10.0.4.17
09:27:10 ERROR worker 2 received a block with a wrong checksum: 8840
09:27:11 INFO worker 2 asked for block 8840 again"""

_CODE: Final = """\
def read_table(path, separator=","):
    rows = []
    with open(path) as file:
        header = file.readline().strip().split(separator)
        for line in file:
            values = line.strip().split(separator)
            if len(values) != len(header):
                raise ValueError("a row has the wrong number of values")
            rows.append(dict(zip(header, values)))
    return rows


def write_table(path, rows, separator=","):
    header = list(rows[0])
    with open(path, "w") as file:
        file.write(separator.join(header) + "\\n")
        for row in rows:
            file.write(separator.join(row[name] for name in header) + "\\n")"""

_ORDERS: Final = """\
Order 5521: 3 kettles, steel, for Anna Brandt, Mill Lane 4, Aldersby
Order 5522: 1 lamp, green, for Tomas Reyes, Harbour Street 19, Velmar
Order 5523: 12 glasses, clear, for the Blue Heron Inn, Market Square 1, Aldersby
Order 5524: 2 chairs, oak, for Ruth Okafor, Station Road 7, Northwick
Order 5525: 6 plates, white, for Jonas Weber, Mill Lane 11, Aldersby"""

_LETTER: Final = """\
Dear Mr Carver, thank you for your letter of the second of May. We are sorry to hear that the bookcase arrived with \
a broken shelf. A new shelf was sent to you this morning by parcel post and should reach you by Friday. You need not \
send the broken one back. If any of the screws are missing as well, please write to us and we will add them at no \
cost. Your guarantee of five years begins on the day on which the new shelf arrives. Yours sincerely, Marta \
Lindqvist."""

TASKS: Final = (
    Task(
        "change-names", "edit", f"Repeat this text word for word, but write Norhaven instead of Velmar:\n\n{_HARBOUR}"
    ),
    Task("proofread", "edit", f"Correct the spelling of this letter and write it again in full:\n\n{_LETTER}"),
    Task("rename", "edit", f"Write this Python code again with `separator` renamed to `delimiter`:\n\n{_CODE}"),
    Task("docstrings", "edit", f"Add a docstring to each function of this code and show all of it:\n\n{_CODE}"),
    Task("errors", "extract", f"Here is a log:\n\n{_LOG}\n\nWhat went wrong? Quote the lines."),
    Task("orders", "extract", f"Extract the orders of Aldersby, word for word.\n\n{_ORDERS}"),
    Task("table", "extract", f"Turn this list of orders into a Markdown table of number, goods and name:\n\n{_ORDERS}"),
    Task("summary", "quote", f"Sum up this text in four sentences that quote it:\n\n{_MINUTES}"),
    Task("key-sentences", "quote", f"Quote the three most important sentences of this text:\n\n{_HARBOUR}"),
    Task("decisions", "quote", f"Which decisions were taken? Quote the sentence for each.\n\n{_MINUTES}"),
    Task("story", "free", "Write a short story about a clockmaker who finds a door in the cellar."),
    Task("explain", "free", "Explain to a twelve-year-old why the sky is blue and sunsets are red."),
    Task("advice", "free", "How should I prepare for my first long bicycle tour? Give me practical advice."),
    Task(
        "letter", "free", "Write a polite letter to a landlord about a heating system that has been broken for a week."
    ),
    Task("history", "free", "What were the most important causes of the industrial revolution?"),
    Task("poem", "free", "Write a poem of twenty lines about the first snow in a city."),
)
