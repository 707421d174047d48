"""An onnxruntime session with the settings that matter, measured:

* denormals as zero: masked scores run through exp into denormals, which cost a quarter of the attention's time;
* `force_spinning_stop`: threads spin inside a step, where it saves 15 %, and sleep between steps, so idling costs
  nothing;
* thread counts are always explicit: left to itself onnxruntime pins to cores that may not be ours;
* `x64quantprecision` only where it is needed: it makes signed 8-bit products exact on processors whose usual kernel
  saturates, and makes them twelve times slower everywhere else.
"""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from edgeqwen.errors import ModelInvalid

MESSAGE_LEN = 300


def session_options(num_threads: int, *, is_precise: bool = False) -> ort.SessionOptions:
    """The settings of the header, for `num_threads` threads in all."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if is_precise:
        options.add_session_config_entry("session.x64quantprecision", "1")
    return options


def open_session(path: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    """Load a graph for the CPU; raises `ModelInvalid` that names the file."""
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own types, RuntimeError and ValueError
        raise ModelInvalid(f"{path}: onnxruntime cannot load this graph: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error of onnxruntime says, without the lines that follow."""
    return str(error).strip().split("\n", 1)[0][:MESSAGE_LEN]
