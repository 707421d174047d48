"""The configuration read again while the daemon runs, because an admin or a signal says so.

First everything is read and checked; whatever is wrong leaves all as it is. Then all parts are told at once, between
two events of the loop. What is under way goes on as it began: the parts take new values for what begins afterwards.
Keys that are built into what runs are left alone and named. What was set by a flag or in the environment comes before
the file, as it did at the start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from edgeqwen.config import Config, ConfigSources, changes_between
from edgeqwen.errors import ConfigInvalid, EdgeqwenError
from edgeqwen.http.access import HttpAccess
from edgeqwen.logs import Event
from edgeqwen.part_settings import PartSettings, check_places, part_settings
from edgeqwen.service import Notifier

KEY_FILE: Final = "http.api_key_file"
log = logging.getLogger(__name__)


class Reloader:
    """Knows what runs: `config`, read from `sources`, and the `settings` made of it.

    `check` raises `EdgeqwenError` if it is too late for a change; `apply` tells the parts.
    """

    def __init__(
        self,
        sources: ConfigSources,
        config: Config,
        settings: PartSettings,
        *,
        cache_dir: Path,
        check: Callable[[], None],
        apply: Callable[[PartSettings], None],
        notifier: Notifier,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._sources = sources
        self._config = config
        self._settings = settings
        self._cache_dir = cache_dir
        self._check = check
        self._apply = apply
        self._notifier = notifier
        self._monotonic_ns = monotonic_ns

    def reload(self, who: str) -> dict[str, Any]:
        """`changed`: keys whose new values count from now on; `restart`: those that differ from what runs, and count
        after a restart. `who` wants it, for the log.

        Raises `ConfigInvalid` for what is wrong, and what `check` raises; nothing has changed then.
        """
        try:
            self._check()
            with self._notifier.reloading(self._monotonic_ns() // 1000):
                changed, restart = self._reload()
        except EdgeqwenError as error:
            log.warning(Event("reload_failed", by=who, error=error.message))
            raise
        log.info(Event("reloaded", by=who, changed=",".join(changed), restart=",".join(restart)))
        return {"changed": list(changed), "restart": list(restart)}

    def _reload(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if self._sources.path is None and not self._config.http.api_key_file:
            raise ConfigInvalid("there is no configuration to read again: serve was started without --config FILE")
        read = self._sources.read_again()
        check_places(read)
        changes = changes_between(self._config, read)
        settings = part_settings(changes.config, self._cache_dir)
        changed = changes.changed
        if KEY_FILE not in changed and _keys(settings.access) != _keys(self._settings.access):
            changed = (KEY_FILE, *changed)
        self._apply(settings)
        self._config, self._settings = changes.config, settings
        return changed, changes.restart


def _keys(access: HttpAccess) -> frozenset[str]:
    return frozenset() if access.keys is None else access.keys.owners
