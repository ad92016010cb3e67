"""The package on a system that is not Linux: without modules, functions and files that only POSIX or Linux has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_accel.kernels.cpu import refusal

ROOT = Path(__file__).parents[1]

# Other packages are loaded before: they have ways of their own on each system. Of hf_accel everything is loaded.
SCRIPT = """if True:
    import builtins, importlib, os, pkgutil, signal, sys
    import filelock, psutil, torch, transformers, transformers.modeling_utils, typer
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
    try:
        import fastapi, prometheus_client, uvicorn
    except ImportError:  # extras
        pass
    own = builtins.__import__
    def without_posix(name, globals=None, *rest):
        if (globals or {}).get("__name__", "").startswith("hf_accel") and name in sys.argv[3].split(","):
            raise ImportError(f"this system has no {name}")
        return own(name, globals, *rest)
    builtins.__import__ = without_posix
    for name in ("fork", "forkpty", "register_at_fork", "sched_getaffinity", "sysconf", "uname", "getuid", "setsid"):
        delattr(os, name)
    for name in ("SIGALRM", "SIGKILL", "SIGHUP", "SIGUSR1", "setitimer", "alarm"):
        delattr(signal, name)
    def hidden(event, arguments):
        if event == "open" and str(arguments[0]).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", arguments[0])
    sys.addaudithook(hidden)
    sys.platform = "darwin"
    psutil.virtual_memory = lambda: type("Memory", (), {"total": 2**34, "available": 2**33})
    import hf_accel
    loaded = 0
    for module in pkgutil.walk_packages(hf_accel.__path__, "hf_accel."):
        if module.name.startswith(("hf_accel.kernels.triton", "hf_accel.cli.optimum")):
            continue  # what needs packages that not every system has
        if module.name.endswith(("__main__", "libhf_accel_cpu")):  # programs, and a library
            continue
        importlib.import_module(module.name)
        loaded += 1
    path, out = sys.argv[1:3]
    model = AutoModelForCausalLM.from_pretrained(path)
    inputs = AutoTokenizer.from_pretrained(path)("import re", return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    with hf_accel.patched(model, weights=None):
        assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), expected)
    hf_accel.patch(model)
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    for _ in range(2):  # a new file, and one that replaces another
        hf_accel.save_gguf(model, os.path.join(out, "model.gguf"))
        hf_accel.save_compressed(model, os.path.join(out, "compressed"))
        model.save_pretrained(os.path.join(out, "saved"))
    again = AutoModelForCausalLM.from_pretrained(os.path.join(out, "saved"))
    assert torch.equal(again.generate(**inputs, max_new_tokens=8, do_sample=False), tokens)
    print(loaded, sorted(os.listdir(out)), hf_accel.estimate(path, context=8) is not None)
    """
POSIX = "fcntl,grp,pwd,resource,termios,pty,tty,syslog"


@pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
def test_all_of_it_is_imported_and_used(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT / "examples" / "stdlib-tiny"), str(tmp_path), POSIX],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded, _, rest = done.stdout.strip().splitlines()[-1].partition(" ")
    assert int(loaded) > 150 and rest == "['compressed', 'model.gguf', 'saved'] True"
