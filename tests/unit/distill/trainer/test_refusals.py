"""What cannot be distilled is refused before it is trained wrongly, with the way out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModel,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
)

from hf_accel.distill.trainer.callback import DistillationCallback
from hf_accel.errors import UnsupportedError

from ..classroom import VOCABULARY, arguments, bert, classified, gpt2, llama, t5, texts


def train(folder: Path, student: Any, teacher: Any, data: Any = None, *, trainer: Any = Trainer, **more: Any) -> None:
    ours = {key: more.pop(key) for key in ("fused", "shift", "alpha") if key in more}
    given = {key: more.pop(key) for key in ("compute_loss_func", "processing_class") if key in more}
    callback = DistillationCallback(teacher, **ours)
    data = texts() if data is None else data
    trainer(student, arguments(folder, **more), train_dataset=data, callbacks=[callback], **given).train()


@pytest.mark.parametrize(
    "arguments, way_out",
    [
        ({"label_smoothing_factor": 0.1}, "set it to 0"),
        ({"compute_loss_func": lambda outputs, labels, num_items_in_batch: 0}, "distillation_loss"),
        ({"use_liger_kernel": True}, "fused_linear_cross_entropy"),
    ],
)
def test_arguments_that_take_the_labels_away(
    tmp_path: Path, arguments: dict[str, Any], way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.trainer as module

    monkeypatch.setattr(module, "apply_liger_kernel", lambda *args, **kwargs: None)
    monkeypatch.setattr(module.Trainer, "_validate_args", lambda self: None)
    with pytest.raises(UnsupportedError, match=way_out):
        train(tmp_path, llama(1), llama(2), **arguments)


def test_several_gpus_in_one_process(tmp_path: Path) -> None:
    callback = DistillationCallback(llama(2))
    trainer = Trainer(llama(1), arguments(tmp_path), train_dataset=texts(), callbacks=[callback])
    trainer.args._n_gpu = 2
    with pytest.raises(UnsupportedError, match="accelerate launch"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)


def test_a_subclass_that_computes_its_own_loss_is_found_out(tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            return model(**inputs).logits.square().mean()

    class Silent(Own):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            inputs = {key: value for key, value in inputs.items() if key != "labels"}
            return model(**inputs).logits.square().mean()

    class Inner(Own):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            return model.model(inputs["input_ids"]).last_hidden_state.square().mean()

    for trainer, words in ((Own, "did not learn from"), (Silent, "without labels"), (Inner, "never asked for")):
        student = llama(1)
        before = copy.deepcopy(student.state_dict())
        with pytest.raises(UnsupportedError, match=words):
            train(tmp_path, student, llama(2), trainer=trainer)
        assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


def test_a_subclass_that_adds_to_the_loss_is_welcome(tmp_path: Path) -> None:
    class More(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, return_outputs, **more)
            return loss + 0.1 * model.lm_head.weight.square().mean()

    train(tmp_path, llama(1), llama(2), trainer=More)


def test_models_that_predict_other_things(tmp_path: Path) -> None:
    classes = classified()
    three, four = (bert(BertForSequenceClassification, 1, num_labels=n) for n in (3, 4))
    kinds: list[tuple[Any, Any, Any, str]] = [
        (three, four, classes, "num_labels=4"),
        (three, bert(BertForMaskedLM, 2), classes, "kind of head"),
        (bert(BertForSequenceClassification, 1, num_labels=1), three, classes, "regression"),
        (bert(BertForSequenceClassification, 1, problem_type="multi_label_classification"), three, classes, "softmax"),
        (AutoModel.from_config(llama(1).config), llama(2), None, "no labels"),
        (bert(BertForQuestionAnswering, 1), bert(BertForQuestionAnswering, 2), None, "labels"),
        (t5(1), llama(2), None, "encoder"),
        (llama(1), llama(2, vocab_size=VOCABULARY + 8), None, "processing_class"),
    ]
    for student, teacher, data, words in kinds:
        with pytest.raises(UnsupportedError, match=words):
            train(tmp_path, student, teacher, data)


def test_classes_in_another_order(tmp_path: Path) -> None:
    def named(*names: str) -> Any:
        numbered = dict(enumerate(names))
        return bert(
            BertForSequenceClassification, 1, id2label=numbered, label2id={name: i for i, name in numbered.items()}
        )

    data = classified(classes=2)
    with pytest.raises(UnsupportedError, match="id2label"):
        train(tmp_path, named("no", "yes"), named("yes", "no"), data)
    train(tmp_path, named("no", "yes"), named("NO", "YES"), data)
    train(tmp_path, bert(BertForSequenceClassification, 1, num_labels=2), named("NO", "YES"), data)


def test_labels_that_are_no_classes(tmp_path: Path) -> None:
    student, teacher = (bert(BertForSequenceClassification, seed, num_labels=3) for seed in (1, 2))
    data = [{**row, "labels": torch.rand(3)} for row in classified()]
    with pytest.raises(UnsupportedError, match="class indices"):
        train(tmp_path, student, teacher, data)


def test_the_student_as_its_own_teacher(tmp_path: Path) -> None:
    student = llama(1)
    with pytest.raises(UnsupportedError, match="itself"):
        train(tmp_path, student, student)
    with pytest.raises(UnsupportedError, match="peft"):
        train(tmp_path, student, "base")
    with pytest.raises(UnsupportedError, match="TeacherCache"):
        DistillationCallback(3)  # type: ignore[arg-type]


def words(size: int, first: str = "w") -> PreTrainedTokenizerFast:
    vocabulary = {f"{first if i > 40 else 'w'}{i}": i for i in range(size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="w0")), pad_token="w0")


def test_vocabularies_that_differ_in_padding_alone(tmp_path: Path) -> None:
    student, teacher = llama(1), llama(2, vocab_size=VOCABULARY + 8)
    train(tmp_path, student, teacher, processing_class=words(VOCABULARY))
    with pytest.raises(UnsupportedError, match="two tokenizers"):
        train(tmp_path, llama(1, vocab_size=VOCABULARY + 4), teacher, processing_class=words(VOCABULARY + 6))


def test_tokenizers_of_one_size_that_differ(tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    words(VOCABULARY, first="other").save_pretrained(folder)
    llama(2).save_pretrained(folder)
    teacher = type(llama(2)).from_pretrained(folder)
    with pytest.raises(UnsupportedError, match="'w41' to the student and 'other41'"):
        train(tmp_path, llama(1), teacher, processing_class=words(VOCABULARY))
    words(VOCABULARY).save_pretrained(folder)
    train(tmp_path, llama(1), teacher, processing_class=words(VOCABULARY))


def test_a_wrong_shift_is_found_out(tmp_path: Path) -> None:
    """A model whose class says nothing of its loss, and which reads its labels in place (as XLNet does)."""

    class InPlace(type(llama(1))):  # type: ignore[misc]
        pass

    def in_place(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    student = llama(1)
    student.loss_function = in_place
    with pytest.raises(UnsupportedError, match="shift=False"):
        train(tmp_path, student, llama(2))
    again = llama(1)
    again.loss_function = in_place
    train(tmp_path, again, llama(2), shift=False)


def test_fused_without_its_parts(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="fused=False"):
        train(tmp_path, bert(BertForMaskedLM, 1), bert(BertForMaskedLM, 2), fused=True)
    student = llama(1)
    student.lm_head = torch.nn.Sequential(student.lm_head)
    with pytest.raises(UnsupportedError, match="plain linear"):
        train(tmp_path, student, gpt2(2), fused=True)


def test_a_head_that_does_more_than_is_known(tmp_path: Path) -> None:
    student = llama(1)
    inner = student.lm_head.forward
    student.lm_head.forward = lambda x: 2 * inner(x)
    with pytest.raises(UnsupportedError, match="more to its hidden states"):
        train(tmp_path, student, llama(2), fused=True)
