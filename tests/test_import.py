"""What a user sees in a terminal of our import and first patch, which is nothing; that the import is enough, loads
what is asked for, and works on a system that is not Linux.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import hf_accel
from hf_accel.kernels.cpu import refusal

ROOT = Path(__file__).parent.parent
TINY = ROOT / "examples" / "stdlib-tiny"


def python(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def test_an_import_prints_and_loads_nothing() -> None:
    loaded = "{'torch', 'transformers'} & set(sys.modules)"
    done = python(f"import sys, hf_accel; assert not {loaded} and not set(hf_accel._LAZY) & set(vars(hf_accel))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


QUANTIZERS = ("torchao", "bitsandbytes", "peft", "compressed_tensors", "gguf", "triton", "matplotlib", "ray")
# What transformers prints while it is loaded, and what it loads, comes before: file descriptors 1 and 2 are ours then.
PATCH = f"""if True:
    import os, sys, torch, transformers.modeling_utils
    before = set(sys.modules)
    import hf_accel
    from transformers import AutoModelForCausalLM
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    with open(sys.argv[2], "wb") as printed:
        sys.stdout.flush(), sys.stderr.flush()
        said = os.dup(1)
        os.dup2(printed.fileno(), 1), os.dup2(printed.fileno(), 2)
        hf_accel.patch(model)
        os.write(said, str(sorted(set({QUANTIZERS}) & (set(sys.modules) - before))).encode())
        ids = torch.tensor([[5, 6, 7]])
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        hf_accel.unpatch(model)
        sys.stdout.flush(), sys.stderr.flush()
    """
NAMES = """if True:
    import sys, hf_accel
    assert hf_accel.distillation_loss is hf_accel.distillation_loss
    assert "hf_accel.distill.losses.distillation_loss" in sys.modules
    import hf_accel.verify.certificate, hf_accel.estimate
    assert callable(hf_accel.verify) and callable(hf_accel.estimate), "and not the folders of these names"
    hf_accel.patch, hf_accel.load
    assert not [name for name in sys.modules if name.startswith(("hf_accel.distill.tr", "transformers.trainer"))]
    print("loaded")
    """
# Other packages are loaded before: they have ways of their own on each system. Of hf_accel everything is loaded.
ELSEWHERE = """if True:
    import builtins, importlib, os, pkgutil, signal, sys
    import filelock, psutil, torch, transformers, transformers.modeling_utils, typer
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
    try:
        import fastapi, prometheus_client, uvicorn
    except ImportError:  # extras
        pass
    POSIX = "fcntl", "grp", "pwd", "resource", "termios", "pty", "tty", "syslog"
    own = builtins.__import__
    def without_posix(name, globals=None, *rest):
        if (globals or {}).get("__name__", "").startswith("hf_accel") and name in POSIX:
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
    path, out = sys.argv[1], f"{sys.argv[2]} elsewhere"
    os.mkdir(out)
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
AUTO = "from transformers import AutoModelForCausalLM"
USE = """
model = AutoModelForCausalLM.from_pretrained(sys.argv[3])
assert "hf_accel.patching" in sys.modules and type(model.model.layers[0].mlp.up_proj).__name__ == "QuantLinear"
stock = AutoModelForCausalLM.from_pretrained(sys.argv[1])
import torch
ids = torch.tensor([[1, 2, 3]])
expected = stock(input_ids=ids).logits
ours = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="hf_accel")
torch.testing.assert_close(ours(input_ids=ids).logits, expected, atol=0.1, rtol=0.05)
print("loaded")
"""
# What one process imports before it forks a child for each of some scripts: imports are what takes seconds.
FORKS = [
    ("import torch", {"import hf_accel first": f"import sys, hf_accel\n{AUTO}{USE}"}),
    ("import transformers.quantizers.auto", {"in the middle": f"import sys, hf_accel\n{AUTO}{USE}"}),
    (
        f"{AUTO}, LlamaForCausalLM",
        {
            "import hf_accel last": f"import sys\n{AUTO}\nimport hf_accel{USE}",
            "patch": PATCH,
            "names": NAMES,
            "elsewhere": ELSEWHERE,
        },
    ),
]
FORK = """if True:
    import json, os, pathlib, sys
    out = pathlib.Path(sys.argv.pop())
    for imports, scripts in json.loads(sys.argv.pop()):
        exec(imports, {})
        assert "hf_accel" not in sys.modules
        for name, script in scripts.items():
            child = os.fork()
            if child == 0:
                for place in (1, 2):
                    os.dup2(os.open(out / f"{name} {place}", os.O_CREAT | os.O_WRONLY), place)
                exec(script, {"__name__": "__main__"})
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(0)
            os.waitpid(child, 0)
    """
Ended = dict[str, str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """What each script has printed to its stdout, and "printed": what was printed by patch(); errors are raised."""
    folder = tmp_path_factory.mktemp("import")
    config = hf_accel.AccelConfig("int8")
    AutoModelForCausalLM.from_pretrained(TINY, quantization_config=config).save_pretrained(folder / "int8")
    done = python(FORK, TINY, folder / "printed", folder / "int8", json.dumps(FORKS), folder)
    written = {file.name: file.read_text() for file in folder.glob("* [12]")}
    assert done.returncode == 0, (done.stderr, written)
    found = {name: written[f"{name} 1"] for _, scripts in FORKS for name in scripts}
    errors = "\n".join(text for name, text in written.items() if name.endswith("2") and "Traceback" in text)
    return found | {"printed": (folder / "printed").read_text(), "errors": errors}


def test_a_first_patch_prints_nothing(ended: Ended) -> None:
    if refusal() is not None:
        pytest.skip(f"patch() warns of it: {refusal()}")
    assert ended["printed"] == "" and not ended["errors"], ended["errors"]


def test_a_first_patch_loads_no_other_library(ended: Ended) -> None:
    """Beyond those that transformers loads with the base class of its models."""
    assert ended["patch"] == "[]", ended["errors"]


@pytest.mark.parametrize("order", ["import hf_accel first", "in the middle", "import hf_accel last"])
def test_an_import_is_enough_to_load_what_we_saved(order: str, ended: Ended) -> None:
    """No name of hf_accel is used: transformers finds the quantizer, and the attention, in its registries."""
    assert ended[order] == "loaded\n", ended["errors"]


def test_names_are_loaded_when_they_are_asked_for(ended: Ended) -> None:
    assert ended["names"] == "loaded\n", ended["errors"]


@pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
def test_all_of_it_is_imported_and_used_on_another_system(ended: Ended) -> None:
    """Without modules, functions and files that only POSIX or Linux has."""
    assert ended["elsewhere"], ended["errors"]
    loaded, _, rest = ended["elsewhere"].strip().splitlines()[-1].partition(" ")
    assert int(loaded) > 150 and rest == "['compressed', 'model.gguf', 'saved'] True"
