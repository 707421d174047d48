"""A runtime on torch: a decoder of our own over the same KV arenas, for machines that torch serves better.

    library    torch itself: its environment, its import, and what it needs of machine and unit
    weights    the matrices, in the form that a step multiplies with
    operators  what a compiler must not look into: products with packed weights, attention over the cache
    decoder    the layers, written once for eager and compiled execution
    runtime    `core.step.Runtime` of these

Nothing here is imported unless torch is what the configuration names: the base install does not have it.
"""
