"""hf-accel serve: an OpenAI-compatible server over one patched model."""

from __future__ import annotations

import signal
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_accel.config import DRAFTERS

from .limit_options import limit_parameters, limits_of
from .models import check_text_model, checked_path, explained, is_row_path, is_sound_path, named_dtype
from .options import Asked, Dtype, Fit, common, texts_in_file, with_fit
from .output import BadInputError, say

NEEDED = ("fastapi", "uvicorn", "openai", "prometheus_client")
NEEDED_FOR_SOUNDS = ("python_multipart", "soundfile", "soxr")


@common(others=limit_parameters())
def serve(
    path: Annotated[
        str | None, typer.Argument(metavar="[PATH]", help="A model's folder, a .gguf file, or a name on the hub.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH of a model, in place of PATH; may be repeated.")
    ] = None,
    dtype: Dtype = "auto",
    fit: Fit = None,
    device: Annotated[str | None, typer.Option(help="Where the model is put: cpu, cuda, ...")] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model; PATH if left out.")] = None,
    host: Annotated[str, typer.Option(help="The address that clients connect to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="HF_ACCEL_API_KEY", help="The key that clients must send.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Without a key: another name to answer to; may be repeated; '*' is any.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="A site whose pages may ask, as https://chat.example; may be repeated; '*' is any."),
    ] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A file with a Jinja template.")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=PATH of a PEFT LoRA that clients name as model, MODEL:NAME=PATH where several models write "
            "text; may be repeated."
        ),
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="A folder where what prompts begin with stays for the next start.")
    ] = None,
    cache_dir_bytes: Annotated[int, typer.Option(min=1, help="Bytes of it at most.")] = 16 * 2**30,
    drain_seconds: Annotated[float, typer.Option(min=0, help="Seconds for requests to end after SIGTERM.")] = 30.0,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Processes of torchrun that share the model.")] = 1,
    rank_timeout: Annotated[float, typer.Option(min=1, help="Seconds that a process of these may be silent.")] = 600.0,
    *,
    asked: Asked,
) -> None:
    """Serve a model, or several, to any client of OpenAI's API: chat completions, completions and responses.

    An encoder or a folder of sentence-transformers answers /v1/embeddings, a cross-encoder /v1/rerank and
    /v1/score, Whisper /v1/audio/transcriptions.
    A page at / chats with the model; Prometheus reads /metrics; /health and /ready are for what starts and stops it.

    \b
    Examples:
      hf-accel serve examples/stdlib-tiny --weights int4 --port 8000
      hf-accel serve Qwen/Qwen3-0.6B --api-key secret --host 0.0.0.0
      hf-accel serve --model chat=Qwen/Qwen3-0.6B --model embed=BAAI/bge-small-en-v1.5 --fit 6GB
      torchrun --nproc-per-node 2 -m hf_accel serve MODEL --tensor-parallel 2
      curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "import re"}'
    """
    check_installed(NEEDED)
    given = named_models(path, name, model or ())
    places = {name: checked_path(each) for name, each in given.items()}
    wanted, keywords = named_dtype(dtype), with_fit(asked.keywords(), fit)
    keywords |= {} if device is None else {"device_map": device}
    texts = [name for name, each in given.items() if not is_row_path(each) and not is_sound_path(each)]
    for each in texts:
        check_text_model(given[each], "serve")
    if any(map(is_sound_path, given.values())):
        check_installed(NEEDED_FOR_SOUNDS)
    drafter = asked.given.get("speculative")
    of_one = {
        "--chat-template": chat_template is not None, "--speculative PATH": drafter not in (None, "none", *DRAFTERS),
    }  # fmt: skip
    check_of_one(of_one, texts)
    check_of_one({"--tensor-parallel": tensor_parallel > 1}, given)
    if cache_dir is not None:
        keywords["cache"] = kept_cache(keywords.get("cache", "paged"), cache_dir, cache_dir_bytes, is_text=bool(texts))
    adapters = [of_model(named_path(each, "--adapter"), texts) for each in adapter or ()]
    template = None if chat_template is None else texts_in_file(chat_template)[0]
    from hf_accel.serving.hf.served_model import follow, join_ranks, leading

    relay = join_ranks(tensor_parallel, timeout=rank_timeout)

    def load() -> Any:
        from hf_accel.serving.hf.loaded_models import load_models

        models = load_models(
            places, limits=limits_of(asked.others), chat_template=template, dtype=wanted or "auto",
            engine={"relay": relay}, within=explained, **keywords,
        )  # fmt: skip
        for of, adapter_name, adapter_path in adapters:
            models.load_adapter(adapter_name, adapter_path, model=of)
        return models

    if relay is not None and not relay.leads:
        (service,) = load().services
        for number in (signal.SIGTERM, signal.SIGINT):  # torchrun sends it to all; the first rank decides when to end
            signal.signal(number, signal.SIG_IGN)
        return follow(service.engine, relay)
    with closing(bind(host, port)) as bound:
        from hf_accel.serving.guard import LOOPBACK, Hosts, checked_origin

        origins = [checked_origin(origin) for origin in allow_origin or ()]
        if host not in LOOPBACK and api_key is None:
            say(f"warning: {host} is open to others, and no --api-key is asked for")
        with asked.output.progress("loading the model"):
            from hf_accel.serving.hf.application import make_app
            from hf_accel.serving.http_server import make_server

            models = load()
            for service in models.services:
                if service.tokenizer.chat_template is not None:
                    service.templates.start()
            app = make_app(
                models, api_key=api_key, hosts=Hosts.of(host, allow_host or (), origins=origins), origins=origins
            )
            server = make_server(app, models, drain_seconds=drain_seconds)
        address = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
        said = {"url": f"{address}/v1", "page": f"{address}/", "model": next(iter(given)), "models": [*given]}
        verb, them = ("is", "it") if len(given) == 1 else ("are", "them")
        asked.output.write(said, f"{', '.join(given)} {verb} served at {address}/v1; {address}/ chats with {them}")
        with leading(relay, models.services[0], server):
            server.run(sockets=[bound])


def kept_cache(cache: Any, directory: Path, most_bytes: int, *, is_text: bool) -> dict[str, Any]:
    """Return the cache= of a model whose prompts stay in a folder. Raises BadInputError where there are none."""
    if not is_text or cache is None:
        why = "--cache none has no pages" if is_text else "this one writes no text"
        raise BadInputError(f"--cache-dir is for models that write text over pages, and {why}; leave it out")
    return {**(cache if isinstance(cache, dict) else {}), "directory": str(directory), "directory_bytes": most_bytes}


def check_installed(packages: Sequence[str]) -> None:
    """Raise BadInputError for packages of the extra that are not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise BadInputError(f'{", ".join(missing)} is not installed, which serve needs: pip install "hf_accel[serve]"')


def named_models(path: str | None, name: str | None, given: Sequence[str]) -> dict[str, str]:
    """Return the paths of the models that are to be served, by their names. Raises BadInputError."""
    if path is not None and given:
        raise BadInputError(f"{path} and --model are both given; name it too: --model NAME={path}")
    if path is not None:
        return {name or path: path}
    if not given:
        raise BadInputError("no model is given; give its PATH, or --model NAME=PATH, which may be repeated")
    if name is not None:
        raise BadInputError(f"--name {name} is for one PATH; --model NAME=PATH says the name itself")
    found: dict[str, str] = {}
    for each, place in (named_path(one, "--model") for one in given):
        if each in found:
            raise BadInputError(f"two models have the name {each!r}: {found[each]} and {place}; rename one of them")
        found[each] = place
    return found


def check_of_one(asked: Mapping[str, bool], models: Collection[str]) -> None:
    """Raise BadInputError for an option that belongs to one model if there are several."""
    for option, is_given in asked.items():
        if is_given and len(models) > 1:
            raise BadInputError(f"{option} is for one model, and here are {', '.join(models)}; leave it out")


def of_model(named: tuple[str, str], texts: Sequence[str]) -> tuple[str, str, str]:
    """Return the model, the name and the path of an adapter that was given as NAME=PATH or MODEL:NAME=PATH.

    texts: the names of the models that write text. Raises BadInputError.
    """
    given, path = named
    if not texts:
        raise BadInputError("--adapter is for models that write text, and here is none; leave it out")
    for model in sorted(texts, key=len, reverse=True):
        name = given.removeprefix(f"{model}:")
        if name != given and name:
            return model, name, path
    if len(texts) > 1:
        raise BadInputError(
            f"--adapter {given}={path} does not say which model it is for; give --adapter MODEL:{given}={path}, where "
            f"MODEL is one of {', '.join(texts)}"
        )
    return texts[0], given, path


def named_path(given: str, option: str) -> tuple[str, str]:
    """Return the name and the path of NAME=PATH. Raises BadInputError."""
    name, equals, path = given.partition("=")
    if not (name and equals and path):
        raise BadInputError(f"{option} {given!r} is not NAME=PATH; give, for example, {option} support=path/support")
    return name, path


def bind(host: str, port: int) -> socket.socket:
    """Bind the port before the model is loaded, so that a port in use is refused at once. Raises BadInputError."""
    from hf_accel.serving.http_server import bound_socket

    try:
        return bound_socket(host, port)
    except OSError as error:
        raise BadInputError(f"{host}:{port}: {error.strerror or error}; choose another --host or --port") from error
