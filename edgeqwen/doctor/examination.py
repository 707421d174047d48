"""The examination as a whole: what there is, what was found, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from edgeqwen.config import KvTable
from edgeqwen.core.state import could_write
from edgeqwen.cpu import Memory, Processor, ThreadPlan, clock_mhz, fingerprint, format_cpu_list, read_memory
from edgeqwen.doctor.access import SocketReport, examine_socket, own_groups, socket_findings
from edgeqwen.doctor.finding import Finding, size_text
from edgeqwen.doctor.memory import memory_findings
from edgeqwen.doctor.package import PackageReport, examine_package, quant_findings
from edgeqwen.doctor.power import power_findings
from edgeqwen.doctor.processor import processor_findings, quant_notes
from edgeqwen.doctor.runtimes import Timing, installed_runtimes, runtime_findings, timing_findings
from edgeqwen.doctor.sandbox import Sandbox, disk_findings, read_sandbox, sandbox_findings
from edgeqwen.doctor.trial import Trial, trial_findings, trial_obstacle

LABEL_LEN = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is examined: a processor with its thread plan, the package that would be served if any, the folder of the
    machine's profile, that of what may be lost, and the socket that clients would ask. `runtime_version` is that of
    the installed onnxruntime.
    """

    processor: Processor
    threads: ThreadPlan
    runtime_version: str
    state_dir: Path
    package_path: Path | None = None
    kv: KvTable = field(default_factory=KvTable)
    cache_dir: Path | None = None
    socket_path: Path | None = None
    configured_runtime: str = "onnx"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """`profile` is what was measured of this machine before, by file; empty if nothing was."""

    subject: Subject
    clock_mhz: int | None
    memory: Memory
    fingerprint: str
    profile: Mapping[str, Any]
    package: PackageReport | None
    findings: tuple[Finding, ...]
    sandbox: Sandbox
    socket: SocketReport | None = None
    trial: Trial | None = None
    runtimes: Mapping[str, str | None] = field(default_factory=dict)
    timing: Timing | None = None

    def with_timing(self, timing: Timing, *findings: Finding) -> Examination:
        """And how fast the runtimes are here."""
        found = timing_findings(timing, self.subject.configured_runtime)
        return replace(self, timing=timing, findings=(*self.findings, *findings, *found))

    def with_trial(self, trial: Trial | Finding) -> Examination:
        """And what a run has shown."""
        if isinstance(trial, Finding):
            return replace(self, findings=(*self.findings, trial))
        threads = self.subject.threads
        found = trial_findings(
            trial,
            quant=self.package.facts["quant"] if self.package else "",
            num_threads=threads.decode.num_threads,
            num_cores=len(threads.usable),
        )
        return replace(self, trial=trial, findings=(*self.findings, *found))

    @property
    def trial_obstacle(self) -> Finding | None:
        """Why a run would do harm now."""
        return trial_obstacle(
            num_active=self.socket.num_active if self.socket else 0,
            needed_bytes=self.package.facts.get("needed_bytes", 0) if self.package else 0,
            free_bytes=self.memory.free if self.memory.most else None,
        )

    @property
    def exit_code(self) -> int:
        """That of the first error; 0 if nothing keeps the daemon from serving."""
        return next((finding.exit_code for finding in self.findings if finding.level == "error"), 0)

    def to_dict(self) -> dict[str, Any]:
        """For scripts."""
        processor, threads = self.subject.processor, self.subject.threads
        return {
            "ok": self.exit_code == 0,
            "processor": {
                "machine": processor.machine,
                "name": processor.name,
                "features": list(processor.features),
                "target": processor.target,
                "clock_mhz": self.clock_mhz,
                "quants": dict(quant_notes(processor)),
            },
            "threads": threads.to_dict()
            | {"usable": format_cpu_list(threads.usable), "quota": threads.quota, "reasons": list(threads.reasons)},
            "memory": {key: value for key, value in asdict(self.memory).items() if key != "limits"}
            | {"limit": self.memory.limits.limit, "high": self.memory.limits.high},
            "fingerprint": self.fingerprint,
            "profile": dict(self.profile),
            "package": self.package.facts if self.package else None,
            "sandbox": self.sandbox.to_dict(),
            "socket": self.socket.to_dict() if self.socket else None,
            "trial": self.trial.to_dict() if self.trial else None,
            "runtimes": dict(self.runtimes),
            "timing": self.timing.to_dict() if self.timing else None,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def to_text(self) -> str:
        """For people: what there is, then the findings, the gravest first."""
        return "\n".join([*self._facts(), *self._finding_lines()])

    def _facts(self) -> Iterator[str]:
        processor, threads, memory = self.subject.processor, self.subject.threads, self.memory
        clock = f", {self.clock_mhz} MHz" if self.clock_mhz else ""
        yield _line("processor", f"{processor.name or 'unnamed'} ({processor.machine}){clock}")
        yield _line("", f"{' '.join(processor.features) or 'no instruction sets known'}; target {processor.target}")
        for quant, note in quant_notes(processor).items():
            yield _line(f"  {quant}", note)
        yield _line("threads", f"decoding: {threads.decode}; prompts: {threads.prefill}")
        for reason in threads.reasons:
            yield _line("", reason)
        swap = f"; {size_text(memory.swap_used)} of {size_text(memory.swap_total)} swap in use"
        yield _line(
            "memory", f"{size_text(memory.free)} free of {size_text(memory.most)}{swap if memory.swap_total else ''}"
        )
        yield _line("sandbox", self.sandbox.to_text())
        if self.socket is not None:
            yield _line("socket", self.socket.to_text())
        yield from self._package_lines()
        if self.trial is not None:
            for number, line in enumerate(self.trial.lines()):
                yield _line("" if number else "a run", line)
        yield from self._runtime_lines()
        state = f"{self.subject.state_dir} (this machine is {self.fingerprint})"
        yield _line("profile", f"none in {state}" if not self.profile else f"in {state}")
        for name, content in self.profile.items():
            yield _line("", f"{name}: {json.dumps(content, ensure_ascii=False)}")
        if self.profile:
            yield _line(
                "", "(a file that you remove is measured again at the next start, best while nothing else runs)"
            )

    def _runtime_lines(self) -> Iterator[str]:
        versions = [f"{name} {version or '(not installed)'}" for name, version in self.runtimes.items()]
        yield _line("runtimes", ", ".join(versions))
        for line in self.timing.lines() if self.timing else ():
            yield _line("", line)

    def _package_lines(self) -> Iterator[str]:
        if self.package is None:
            yield _line("package", "none given, and not just one installed")
            return
        facts = self.package.facts
        yield _line("package", facts["path"])
        if "quant" in facts:
            yield _line("", f"{facts['quant']} for {facts['target']}, {size_text(facts['bytes'])}, all files whole")
            cache = f"{size_text(facts['conversation_bytes'])} more for {facts['context']} tokens of conversation"
            yield _line("", f"needs {size_text(facts['needed_bytes'])}, and up to {cache}")

    def _finding_lines(self) -> Iterator[str]:
        for level in ("error", "warning", "note"):
            for finding in self.findings:
                if finding.level == level:
                    yield f"{level}: {finding.text}"
                    yield f"    {finding.advice}"
        if all(finding.level == "note" for finding in self.findings):
            yield "nothing is in the way"


def examine(subject: Subject, root: Path = Path("/")) -> Examination:
    """Look at everything; a package is read whole, which takes as long as its size says."""
    memory, sandbox = read_memory(root), read_sandbox(root)
    socket = None if subject.socket_path is None else examine_socket(subject.socket_path)
    folders = {"service.state_dir": subject.state_dir, "service.cache_dir": subject.cache_dir or subject.state_dir}
    package = None
    if subject.package_path is not None:
        package = examine_package(subject.package_path, subject.processor, memory, subject.kv)
    digest = fingerprint(
        subject.processor, thread_counts=subject.threads.counts, runtime_version=subject.runtime_version
    )
    runtimes = installed_runtimes()
    return Examination(
        subject=subject,
        runtimes=runtimes,
        clock_mhz=clock_mhz(root),
        memory=memory,
        fingerprint=digest,
        profile=read_profile(subject.state_dir, digest),
        package=package,
        sandbox=sandbox,
        socket=socket,
        findings=(
            *processor_findings(subject.processor),
            *runtime_findings(subject.processor, runtimes),
            *(package.findings if package else quant_findings(memory)),
            *thread_findings(subject.threads),
            *power_findings(root, subject.threads.decode.cpus or subject.threads.usable),
            *memory_findings(memory, root),
            *state_findings(subject.state_dir),
            *disk_findings(folders, subject.kv.disk_mb << 20),
            *sandbox_findings(sandbox),
            *(socket_findings(socket, own_groups()) if socket else ()),
        ),
    )


def thread_findings(threads: ThreadPlan) -> Iterator[Finding]:
    """What the plan itself warns of."""
    for warning in threads.warnings:
        text, _, advice = warning.partition("; ")
        yield Finding("warning", "threads", text, advice)
    if threads.quota is not None:
        text = f"a control group limits CPU time to {threads.quota:g} cores"
        yield Finding(
            "note", "cpu-quota", text, "if it is yours to set: CPUWeight shares CPUs without stopping anybody"
        )


def state_findings(state_dir: Path) -> Iterator[Finding]:
    """A state folder in which nothing can be kept."""
    if not could_write(state_dir):
        text = f"{state_dir} cannot be written to: what is measured of this machine is measured anew at each start"
        yield Finding("warning", "state-dir", text, "make it writable for the daemon's user, or give --state-dir")


def read_profile(state_dir: Path, digest: str) -> dict[str, Any]:
    """What the files named by this machine's fingerprint say, by their path in `state_dir`; one that is no JSON is told
    as None.
    """
    pattern = f"*{digest}*.json"
    try:
        paths = [*state_dir.glob(pattern), *state_dir.glob(f"*/{pattern}")]
    except OSError:
        return {}
    return {str(path.relative_to(state_dir)): _read_json(path) for path in sorted(paths)}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _line(label: str, text: str) -> str:
    return f"{label:<{LABEL_LEN}}{text}".rstrip()
