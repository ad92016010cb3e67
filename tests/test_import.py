"""What a user sees in a terminal of our import and first patch, which is nothing; and that the import is enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_first_patch_prints_nothing(tmp_path: Path) -> None:
    from hf_accel.kernels import cpu as kernels

    if kernels.refusal() is not None:
        pytest.skip(f"patch() warns of it: {kernels.refusal()}")
    done = python(PATCH, TINY, tmp_path / "printed")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "printed").read_bytes() == b""


QUANTIZERS = ("torchao", "bitsandbytes", "peft", "compressed_tensors", "gguf", "triton", "matplotlib", "ray")
LOADED = f"""if True:
    import sys, transformers.modeling_utils
    before = set(sys.modules)
    import hf_accel
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
    hf_accel.patch(model)
    print(sorted(set({QUANTIZERS}) & (set(sys.modules) - before)))
    """


def test_a_first_patch_loads_no_other_library() -> None:
    """Beyond those that transformers loads with the base class of its models."""
    done = python(LOADED, TINY)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


SAVE = """if True:
    import sys, hf_accel
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=hf_accel.AccelConfig("int8"))
    model.save_pretrained(sys.argv[2])
    """
AUTO = "from transformers import AutoModelForCausalLM"
LOAD = {
    "import hf_accel first": f"import sys, hf_accel\n{AUTO}",
    "import hf_accel last": f"import sys\n{AUTO}, LlamaForCausalLM\nimport hf_accel",
    "in the middle": f"import sys, transformers.quantizers.auto, hf_accel\n{AUTO}",
}
USE = """
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert "hf_accel.patching" in sys.modules and type(model.model.layers[0].mlp.up_proj).__name__ == "QuantLinear"
stock = AutoModelForCausalLM.from_pretrained(sys.argv[2])
import torch
ids = torch.tensor([[1, 2, 3]])
expected = stock(input_ids=ids).logits
ours = AutoModelForCausalLM.from_pretrained(sys.argv[2], attn_implementation="hf_accel")
torch.testing.assert_close(ours(input_ids=ids).logits, expected, atol=0.1, rtol=0.05)
print("loaded")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a checkpoint, and what went wrong where it was saved."""
    path = tmp_path_factory.mktemp("saved") / "int8"
    done = python(SAVE, TINY, path)
    return path, done.stderr if done.returncode else ""


@pytest.mark.parametrize("order", LOAD)
def test_an_import_is_enough_to_load_what_we_saved(order: str, saved: tuple[Path, str]) -> None:
    """No name of hf_accel is used: transformers finds the quantizer, and the attention, in its registries."""
    path, error = saved
    assert not error
    done = python(LOAD[order] + USE, path, TINY)
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr
