"""The socket protocol `eqp/1` without I/O: bytes to messages, events to frames. Knows errors and core only."""
