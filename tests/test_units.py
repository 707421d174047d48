"""The units: systemd finds nothing to say about them, they are locked down, and free of what is known to go wrong.

Nothing here needs a running systemd; its tools look at files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest

from edgeqwen import errors

ROOT: Final = Path(__file__).parents[1] / "systemd"
SYSTEM: Final = ROOT / "system"
USER: Final = ROOT / "user"
DROP_INS: Final = sorted(path.stem for path in (ROOT / "drop-ins").glob("*.conf"))
USER_DROP_INS: Final = sorted(set(DROP_INS) - {"cpus"})
COMMAND: Final = "/usr/bin/edgeqwen"
MOST_EXPOSURE: Final = 1.0

SERVICES: Final = {
    "system": SYSTEM / "edgeqwen.service",
    "template": SYSTEM / "edgeqwen@.service",
    "user": USER / "edgeqwen.service",
}
SOCKETS: Final = {kind: path.with_suffix(".socket") for kind, path in SERVICES.items()}

needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")

Unit = dict[str, dict[str, list[str]]]


def parsed(text: str) -> Unit:
    """Section -> key -> its values in order. Later lines of the same key add to it."""
    unit: Unit = defaultdict(lambda: defaultdict(list))
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            unit[section][key].append(value)
    return unit


def read(path: Path) -> Unit:
    return parsed(path.read_text(encoding="utf-8"))


def words(unit: Unit, key: str, section: str = "Service") -> set[str]:
    return {word for value in unit[section][key] for word in value.split()}


def only(unit: Unit, key: str, section: str = "Service") -> str:
    (value,) = unit[section][key]
    return value


def unit_folder(folder: Path, source: Path) -> Path:
    """A copy of the units whose program is one that is here."""
    folder.mkdir()
    for path in source.iterdir():
        text = path.read_text(encoding="utf-8").replace(COMMAND, "/bin/true")
        if not Path("/bin/kill").exists():  # of procps, which the package depends on
            text = text.replace("/bin/kill", "/bin/true")
        (folder / path.name).write_text(text, encoding="utf-8")
    return folder


def add_drop_in(folder: Path, unit: str, name: str) -> None:
    beside = folder / f"{unit}.d"
    beside.mkdir()
    shutil.copy(ROOT / "drop-ins" / f"{name}.conf", beside)


def analyze(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """systemd-analyze, which sees our units first and then those of the system."""
    environ = {**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:", "XDG_RUNTIME_DIR": str(folder.parent), "LC_ALL": "C"}
    return subprocess.run(
        ["systemd-analyze", *arguments], env=environ, capture_output=True, text=True, check=False, timeout=120
    )


def complaints(folder: Path, unit: str, *, is_user: bool = False) -> str:
    """All that `verify` says about a unit; its exit code is 0 for a key that does not exist."""
    scope = ["--user"] if is_user else []
    result = analyze(folder, *scope, "verify", "--man=no", str(folder / unit))
    return result.stdout + result.stderr + (f"exit {result.returncode}" if result.returncode else "")


@needs_analyze
@pytest.mark.parametrize("drop_in", [None, *DROP_INS])
@pytest.mark.parametrize("unit", ["edgeqwen.service", "edgeqwen@.service"])
def test_nothing_is_wrong_with_system_units(tmp_path: Path, unit: str, drop_in: str | None) -> None:
    folder = unit_folder(tmp_path / "units", SYSTEM)
    if drop_in:
        add_drop_in(folder, unit, drop_in)
    instance = unit.replace("@", "@small")
    assert complaints(folder, instance) == ""


@needs_analyze
@pytest.mark.parametrize("unit", ["edgeqwen.socket", "edgeqwen@small.socket", "edgeqwen.slice"])
def test_nothing_is_wrong_with_sockets_and_the_slice(tmp_path: Path, unit: str) -> None:
    assert complaints(unit_folder(tmp_path / "units", SYSTEM), unit) == ""


@needs_analyze
@pytest.mark.parametrize("drop_in", [None, *USER_DROP_INS])
def test_nothing_is_wrong_with_user_units(tmp_path: Path, drop_in: str | None) -> None:
    folder = unit_folder(tmp_path / "units", USER)
    if drop_in:
        add_drop_in(folder, "edgeqwen.service", drop_in)
    for unit in ("edgeqwen.socket", "edgeqwen.service"):
        assert complaints(folder, unit, is_user=True) == ""


@needs_analyze
@pytest.mark.parametrize("source", [SYSTEM, USER])
def test_misspelt_key_is_noticed(tmp_path: Path, source: Path) -> None:
    folder = unit_folder(tmp_path / "units", source)
    service = folder / "edgeqwen.service"
    text = service.read_text(encoding="utf-8")
    service.write_text(text.replace("NoNewPrivileges=", "NoNewPriviliges="), encoding="utf-8")
    assert "NoNewPriviliges" in complaints(folder, "edgeqwen.service", is_user=source == USER)


@needs_analyze
def test_misspelt_key_of_a_drop_in_is_noticed(tmp_path: Path) -> None:
    folder = unit_folder(tmp_path / "units", SYSTEM)
    add_drop_in(folder, "edgeqwen.service", "jit")
    drop_in = folder / "edgeqwen.service.d" / "jit.conf"
    drop_in.write_text(drop_in.read_text(encoding="utf-8").replace("Memory", "Memmory"), encoding="utf-8")
    assert "MemmoryDenyWriteExecute" in complaints(folder, "edgeqwen.service")


@needs_analyze
@pytest.mark.parametrize("unit", ["edgeqwen.service", "edgeqwen@small.service"])
@pytest.mark.parametrize("drop_in", [None, *DROP_INS])
def test_system_units_are_locked_down(tmp_path: Path, unit: str, drop_in: str | None) -> None:
    folder = unit_folder(tmp_path / "units", SYSTEM)
    if drop_in:
        add_drop_in(folder, unit.replace("small", ""), drop_in)
    result = analyze(folder, "security", "--no-pager", "--offline=true", str(folder / unit))
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", result.stdout)
    assert found, result.stdout + result.stderr
    most = MOST_EXPOSURE if drop_in != "tcp" else 1.5  # which has a network
    assert float(found[1]) <= most


@needs_analyze
def test_exposure_is_noticed(tmp_path: Path) -> None:
    folder = unit_folder(tmp_path / "units", SYSTEM)
    (folder / "edgeqwen.service").write_text("[Service]\nExecStart=/bin/true\n", encoding="utf-8")
    result = analyze(folder, "security", "--no-pager", "--offline=true", str(folder / "edgeqwen.service"))
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", result.stdout)
    assert found
    assert float(found[1]) > MOST_EXPOSURE


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
def test_users_and_groups_are_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    run = subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", str(ROOT / "sysusers.d/edgeqwen.conf")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if os.geteuid() != 0 and "Permission denied" in run.stderr:
        pytest.skip("only root may make users")
    assert run.returncode == 0, run.stderr
    users = (tmp_path / "etc/passwd").read_text(encoding="utf-8").splitlines()
    groups = (tmp_path / "etc/group").read_text(encoding="utf-8").splitlines()
    (user,) = (line.split(":") for line in users if line.startswith("edgeqwen:"))
    assert user[5:] == ["/var/lib/edgeqwen", "/usr/sbin/nologin"]
    assert {line.split(":")[0] for line in groups} >= {"edgeqwen", "edgeqwen-admin"}


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="systemd-tmpfiles is not installed")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give folders to others")
def test_folder_of_models_is_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/:\nedgeqwen:x:977:976::/:\n", encoding="utf-8")
    (tmp_path / "etc/group").write_text("root:x:0:\nedgeqwen:x:976:\n", encoding="utf-8")
    run = subprocess.run(
        ["systemd-tmpfiles", "--create", f"--root={tmp_path}", str(ROOT / "tmpfiles.d/edgeqwen.conf")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (0, "")
    for name, mode in (("var/lib/edgeqwen", 0o700), ("var/lib/edgeqwen/models", 0o755)):
        status = (tmp_path / name).stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (977, 976, mode)


@pytest.mark.parametrize("kind", SERVICES)
def test_clients_have_uids(kind: str) -> None:
    """In a user namespace SO_PEERCRED says 65534 of everybody else; a user's unit gets one for anything with mounts."""
    service = read(SERVICES[kind])
    if kind != "user":
        assert only(service, "PrivateUsers") == "no"
        return
    namespaced = {"ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices", "PrivateNetwork", "PrivateMounts"}
    namespaced |= {"ProtectProc", "ProcSubset", "PrivateUsers", "PrivateIPC", "ProtectKernelTunables", "NoExecPaths"}
    namespaced |= {"ReadOnlyPaths", "ProtectControlGroups", "StateDirectory", "CacheDirectory", "ProtectHostname"}
    assert not namespaced & set(service["Service"])


@pytest.mark.parametrize("kind", ["system", "template"])
def test_libraries_see_the_processor(kind: str) -> None:
    service = read(SERVICES[kind])
    assert only(service, "ProcSubset") == "all"
    assert only(service, "ProtectProc") == "invisible"


@pytest.mark.parametrize("kind", ["system", "template"])
def test_user_is_static(kind: str) -> None:
    service = read(SERVICES[kind])
    assert "DynamicUser" not in service["Service"]
    assert only(service, "User") == only(service, "Group") == "edgeqwen"
    assert re.search(r"^u edgeqwen ", (ROOT / "sysusers.d/edgeqwen.conf").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("kind", SERVICES)
def test_socket_outlives_the_service(kind: str) -> None:
    service, sock = read(SERVICES[kind]), read(SOCKETS[kind])
    assert "RuntimeDirectory" not in service["Service"]
    assert "RemoveOnStop" not in sock["Socket"]
    assert only(sock, "Accept", "Socket") == "no"
    name = SOCKETS[kind].name.replace("@", "@%i")
    assert name in words(service, "Requires", "Unit") & words(service, "After", "Unit") & words(
        service, "Also", "Install"
    )
    assert f"EDGEQWEN_SOCKET_PATH={only(sock, 'ListenStream', 'Socket')}" in words(service, "Environment")


@pytest.mark.parametrize("kind", SERVICES)
def test_socket_is_not_for_everybody(kind: str) -> None:
    sock = read(SOCKETS[kind])["Socket"]
    if kind == "user":
        assert sock["SocketMode"] == ["0600"]
    else:
        given = [sock[key] for key in ("SocketUser", "SocketGroup", "SocketMode", "DirectoryMode")]
        assert given == [["root"], ["edgeqwen"], ["0660"], ["0755"]]


@pytest.mark.parametrize("kind", SERVICES)
def test_io_uring_and_privileges_are_refused_with_an_error(kind: str) -> None:
    service = read(SERVICES[kind])
    allowed, denied = service["Service"]["SystemCallFilter"]
    assert allowed == "@system-service"
    assert denied.startswith("~")
    refused = set(denied[1:].split())
    assert refused >= {"@privileged", "io_uring_setup", "io_uring_enter", "io_uring_register"}
    assert "@resources" not in refused  # threads are placed on cores
    assert only(service, "SystemCallErrorNumber") == "EPERM"


@pytest.mark.parametrize("kind", SERVICES)
def test_memory_that_is_written_is_not_executed(kind: str) -> None:
    assert only(read(SERVICES[kind]), "MemoryDenyWriteExecute") == "yes"
    assert only(read(ROOT / "drop-ins/jit.conf"), "MemoryDenyWriteExecute") == "no"


@pytest.mark.parametrize("kind", ["system", "template"])
def test_files_that_are_written_are_not_executed(kind: str) -> None:
    """A folder that the unit has mounted apart does not take that from the one above it."""
    service = read(SERVICES[kind])
    apart = {f"/var/lib/{only(service, 'StateDirectory')}", f"/var/cache/{only(service, 'CacheDirectory')}"}
    assert words(service, "NoExecPaths") >= apart | words(service, "ReadOnlyPaths") | {
        "/var",
        "/tmp",
        "/var/tmp",
        "/run",
    }


@pytest.mark.parametrize("kind", SERVICES)
def test_manager_is_older_than_notify_reload(kind: str) -> None:
    service = read(SERVICES[kind])
    assert only(service, "Type") == "notify"
    assert only(service, "ExecReload") == "/bin/kill -HUP $MAINPID"


@pytest.mark.parametrize("kind", SERVICES)
def test_only_what_a_restart_may_mend_is_restarted(kind: str) -> None:
    service = read(SERVICES[kind])
    assert only(service, "Restart") == "on-failure"
    final = {int(word) for word in words(service, "RestartPreventExitStatus")}
    assert final == {64, 65, 66, 77, 78}
    assert errors.CODES["engine"].exit_code not in final
    assert errors.EXIT_CANNOT_WRITE not in final


@pytest.mark.parametrize("kind", SERVICES)
def test_watchdog_is_slow_enough_for_a_laptop(kind: str) -> None:
    seconds = re.fullmatch(r"(\d+)s", only(read(SERVICES[kind]), "WatchdogSec"))
    assert seconds
    assert int(seconds[1]) >= 60


@pytest.mark.parametrize("kind", SERVICES)
def test_memory_suffices_for_the_model_and_its_cache(kind: str) -> None:
    """The largest form of Qwen3-0.6B, a quarter of what is left for keys and values, and what long prompts took."""
    service = read(SERVICES[kind])
    high_mib = int(only(service, "MemoryHigh").removesuffix("G")) * 1024
    max_mib = int(only(service, "MemoryMax").removesuffix("M"))
    model_mib, long_prompts_mib = 993e6 / (1 << 20), 600e6 / (1 << 20)
    cache_mib = (high_mib - model_mib) / 4
    assert 1.25 * (model_mib + cache_mib + long_prompts_mib) <= high_mib < max_mib
    assert only(service, "MemorySwapMax") == "0"


def test_placing_on_cpus_is_by_control_group() -> None:
    for path in [*SERVICES.values(), *(ROOT / "drop-ins").glob("*.conf")]:
        assert "CPUAffinity" not in read(path)["Service"], path
        assert "CPUQuota" not in read(path)["Service"], path
    assert only(read(ROOT / "drop-ins/cpus.conf"), "AllowedCPUs")


def test_tcp_opens_this_machine_alone() -> None:
    tcp = read(ROOT / "drop-ins/tcp.conf")
    assert only(tcp, "PrivateNetwork") == "no"
    assert words(tcp, "RestrictAddressFamilies") == {"AF_INET", "AF_INET6"}
    assert words(tcp, "IPAddressAllow") == {"localhost"}
    assert words(tcp, "Environment") == {"EDGEQWEN_HTTP_LISTEN=127.0.0.1:8080"}


@pytest.mark.parametrize("kind", SERVICES)
def test_settings_of_the_unit_are_settings_of_the_daemon(kind: str) -> None:
    """A variable EDGEQWEN_... that is none keeps the daemon from starting."""
    from edgeqwen.config import ConfigSources

    given = [*words(read(SERVICES[kind]), "Environment")]
    given += [word for path in (ROOT / "drop-ins").glob("*.conf") for word in words(read(path), "Environment")]
    config = ConfigSources(None, dict(word.split("=", 1) for word in given), {}).read()
    assert config.service.idle_exit_s == 600.0
    assert config.http.listen == "127.0.0.1:8080"


def test_instances_share_nothing_with_the_service() -> None:
    service, template = read(SERVICES["system"]), read(SERVICES["template"])
    assert only(template, "Slice") == "edgeqwen.slice"
    for key in ("StateDirectory", "CacheDirectory"):
        # Not beside models/ and sessions/, which would be instances then.
        assert only(template, key) == f"{only(service, key)}/instances/%i"
    differing = {"StateDirectory", "CacheDirectory", "ExecStart", "Environment", "Slice", "NoExecPaths"}
    same = {key: value for key, value in service["Service"].items() if key not in differing}
    assert same == {key: value for key, value in template["Service"].items() if key not in differing}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.*")), ids=lambda path: path.name)
def test_lines_have_no_comments_behind_them(path: Path) -> None:
    """systemd would take them for a part of the value."""
    if path.is_dir() or "sysusers" in path.name:
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        assert line.startswith("#") or " #" not in line
