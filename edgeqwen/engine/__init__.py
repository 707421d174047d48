"""The engine: plan, run on the engine thread, commit, turn tokens into text, retire. Knows nothing of sockets."""
