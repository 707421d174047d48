"""Prometheus' text format, version 0.0.4: families of samples, each with its help and its type.

Written here and not by the `prometheus_client` package: that one brings a registry with locks, an HTTP server and a
WSGI application, 5 MB of modules in a daemon that has not been asked by HTTP yet, for what is a page of string
formatting. Its parser, and Prometheus' own `promtool`, say in the tests whether what is written here is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from edgeqwen.metrics.histogram import Histogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Pairs of name and value."""

_ESCAPED_HELP: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})
_ESCAPED_VALUE: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Exposition:
    """Families in the order in which they are added."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def gauge(self, name: str, meaning: str, value: float, labels: Labels = ()) -> None:
        """A family of one sample that may rise and fall."""
        self.family("gauge", name, meaning, {labels: value})

    def counter(self, name: str, meaning: str, value: float) -> None:
        """A family of one sample that only rises; its name ends with `_total`."""
        self.family("counter", name, meaning, {(): value})

    def family(
        self, kind: Literal["counter", "gauge"], name: str, meaning: str, samples: Mapping[Labels, float]
    ) -> None:
        """Samples told apart by their labels."""
        assert (kind == "counter") == name.endswith("_total"), name
        self._begin(kind, name, meaning)
        for labels, value in samples.items():
            self._add(name, labels, value)

    def histograms(self, name: str, meaning: str, histograms: Mapping[Labels, Histogram]) -> None:
        """Histograms told apart by their labels."""
        self._begin("histogram", name, meaning)
        for labels, histogram in histograms.items():
            counts = histogram.cumulative()
            for bound, count in zip((*histogram.bounds, float("inf")), counts, strict=True):
                self._add(f"{name}_bucket", (*labels, ("le", _number(float(bound)))), count)
            self._add(f"{name}_sum", labels, histogram.sum)
            self._add(f"{name}_count", labels, counts[-1])

    def text(self) -> str:
        """All of it."""
        return "".join(f"{line}\n" for line in self._lines)

    def _begin(self, kind: str, name: str, meaning: str) -> None:
        self._lines.append(f"# HELP {name} {meaning.translate(_ESCAPED_HELP)}")
        self._lines.append(f"# TYPE {name} {kind}")

    def _add(self, name: str, labels: Labels, value: float) -> None:
        pairs = ",".join(f'{key}="{text.translate(_ESCAPED_VALUE)}"' for key, text in labels)
        self._lines.append(f"{name}{{{pairs}}} {_number(value)}" if pairs else f"{name} {_number(value)}")


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return repr(value)
