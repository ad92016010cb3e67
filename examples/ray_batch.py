"""Answer every prompt of a parquet file on Ray: patched models are actors, and each batch of answers is a file.

python examples/ray_batch.py prompts.parquet answers --model PATH --workers 2
python examples/ray_batch.py --demo       writes prompts.parquet here, and answers it with the small model

The file has a column of ids, each once, and a column of prompts. Run it again after a crash, or with more rows: what
stands in the folder is not computed again. Several machines need both paths on a file system that all of them see.
It connects to the cluster that RAY_ADDRESS names; without one it starts Ray on this machine.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import logging
import os
import socket
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "stdlib-tiny"
DEMO = ["import re\n\ndef ", "class Reader:\n    def ", "def main(", "import os\n", "try:\n    ", "for name in "]
START_SECONDS = 600  # for all workers to load their models, before the first batch is given to one of them
STARTS = ".starts"  # a file of as many bytes as actors were started in this run
OWN_STORE = 2**28  # bytes of the object store of a Ray that is started here: only prompts go through it
SETTINGS = "_settings.json"  # readers of a folder of parquet files pass over names that begin so


class Answer:
    """An actor: one patched model, which answers a batch and writes it before it takes the next one."""

    def __init__(self, out: Path, settings: dict[str, Any], threads: int, most_starts: int) -> None:
        count_start(out, most_starts)
        import torch

        import hf_accel
        from hf_accel.checkpoints.load import load_tokenizer

        torch.set_num_threads(threads)
        device = "cuda" if torch.cuda.is_available() else "cpu"  # Ray shows an actor the GPUs that it was given
        weights = {"weights": settings["weights"]} if settings["weights"] else {}
        self.model = hf_accel.load(settings["model"], device_map=device, **weights).eval()
        self.tokenizer = load_tokenizer(settings["model"])
        self.out, self.settings = out, settings

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Write a file of answers; what goes on through Ray is one row that counts them."""
        began = time.time()
        prompts = [self.tokenizer(text)["input_ids"] for text in batch[self.settings["prompt"]]]
        outputs = self.model.generate_batch(prompts, max_new_tokens=self.settings["max_new_tokens"], do_sample=False)
        tokens = [output.generated_tokens for output in outputs.values()]
        worker = f"{socket.gethostname()}:{os.getpid()}"
        answers = {
            self.settings["id"]: batch[self.settings["id"]],
            "text": self.tokenizer.batch_decode(tokens, skip_special_tokens=True),
            "tokens": [len(one) for one in tokens],
            "worker": [worker] * len(tokens),
        }
        write(self.out, answers, self.settings["id"])
        counts = {"rows": len(tokens), "tokens": sum(answers["tokens"]), "worker": worker}
        return {name: [value] for name, value in {**counts, "began": began, "ended": time.time()}.items()}


def count_start(out: Path, most: int) -> None:
    """Raise RuntimeError at the start of one actor more than `most`: Ray would start those that die for ever."""
    with (out / STARTS).open("ab") as file:
        file.write(b".")
        if file.tell() > most:
            raise RuntimeError(f"the workers died too often: {most} of them were started")


def write(out: Path, answers: dict[str, Any], id_column: str) -> None:
    """Write a batch under a temporary name, then rename it: a file is whole or not there.

    A batch that Ray computes twice, because its actor died late, has the same ids and so the same name.
    """
    import pyarrow
    from pyarrow import parquet

    from hf_accel.hardware.atomic import replaced_file

    ids = json.dumps([str(one) for one in answers[id_column]])
    name = f"part-{hashlib.sha256(ids.encode()).hexdigest()[:16]}.parquet"
    with replaced_file(out / name) as path:
        parquet.write_table(pyarrow.table(answers), path)


def written(out: Path, id_column: str) -> Counter[Any]:
    """How often each id stands in the folder."""
    from pyarrow import parquet

    found: Counter[Any] = Counter()
    for path in out.glob("part-*.parquet"):
        found.update(parquet.read_table(path, columns=[id_column])[id_column].to_pylist())
    return found


def prepare(arguments: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    """The ids of the file, and the settings of the answers. Raises ValueError for what cannot be answered."""
    from pyarrow import parquet

    columns = (arguments.id, arguments.prompt)
    missing = [name for name in columns if name not in parquet.read_schema(arguments.file).names]
    if missing:
        raise ValueError(f"{arguments.file} has no column {missing[0]!r}; name another one by --id or --prompt")
    ids, prompts = (parquet.read_table(arguments.file, columns=[name])[name].to_pylist() for name in columns)
    twice = [one for one, count in Counter(ids).items() if count > 1]
    if twice:
        raise ValueError(f"{arguments.file}: the id {twice[0]!r} stands there more than once; give each row its own")
    empty = [one for one, prompt in zip(ids, prompts, strict=True) if not prompt or not isinstance(prompt, str)]
    if empty:
        raise ValueError(f"{arguments.file}: the row {empty[0]!r} has no prompt; leave out such rows")
    model = str(Path(arguments.model).resolve()) if Path(arguments.model).exists() else arguments.model
    names = ("id", "prompt", "weights", "max_new_tokens")
    settings = {"model": model, **{name: getattr(arguments, name) for name in names}}
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / SETTINGS
    if path.exists() and json.loads(path.read_text()) != settings:
        raise ValueError(f"{arguments.out} holds answers of other settings, see {path}; name another folder")
    new = path.with_name(f".{SETTINGS}.{os.getpid()}")  # the driver needs no torch, and does not wait for its import
    new.write_text(json.dumps(settings, indent=1))
    new.replace(path)
    return ids, settings


def answer(arguments: argparse.Namespace, settings: dict[str, Any], done: list[Any]) -> list[dict[str, Any]]:
    """Answer the rows whose ids are not among those done; a row of counts for each batch."""
    import pyarrow
    import ray
    from pyarrow import compute

    name = settings["id"]
    known = ray.put(pyarrow.array(done))

    def missing(rows: pyarrow.Table) -> pyarrow.Table:
        return rows.filter(compute.invert(compute.is_in(rows[name], ray.get(known)))) if done else rows

    out = arguments.out.resolve()
    (out / STARTS).unlink(missing_ok=True)
    rows = ray.data.read_parquet(str(arguments.file.resolve())).select_columns([name, settings["prompt"]])
    rows = rows.map_batches(missing, batch_format="pyarrow", zero_copy_batch=True)
    rows = rows.repartition(target_num_rows_per_block=arguments.batch_size)
    batches = rows.map_batches(  # Ray starts an actor that dies again, and gives its batch to one that lives
        Answer,
        fn_constructor_args=(out, settings, arguments.threads, arguments.workers + arguments.restarts),
        batch_size=arguments.batch_size,
        compute=ray.data.ActorPoolStrategy(size=arguments.workers),
        num_cpus=arguments.threads,
        num_gpus=arguments.gpus,
    )
    found = []
    for batch in batches.iter_rows():
        found.append(batch)
        print(f"{sum(one['rows'] for one in found)} rows answered", flush=True)
    (out / STARTS).unlink(missing_ok=True)
    return found


class WorkersDiedError(Exception):
    """Ray gave up: a model failed, or an actor died more often than it may be started again."""


def answered(arguments: argparse.Namespace, settings: dict[str, Any], done: list[Any]) -> list[dict[str, Any]]:
    """answer() on a cluster, or on a Ray of its own. Raises ValueError for more actors than there is room for."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray.data

    if not arguments.verbose:
        warnings.filterwarnings("ignore", module="ray")
        logging.getLogger("ray.data").setLevel(logging.ERROR)
    needed = arguments.workers * arguments.threads + 1  # one for reading, or the actors would wait for it for ever
    own = {"num_cpus": needed, "include_dashboard": False, "object_store_memory": OWN_STORE}
    try:
        ray.init(
            log_to_driver=arguments.verbose, logging_level="WARNING", **({} if "RAY_ADDRESS" in os.environ else own)
        )
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = arguments.verbose
        context.wait_for_min_actors_s = START_SECONDS
        context.max_consecutive_actor_init_deaths = 0  # a model that cannot be loaded is an error at once
        for kind, wanted in (("CPU", needed), ("GPU", arguments.workers * arguments.gpus)):
            room = ray.cluster_resources().get(kind, 0)
            if room < wanted:
                said = f"the cluster has {room:g} of {kind}, and {wanted:g} are needed"
                raise ValueError(f"{said}; give --workers, --threads or --gpus less")
        return answer(arguments, settings, done)
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise WorkersDiedError(lines[-1].strip().rstrip(".")) from error
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a parquet file")
    parser.add_argument("out", nargs="?", type=Path, default=Path("answers"), help="folder of the answers")
    parser.add_argument("--demo", action="store_true", help="write prompts.parquet here, and answer it")
    parser.add_argument("--id", default="id", help="the column of ids")
    parser.add_argument("--prompt", default="prompt", help="the column of prompts")
    parser.add_argument("--model", default=str(SHIPPED), help="a folder, or a name on the Hub")
    parser.add_argument("--weights", help="int8, int4; left out: int8, or as the checkpoint has them")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=64, help="rows that are answered together, and of a file")
    parser.add_argument("--workers", type=int, default=2, help="actors, each with a model of its own")
    parser.add_argument("--threads", type=int, default=1, help="of each actor")
    parser.add_argument("--gpus", type=float, default=0, help="of each actor")
    parser.add_argument("--restarts", type=int, default=3, help="of workers that die, in all")
    parser.add_argument("--verbose", action="store_true", help="show what Ray and the actors print")
    arguments = parser.parse_args()
    missing = [name for name in ("ray", "pyarrow") if importlib.util.find_spec(name) is None]
    if missing:
        parser.exit(2, f"ray_batch: {missing[0]} is not installed: pip install 'hf_accel[ray]'\n")
    if arguments.demo:
        arguments.file = demo()
    if arguments.file is None or not arguments.file.is_file():
        parser.exit(2, f"ray_batch: {arguments.file or 'no file'}: name a parquet file, or give --demo\n")
    run(parser, arguments)


def demo() -> Path:
    import pyarrow
    from pyarrow import parquet

    prompts = [f"# {number}\n{DEMO[number % len(DEMO)]}" for number in range(24)]
    parquet.write_table(pyarrow.table({"id": range(24), "prompt": prompts}), "prompts.parquet")
    return Path("prompts.parquet")


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    try:
        ids, settings = prepare(arguments)
        done = list(written(arguments.out, settings["id"]))
        left = -(-len(set(ids) - set(done)) // arguments.workers)
        arguments.batch_size = max(1, min(arguments.batch_size, left))  # so that each worker has something to do
        found = answered(arguments, settings, done) if set(ids) - set(done) else []
    except ValueError as error:
        parser.exit(2, f"ray_batch: {error}\n")
    except WorkersDiedError as error:
        left = len(set(ids) - set(written(arguments.out, settings["id"])))
        parser.exit(1, f"ray_batch: {error}; {left} of {len(ids)} rows are left: run it again, and it goes on\n")
    counts = written(arguments.out, settings["id"])
    wrong = [one for one in ids if counts[one] != 1]
    if wrong:
        parser.exit(1, f"ray_batch: the row {wrong[0]!r} stands {counts[wrong[0]]} times in {arguments.out}\n")
    rows, tokens = (sum(one[name] for one in found) for name in ("rows", "tokens"))
    seconds = max(one["ended"] for one in found) - min(one["began"] for one in found) if found else 0.0
    print(f"{arguments.out}: {len(ids)} rows, {len(ids) - rows} known, {rows} computed")
    # As the last line, for programs: seconds from the first batch's start to the last one's end, without the loading.
    said = {"rows": rows, "tokens": tokens, "seconds": seconds}
    print(json.dumps({**said, "workers": sorted({one["worker"] for one in found})}))


if __name__ == "__main__":
    main()
