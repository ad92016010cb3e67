"""A file for each topic that `python -m benchmarks.run` measures."""
