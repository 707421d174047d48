"""Processors that this machine is not: user-mode emulation (QEMU) of the programs under test.

The emulator shows /proc/cpuinfo of the machine it runs on, whose processor is another. Paths that exist below its
prefix (`-L`) are taken from there, so each emulated processor gets a prefix with the file that it would show; for ARM,
also with the system of `scripts/prepare-arm`. (So / itself is the prefix, and a socket's folder has to be in it.)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
AARCH64: Final = Path(os.environ.get("TEST_AARCH64_ROOT") or ROOT / ".cache/aarch64")
SOCKETS: Final = "sockets"


@dataclass(frozen=True, slots=True)
class Emulated:
    """A processor by its name of the emulator, and what Linux would say of it."""

    name: str
    machine: str
    cpuinfo: str

    @property
    def obstacle(self) -> str:
        """Why it cannot be emulated here; empty if it can."""
        if shutil.which(f"qemu-{self.machine}") is None:
            return f"there is no qemu-{self.machine} (Debian: apt-get install qemu-user)"
        if self.machine == "aarch64" and not (AARCH64 / ".prepared").exists():
            return "there is no ARM system to emulate (scripts/prepare-arm makes one)"
        return ""

    def prefix(self, folder: Path) -> Path:
        """A fresh prefix in `folder`."""
        prefix = Path(tempfile.mkdtemp(dir=folder, prefix=f"{self.name}-"))
        if self.machine == "aarch64":
            for entry in (AARCH64 / "root").iterdir():
                (prefix / entry.name).symlink_to(entry.resolve())
        (prefix / "proc").mkdir()
        (prefix / "proc/cpuinfo").write_text(self.cpuinfo)
        (prefix / SOCKETS).mkdir(mode=0o700)
        return prefix

    def start(self, arguments: list[str], prefix: Path, **popen: Any) -> subprocess.Popen[bytes]:
        """Run Python with these arguments, the project's modules and dependencies in its path."""
        emulator = [f"qemu-{self.machine}", "-cpu", self.name, "-L", str(prefix)]
        python, paths = sys.executable, [str(ROOT)]
        if self.machine == "aarch64":
            python, paths = str(AARCH64 / "root/usr/bin/python3"), [str(AARCH64 / "site"), *paths]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("EDGEQWEN_")}
        environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.Popen([*emulator, python, *arguments], env=environ, cwd=ROOT, **popen)


def x86(name: str, flags: str) -> Emulated:
    common = "fpu tsc cx8 cmov mmx fxsr sse sse2 syscall nx lm pni cx16 lahf_lm"
    text = f"processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: {name}\nflags\t\t: {common} {flags}\n\n"
    return Emulated(name, "x86_64", text * 2)


def arm(name: str, part: str, features: str) -> Emulated:
    common = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
    identity = (
        f"CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: {part}\nCPU revision\t: 1"
    )
    text = f"processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: {common} {features}\n{identity}\n\n"
    return Emulated(name, "aarch64", text + text.replace("processor\t: 0", "processor\t: 1"))


CORE2 = x86("core2duo", "ssse3")
NEHALEM = x86("Nehalem", "ssse3 sse4_1 sse4_2 popcnt")
HASWELL = x86("Haswell", "ssse3 fma sse4_1 sse4_2 movbe popcnt aes xsave avx f16c abm bmi1 avx2 bmi2 erms")
CORTEX_A72 = arm("cortex-a72", "0xd08", "")
NEOVERSE_N1 = arm("neoverse-n1", "0xd0c", "atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp")
