"""The command hf-accel: plan, estimate, quantize, generate, verify, bench and serve.

Nothing here imports torch or transformers before a command runs: --help and the completion of a shell must not take
the seconds of that.
"""
