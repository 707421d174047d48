"""An onnxruntime session with the settings that matter, measured:

* denormals as zero: masked scores run through exp into denormals, which cost a quarter of the attention's time;
* `force_spinning_stop`: threads spin inside a step, where it saves 15 %, and sleep between steps, so idling costs
  nothing;
* thread counts are always explicit: left to itself onnxruntime pins to cores that may not be ours. Where its threads
  are placed (`affinities`), the calling thread is not: whoever runs the session places that;
* `disable_quant_qdq`: onnxruntime would move the quantised keys' transposition by quantising them a second time;
* `x64quantprecision` only where it is needed: it makes signed 8-bit products exact on processors whose usual kernel
  saturates, and makes them twelve times slower everywhere else;
* no memory patterns: onnxruntime would keep a plan, and lay out the memory of a step anew, for each shape that comes,
  and shapes are many here. Steps are as fast without, and the widest take a tenth less memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import onnxruntime as ort

from edgeqwen.core.model import KV_KINDS, ModelSpec
from edgeqwen.errors import EdgeqwenError, ModelInvalid, RuntimeFailed

MESSAGE_LEN = 300
FLASH_SWITCH: Final = "ORT_GQA_DISABLE_FLASH_ATTENTION"


def session_options(num_threads: int, *, is_precise: bool = False, affinities: str | None = None) -> ort.SessionOptions:
    """The settings of the header, for `num_threads` threads in all. `affinities` places all but the calling thread:
    logical processors counted from 1, a semicolon between threads, a comma between the processors of one.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.enable_mem_pattern = False
    options.log_severity_level = 3
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if affinities is not None:
        options.add_session_config_entry("session.intra_op_thread_affinities", affinities)
    if is_precise:
        options.add_session_config_entry("session.x64quantprecision", "1")
    return options


def shrinking_run() -> ort.RunOptions:
    """Options of a run at whose end the session gives the memory back that no value takes: left to itself it keeps what
    its widest run needed.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def open_session(path: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    """Load a graph for the CPU; raises `ModelInvalid` that names the file, or `RuntimeFailed` for want of memory."""
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own types, RuntimeError and ValueError
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            message = f"{path}: not enough memory to load this graph; free some, or import the model with --quant int4"
            raise RuntimeFailed(message) from error
        raise ModelInvalid(f"{path}: onnxruntime cannot load this graph: {first_line(error)}") from error


@contextlib.contextmanager
def attention_settings(*, is_flash: bool) -> Iterator[None]:
    """How sessions opened inside compute `GroupQueryAttention`: in blocks of the cache (flash), or plainly. Over an
    int8 cache the plain way takes a third less time for one row. onnxruntime reads the setting from the environment
    when it opens a session.
    """
    before = os.environ.get(FLASH_SWITCH)
    if not is_flash:
        os.environ[FLASH_SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(FLASH_SWITCH, None)
        else:
            os.environ[FLASH_SWITCH] = before


@contextlib.contextmanager
def graph_failures() -> Iterator[None]:
    """What onnxruntime raises inside is `RuntimeFailed`."""
    try:
        yield
    except EdgeqwenError:
        raise
    except Exception as error:  # its own types, RuntimeError and ValueError
        raise RuntimeFailed(f"the model's graph failed: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error of onnxruntime says, without the lines that follow."""
    return str(error).strip().split("\n", 1)[0][:MESSAGE_LEN]


def hidden_size(session: ort.InferenceSession) -> int:
    """Length of the hidden states that the graph gives; 0 if it gives none."""
    shape = next((arg.shape for arg in session.get_outputs() if arg.name == "hidden"), [0])
    return shape[-1] if isinstance(shape[-1], int) else 0


def has_shape(session: ort.InferenceSession, spec: ModelSpec) -> bool:
    """Whether the graph is one of `spec`: memory is handed to it by address, so what the two say must agree."""
    past = {arg.name: arg.shape for arg in session.get_inputs() if arg.name.startswith("past.")}
    logits = next((arg.shape for arg in session.get_outputs() if arg.name == "logits"), [None])
    if len(past) != len(KV_KINDS) * spec.num_layers or logits[-1] != spec.vocab_size:
        return False
    if hidden_size(session) not in (0, spec.hidden_size):
        return False
    names = (f"past.{layer}.{kind}" for layer in range(spec.num_layers) for kind in KV_KINDS)
    return all(past.get(name, [])[1::2] == [spec.num_kv_heads, spec.head_dim] for name in names)
