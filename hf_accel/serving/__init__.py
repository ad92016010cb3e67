"""An OpenAI-compatible server over one patched model: transformers' own handlers, with our Engine inside.

`hf_accel.cli.serve` is the command. Nothing here is imported by `import hf_accel`: it needs the extra "serve".
"""
