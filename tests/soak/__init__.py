"""Long runs against a real daemon process: `scripts/soak NAME`. `tests/test_soak.py` runs a short form of each.

Every run is a function that raises `AssertionError` at the first thing that is wrong, and else returns what it counted.
What is random comes from a seed, though threads make no two runs the same.
"""
