"""What Prometheus is told: everything that the daemon measures, as text.

It is about everybody together: who may read it learns how much others ask and when. So it is for admins, unless the
configuration (`http.metrics`) opens it to all who may use HTTP, which a Prometheus on the TCP port needs: nobody is an
admin there. Labels are words of the daemon's own, few and known beforehand; no name, key or text of a client is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, get_args

import edgeqwen
from edgeqwen.engine.inference import Inference
from edgeqwen.engine.life import State
from edgeqwen.engine.outcomes import FINISHES, KINDS
from edgeqwen.engine.stats import EngineStats
from edgeqwen.errors import CODES, EdgeqwenError
from edgeqwen.metrics import Exposition, Histogram, Labels, process_facts
from edgeqwen.protocol.peer import Peer
from edgeqwen.sessions.sessions import Sessions

STATES: Final[tuple[State, ...]] = get_args(State)
RELOADS: Final = ("ok", "failed")
STATUSES: Final = ("200", "400", "401", "403", "404", "429", "500", "503")
REFUSALS: Final = ("bad_request", "too_long", "busy", "quota", "loading", "draining", "engine")
CONNECTION_REFUSALS: Final = ("busy", "quota")
FOR_ADMINS: Final = (
    'metrics are for admins, since they tell of everybody; http.metrics = "all" in the configuration opens them to all '
    "who may use HTTP"
)


class Exporter:
    """Writes the metrics of one server. `num_connections` and `num_accepted` count its connections, those that are open
    and those that ever were.
    """

    def __init__(
        self,
        inference: Inference,
        sessions: Sessions,
        *,
        num_connections: Callable[[], int],
        num_accepted: Callable[[], int],
    ) -> None:
        self._inference = inference
        self._sessions = sessions
        self._num_connections = num_connections
        self._num_accepted = num_accepted
        self._reloads: Counter[str] = Counter()
        self.refused_connections: Counter[str] = Counter()  # by the code of the error
        self.line_errors: Counter[str] = Counter()  # by code
        self.http_responses: Counter[int] = Counter()  # by status
        self.is_for_all = False

    def counting(self, on_reload: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
        """`on_reload`, with how it ends counted."""

        def reload(who: str) -> dict[str, Any]:
            try:
                members = on_reload(who)
            except EdgeqwenError:
                self._reloads["failed"] += 1
                raise
            self._reloads["ok"] += 1
            return members

        return reload

    def text_for(self, peer: Peer) -> str:
        """All metrics. Raises `EdgeqwenError` (`forbidden`) if they are not for `peer`."""
        if not (peer.is_admin or self.is_for_all):
            raise EdgeqwenError(FOR_ADMINS, code="forbidden")
        page, stats = Exposition(), self._inference.stats()
        self._add_model(page)
        self._add_requests(page, stats)
        self._add_times(page)
        _add_tokens(page, stats)
        self._add_cache(page, stats)
        self._add_server(page)
        _add_process(page)
        return page.text()

    def _add_model(self, page: Exposition) -> None:
        inference = self._inference
        names = (("model", inference.model_name), ("quant", inference.quant), ("version", edgeqwen.__version__))
        page.gauge("edgeqwen_model_info", "The model and the daemon's version; always 1.", 1, names)
        states: dict[Labels, float] = {(("state", state),): int(state == inference.state) for state in STATES}
        page.family("gauge", "edgeqwen_model_state", "1 for the state that the model is in, 0 for the others.", states)
        page.gauge("edgeqwen_load_progress_ratio", "How much of the model is loaded.", inference.progress)
        page.gauge("edgeqwen_context_tokens", "Tokens that prompt and answer may have together.", inference.context)

    def _add_requests(self, page: Exposition, stats: EngineStats) -> None:
        meters = self._inference.meters
        page.gauge("edgeqwen_requests_running", "Requests that have begun.", stats.running)
        page.gauge("edgeqwen_requests_queued", "Requests that have not begun.", stats.queued)
        page.gauge("edgeqwen_slots", "Sequences that may be computed at once.", stats.slots)
        page.gauge("edgeqwen_slots_used", "Slots that hold a sequence.", stats.used)
        ends = [(kind, end) for kind in KINDS for end in (*FINISHES, EdgeqwenError.code)]
        ended: dict[Labels, float] = {
            (("kind", kind), ("outcome", end)): meters.ended[kind, end]
            for kind, end in dict.fromkeys([*ends, *meters.ended])
        }
        meaning = "Accepted requests that are over, by finish reason or error code."
        page.family("counter", "edgeqwen_requests_total", meaning, ended)
        meaning = "Requests that the engine did not accept, by the code of the error."
        page.family("counter", "edgeqwen_refused_total", meaning, _by("code", REFUSALS, meters.refused))

    def _add_times(self, page: Exposition) -> None:
        meters = self._inference.meters
        meaning = "From a request's arrival to its first token, of requests that are over and had one."
        page.histograms("edgeqwen_time_to_first_token_seconds", meaning, {(): meters.first_token_s})
        meaning = "Between two tokens of an answer; tokens that were guessed right come together."
        page.histograms("edgeqwen_time_between_tokens_seconds", meaning, {(): meters.token_gap_s})
        meaning = "From a request's arrival until it was begun, or was over."
        page.histograms("edgeqwen_queue_wait_seconds", meaning, {(): meters.queue_s})
        meaning = "From a request's arrival to its end."
        durations: dict[Labels, Histogram] = {(("kind", kind),): each for kind, each in meters.duration_s.items()}
        page.histograms("edgeqwen_request_duration_seconds", meaning, durations)
        steps: dict[Labels, Histogram] = {(("kind", kind),): each for kind, each in meters.step_s.items()}
        page.histograms("edgeqwen_step_duration_seconds", "What a step of the model took.", steps)
        sequences: dict[Labels, Histogram] = {(("kind", kind),): each for kind, each in meters.step_sequences.items()}
        page.histograms("edgeqwen_step_sequences", "Sequences that were computed in one step.", sequences)

    def _add_cache(self, page: Exposition, stats: EngineStats) -> None:
        kv = Counter(stats.kv)
        tiers = {
            "slots": stats.kv_bytes - kv["block_bytes"] - kv["spare_bytes"],
            "blocks": kv["block_bytes"],
            "spare": kv["spare_bytes"],
            "disk": kv["disk_bytes"],
        }
        page.family("gauge", "edgeqwen_kv_bytes", "Keys and values, by where they are.", _by("tier", tiers, tiers))
        budgets = {"memory": kv["budget_bytes"], "disk": self._inference.kv_disk_limit_bytes}
        meaning = "What keys and values may take; slots, blocks and spare ones share the memory."
        page.family("gauge", "edgeqwen_kv_budget_bytes", meaning, _by("place", budgets, budgets))
        meaning = "Memory set aside for requests under way."
        page.gauge("edgeqwen_kv_reserved_bytes", meaning, kv["reserved_bytes"])
        page.gauge("edgeqwen_kv_blocks", "Blocks that are known, in memory or on disk.", kv["blocks"])
        for name, member, meaning in (
            ("kv_evictions", "evicted", "Blocks whose memory was given up for others."),
            ("kv_lost", "lost", "Blocks that were to last and are lost."),
            ("kv_failed_writes", "failed_writes", "Blocks that could not be written to disk."),
            ("preemptions", "preempted", "Sequences that made place for others and went on later."),
            ("prompts_settled", "settled", "Prompts that were computed beforehand in idle time."),
            ("prompts_settling_given_up", "settling_given_up", "Prompts whose computing beforehand was given up."),
        ):
            page.counter(f"edgeqwen_{name}_total", meaning, kv[member])

    def _add_server(self, page: Exposition) -> None:
        page.gauge("edgeqwen_connections", "Open connections.", self._num_connections())
        page.counter("edgeqwen_connections_total", "Connections that clients have made.", self._num_accepted())
        refused = _by("code", CONNECTION_REFUSALS, self.refused_connections)
        meaning = "Connections that were turned away, by the code of the error."
        page.family("counter", "edgeqwen_connections_refused_total", meaning, refused)
        meaning = "Frames of the socket protocol that say an error, by its code."
        page.family("counter", "edgeqwen_line_errors_total", meaning, _by("code", CODES, self.line_errors))
        responses = {str(status): count for status, count in sorted(self.http_responses.items())}
        meaning = "Responses to HTTP requests that could be read, by status."
        page.family("counter", "edgeqwen_http_responses_total", meaning, _by("status", STATUSES, responses))
        page.gauge("edgeqwen_sessions", "Conversations that are kept.", self._sessions.num_sessions)
        unsaved = self._sessions.stats()["unsaved"]
        page.gauge("edgeqwen_sessions_unsaved", "Conversations that are not on disk as they are.", unsaved)
        reloads = _by("result", RELOADS, self._reloads)
        page.family("counter", "edgeqwen_reloads_total", "Times the configuration was read again.", reloads)


def _add_tokens(page: Exposition, stats: EngineStats) -> None:
    kv = Counter(stats.kv)
    for name, count, meaning in (
        ("computed", kv["computed"], "Tokens of prompts and texts that were computed, those in idle time included."),
        ("cached", kv["cached"], "Tokens of prompts that were known and not computed."),
        ("generated", stats.totals["tokens"], "Tokens of answers."),
        ("settled", kv["settled_tokens"], "Tokens of prompts that were computed beforehand in idle time."),
        ("drafted", stats.speculation["drafted"], "Tokens that were guessed."),
        ("accepted", stats.speculation["accepted"], "Tokens that were guessed right."),
    ):
        page.counter(f"edgeqwen_tokens_{name}_total", meaning, count)
    rates: dict[Labels, float] = {(("kind", kind),): rate for kind, rate in stats.tok_s.items()}
    meaning = "Speed over the last seconds of such work; idle time does not count."
    page.family("gauge", "edgeqwen_tokens_per_second", meaning, rates)


def _add_process(page: Exposition) -> None:
    facts = process_facts()
    page.counter("process_cpu_seconds_total", "Processor time in user and kernel mode.", round(facts.cpu_s, 6))
    page.gauge("process_resident_memory_bytes", "Memory that is resident.", facts.resident_bytes)
    page.gauge("process_virtual_memory_bytes", "Memory that is mapped.", facts.virtual_bytes)
    page.gauge("process_start_time_seconds", "When the process began, since 1970.", facts.start_s)
    page.gauge("process_threads", "Threads.", facts.num_threads)
    page.gauge("process_open_fds", "Open file descriptors.", facts.num_fds)
    page.gauge("process_max_fds", "File descriptors that may be open.", facts.max_fds)


def _by(label: str, always: Iterable[str], counts: Mapping[str, float]) -> dict[Labels, float]:
    """Samples by one label, 0 for those of `always` that nothing is known of."""
    return {((label, value),): counts.get(value, 0) for value in dict.fromkeys([*always, *counts])}
