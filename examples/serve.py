"""Serve several users at once: each line that a client sends is a prompt, and its continuation streams back.

python examples/serve.py                 three users of its own, all at the same time
python examples/serve.py --port 8000     wait for others: nc localhost 8000
"""

import argparse
import asyncio
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_accel

PROMPTS = ["import re; def parse(", "class Reader: def ", "def main("]


async def answer(engine: hf_accel.Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One client. If it leaves, so does its request: nobody holds the handle any more."""
    while prompt := (await reader.readline()).decode().rstrip("\n"):
        tokens, sent = [], ""
        async for token in engine.submit(prompt, max_new_tokens=48, temperature=0.7, seed=0):
            tokens.append(token)
            text = engine.tokenizer.decode(tokens)
            if not text.endswith("\ufffd"):  # half a character
                writer.write(text[len(sent) :].encode())
                await writer.drain()
                sent = text
    writer.close()


async def user(number: int, prompt: str, port: int) -> None:
    reader, writer = await asyncio.open_connection("localhost", port)
    writer.write(prompt.encode() + b"\n\n")
    while piece := await reader.read(4096):
        print(f"user {number}: {piece.decode()!r}")


async def main(model: str, port: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    with hf_accel.Engine(hf_accel.patch(AutoModelForCausalLM.from_pretrained(model)), tokenizer=tokenizer) as engine:
        server = await asyncio.start_server(lambda *ends: answer(engine, *ends), "localhost", port)
        if port:
            await server.serve_forever()
        await asyncio.gather(*(user(i, text, server.sockets[0].getsockname()[1]) for i, text in enumerate(PROMPTS)))
        print(f"{engine.stats['new_tokens']} tokens in {engine.stats['passes']} passes of the model")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=str(Path(__file__).parent / "stdlib-tiny"))
parser.add_argument("--port", type=int, default=0, help="0: no server for others")
asyncio.run(main(**vars(parser.parse_args())))
