"""The types and defaults in the signatures that take the keywords of patch, and what they are at run time."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import hf_accel
from hf_accel import AccelConfig, PatchConfig, UnsupportedError
from hf_accel import attention as attention_backends
from hf_accel.config import WEIGHTS

TAKERS: list[Callable[..., Any]] = [
    hf_accel.patch, hf_accel.plan, hf_accel.patched, hf_accel.load, hf_accel.AccelConfig, hf_accel.PatchConfig,
]  # fmt: skip
DEFAULTS = {  # as the README and patch's own docstring name them
    "weights": "int8", "attention": "auto", "cache": "paged", "fuse": True, "speculative": None,
    "keep_original": "auto", "deterministic": False, "context_parallel": None, "config": None,
}  # fmt: skip
CONFIG = {  # what save_pretrained of an earlier version has written into config.json
    "quant_method": "hf_accel",
    "weights": {
        "bits": 4, "format": "int", "group_size": 32, "symmetric": True, "activations": "auto", "method": "rtn",
        "average_bits": None, "skip": [], "head": "int8", "only_if_faster": False,
    },
    "cache": {"block_size": 8, "dtype": "int8", "max_tokens": None, "prefix_sharing": True},
    "fuse": False, "speculative": None, "deterministic": False, "attention": "auto", "keep_original": True,
}  # fmt: skip


@pytest.mark.parametrize("taker", TAKERS, ids=lambda taker: taker.__name__)
def test_signatures_show_the_defaults(taker: Callable[..., Any]) -> None:
    shown = {p.name: p.default for p in inspect.signature(taker).parameters.values() if p.name in DEFAULTS}
    expected = DEFAULTS if taker is not hf_accel.PatchConfig else {k: v for k, v in DEFAULTS.items() if k != "config"}
    assert shown == expected and list(map(type, shown.values())) == [type(shown[name]) for name in shown]


def words(hint: Any) -> list[Any]:
    """The values that a type allows by name."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return list(chain.from_iterable(map(words, get_args(hint))))


@pytest.mark.parametrize("taker", [hf_accel.patch, hf_accel.load], ids=lambda taker: taker.__name__)
def test_types_name_what_is_taken(taker: Callable[..., Any]) -> None:
    hints = get_type_hints(inspect.unwrap(taker))
    assert Any not in [hints[name] for name in DEFAULTS]
    assert words(hints["weights"]) == list(WEIGHTS)
    assert set(words(hints["attention"])) == {"auto", *(backend.name for backend in attention_backends.BACKENDS)}
    for name in ("weights", "cache", "speculative", "keep_original"):
        found = words(hints[name])
        assert found
        for word in found:
            assert PatchConfig.build(**{name: word}).explicit == {name}
    assert type(None) in get_args(hints["weights"]) and PatchConfig in get_args(hints["config"])


def test_a_config_knows_what_was_asked_for() -> None:
    """Else patch(model, config=PatchConfig(weights="int4")) would do what it does by default."""
    config = PatchConfig(weights="int4", cache=None)
    assert config.explicit == {"weights", "cache"}
    assert PatchConfig.build(config) == config and PatchConfig() == PatchConfig.build()
    assert PatchConfig().explicit == frozenset()


def test_without_a_name() -> None:
    assert AccelConfig("int4").patch == PatchConfig.build(weights="int4")
    assert AccelConfig("int4").to_dict() == AccelConfig(weights="int4").to_dict()
    assert AccelConfig("int8").patch.explicit == {"weights"} and AccelConfig().patch.explicit == frozenset()
    with pytest.raises(UnsupportedError, match="AccelConfig takes weights without a name, and the others with theirs"):
        AccelConfig("int4", "paged")  # type: ignore[misc]


def test_a_saved_config_of_an_earlier_version() -> None:
    settings = AccelConfig.from_dict(CONFIG)
    assert settings.patch == PatchConfig.build(
        weights={"bits": 4, "group_size": 32}, cache={"block_size": 8, "dtype": "int8"}, fuse=False, keep_original=True
    )
    assert settings.patch.explicit == CONFIG.keys() - {"quant_method"}


def test_groups_that_earlier_versions_wrote_for_eight_bits() -> None:
    """They had no meaning: scales belonged to outputs, as the settings of the layers say."""
    written = {**CONFIG, "weights": {**CONFIG["weights"], "bits": 8, "group_size": 128}}
    by_output, by_group = {"q_proj": {"bits": 8}}, {"q_proj": {"bits": 8, "group_size": 128}}
    found = [AccelConfig.from_dict({**written, "modules": modules}) for modules in (by_output, by_group)]
    assert [each.patch.weights.group_size for each in found if each.patch.weights] == [None, 128]
    fp8 = {"bits": 8, "format": "fp8", "group_size": 128}
    settings = AccelConfig.from_dict({**CONFIG, "weights": fp8, "modules": {"q_proj": fp8}})
    assert settings.patch.weights == hf_accel.WeightConfig(format="fp8")


SCRIPT = """
from transformers import AutoModelForCausalLM
import hf_accel
model = AutoModelForCausalLM.from_pretrained("folder")
hf_accel.patch(model, weights="int4", cache=None, speculative="ngram", keep_original=True, deterministic=False)
hf_accel.patch(model, weights=hf_accel.WeightConfig(4, group_size=32), cache=hf_accel.CacheConfig("int8"))
hf_accel.patch(model, weights={"bits": 4}, attention="sdpa", speculative=model, config=hf_accel.PatchConfig(fuse=True))
hf_accel.load("folder", weights="auto", dtype="auto")
hf_accel.AccelConfig("int4", cache={"dtype": "int8"})
hf_accel.plan(model, weights=None)
with hf_accel.patched(model, weights="fp8", attention=None):
    pass
"""
WRONG = """
hf_accel.patch(model, weights="int5")
hf_accel.patch(model, weight="int8")
hf_accel.patch(model, "int8")
hf_accel.patch(model, fuse="on")
hf_accel.patch(model, cache="int8")
hf_accel.patch(model, speculative="ngrams")
hf_accel.patch(model, keep_original="yes")
hf_accel.plan(model, weights="int5")
hf_accel.patched(model, attention="flash")
hf_accel.load("folder", weights=8)
hf_accel.AccelConfig("int5")
hf_accel.AccelConfig(weight="int8")
hf_accel.PatchConfig(weights="int5")
hf_accel.WeightConfig(5)
hf_accel.WeightConfig(group_size=48)
hf_accel.CacheConfig(16)
hf_accel.SpeculativeConfig(drafter="ngrams")
""".lstrip()


@pytest.mark.long
def test_a_user_s_script_is_checked_by_its_types(tmp_path: Path) -> None:
    """mypy finds each wrong line of a script, and none of the right ones."""
    (tmp_path / "script.py").write_text(SCRIPT + WRONG)
    package = Path(hf_accel.__file__).parent
    assert (package / "py.typed").exists()
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports", "--follow-imports=silent",
         "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "script.py")],
        cwd=package.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    first = SCRIPT.count("\n") + 1
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert found == set(range(first, first + WRONG.count("\n"))), done.stdout + done.stderr
