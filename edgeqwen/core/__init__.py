"""The vocabulary of the engine: what a model is, what is asked of it, what one step is. Knows only `errors`."""
