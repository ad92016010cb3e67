"""hf-accel serve: an OpenAI-compatible server over one patched model."""

from __future__ import annotations

import signal
import socket
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_accel.serving.limits import Limits

from .models import check_text_model, checked_path, explained, is_row_path, is_sound_path, named_dtype
from .options import Asked, Dtype, Fit, Path_, common, texts_in_file, with_fit
from .output import BadInputError, say

NEEDED = ("fastapi", "uvicorn", "openai", "prometheus_client")


@common()
def serve(
    path: Path_,
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
    ignore_unknown_fields: Annotated[
        bool, typer.Option("--ignore-unknown-fields", help="Leave fields of requests out that are not known here.")
    ] = False,
    chat_template: Annotated[Path | None, typer.Option(help="A file with a Jinja template.")] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Choices computed at a time.")] = Limits.max_running,
    max_queue: Annotated[int, typer.Option(min=0, help="Choices that may wait; more get 429.")] = Limits.max_queue,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of a prompt.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of a choice.")] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a request at most.")] = Limits.max_body_bytes,
    allow_image_host: Annotated[
        list[str] | None, typer.Option(help="A host to fetch images of messages from; may be repeated; '*' is any.")
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH of a PEFT LoRA that clients name as model; may be repeated.")
    ] = None,
    adapter_folder: Annotated[
        Path | None, typer.Option(help="Clients may load the adapters in this folder, and unload any.")
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
    """Serve a model to any client of OpenAI's API: chat completions, completions and responses.

    An encoder or a folder of sentence-transformers answers /v1/embeddings, a cross-encoder /v1/rerank and
    /v1/score, Whisper /v1/audio/transcriptions.
    A page at / chats with the model; Prometheus reads /metrics; /health and /ready are for what starts and stops it.

    \b
    Examples:
      hf-accel serve examples/stdlib-tiny --weights int4 --port 8000
      hf-accel serve Qwen/Qwen3-0.6B --api-key secret --host 0.0.0.0
      torchrun --nproc-per-node 2 -m hf_accel serve MODEL --tensor-parallel 2
      curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "import re"}'
    """
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise BadInputError(f'{", ".join(missing)} is not installed, which serve needs: pip install "hf_accel[serve]"')
    place, wanted, keywords = checked_path(path), named_dtype(dtype), with_fit(asked.keywords(), fit)
    keywords |= {} if device is None else {"device_map": device}
    is_text = not is_row_path(path) and not is_sound_path(path)
    if is_text:
        check_text_model(path, "serve")
    if cache_dir is not None:
        keywords["cache"] = kept_cache(keywords.get("cache", "paged"), cache_dir, cache_dir_bytes, is_text=is_text)
    named_adapters = [named_path(each) for each in adapter or ()]
    template = None if chat_template is None else texts_in_file(chat_template)[0]
    from hf_accel.serving.hf.served_model import follow, join_ranks, leading

    relay = join_ranks(tensor_parallel, timeout=rank_timeout)

    def load() -> Any:
        from hf_accel.serving.hf.served_model import load_served

        limits = Limits(
            max_running, max_queue, max_prompt_tokens, max_new_tokens, max_body_bytes,
            image_hosts=tuple(allow_image_host or ()), adapter_folder=adapter_folder,
            ignore_unknown_fields=ignore_unknown_fields,
        )  # fmt: skip
        with explained(path):
            service = load_served(
                place, name=name or path, limits=limits, chat_template=template, dtype=wanted or "auto",
                engine={"relay": relay}, **keywords,
            )  # fmt: skip
            load_adapters(service, named_adapters)
            return service

    if relay is not None and not relay.leads:
        service = load()
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

            service = load()
            if service.tokenizer.chat_template is not None:
                service.templates.start()
            app = make_app(
                service, api_key=api_key, hosts=Hosts.of(host, allow_host or (), origins=origins), origins=origins
            )
            server = make_server(app, service, drain_seconds=drain_seconds)
        address = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
        said = {"url": f"{address}/v1", "page": f"{address}/", "model": service.name}
        asked.output.write(said, f"{service.name} is served at {said['url']}; {said['page']} chats with it")
        with leading(relay, service, server):
            server.run(sockets=[bound])


def kept_cache(cache: Any, directory: Path, most_bytes: int, *, is_text: bool) -> dict[str, Any]:
    """Return the cache= of a model whose prompts stay in a folder. Raises BadInputError where there are none."""
    if not is_text or cache is None:
        why = "--cache none has no pages" if is_text else "this one writes no text"
        raise BadInputError(f"--cache-dir is for models that write text over pages, and {why}; leave it out")
    return {**(cache if isinstance(cache, dict) else {}), "directory": str(directory), "directory_bytes": most_bytes}


def load_adapters(service: Any, named: list[tuple[str, str]]) -> None:
    """Load adapters by their names and paths. Raises BadInputError or UnsupportedError."""
    from hf_accel.serving.service import Service

    if named and not isinstance(service, Service):
        raise BadInputError("--adapter is for models that write text, and this one is none; leave it out")
    for name, path in named:
        service.load_adapter(name, path)


def named_path(given: str) -> tuple[str, str]:
    """Return the name and the path of NAME=PATH. Raises BadInputError."""
    name, equals, path = given.partition("=")
    if not (name and equals and path):
        raise BadInputError(
            f"--adapter {given!r} is not NAME=PATH; give, for example, --adapter support=loras/support"
        )
    return name, path


def bind(host: str, port: int) -> socket.socket:
    """Bind the port before the model is loaded, so that a port in use is refused at once. Raises BadInputError."""
    from hf_accel.serving.http_server import bound_socket

    try:
        return bound_socket(host, port)
    except OSError as error:
        raise BadInputError(f"{host}:{port}: {error.strerror or error}; choose another --host or --port") from error
