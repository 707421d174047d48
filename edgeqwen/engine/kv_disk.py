"""The disk of the KV cache as the settings say: an engine's, and a visit to it while there is no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from edgeqwen.core.step import KVData, RuntimeSpec
from edgeqwen.engine.block_disk import BlockDisk
from edgeqwen.engine.memory_budget import make_store
from edgeqwen.engine.settings import KvSettings
from edgeqwen.kvcache import Block, BlockStore
from edgeqwen.kvcache.block_folder import BlockFolder
from edgeqwen.scheduler import Fetch


def make_disk(
    spec: RuntimeSpec,
    kv: KvSettings,
    store: BlockStore,
    *,
    on_fetched: Callable[[Fetch, list[KVData | None]], list[Block]],
    on_change: Callable[[], None],
    clock: Callable[[], float],
    today: Callable[[], int],
) -> BlockDisk:
    """One that has not begun. `kv` must name a folder; `today` numbers the days, for what may be written in one."""
    assert kv.folder is not None
    open_folder = partial(
        BlockFolder.open,
        kv.folder,
        fingerprint=spec.kv_fingerprint,
        max_bytes=kv.disk_bytes,
        daily_bytes=kv.daily_write_bytes,
        today=today,
    )
    return BlockDisk(open_folder, store, on_fetched=on_fetched, on_change=on_change, clock=clock)


async def discard_on_disk(
    spec: RuntimeSpec,
    kv: KvSettings,
    discarded: Sequence[tuple[str, tuple[int, ...]]],
    *,
    clock: Callable[[], float],
    today: Callable[[], int],
) -> None:
    """Remove what is kept for each owner's ids alone. There must be no engine meanwhile."""
    if kv.folder is None:
        return
    store = make_store(spec, kv)
    disk = make_disk(spec, kv, store, on_fetched=lambda *_: [], on_change=lambda: None, clock=clock, today=today)
    await disk.start()
    for owner, ids in discarded:
        disk.remove(store.discard(owner, ids))
    await disk.close()
