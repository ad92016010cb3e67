"""Train the small Llama that ships in examples/stdlib-tiny, from text that every machine has.

    python examples/train_tiny_model.py                    # about an hour on two cores
    python examples/train_tiny_model.py --steps 20 --out smoke     # a smoke run

The text is the source of Python's standard library (PSF licence, see the NOTICE written beside
the model). One module in fifty, chosen by a hash of its path, is never trained on; a part of
those modules is stored as heldout.txt and is what every perplexity of the project is taken on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import shutil
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3", "pydoc_data"}
SKIPPED_FILES = {"_pydecimal.py", "_sysconfigdata"}
HELDOUT_CHARACTERS = 200_000

NOTICE = """\
The weights and the tokenizer in this folder were trained, and heldout.txt was copied, from the
source code of the Python {version} standard library:
    Copyright (c) 2001 Python Software Foundation; All Rights Reserved
    Licensed under the Python Software Foundation License Version 2, whose text is in LICENSE.txt
The script is examples/train_tiny_model.py; its settings, seed and losses are in training.json.
The model is a test object: it writes text that looks like Python, not programs that work.
"""


def read_modules() -> tuple[list[str], list[str]]:
    """The standard library's modules as (training texts, held-out texts)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, heldout = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS & set(name.parts) or any(path.name.startswith(s) for s in SKIPPED_FILES):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        bucket = hashlib.sha256(name.as_posix().encode()).digest()[0]
        (heldout if bucket < 256 // 50 else train).append(text)
    return train, heldout


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    ids: list[int] = []
    for encoding in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        ids += [tokenizer.bos_token_id, *encoding]
    return torch.tensor(ids, dtype=torch.int32)


def build_model(tokenizer: PreTrainedTokenizerFast, context: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4 * context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def optimizers(model: LlamaForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layers" in n)]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(step: int, steps: int) -> float:
    """Warm-up over 2 %, constant, then linear to zero over the last 40 %."""
    warmup, decay = max(1, steps // 50), max(1, int(steps * 0.4))
    return min(1.0, (step + 1) / warmup, (steps - step) / decay)


def batch(stream: torch.Tensor, size: int, context: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(stream) - context, (size,), generator=generator)
    return torch.stack([stream[s : s + context] for s in starts.tolist()]).long()


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, stream: torch.Tensor, context: int) -> float:
    """Mean loss in nats per token over consecutive windows of the stream."""
    windows = stream[: len(stream) // context * context].view(-1, context).long()
    losses = [model(input_ids=w[None], labels=w[None]).loss.item() for w in windows]
    return sum(losses) / len(losses)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    train_texts, heldout_texts = read_modules()
    tokenizer = train_tokenizer(train_texts, args.vocab_size)
    stream = token_stream(tokenizer, train_texts)
    heldout = token_stream(tokenizer, heldout_texts)[:100_000]
    model = build_model(tokenizer, args.context)
    generator = torch.Generator().manual_seed(args.seed)
    groups = optimizers(model, args.learning_rate)
    print(f"{len(stream):,} tokens, {model.num_parameters():,} parameters, {args.steps} steps", flush=True)

    start, log = time.perf_counter(), []
    for step in range(args.steps):
        for group in (g for o in groups for g in o.param_groups):
            group["lr"] = args.learning_rate * schedule(step, args.steps)
        ids = batch(stream, args.batch_size, args.context, generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in groups:
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0 or step == args.steps - 1:
            seconds = time.perf_counter() - start
            log.append({"step": step, "loss": round(loss.item(), 4)})
            print(f"step {step:5d}  loss {loss.item():.3f}  {seconds:6.0f} s", flush=True)

    model = model.to(torch.bfloat16).eval()
    heldout_loss = evaluate(model, heldout, args.context)
    print(f"held-out perplexity {math.exp(heldout_loss):.2f}")
    training = {
        "training_tokens_in_corpus": len(stream),
        "training_tokens_seen": args.steps * args.batch_size * args.context,
        "heldout_loss_nats_per_token": round(heldout_loss, 4),
        "heldout_perplexity": round(math.exp(heldout_loss), 3),
        "loss": log,
    }
    save(args, model, tokenizer, heldout_texts=heldout_texts, training=training)


def save(args, model, tokenizer, *, heldout_texts, training) -> None:
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config.update(do_sample=False, max_new_tokens=64)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "heldout.txt").write_text("\n".join(heldout_texts)[:HELDOUT_CHARACTERS], encoding="utf-8")
    (out / "NOTICE").write_text(NOTICE.format(version=platform.python_version()), encoding="utf-8")
    record = {
        "script": "examples/train_tiny_model.py",
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "python": platform.python_version(),
        "torch": torch.__version__,
        **training,
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    shutil.copy(Path(sysconfig.get_paths()["stdlib"], "LICENSE.txt"), out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "stdlib-tiny"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
