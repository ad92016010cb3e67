"""What hf_accel is worth on this machine: stock transformers and other libraries against it, in one run.

    python -m benchmarks.run decode

Every topic is a file with a `measure` function, every competitor a file in setups/. A model is verified
before it is timed, and the repetitions of all of them take turns, so that a slow moment hits all.
"""
