"""The model and the tokenizer of a command's PATH."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .output import BadInputError

DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
GIVE = "give a model's folder, a .gguf file, or a name on the Hugging Face hub"


def checked_path(path: str) -> str:
    """Return PATH if it may be a model. Raises BadInputError before torch is loaded if it surely is none."""
    place = Path(path).expanduser()
    if place.is_dir():
        if (place / "config.json").is_file():
            _check_config(place / "config.json")
            return str(place)
        if (place / "adapter_config.json").is_file():
            raise BadInputError(f"{path} holds an adapter and no model; merge it into its model, and save that")
        raise BadInputError(f"there is no config.json in {path}; {GIVE}")
    if place.is_file():
        if place.suffix == ".gguf":
            return str(place)
        raise BadInputError(f"{path} is a file, and no .gguf; {GIVE}")
    looks_local = path.startswith(("/", "./", "../", "~")) or path.endswith(".gguf")
    if looks_local or not HUB_NAME.fullmatch(path):
        raise BadInputError(f"{path} does not exist; {GIVE}")
    return path


def _check_config(file: Path) -> None:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"{file} cannot be read: {error}; copy or download the model again") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise BadInputError(f"{file} names no model_type, so it is not a transformers model's; {GIVE}")
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype is not None:
        named_dtype(str(dtype), where=f"dtype in {file}")


def named_dtype(name: str, *, where: str = "--dtype") -> Any:
    """Return a torch.dtype; None for "auto"."""
    if name == "auto":
        return None
    import torch

    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise BadInputError(f"{where}: {name!r} is not a dtype; choose one of {', '.join(DTYPE_NAMES)}")
    return dtype


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Raise an error that names the model that transformers could not read, with one sentence of its message."""
    from hf_accel import HfAccelError

    try:
        yield
    except (HfAccelError, BadInputError):
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = " ".join(str(error).split())
        unknown = re.search(r"model type `?'?([\w-]+)", said)
        if unknown and "does not recognize" in said:
            raise BadInputError(
                f"{path} is of the architecture {unknown[1]!r}, which this transformers does not know; upgrade "
                "transformers, or give another model"
            ) from error
        if not Path(path).exists():
            raise BadInputError(
                f"{path} is no folder or file here, and not read from the hub: {_first(said)}"
            ) from error
        raise BadInputError(f"what {path} holds cannot be loaded: {_first(said)}") from error


def _first(text: str) -> str:
    return re.split(r"(?<=[a-z)'])\. ", text, maxsplit=1)[0].rstrip(".") or "no reason given"


def check_text_model(path: str, command: str) -> None:
    """Raise BadInputError for a model that writes nothing from a text, before its weights are loaded."""
    place = checked_path(path)
    if place.endswith(".gguf"):
        return
    from transformers import AutoConfig, PreTrainedModel

    from hf_accel.estimate.shapes import class_of

    with explained(path):
        kind = class_of(AutoConfig.from_pretrained(place))
    if not issubclass(kind, PreTrainedModel):  # an auto class, which finds out
        return
    where = f"{command}: {kind.__name__}"
    if not kind.can_generate():
        raise BadInputError(
            f"{where} does not generate text; hf-accel plan, bench, verify and quantize take it, and in "
            "Python hf_accel.patch(model) speeds up its forward passes"
        )
    if kind.main_input_name != "input_ids":
        raise BadInputError(
            f"{where} starts from {kind.main_input_name} and not from a text; call its generate() in Python, after "
            "hf_accel.patch(model)"
        )


def is_encoder_path(path: str) -> bool:
    """Return whether PATH holds a model that does not generate: an encoder, with a head or without."""
    place = checked_path(path)
    if place.endswith(".gguf"):
        return False
    from transformers import AutoConfig, PreTrainedModel

    from hf_accel.estimate.shapes import class_of

    with explained(path):
        kind = class_of(AutoConfig.from_pretrained(place))
    return issubclass(kind, PreTrainedModel) and not kind.can_generate()


def is_row_path(path: str) -> bool:
    """Return whether PATH makes vectors or scores of texts: an encoder, or a folder of sentence-transformers."""
    from hf_accel.checkpoints.text_encoder import encodes

    place = checked_path(path)
    with explained(path):
        return encodes(place)


def is_sound_path(path: str) -> bool:
    """Return whether PATH says what is said in a sound: a checkpoint of Whisper."""
    from hf_accel.serving.hf.transcriptions import transcribes

    with explained(path):
        return transcribes(checked_path(path))


def is_quantized_path(path: str) -> bool:
    """Return whether PATH holds weights that are quantized already."""
    from hf_accel.estimate.shapes import read_config, stored_config

    place = checked_path(path)
    if place.endswith(".gguf"):
        return True
    with explained(path):
        return stored_config(read_config(place)) is not None


def load_patched(path: str, *, dtype: str = "auto", device: str | None = None, **keywords: Any) -> Any:
    """Load a model patched with `keywords`; a checkpoint that is quantized already keeps its bits."""
    place, wanted = checked_path(path), named_dtype(dtype)
    import hf_accel
    from hf_accel.config.fit import take_fit

    with explained(path):
        rest = dict(keywords)
        take_fit(rest)
        hf_accel.PatchConfig.build(**rest)  # refuses at once what would be refused after loading
        more: dict[str, Any] = {} if device is None else {"device_map": device}
        model: Any = hf_accel.load(place, **keywords, **more, dtype=wanted or "auto")
        return model.eval()


def load_float(path: str, *, dtype: str = "auto") -> Any:
    """Load a model with transformers. Raises BadInputError for one that is quantized already."""
    place, wanted = checked_path(path), named_dtype(dtype)
    from hf_accel.estimate.shapes import class_of, read_config, stored_config

    if place.endswith(".gguf"):
        raise BadInputError(f"{path}: a .gguf file is not loaded in floating point here; give the float checkpoint")
    with explained(path):
        config = read_config(place)
        if stored_config(config) is not None:
            raise BadInputError(f"{path} is quantized already; give the float checkpoint that it was made of")
        model: Any = class_of(config).from_pretrained(place, config=config, dtype=wanted or "auto")
        return model.eval()


def tokenizer_of(path: str) -> Any:
    """Load the tokenizer of a model. Raises BadInputError if there is none."""
    from hf_accel.checkpoints.load import load_tokenizer

    place = checked_path(path)
    try:
        return load_tokenizer(place)
    except Exception as error:  # whatever is missing or broken there
        raise BadInputError(
            f"no tokenizer can be loaded from {path}: {_first(' '.join(str(error).split()))}"
        ) from error
