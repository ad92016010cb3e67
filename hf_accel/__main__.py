"""`python -m hf_accel` is the command hf-accel."""

from .cli.app import app

if __name__ == "__main__":
    app()
