"""Implementations of `core.step.Runtime`, one module each; nothing above imports them but the composition root.

onnxruntime's builds for Linux report use to their vendor from the moment they are imported: they write a device id
and a database of events under the home directory and post them when there is a network. A daemon that promises to
open no network connection cannot have that, so it is switched off before any module here can import the library; its
own call for that (`disable_telemetry_events`) comes too late to keep the files from being written.
"""

from __future__ import annotations

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
