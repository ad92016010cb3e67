"""A checkpoint that makes vectors or scores of texts: its model, patched, and what stands behind it in its folder.

The folders of sentence-transformers are read without that package: modules.json names the model, and then a pooling
and what follows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import cached_file

from ..errors import UnsupportedError
from ..estimate.lengths import longest_text
from ..estimate.shapes import class_of, read_config
from .load import load, load_tokenizer

MODULES, SETTINGS_OF_PROMPTS = "modules.json", "config_sentence_transformers.json"
SETTINGS_OF_LENGTHS = "sentence_bert_config.json"
IN_PYTHON = "in Python, hf_accel.patch(SentenceTransformer(path)) takes it"
Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TextRow:
    """The tokens of a text, or of two. types: which of the two a token is of. skipped: the tokens in front that
    pooling leaves out, those of a prompt.
    """

    ids: list[int]
    types: list[int] | None = None
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.ids)


class TextEncoder:
    """Makes a vector of each text or, if the model has a head for classes, a score of two texts.

    model: patched. steps: what makes vectors of pooled ones, or a score of a logit. pool: [N, T, width] and the mask
    [N, T] -> [N, dim]; None for scores. prompts: texts in front of each text, by name. max_tokens: of a text.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        pool: Callable[[Tensor, Tensor], Tensor] | None,
        steps: Sequence[Step],
        max_tokens: int,
        folder: Folder,
    ) -> None:
        self.model, self.tokenizer, self.max_tokens = model, tokenizer, max_tokens
        self._pool, self._steps = pool, list(steps)
        self._lower = bool(folder.lengths.get("do_lower_case"))
        self._include_prompt = folder.pooling.get("include_prompt", True)
        self.prompts: Mapping[str, str] = folder.prompts.get("prompts") or {}
        self.default_prompt: str | None = folder.prompts.get("default_prompt_name")
        self.normalizes = _normalized in self._steps

    @property
    def scores(self) -> bool:
        """True if it makes scores of two texts, and no vectors."""
        return self._pool is None

    @property
    def takes_batches(self) -> bool:
        """False for a head that looks for the last token of a text by a padding token, and knows none."""
        return not self.scores or self.model.config.pad_token_id is not None or hasattr(self.model, "classifier")

    def row(
        self, text: str, second: str | None = None, *, prompt: str | None = None, cut: int | None = None
    ) -> TextRow:
        """Return the tokens of a text, or of two. prompt: the name of a text in front of it; None is the default.

        cut: how many tokens are kept; None keeps all.
        """
        name = self.default_prompt if prompt is None else prompt
        before = "" if name is None or second is not None else self.prompts[name]
        texts = [before + text] if second is None else [text, second]
        texts = [one.lower() for one in texts] if self._lower else texts
        found = self.tokenizer(*texts, **({} if cut is None else {"truncation": True, "max_length": cut}))
        types = found.get("token_type_ids") if second is not None else None
        return TextRow(found["input_ids"], types, 0 if self._include_prompt or not before else self._length(before))

    def _length(self, prompt: str) -> int:
        ids = self.tokenizer(prompt.lower() if self._lower else prompt)["input_ids"]
        return len(ids) - (ids[-1] in self.tokenizer.all_special_ids)

    @torch.no_grad()
    def compute(self, rows: Sequence[TextRow]) -> Tensor:
        """Return the vectors of texts, [N, dim], or the scores of pairs, [N, 1], in float32.

        Rows are padded on the right, and a patched model computes their tokens alone.
        """
        width = max(map(len, rows))
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(width) < lengths[:, None]).long()
        given = {"input_ids": _padded([row.ids for row in rows], width, self.tokenizer.pad_token_id or 0)}
        if any(row.types for row in rows):
            given["token_type_ids"] = _padded([row.types or [0] * len(row) for row in rows], width, 0)
        device = self.model.device
        given = {name: tensor.to(device) for name, tensor in {**given, "attention_mask": mask}.items()}
        if self._pool is None:
            found = self.model(**given).logits
        else:
            skipped = torch.tensor([row.skipped for row in rows])
            seen = mask * (torch.arange(width) >= skipped[:, None])
            found = self._pool(self.model.base_model(**given).last_hidden_state, seen.to(device))
        for step in self._steps:
            found = step(found)
        return found.float().cpu()


def _padded(rows: Sequence[list[int]], width: int, value: int) -> Tensor:
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


# -- pooling, as sentence-transformers does it -----------------------------------------------------------


def _first(states: Tensor, mask: Tensor) -> Tensor:
    return states[torch.arange(len(states)), mask.argmax(1)]


def _last(states: Tensor, mask: Tensor) -> Tensor:
    return states[torch.arange(len(states)), mask.shape[1] - 1 - mask.flip(1).argmax(1)]


def _largest(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)


def _weighted(states: Tensor, weights: Tensor, power: float = 1.0) -> Tensor:
    total = (states * weights[..., None].to(states.dtype)).sum(1, dtype=torch.float32)
    return (total / weights.sum(1, keepdim=True).clamp(min=1e-9).pow(power)).to(states.dtype)


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": _first,
    "max": _largest,
    "mean": lambda states, mask: _weighted(states, mask.float()),
    "mean_sqrt_len_tokens": lambda states, mask: _weighted(states, mask.float(), 0.5),
    "weightedmean": lambda states, mask: _weighted(
        states, mask.float() * torch.arange(1, mask.shape[1] + 1, device=mask.device)
    ),
    "lasttoken": _last,
}
OLD_NAMES = {  # keys of older files, in the order in which their vectors follow each other
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def _pooling(config: Mapping[str, Any], path: str) -> Callable[[Tensor, Tensor], Tensor]:
    named = config.get("pooling_mode") or [OLD_NAMES[key] for key in OLD_NAMES if config.get(key)] or "mean"
    modes = [named] if isinstance(named, str) else list(named)
    unknown = [mode for mode in modes if mode not in POOLINGS]
    if unknown:
        raise UnsupportedError(f"{path}: the pooling {unknown[0]!r} is not known; {IN_PYTHON}")
    return lambda states, mask: torch.cat([POOLINGS[mode](states, mask) for mode in modes], dim=-1)


# -- the folder ----------------------------------------------------------------------------------------


class Folder:
    """The files of sentence-transformers at a path, a folder or a name on the Hub; a path may have none of them."""

    def __init__(self, path: str) -> None:
        self.path = path
        modules = self._json(MODULES)
        self.modules: list[dict[str, Any]] = modules if isinstance(modules, list) else []
        # Where the model itself is: usually in the folder, of some older ones in one of its folders.
        self.inner: str = self.modules[0]["path"] if self.modules else ""
        self.lengths: dict[str, Any] = self._json(SETTINGS_OF_LENGTHS, self.inner) or {}
        self.prompts: dict[str, Any] = self._json(SETTINGS_OF_PROMPTS) or {}
        kinds = [_kind(module) for module in self.modules]
        if self.modules and (kinds[0] != "Transformer" or "Pooling" not in kinds[1:2]):
            raise UnsupportedError(f"{path}: {MODULES} names {', '.join(kinds)}, which are not known so; {IN_PYTHON}")
        self.pooling: dict[str, Any] = self._json("config.json", self.modules[1]["path"]) if self.modules else {}

    def _json(self, name: str, inner: str = "") -> Any:
        file = self._file(name, inner)
        return None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))

    def _file(self, name: str, inner: str) -> str | None:
        given = {"subfolder": inner, "_raise_exceptions_for_missing_entries": False}
        found: str | None = cached_file(self.path, name, **given)
        return found

    def steps(self) -> Iterator[Step]:
        """Yield what follows the pooling. Raises UnsupportedError for a module that is not known."""
        for module in self.modules[2:]:
            match _kind(module):
                case "Normalize":
                    yield _normalized
                case "Dense":
                    yield self._dense(module["path"])
                case "Dropout":
                    pass
                case kind:
                    raise UnsupportedError(f"{self.path}: {MODULES} names {kind}, which is not known; {IN_PYTHON}")

    def _dense(self, inner: str) -> Step:
        config = self._json("config.json", inner) or {}
        others = {key: config[key] for key in ("module_input_name", "module_output_name") if config.get(key)}
        name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
        if config.get("use_residual") or set(others.values()) - {"sentence_embedding"}:
            raise UnsupportedError(f"{self.path}: the Dense in {inner} has settings that are not known; {IN_PYTHON}")
        linear = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
        file, old = self._file("model.safetensors", inner), self._file("pytorch_model.bin", inner)
        tensors = load_file(file) if file is not None else torch.load(str(old), map_location="cpu", weights_only=True)
        linear.load_state_dict({key.removeprefix("linear."): value for key, value in tensors.items()})
        linear.requires_grad_(False)
        activation = activation_named(name, self.path)
        return lambda pooled: activation(linear.to(pooled.device)(pooled.float()))


def _kind(module: Mapping[str, Any]) -> str:
    return str(module.get("type", "")).rpartition(".")[2]


def _normalized(vectors: Tensor) -> Tensor:
    return nn.functional.normalize(vectors.float(), dim=-1)


def activation_named(name: str, path: str) -> nn.Module:
    """Return an activation of torch.nn by its full name. Raises UnsupportedError for anything else."""
    found = getattr(nn, name.rpartition(".")[2], None) if name.startswith("torch.nn.") else None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise UnsupportedError(f"{path}: the activation {name!r} is not one of torch.nn; {IN_PYTHON}")
    activation: nn.Module = found()
    return activation


# -- loading -------------------------------------------------------------------------------------------


def encodes(path: str) -> bool:
    """Return whether a checkpoint makes vectors or scores of texts, and writes none: by its files, without weights."""
    if path.endswith(".gguf"):
        return False
    if Folder(path).modules:
        return True
    kind = class_of(read_config(path))
    return not getattr(kind, "can_generate", lambda: True)() and kind.main_input_name == "input_ids"


def load_text_encoder(path: str, **keywords: Any) -> TextEncoder:
    """Load and patch what makes vectors or scores of texts. keywords: those of hf_accel.load().

    A folder of an encoder alone gets mean pooling, as sentence-transformers gives it.
    Raises UnsupportedError for parts that are not known, and for a head of several classes.
    """
    folder = Folder(path)
    inner: dict[str, Any] = {"subfolder": folder.inner} if folder.inner else {}
    place = str(Path(path, folder.inner)) if folder.inner and Path(path).is_dir() else path
    hub: dict[str, Any] = {} if place != path else inner
    config = read_config(place, **hub)
    kind = class_of(config)
    steps = list(folder.steps())
    pool: Callable[[Tensor, Tensor], Tensor] | None = _pooling(folder.pooling, path)
    has_head = not folder.modules and kind.__name__.endswith("ForSequenceClassification")
    if has_head and config.num_labels != 1:
        raise UnsupportedError(f"{path} chooses among {config.num_labels} classes; a score needs a head of one")
    if config.is_encoder_decoder and kind.can_generate():
        raise UnsupportedError(f"{path} has a decoder behind its encoder; save its encoder alone")
    if has_head:
        steps, pool = [activation_named(_activation_name(config), path)], None
    tokenizer = load_tokenizer(place, **hub)
    model: Any = load(place, **hub, **keywords)
    model.eval()
    longest = min(int(tokenizer.model_max_length), folder.lengths.get("max_seq_length") or 2**30)
    return TextEncoder(
        model, tokenizer, pool=pool, steps=steps, max_tokens=longest_text(model, longest), folder=folder
    )


def _activation_name(config: Any) -> str:
    """Return the function behind the logit, as a CrossEncoder of sentence-transformers finds it."""
    given = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    old = getattr(config, "sbert_ce_default_activation_function", None)
    return str(given or old or "torch.nn.modules.activation.Sigmoid")
