"""The tables of the configuration and their keys, each with its default, its range, and when a new value counts.

A key that is `live` takes effect when the configuration is read again; any other when the daemon starts the next time,
since what it says is built into what runs: sockets, threads, the model, the cache.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

MAX_DEFAULT_CONTEXT = 8192
KV_TYPES = ("auto", "fp32", "int8", "bf16")
TORCH_MODES = ("eager", "compile")
TORCH_WEIGHTS = ("auto", "fp32", "bf16", "int8", "woq8")
LOG_LEVELS = ("info", "warning", "error")
ONEDNN_ISAS = (
    "auto",
    "sse41",
    "avx",
    "avx2",
    "avx2_vnni",
    "avx2_vnni_2",
    "avx512_core",
    "avx512_core_vnni",
    "avx512_core_bf16",
    "avx512_core_fp16",
    "avx512_core_amx",
    "avx512_core_amx_fp16",
)
METRICS_READERS = ("admin", "all")
LOG_FORMATS = ("auto", "journal", "text", "json")

Value: TypeAlias = int | float | str | bool | tuple[str, ...]


def _key(
    default: Value,
    *,
    live: bool = False,
    least: float | None = None,
    most: float | None = None,
    options: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with a range, both ends included, or with the texts that it may be."""
    return field(default=default, metadata={"live": live, "least": least, "most": most, "options": options})


@dataclass(frozen=True, slots=True)
class ModelTable:
    """`package` is a folder or the name of an installed package; empty means the only one installed."""

    package: str = _key("")


@dataclass(frozen=True, slots=True)
class SocketTable:
    """`path` empty means the default place of the user who runs. Members of `group`, if given, may connect too. `mode`
    is that of the socket in octal; `auto` is 0660 with a group and else 0600.
    """

    path: str = _key("")
    group: str = _key("")
    mode: str = _key("auto", options=("auto", "0600", "0660", "0666"))


@dataclass(frozen=True, slots=True)
class HttpTable:
    """HTTP is spoken on the socket. `listen`, such as `127.0.0.1:8080`, has it on a TCP port too; empty means none.

    Network clients need a key of `api_key_file` if it is given (one a line), and it must be if other machines reach the
    address. They may call the daemon by a loopback name, by the address it listens on, and by `allowed_hosts` (without
    a port; IPv6 in brackets). Web pages of `allowed_origins`, such as `http://localhost:3000`, may ask.

    `metrics` of all users together are for admins on the socket, or for all who may use HTTP.
    """

    listen: str = _key("")
    api_key_file: str = _key("", live=True)
    allowed_hosts: tuple[str, ...] = _key((), live=True)
    allowed_origins: tuple[str, ...] = _key((), live=True)
    metrics: str = _key("admin", live=True, options=METRICS_READERS)


@dataclass(frozen=True, slots=True)
class CpuTable:
    """`threads` are those of a step; `decode_threads` and `prefill_threads` if the two kinds of step differ; 0 means as
    the thread plan finds best. `cpus` is a list such as `0-3,8`; empty means all that the process may use. `pin` false
    leaves it to the kernel which of them a thread runs on.
    """

    threads: int = _key(0, least=0, most=1024)
    decode_threads: int = _key(0, least=0, most=1024)
    prefill_threads: int = _key(0, least=0, most=1024)
    cpus: str = _key("")
    pin: bool = _key(True)


@dataclass(frozen=True, slots=True)
class KvTable:
    """`context` is the tokens one slot holds; 0 means the model's own limit, at most 8,192. `type` is how keys and
    values are kept: `auto` takes what suits the package and the memory there is.

    `memory_mb` (MiB, as the others) bounds all keys and values in memory; 0 takes a quarter of what is free. Those of
    conversations are also kept on disk: `disk_mb` at most (0: none), and `daily_writes_mb` written in a day. `settle`
    computes in idle time how a past turn reads in the next prompt. `system_prompts` are texts that all users begin
    with: computed at the start, and shared.
    """

    slots: int = _key(8, least=1, most=256)
    context: int = _key(0, least=0, most=1_048_576)
    type: str = _key("auto", options=KV_TYPES)
    memory_mb: int = _key(0, least=0, most=1 << 24)
    disk_mb: int = _key(2048, live=True, least=0, most=1 << 24)
    daily_writes_mb: int = _key(8192, live=True, least=0, most=1 << 24)
    settle: bool = _key(True, live=True)
    system_prompts: tuple[str, ...] = _key((), live=True)

    def context_of(self, max_position: int) -> int:
        """The tokens of a slot for a model that has `max_position`."""
        return self.context or min(max_position, MAX_DEFAULT_CONTEXT)


@dataclass(frozen=True, slots=True)
class LimitsTable:
    """What one client and all clients together may ask for. `stop_bytes` is of one stop string, `per_uid` what of one
    user runs and waits, `queue` what of all waits.
    """

    line_bytes: int = _key(1 << 20, live=True, least=1024, most=1 << 30)
    nesting: int = _key(32, live=True, least=8, most=64)
    messages: int = _key(256, live=True, least=1, most=65_536)
    stop_strings: int = _key(8, live=True, least=1, most=256)
    stop_bytes: int = _key(64, live=True, least=1, most=4096)
    connections: int = _key(128, live=True, least=2, most=65_536)
    connections_per_uid: int = _key(64, live=True, least=1, most=65_536)
    inflight: int = _key(8, live=True, least=1, most=1024)
    batch_items: int = _key(64, live=True, least=1, most=65_536)
    queue: int = _key(128, live=True, least=1, most=65_536)
    per_uid: int = _key(64, live=True, least=1, most=65_536)
    default_max_tokens: int = _key(2048, live=True, least=1, most=1_048_576)
    max_deadline_ms: int = _key(600_000, live=True, least=1, most=86_400_000)


@dataclass(frozen=True, slots=True)
class SessionsTable:
    """`per_uid` sessions of one user at most; one is forgotten `ttl_s` seconds after its last turn, if it does not say
    itself when.
    """

    per_uid: int = _key(1024, live=True, least=1, most=65_536)
    ttl_s: int = _key(7 * 86_400, live=True, least=1, most=90 * 86_400)


@dataclass(frozen=True, slots=True)
class EngineTable:
    """`runtime` is `onnx`, which serves packages; `torch` or `ipex`, which serve checkpoints and packages whose
    checkpoint is still there; `auto`, whichever of these was found to be fastest here; or `fake:SCRIPT` (scripted
    answers, for tests).

    `speculation` guesses tokens ahead where an answer repeats what stands before it. `deterministic` keeps to one graph
    and no guessing, for quantisations whose last bits depend on the number of rows.
    """

    runtime: str = _key("onnx")
    speculation: bool = _key(True)
    deterministic: bool = _key(False)


@dataclass(frozen=True, slots=True)
class TorchTable:
    """Of the runtimes torch and ipex. `mode` `compile` has a C++ compiler fuse what stands between the products; the
    code is kept in `service.cache_dir`. `weights` are matrices in fp32 or bf16, `int8` (so is what they multiply), or
    `woq8` (8-bit weights alone); `auto` is bf16 where the processor computes in it, else fp32. `max_isa` keeps oneDNN
    to older instruction sets, by its own names (`avx2`, `avx512_core`, `avx512_core_amx`, ...).
    """

    mode: str = _key("eager", options=TORCH_MODES)
    weights: str = _key("auto", options=TORCH_WEIGHTS)
    max_isa: str = _key("auto", options=ONEDNN_ISAS)


@dataclass(frozen=True, slots=True)
class ServiceTable:
    """What is less than `log_level` is not logged; `log_format` `auto` has it in the journal field by field where
    standard error leads there, else as lines. `drain_s` is how long running answers may take to end after SIGTERM.
    When nobody has asked anything for `idle_unload_s` seconds (0: never), the model's memory is given back until the
    next request. When for `idle_exit_s` nobody was connected either, the daemon ends (0: never), if a service manager
    holds its socket and starts it again for the next client.
    `state_dir` keeps what was measured of this machine, `cache_dir` what may be lost; empty means the default place of
    the user who runs.
    """

    log_level: str = _key("info", live=True, options=LOG_LEVELS)
    log_format: str = _key("auto", options=LOG_FORMATS)
    drain_s: float = _key(10.0, live=True, least=0.0, most=3600.0)
    idle_exit_s: float = _key(0.0, least=0.0, most=604_800.0)
    idle_unload_s: float = _key(900.0, live=True, least=0.0, most=604_800.0)
    state_dir: str = _key("")
    cache_dir: str = _key("")


@dataclass(frozen=True, slots=True)
class Config:
    """All tables; the defaults are a working configuration."""

    model: ModelTable = field(default_factory=ModelTable)
    socket: SocketTable = field(default_factory=SocketTable)
    http: HttpTable = field(default_factory=HttpTable)
    cpu: CpuTable = field(default_factory=CpuTable)
    kv: KvTable = field(default_factory=KvTable)
    limits: LimitsTable = field(default_factory=LimitsTable)
    sessions: SessionsTable = field(default_factory=SessionsTable)
    engine: EngineTable = field(default_factory=EngineTable)
    torch: TorchTable = field(default_factory=TorchTable)
    service: ServiceTable = field(default_factory=ServiceTable)


def fields_of_tables() -> dict[str, dict[str, dataclasses.Field[Any]]]:
    """Table -> key -> its field."""
    default = Config()
    return {
        table.name: {key.name: key for key in dataclasses.fields(getattr(default, table.name))}
        for table in dataclasses.fields(Config)
    }


LIVE_KEYS: Final[frozenset[str]] = frozenset(
    f"{table}.{name}"
    for table, keys in fields_of_tables().items()
    for name, key in keys.items()
    if key.metadata["live"]
)
"""As `table.key`: those whose new values count without a restart."""
