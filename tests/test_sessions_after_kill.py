"""Daemons killed at random moments while sessions go on: every turn whose last frame was seen is there afterwards."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

from edgeqwen.client import CutOff, NoDaemon
from tests.daemons import HANG_GUARD_S, DaemonProcess, running_daemon, script_of

NUM_KILLS, NUM_CLIENTS = 4, 4


class Speaker:
    """A client that goes on with its session, turn after turn, until the daemon is gone."""

    def __init__(self, number: int) -> None:
        self.session = f"@s{number}"
        self.told: list[str] = []  # prompts and answers of the turns whose final frame came
        self.rev = 0

    def speak(self, daemon: DaemonProcess) -> None:
        try:
            with daemon.client() as client:
                while True:
                    prompt = f"q{self.rev + 1}"
                    final = client.request("chat", session=self.session, prompt=prompt, if_rev=self.rev)
                    assert "saved" not in final
                    self.rev = final["rev"]
                    self.told += [prompt, final["text"]]
        except (CutOff, NoDaemon):
            return

    def compare(self, daemon: DaemonProcess) -> None:
        """At most the turn that was under way is there besides; go on from what is."""
        with daemon.client() as client:
            rows = {f"@{row['name']}" for row in client.request("session.list")["sessions"]}
            if self.session not in rows:
                assert not self.told
                return
            frame = client.request("session.get", session=self.session, messages=True)
        said = [message["content"] for message in frame["messages"]]
        assert said[: len(self.told)] == self.told
        assert said[len(self.told) :] in ([], [f"q{self.rev + 1}", "yes"])
        assert (len(said), frame["turns"]) == (2 * frame["rev"], frame["rev"])
        self.rev, self.told = frame["rev"], said


def test_turns_that_were_told_of_survive_kills_at_any_moment(tmp_path: Path) -> None:
    state = {"STATE_DIRECTORY": str(tmp_path)}
    speakers = [Speaker(number) for number in range(NUM_CLIENTS)]
    for seed in range(NUM_KILLS):
        with running_daemon(script_of("yes"), environ=state) as daemon:
            for speaker in speakers:
                speaker.compare(daemon)  # waits until the sessions are read
            assert daemon.wait_for(queued=0)["session_files"]["damaged"] == 0
            threads = [threading.Thread(target=speaker.speak, args=(daemon,)) for speaker in speakers]
            for thread in threads:
                thread.start()
            time.sleep(0.2 + random.Random(seed).random() / 4)
            daemon.process.kill()
            for thread in threads:
                thread.join(HANG_GUARD_S)
                assert not thread.is_alive()
    with running_daemon(script_of("yes"), environ=state) as daemon:
        for speaker in speakers:
            speaker.compare(daemon)
        assert sum(speaker.rev for speaker in speakers) > NUM_KILLS
