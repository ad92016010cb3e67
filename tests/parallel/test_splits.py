"""The state of a model that is split over ranks, and models that are split in ways that hf_accel does not know."""

from __future__ import annotations

import re
from pathlib import Path

from . import split_jobs as jobs
from .ranks import Ranks
from .tensor_jobs import generated, load, prompts


def test_a_state_is_of_one_rank(path: str, ranks: Ranks, tmp_path: Path) -> None:
    """Float weights are DTensors, as transformers has them; quantized parts say whose they are, and go back there."""
    for rank, found in enumerate(ranks.run(jobs.job_states, path, str(tmp_path))):
        assert found["exact"] == found["stock"]
        assert sum(sharded for _, _, sharded in found["exact"].values()) >= 14
        assert len(found["parts"]) >= 2 * 14 and found["other names"] == []
        assert all(f"_proj.rank_{rank}_of_2." in name or name.startswith("lm_head") for name in found["parts"])
        assert found["forgotten"] and found["back"] and found["kept"] and found["checkpoint"]
        own, other = (f"rank_{number}_of_2." for number in (rank, 1 - rank))
        for name, given, stored in (
            ("other", other, own), ("whole takes a part", own, ""), ("part takes the whole", "", own)
        ):  # fmt: skip
            assert re.search(
                rf"q_proj\.{given}\w+ is not for this model, which stores \S+q_proj\.{stored}weight;", found[name]
            )
        assert "give each rank what the same rank of as many has saved" in found["other"]


def test_saving_float_weights_is_the_way_out(path: str, ranks: Ranks, tmp_path: Path) -> None:
    expected = generated(load(path, split=False), prompts()[:2])
    for found in ranks.run(jobs.job_saved, path, str(tmp_path)):
        assert "hf-accel quantize" in found["said"] and "hf_accel.unpatch(model) and save" in found["said"]
        assert found["tokens"] == expected


def test_other_splits_are_refused(path: str, ranks: Ranks) -> None:
    first, second = ranks.run(jobs.job_other_splits, path)
    assert first == second
    way_out = "load it with DistributedConfig(tp_size=..., tp_plan='auto'), or whole"
    for name in ("fsdp_size", "pp_size", "ep_size", "dp_replicate_size"):
        assert "the model is split by tp_size=2, " in first[name] and f"{name}=2; hf_accel knows" in first[name]
        assert way_out in first[name]
    assert "tp_size=2, enable_expert_parallel=True;" in first["experts of older transformers"]
    assert "split by pp_size=2;" in first["pipeline alone"] and way_out in first["pipeline alone"]
    assert "but not by tensor parallel of transformers; load the model with" in first["torch's FSDP"]
    assert "over 2 dimensions of ranks; load with tp_size= alone" in first["two dimensions"]
