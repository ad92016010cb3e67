"""The command hf-accel: plan, estimate, quantize, generate, verify, bench and serve.

It is installed as hf_accel_cli, a package next to hf_accel: `import hf_accel` loads torch and transformers, seconds
that --help and the completion of a shell must not take. Nothing here imports either before a command runs.
"""
