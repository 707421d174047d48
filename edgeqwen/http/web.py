"""The library that speaks HTTP, aiohttp: what of its server is used here, and no more of it in memory than that needs.

Its package imports its client as well, with cookies, forms and connectors, and `aiohttp.web` an application framework:
together two fifths of what they take (4 MB), for nothing. So the package is put in place before its own code has run,
and the modules that are wanted are imported by name. Whoever asks the package for anything else gets all of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

NAME: Final = "aiohttp"
_VERSION: Final = re.compile(r'^__version__ = "([^"]+)"', re.MULTILINE)


class _Package(ModuleType):
    """A package whose own code runs when something is asked of it that is none of its modules."""

    def __getattr__(self, name: str) -> Any:
        if importlib.util.find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        self.__class__ = ModuleType  # type: ignore[assignment]  # from here on it is as it would have been
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _put_in_place() -> None:
    """Have the package in `sys.modules`, unless it is there or nowhere, which the imports below will tell."""
    spec = None if NAME in sys.modules else importlib.util.find_spec(NAME)
    if spec is None or spec.origin is None:
        return
    package = importlib.util.module_from_spec(spec)
    version = _VERSION.search(Path(spec.origin).read_text(encoding="utf-8"))
    if version is not None:
        package.__dict__["__version__"] = version[1]  # its modules ask for it
    package.__class__ = _Package
    sys.modules[NAME] = package


_put_in_place()

from aiohttp.client_exceptions import ClientPayloadError  # noqa: E402
from aiohttp.http_exceptions import HttpProcessingError  # noqa: E402
from aiohttp.http_writer import HttpVersion11  # noqa: E402
from aiohttp.streams import StreamReader  # noqa: E402
from aiohttp.web_protocol import RequestHandler, _ErrInfo  # noqa: E402
from aiohttp.web_request import BaseRequest  # noqa: E402
from aiohttp.web_response import Response, StreamResponse  # noqa: E402
from aiohttp.web_server import Server  # noqa: E402

ErrInfo = _ErrInfo
"""In the place of a request that could not be read."""

__all__ = [
    "BaseRequest",
    "ClientPayloadError",
    "ErrInfo",
    "HttpProcessingError",
    "HttpVersion11",
    "RequestHandler",
    "Response",
    "Server",
    "StreamReader",
    "StreamResponse",
]
