"""What the machine offers: instruction sets, cores and how they differ, limits of control groups, memory.

Everything is read from files below a root that is handed in, so that a test describes a machine by writing files.
"""

from edgeqwen.cpu.groups import MemoryLimits, cpu_quota, cpuset, memory_limits
from edgeqwen.cpu.memory import Memory, read_memory
from edgeqwen.cpu.plan import ThreadGroup, ThreadPlan, ThreadWishes, plan_threads
from edgeqwen.cpu.processor import (
    Processor,
    Target,
    check_processor,
    clock_mhz,
    fingerprint,
    missing_flags,
    parse_cpuinfo,
    read_processor,
)
from edgeqwen.cpu.residency import forget_pages, keep_large_blocks_apart, share_heaps, trim_heap
from edgeqwen.cpu.sysfiles import format_cpu_list, parse_cpu_list
from edgeqwen.cpu.threads import may_place_threads, place_calling_thread, placed, read_thread_plan, usable_cpus
from edgeqwen.cpu.topology import Core, Topology, read_topology

__all__ = [
    "Core",
    "Memory",
    "MemoryLimits",
    "Processor",
    "Target",
    "ThreadGroup",
    "ThreadPlan",
    "ThreadWishes",
    "Topology",
    "check_processor",
    "clock_mhz",
    "cpu_quota",
    "cpuset",
    "fingerprint",
    "forget_pages",
    "format_cpu_list",
    "keep_large_blocks_apart",
    "may_place_threads",
    "memory_limits",
    "missing_flags",
    "parse_cpu_list",
    "parse_cpuinfo",
    "place_calling_thread",
    "placed",
    "plan_threads",
    "read_memory",
    "read_processor",
    "read_thread_plan",
    "read_topology",
    "share_heaps",
    "trim_heap",
    "usable_cpus",
]
