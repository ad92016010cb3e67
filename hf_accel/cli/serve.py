"""hf-accel serve: an OpenAI-compatible server over one patched model."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import HfAccelError
from ..keywords import one_of

NEEDED = ("fastapi", "uvicorn", "openai", "prometheus_client")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    model: Annotated[str, typer.Argument(help="A folder, a name on the Hub, or a .gguf file.")],
    weights: Annotated[
        str | None, typer.Option(help="int8, int4, nf4, auto or none; left out, int8 or what the checkpoint has.")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="K and V as auto, int8, fp8 or int4.")] = None,
    dtype: Annotated[str, typer.Option(help="The dtype that float weights are loaded in.")] = "auto",
    speculative: Annotated[str | None, typer.Option(help="auto, ngram, suffix or self-int4.")] = None,
    device: Annotated[str, typer.Option(help="Where the model is put: cpu, cuda, ...")] = "cpu",
    name: Annotated[str | None, typer.Option(help="What clients call the model; left out, MODEL.")] = None,
    host: Annotated[str, typer.Option(help="The address that clients connect to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="HF_ACCEL_API_KEY", help="What clients must send.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A file with a Jinja template.")] = None,
    max_cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of all requests in the KV cache; left out, it grows.")
    ] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Choices that are computed at the same time.")] = 64,
    max_queue: Annotated[int, typer.Option(min=0, help="Choices that may wait; then clients get 429.")] = 256,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Of a prompt; left out, the context.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of a choice; left out, the context.")] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Of a request's body.")] = 2**20,
    drain_seconds: Annotated[float, typer.Option(min=0, help="For running requests to end after SIGTERM.")] = 30.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print where it listens as JSON.")] = False,
) -> None:
    """Serve a model to any client of OpenAI's API: chat completions, completions and responses.

    hf-accel serve examples/stdlib-tiny --weights int4 --port 8000

    curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "import re"}'

    Prometheus reads /metrics; /health and /ready are for what starts and stops the server.
    """
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise failed(f"{', '.join(missing)} is not installed, which serve needs: pip install 'hf_accel[serve]'")
    bound = listen(host, port)
    with closing(bound), one_line_errors(model):
        one_of("dtype", dtype, DTYPES)
        if host not in LOOPBACK and api_key is None:
            typer.echo(f"warning: {host} is open to others, and no --api-key is asked for", err=True)
        loading: dict[str, Any] = {
            "name": name,
            "chat_template": None if chat_template is None else chat_template.read_text(encoding="utf-8"),
            "engine": {"max_tokens": max_cache_tokens},
            "limits": {
                "max_running": max_running,
                "max_queue": max_queue,
                "max_prompt_tokens": max_prompt_tokens,
                "max_new_tokens": max_new_tokens,
                "max_body_bytes": max_body_bytes,
            },
            "dtype": dtype,
            **({} if device == "cpu" else {"device_map": device}),
            **({} if weights is None else {"weights": None if weights == "none" else weights}),
            **({} if kv_dtype is None else {"cache": {"dtype": kv_dtype}}),
            **({} if speculative is None else {"speculative": speculative}),
        }
        server = load_server(model, loading, api_key=api_key, drain_seconds=drain_seconds)
        address = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}/v1"
        said = {"url": address, "model": name or model}
        typer.echo(json.dumps(said) if json_output else f"{said['model']} is served at {address}")
        sys.stdout.flush()
        server.run(sockets=[bound])


def listen(host: str, port: int) -> socket.socket:
    """Bind the port before the model is loaded, so that one in use is known at once."""
    from ..serving.http_server import bound_socket

    try:
        return bound_socket(host, port)
    except OSError as error:
        raise failed(f"{host}:{port}: {error.strerror or error}; choose another --host or --port") from None


def load_server(model: str, loading: dict[str, Any], *, api_key: str | None, drain_seconds: float) -> Any:
    """Load the model and make the server around it. loading: keywords of `load_service`; limits as a dict."""
    from ..serving.hf.application import make_app
    from ..serving.hf.served_model import load_service
    from ..serving.http_server import make_server
    from ..serving.limits import Limits

    loading["limits"] = Limits(**loading["limits"])
    service = load_service(model, **loading)
    return make_server(make_app(service, api_key=api_key), service, drain_seconds=drain_seconds)


@contextmanager
def one_line_errors(model: str) -> Iterator[None]:
    """Turn what goes wrong with the user's input into one line and exit code 2."""
    try:
        yield
    except (OSError, ValueError, HfAccelError) as error:
        words = " ".join(str(error).split())
        raise failed(words if model in words else f"{model}: {words}") from error


def failed(message: str) -> SystemExit:
    """Say in one line what is wrong, and return what to raise."""
    typer.echo(f"hf-accel serve: {message}", err=True)
    return SystemExit(2)


if __name__ == "__main__":
    typer.run(serve)
