"""The objects that users hold a model in: sentence-transformers' modules, pipelines, modules of their own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, pipeline

import hf_accel
from hf_accel.errors import UnsupportedError
from hf_accel.kernels import cpu as kernels

from .families import build as build_decoder
from .test_encoders import SIZES, build, counted

WORDS = 61
TEXTS = ["w7 w8 w9 w10 w11", "w12", "w13 w14 w15"]


class Transformer(nn.Module):
    """Like sentence-transformers' module of this name: it holds the model, and puts its result among the features."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.auto_model = model

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        ids, mask = features["input_ids"], features["attention_mask"]
        return {**features, "tokens": self.auto_model(input_ids=ids, attention_mask=mask).last_hidden_state}


class Pooling(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        tokens, mask = features["tokens"], features["attention_mask"][..., None]
        if self.mode == "max":
            return tokens.masked_fill(mask == 0, -1e9).amax(1)
        if self.mode == "cls":
            return tokens[:, 0]
        if self.mode == "last":
            return tokens[torch.arange(len(tokens)), mask.sum((1, 2)) - 1]
        return (tokens * mask).sum(1) / mask.sum(1)


def embedder(mode: str = "mean") -> nn.Sequential:
    return nn.Sequential(Transformer(build()), Pooling(mode)).eval()


def features() -> dict[str, Tensor]:
    torch.manual_seed(1)
    mask = (torch.arange(11) < torch.tensor([11, 3, 7, 1])[:, None]).long()
    return {"input_ids": torch.randint(5, WORDS, mask.shape) * mask + (1 - mask), "attention_mask": mask}


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
@pytest.mark.parametrize("mode", ["mean", "max", "cls", "last"])
def test_embeddings_are_those_of_stock(mode: str) -> None:
    model, given = embedder(mode), features()
    with torch.no_grad():
        expected = model(given)
        assert hf_accel.patch(model, weights=None) is model
        with counted() as calls:
            torch.testing.assert_close(model(given), expected, rtol=1e-4, atol=1e-5)
        assert calls["layers"] == 3
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert hf_accel.is_patched(copied)
            torch.testing.assert_close(copied(given), expected, rtol=1e-4, atol=1e-5)
        assert hf_accel.unpatch(model) is model
        assert torch.equal(model(given), expected)
    assert not hf_accel.is_patched(model)


def test_training_gives_stock_s_loss_and_gradients() -> None:
    model, given = embedder().train(), features()

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        model(given).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    with hf_accel.patched(model, weights=None):
        found = gradients()
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_all_functions_take_the_object() -> None:
    model = embedder()
    inner: Any = model[0].auto_model
    assert hf_accel.plan(model).to_dict() == hf_accel.plan(inner).to_dict()
    sizes: dict[str, float] = {"bandwidth": 1e10, "compute": 1e11}
    assert hf_accel.estimate(model, **sizes).to_dict() == hf_accel.estimate(inner, **sizes).to_dict()
    assert not hf_accel.is_patched(model)
    with hf_accel.patched(model):
        assert hf_accel.is_patched(model) and hf_accel.is_patched(inner)
        assert hf_accel.stats(model) == hf_accel.stats(inner)
        hf_accel.weights_changed(model)
        assert hf_accel.patch(model) is model
        with pytest.raises(UnsupportedError, match="patched already, with weights"):
            hf_accel.patch(model, weights=None)
    assert not hf_accel.is_patched(inner)


def test_several_models_are_refused_by_name() -> None:
    several = nn.ModuleDict({"query": build(), "answers": nn.ModuleList([build("Roberta")])})
    for function in (hf_accel.patch, hf_accel.unpatch, hf_accel.plan, hf_accel.estimate):
        expected = r"2 transformers models, \.query \(a BertModel\), \.answers\[0\] \(a RobertaModel\); pass one"
        with pytest.raises(UnsupportedError, match=expected):
            function(several)
    hf_accel.unpatch(hf_accel.patch(several["query"]))


def test_a_model_that_is_held_twice_is_one() -> None:
    model = build()

    class Holder:
        def __init__(self) -> None:
            self.model, self.again = model, model

    holder = Holder()
    assert hf_accel.patch(holder) is holder
    assert hf_accel.is_patched(model)
    assert not hf_accel.is_patched(hf_accel.unpatch(holder))


# -- pipelines ---------------------------------------------------------------------------------------------


def tokenizer(padding_side: str = "right") -> PreTrainedTokenizerFast:
    special = {"<pad>": 1, "<mask>": 2, "<unk>": 3}
    words = special | {f"w{i}": i for i in [0, *range(4, WORDS)]}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", mask_token="<mask>", unk_token="<unk>", padding_side=padding_side
    )


def of_bert(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, kind)(transformers.BertConfig(**SIZES))
    return model.eval()


def of_images() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 60, "num_attention_heads": 5, "intermediate_size": 92, "num_hidden_layers": 3}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **sizes))
    kind: Any = getattr(transformers, "ViTImageProcessorPil", transformers.ViTImageProcessor)
    return pipeline("image-classification", model=model.eval(), image_processor=kind(size={"height": 32, "width": 32}))


def of_sound() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 60, "num_attention_heads": 5, "intermediate_size": 92, "num_hidden_layers": 3}
    config = transformers.Wav2Vec2Config(
        vocab_size=WORDS, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 4), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4, **sizes,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForCTC(config).eval()
    extractor = transformers.Wav2Vec2FeatureExtractor()
    return pipeline("automatic-speech-recognition", model=model, tokenizer=tokenizer(), feature_extractor=extractor)  # type: ignore[call-overload]


def of_text(task: str, kind: str) -> Any:
    return pipeline(task, model=of_bert(kind), tokenizer=tokenizer())  # type: ignore[call-overload]


PIPELINES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "text-classification": (lambda: of_text("text-classification", "BertForSequenceClassification"), lambda: TEXTS),
    "feature-extraction": (lambda: of_text("feature-extraction", "BertModel"), lambda: TEXTS),
    "token-classification": (lambda: of_text("token-classification", "BertForTokenClassification"), lambda: TEXTS),
    "fill-mask": (lambda: of_text("fill-mask", "BertForMaskedLM"), lambda: ["w7 <mask> w9", "w4 w5 w6 <mask>"]),
    "image-classification": (of_images, lambda: Image.fromarray(numpy.arange(3072, dtype="uint8").reshape(32, 32, 3))),
    "automatic-speech-recognition": (of_sound, lambda: numpy.sin(numpy.arange(4000, dtype="float32"))),
    "text-generation": (
        lambda: pipeline("text-generation", model=build_decoder("llama"), tokenizer=tokenizer("left")),
        lambda: TEXTS,
    ),
}


def numbers(found: Any) -> tuple[list[float], list[Any]]:
    """The floats in an answer, and all the rest."""
    if isinstance(found, float | numpy.floating):
        return [float(found)], []
    parts = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list | tuple) else ()
    pairs = [numbers(value) for _, value in parts]
    return [x for floats, _ in pairs for x in floats], [x for _, rest in pairs for x in rest] if parts else [found]


@pytest.mark.parametrize("task", PIPELINES)
def test_a_pipeline_is_patched_itself(task: str) -> None:
    make, make_inputs = PIPELINES[task]
    pipe, given = make(), make_inputs()
    more: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False} if task == "text-generation" else {}
    expected = numbers(pipe(given, **more))
    assert hf_accel.patch(pipe, weights=None) is pipe
    assert hf_accel.is_patched(pipe.model)
    found = numbers(pipe(given, **more))
    assert found[1] == expected[1]
    assert found[0] == pytest.approx(expected[0], rel=1e-3, abs=1e-5)
    hf_accel.unpatch(pipe)
    assert not hf_accel.is_patched(pipe)
    assert numbers(pipe(given, **more)) == expected


# -- the real package, where it is installed ---------------------------------------------------------------


def test_sentence_transformers(tmp_path: Any) -> None:
    package = pytest.importorskip("sentence_transformers")
    build().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model = package.SentenceTransformer(str(tmp_path), device="cpu")
    expected = model.encode(TEXTS)
    assert hf_accel.patch(model, weights=None) is model
    numpy.testing.assert_allclose(model.encode(TEXTS), expected, rtol=1e-4, atol=1e-5)
    hf_accel.unpatch(model)
    numpy.testing.assert_array_equal(model.encode(TEXTS), expected)


def test_a_cross_encoder(tmp_path: Any) -> None:
    package = pytest.importorskip("sentence_transformers")
    model = of_bert("BertForSequenceClassification")
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    ranker = package.CrossEncoder(str(tmp_path), device="cpu", num_labels=2)
    pairs = [("w7 w8", "w9 w10 w11"), ("w12", "w13")]
    expected = ranker.predict(pairs)
    assert hf_accel.patch(ranker, weights=None) is ranker
    numpy.testing.assert_allclose(ranker.predict(pairs), expected, rtol=1e-4, atol=1e-5)
    hf_accel.unpatch(ranker)
    numpy.testing.assert_array_equal(ranker.predict(pairs), expected)
