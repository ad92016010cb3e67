"""What a user sees in a terminal of our import and first patch, which is nothing; and that the import is enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import hf_accel

ROOT = Path(__file__).parent.parent
TINY = ROOT / "examples" / "stdlib-tiny"


def python(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def test_an_import_prints_nothing() -> None:
    done = python("import hf_accel")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# What transformers prints while it is loaded, and what it loads, comes before: file descriptors 1 and 2 are ours then.
PATCH = """if True:
    import hf_accel, os, sys, torch, transformers
    from transformers import AutoModelForCausalLM
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    with open(sys.argv[2], "wb") as printed:
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(printed.fileno(), 1), os.dup2(printed.fileno(), 2)
        hf_accel.patch(model)
        ids = torch.tensor([[5, 6, 7]])
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        hf_accel.unpatch(model)
        sys.stdout.flush(), sys.stderr.flush()
    """
QUANTIZERS = ("torchao", "bitsandbytes", "peft", "compressed_tensors", "gguf", "triton", "matplotlib", "ray")
LOADED = f"""if True:
    import sys, transformers.modeling_utils
    before = set(sys.modules)
    import hf_accel
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
    hf_accel.patch(model)
    print(sorted(set({QUANTIZERS}) & (set(sys.modules) - before)))
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
        {"import hf_accel last": f"import sys\n{AUTO}\nimport hf_accel{USE}", "patch": PATCH, "loaded": LOADED},
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
    from hf_accel.kernels import cpu as kernels

    if kernels.refusal() is not None:
        pytest.skip(f"patch() warns of it: {kernels.refusal()}")
    assert ended["printed"] == "" and not ended["errors"], ended["errors"]


def test_a_first_patch_loads_no_other_library(ended: Ended) -> None:
    """Beyond those that transformers loads with the base class of its models."""
    assert ended["loaded"] == "[]\n", ended["errors"]


@pytest.mark.parametrize("order", ["import hf_accel first", "in the middle", "import hf_accel last"])
def test_an_import_is_enough_to_load_what_we_saved(order: str, ended: Ended) -> None:
    """No name of hf_accel is used: transformers finds the quantizer, and the attention, in its registries."""
    assert ended[order] == "loaded\n", ended["errors"]
