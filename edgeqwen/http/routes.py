"""Which paths there are, which methods they take, and in whose form their errors are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from edgeqwen.errors import EdgeqwenError
from edgeqwen.http import web
from edgeqwen.protocol.peer import Peer

Answer: TypeAlias = Callable[[web.BaseRequest, str, Peer], Awaitable[web.StreamResponse]]
"""Answers a request; the text is what stands in the place of the path's `{...}`."""

Refuse: TypeAlias = Callable[[EdgeqwenError, int | None], web.Response]
"""The response that tells an error, with the status given or that of its code."""


@dataclass(frozen=True, slots=True)
class Route:
    """`path` is as an OpenAPI file spells it; a `{name}` may be its last part only, and holds slashes too."""

    method: str
    path: str
    answer: Answer
    refuse: Refuse


class Routes:
    """Finds routes. `refuse` is for paths that there are not."""

    def __init__(self, routes: Iterable[Route], refuse: Refuse) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._open: dict[str, dict[str, Route]] = {}  # by what stands before the last part
        self._refuse = refuse
        for route in routes:
            before, _, name = route.path.partition("{")
            (self._open if name else self._exact).setdefault(before, {})[route.method] = route

    def __iter__(self) -> Iterator[Route]:
        """All of them."""
        return (route for table in (self._exact, self._open) for each in table.values() for route in each.values())

    def find(self, path: str) -> tuple[Mapping[str, Route], str]:
        """The routes of a path, by method, and what stands in its open part; none if there is nothing there."""
        if path in self._exact:
            return self._exact[path], ""
        for before, routes in self._open.items():
            if path.startswith(before) and len(path) > len(before):
                return routes, path.removeprefix(before)
        return {}, ""

    def refuse(self, path: str, error: EdgeqwenError, *, status: int | None = None) -> web.Response:
        """The error in the form that clients of the path read."""
        routes, _ = self.find(path)
        refuse = next(iter(routes.values())).refuse if routes else self._refuse
        return refuse(error, status)
