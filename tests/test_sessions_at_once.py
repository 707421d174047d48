"""Many clients on few sessions: whatever they do at once, a history is the turns they were told of, in order."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.test_sessions import NO_SCRIPT, Rig, code, running
from tests.wire import WireClient, fake_inference, until

NUM_CLIENTS, NUM_ROUNDS = 8, 25
NAMES = ("@a", "@b", "@c")
MAY_BE_REFUSED = {"session_busy", "not_found", "conflict"}


class Chronicle:
    """What clients were told: by session id and revision, the messages of the turn (None: a reset)."""

    def __init__(self) -> None:
        self.turns: dict[str, dict[int, list[str] | None]] = defaultdict(dict)
        self.num_finals = 0

    def note(self, session: str, rev: int, messages: list[str] | None) -> None:
        assert rev not in self.turns[session], "a revision was made twice"
        self.turns[session][rev] = messages

    def history(self, session: str, rev: int) -> list[str]:
        """All messages of the session at `rev`."""
        told: list[str] = []
        for each in range(1, rev + 1):
            messages = self.turns[session][each]
            told = [] if messages is None else told + messages
        return told


async def one_client(rig: Rig, chronicle: Chronicle, number: int) -> None:
    chance = random.Random(number)
    client = await rig.client()
    for turn in range(NUM_ROUNDS):
        name = chance.choice(NAMES)
        match chance.choice(["chat", "chat", "chat", "cancel", "hang up", "fork", "reset", "delete", "get"]):
            case "chat":
                await chat(client, chronicle, name, f"{number}.{turn}")
            case "cancel":
                client.send(
                    {"op": "chat", "id": 1, "session": name, "prompt": f"{number}.{turn}", "max_tokens": 9},
                    {"op": "cancel", "id": 2, "target": 1},
                )
                finals = [(await client.read_final())[0] for _ in range(2)]
                note_final(chronicle, next(final for final in finals if final["id"] == 1), f"{number}.{turn}")
            case "hang up":
                # Cancelled, or kept without anybody being told: only where nobody else looks.
                client.send({"op": "chat", "id": 1, "session": f"@gone{number}", "prompt": "x", "max_tokens": 9})
                await asyncio.sleep(chance.random() / 100)
                client.close()
                client = await rig.client()
            case "fork":
                await fork(client, chronicle, name)
            case "reset":
                final = await client.ask({"op": "session.reset", "session": name})
                if is_done(final):
                    chronicle.note(final["session"], final["rev"], None)
            case "delete":
                is_done(await client.ask({"op": "session.delete", "session": name}))
            case "get":
                await check(client, chronicle, name)


def is_done(final: dict[str, Any]) -> bool:
    if "error" not in final:
        return True
    assert code(final)[0] in MAY_BE_REFUSED, final
    return False


def note_final(chronicle: Chronicle, final: dict[str, Any], prompt: str) -> None:
    chronicle.num_finals += 1
    if is_done(final) and final["finish"] in {"stop", "length"}:
        chronicle.note(final["session"], final["rev"], [prompt, final["text"]])


async def chat(client: WireClient, chronicle: Chronicle, session: str, prompt: str) -> None:
    note_final(
        chronicle, await client.ask({"op": "chat", "session": session, "prompt": prompt, "max_tokens": 9}), prompt
    )


async def fork(client: WireClient, chronicle: Chronicle, name: str) -> None:
    final = await client.ask({"op": "session.fork", "session": name})
    if is_done(final):
        told = await client.ask({"op": "session.get", "session": final["session"], "messages": True})
        chronicle.turns[final["session"]] = {rev: [] for rev in range(1, final["rev"])}
        if final["rev"]:
            chronicle.turns[final["session"]][final["rev"]] = [each["content"] for each in told["messages"]]
        await chat(client, chronicle, final["session"], "fork")
        await check(client, chronicle, final["session"])
        assert (await client.ask({"op": "session.delete", "session": final["session"]}))["deleted"] == 1


async def check(client: WireClient, chronicle: Chronicle, session: str) -> None:
    """A turn's revision shows here before its own client has read of it, so there may be one that is yet unknown."""
    final = await client.ask({"op": "session.get", "session": session, "messages": True})
    if is_done(final) and all(rev in chronicle.turns[final["session"]] for rev in range(1, final["rev"] + 1)):
        expected = chronicle.history(final["session"], final["rev"])
        assert [each["content"] for each in final["messages"]] == expected


async def test_history_is_what_clients_were_told_whatever_they_do_at_once(tmp_path: Path) -> None:
    chronicle = Chronicle()
    async with running(tmp_path, fake_inference(**NO_SCRIPT, step_s=0.0005)) as rig:
        async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
            for number in range(NUM_CLIENTS):
                tasks.create_task(one_client(rig, chronicle, number))
        await until(lambda: rig.inference.stats().running == 0)
        client = await rig.client()
        listed = (await client.ask({"op": "session.list"}))["sessions"]
        assert not any(row["busy"] for row in listed)
        for row in listed:
            if not row["name"].startswith("gone"):
                assert set(range(1, row["rev"] + 1)) <= set(chronicle.turns[row["session"]])
                await check(client, chronicle, row["session"])
        assert sorted((row["session"], row["rev"]) for row in listed) == rig.on_disk()
        assert chronicle.num_finals > NUM_CLIENTS * NUM_ROUNDS // 4
