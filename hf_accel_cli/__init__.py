"""The command hf-accel: plan, estimate, quantize, generate, verify, bench and serve.

A package beside hf_accel, and not in it: `import hf_accel` loads torch and transformers, seconds that --help and the
completion of a shell must not take. Nothing here imports either before a command runs.
"""
