"""The units under a systemd of their own: what enabling the socket, a crash, a hang or a drop-in does.

    scripts/soak booted [--deb FILE] [--gguf FILE] [--codename bookworm]

As root on Debian, with debootstrap and cgroup v2. Like `scripts/soak package` up to the model; then systemd is started
in that system as the first process of namespaces of its own, and the commands of docs/operations.md are run there. One
JSON line for each step.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.soak.booting import Booted, booted
from tests.soak.package import (
    QUESTION,
    SOCKET,
    add_users,
    build,
    find_gguf,
    import_model,
    install,
    new_system,
    parsed_arguments,
    step,
)

WATCHDOG_S: Final = 60
HEALTH: Final = f"curl -s --unix-socket {SOCKET} http://x/health"


def first_answer(system: Booted) -> None:
    began = time.monotonic()
    assert system.run("systemctl is-active edgeqwen.socket").strip() == "active"
    assert system.run(f"stat -c '%U %G %a' {SOCKET}").split() == ["root", "edgeqwen", "660"]
    assert system.show("ActiveState") == "inactive"
    text = system.ask()
    assert system.show("ActiveState") == "active"
    step("first answer", began, text=text, status=system.show("StatusText"))
    began = time.monotonic()
    confined(system)
    system.run("edgeqwen ask Hello", user="mallory", exit_code=77)
    step("confined", began, exposure=exposure(system))


def confined(system: Booted) -> None:
    """What the kernel says of the running daemon."""
    pid = system.show("MainPID")
    status = dict(line.split(":\t", 1) for line in system.run(f"cat /proc/{pid}/status").splitlines() if ":\t" in line)
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    for kind, is_own in (("user", False), ("net", True), ("mnt", True), ("ipc", True)):
        ours, theirs = (system.run(f"readlink /proc/{each}/ns/{kind}") for each in ("1", pid))
        assert (ours != theirs) == is_own, kind
    mounts = {
        fields[1]: fields[3].split(",") for fields in map(str.split, system.run(f"cat /proc/{pid}/mounts").splitlines())
    }
    assert "ro" in mounts["/"]
    for place in ("/var/lib/edgeqwen", "/var/cache/edgeqwen"):
        assert {"rw", "noexec"} <= set(mounts[place]), (place, mounts[place])
    assert {"ro", "noexec"} <= set(mounts["/var/lib/edgeqwen/models"])
    assert "noexec" in mounts["/tmp"]


def exposure(system: Booted) -> float:
    """As systemd scores the unit that runs."""
    found = re.search(r"exposure level for \S+: ([0-9.]+)", system.run("systemd-analyze security --no-pager edgeqwen"))
    assert found
    return float(found[1])


def reload_and_restart(system: Booted) -> None:
    began = time.monotonic()
    before = system.show("MainPID")
    system.run("sed -i 's/^#queue = .*/queue = 9/' /etc/edgeqwen/edgeqwen.toml && systemctl reload edgeqwen")
    assert (system.show("MainPID"), system.show("ActiveState")) == (before, "active")
    assert "changed=limits.queue" in system.run("journalctl -u edgeqwen -n 5 -o cat")
    step("reload", began)
    began = time.monotonic()
    inode = system.run(f"stat -c %i {SOCKET}")
    system.run("systemctl stop edgeqwen")
    assert (system.show("Result"), system.show("ActiveState")) == ("success", "inactive")
    system.ask()
    assert system.run(f"stat -c %i {SOCKET}") == inode
    step("stop and ask", began)


def logs(system: Booted) -> None:
    """Fields in the journal; of what was asked and answered, nothing."""
    began = time.monotonic()
    lines = system.run("journalctl -u edgeqwen -o json").splitlines()
    entries = [entry for entry in map(json.loads, lines) if "EDGEQWEN_EVENT" in entry]
    events = {entry["EDGEQWEN_EVENT"] for entry in entries}
    assert {"listening", "ready", "request"} <= events, events
    assert not [line for line in lines if "Paris" in line or "capital of" in line]
    step("journal", began, entries=len(entries), events=sorted(events))


def remade(system: Booted) -> None:
    """A package for any processor: its copy for this one is made by another process, within the same limits."""
    began = time.monotonic()
    models = "/var/lib/edgeqwen/models"
    system.run(f"edgeqwen import {models}/smollm2-135m-instruct --target any --name any --out {models}/any")
    with_settings(system, 's/^#*package = .*/package = "any"/')
    system.run("systemctl restart edgeqwen")
    text = system.ask()
    copies = system.run("find /var/cache/edgeqwen -name model.json").split()
    step("remade", began, text=text, copies=len(copies))
    with_settings(system, 's/^#*package = .*/package = "smollm2-135m-instruct"/')
    system.run(f"systemctl restart edgeqwen && rm -r {models}/any")


def asleep(system: Booted) -> None:
    """The model's memory is given back, and a request wakes it."""
    began = time.monotonic()
    system.ask()
    awake = resident_mb(system)
    with_settings(system, "s/^#*idle_unload_s = .*/idle_unload_s = 1/")
    system.run("systemctl reload edgeqwen")
    system.until(lambda: json.loads(system.run(HEALTH))["state"] == "asleep", "falling asleep")
    sleeping = resident_mb(system)
    assert sleeping < awake, (sleeping, awake)
    began_at = time.monotonic()
    system.ask()
    woken_s = time.monotonic() - began_at
    with_settings(system, "s/^idle_unload_s = .*/idle_unload_s = 900/")
    system.run("systemctl reload edgeqwen")
    step("asleep", began, awake_mb=awake, asleep_mb=sleeping, answer_s=round(woken_s, 2))


def with_settings(system: Booted, change: str) -> None:
    system.run(f"sed -i {shlex.quote(change)} /etc/edgeqwen/edgeqwen.toml")


def resident_mb(system: Booted) -> int:
    status = system.run(f"cat /proc/{system.show('MainPID')}/status").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) >> 10


def crash_and_hang(system: Booted) -> None:
    began = time.monotonic()
    system.run("systemctl reset-failed edgeqwen")  # restarts by hand count towards StartLimitBurst=, too
    before = system.show("MainPID")
    system.run("systemctl kill --signal=KILL edgeqwen")
    system.until(lambda: system.show("MainPID") not in {before, "0"}, "the restart after a crash")
    system.until(lambda: system.show("ActiveState") == "active", "the start after a crash")
    system.ask()
    step("crash", began, restarts=system.show("NRestarts"))
    began = time.monotonic()
    before = system.show("MainPID")
    system.run(f"kill -STOP {before}")
    system.until(lambda: system.show("MainPID") != before, "the end of a daemon that hangs")
    took_s = time.monotonic() - began
    assert took_s > WATCHDOG_S / 2, took_s
    system.until(lambda: system.show("ActiveState") == "active", "the start after a hang")
    said = system.run("journalctl -u edgeqwen -o cat")
    assert "Watchdog timeout" in said
    assert "Current thread" in said or "most recent call first" in said  # where it stood
    system.ask()
    step("hang", began, until_ended_s=round(took_s, 1))


def bad_settings(system: Booted) -> None:
    """Who asks is told; nothing starts over and over; once mended it goes on."""
    began = time.monotonic()
    system.run("cp /etc/edgeqwen/edgeqwen.toml /root/good && echo nonsense >>/etc/edgeqwen/edgeqwen.toml")
    system.run("systemctl stop edgeqwen")
    said = system.ask(exit_code=78)
    assert "/etc/edgeqwen/edgeqwen.toml" in said
    system.until(lambda: system.show("ActiveState") == "failed", "the end of a daemon with bad settings")
    time.sleep(3.0)  # longer than RestartSec=
    assert (system.show("ExecMainStatus"), system.show("NRestarts")) == ("78", "0")
    system.run("cp /root/good /etc/edgeqwen/edgeqwen.toml")
    system.run("systemctl reset-failed 'edgeqwen*' && systemctl start edgeqwen.socket")
    system.ask()
    step("bad settings", began, said=said)


def drop_ins(system: Booted) -> None:
    began = time.monotonic()
    system.run("systemctl reset-failed edgeqwen")
    system.take("on-demand", "s/_S=600/_S=1/")
    system.until(lambda: system.show("ActiveState") == "inactive", "leaving when idle")
    assert system.show("Result") == "success"
    system.ask()
    system.drop()
    step("on demand", began)
    began = time.monotonic()
    system.take("tcp")
    assert json.loads(system.run("curl -s http://127.0.0.1:8080/health"))["ok"]
    system.drop()
    step("tcp", began)
    began = time.monotonic()
    for name, key, value in (("jit", "MemoryDenyWriteExecute", "no"), ("mlock", "Slice", "edgeqwen.slice")):
        system.take(name)
        system.ask()
        assert system.show(key) == value
        system.drop()
    step("jit, mlock", began)


def instance(system: Booted) -> None:
    began = time.monotonic()
    system.run("printf '[model]\\npackage = \"smollm2-135m-instruct\"\\n' >/etc/edgeqwen/small.toml")
    system.run("systemctl enable --now edgeqwen@small.socket")
    text = system.ask(flags="--socket /run/edgeqwen/small.sock")
    assert system.show("ActiveState", "edgeqwen@small.service") == "active"
    assert system.show("ControlGroup", "edgeqwen@small.service").endswith("/edgeqwen.slice/edgeqwen@small.service")
    system.run("systemctl disable --now edgeqwen@small.socket && systemctl stop edgeqwen@small.service")
    system.run("systemctl start edgeqwen@nothing.socket", exit_code=1)
    step("instance", began, text=text)


def user_service(system: Booted) -> None:
    """A user's own daemon, in no user namespace."""
    began = time.monotonic()
    uid = system.run("id -u alice").strip()
    home = "/home/alice/.local/share/edgeqwen/models"
    system.run(f"install -d -o alice -g alice {home} && cp -r /var/lib/edgeqwen/models/smollm2-135m-instruct {home}")
    system.run("loginctl enable-linger alice")
    environ = f"export HOME=/home/alice XDG_RUNTIME_DIR=/run/user/{uid};"
    system.until(
        lambda: "running" in system.run(f"{environ} systemctl --user is-system-running 2>&1 || true", user="alice"),
        "the manager of a user",
    )
    settings = "mkdir -p ~/.config/edgeqwen && cp /etc/edgeqwen/edgeqwen.toml ~/.config/edgeqwen/"
    system.run(f"{environ} {settings} && systemctl --user enable --now edgeqwen.socket", user="alice")
    assert system.run(f"stat -c '%U %a' /run/user/{uid}/edgeqwen.sock").split() == ["alice", "600"]
    text = system.run(
        f"{environ} edgeqwen ask --temperature 0 --max-tokens 40 {shlex.quote(QUESTION)}", user="alice"
    ).strip()
    pid = system.run(f"{environ} systemctl --user show -p MainPID --value edgeqwen", user="alice").strip()
    assert system.run(f"readlink /proc/{pid}/ns/user") == system.run("readlink /proc/1/ns/user")
    system.run("loginctl disable-linger alice && loginctl terminate-user alice || true")
    step("user", began, text=text)


def backup(system: Booted) -> None:
    began = time.monotonic()
    system.run("edgeqwen ask --session notes --max-tokens 5 Hello")
    system.run("tar -C / -czf /root/edgeqwen.tar.gz etc/edgeqwen var/lib/edgeqwen/sessions")
    system.run("systemctl stop edgeqwen.socket edgeqwen.service && rm -r /var/lib/edgeqwen/sessions")
    system.run("tar -C / -xzpf /root/edgeqwen.tar.gz && chown -R edgeqwen: /var/lib/edgeqwen/sessions")
    system.run("systemctl start edgeqwen.socket")
    assert "notes" in system.run("edgeqwen sessions list")
    step("backup", began)


def upgrade_and_purge(system: Booted, deb: Path) -> None:
    """With a daemon that runs. There is no network in there, and all that the package needs is installed."""
    began = time.monotonic()
    before = system.show("MainPID")
    assert before != "0"
    system.run(f"cd /root && dpkg --force-confold -i {deb.name}")
    assert system.show("MainPID") not in {before, "0"}
    assert "queue = 9" in system.run("cat /etc/edgeqwen/edgeqwen.toml")
    step("upgrade", began)
    began = time.monotonic()
    system.run("systemctl set-property edgeqwen.service MemoryHigh=4G")
    system.run("dpkg --purge edgeqwen")
    assert system.run("pgrep -u edgeqwen || true") == ""
    left = system.run("find / -xdev -name '*edgeqwen*' -not -path '/proc/*' -not -path '/root/*' -not -path '/home/*'")
    assert left == "", left
    assert not (system.root / SOCKET[1:]).exists()
    step("purge", began)


def main() -> None:
    given = parsed_arguments(__doc__)
    began = time.monotonic()
    deb = build(given.deb)
    with tempfile.TemporaryDirectory(prefix="soak-booted-") as folder:
        Path(folder).chmod(0o755)
        with new_system(Path(folder), given.codename) as system:
            install(system, deb)
            import_model(system, find_gguf(given.gguf, Path(folder)))
            add_users(system, "dbus-user-session", "libpam-systemd")
        with booted(system) as inside:
            first_answer(inside)
            reload_and_restart(inside)
            logs(inside)
            remade(inside)
            asleep(inside)
            crash_and_hang(inside)
            bad_settings(inside)
            drop_ins(inside)
            instance(inside)
            user_service(inside)
            backup(inside)
            upgrade_and_purge(inside, deb)
    step("all", began)


if __name__ == "__main__":
    main()
