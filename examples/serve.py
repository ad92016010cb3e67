"""Serve several users at once: each line that a client sends is a prompt, and its continuation streams back.

python examples/serve.py           three users of its own, all at the same time
python examples/serve.py 8000      wait for others: nc localhost 8000
"""

import asyncio
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_accel

PROMPTS = ["import re; def parse(", "class Reader: def ", "def main("]


async def answer(engine: hf_accel.Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while prompt := (await reader.readline()).decode().strip():
        tokens, sent = [], ""
        async for token in engine.submit(prompt, max_new_tokens=48, temperature=0.7, seed=0):
            tokens.append(token)
            text = engine.tokenizer.decode(tokens)
            if not text.endswith("\ufffd"):  # half a character
                writer.write(text[len(sent) :].encode())
                sent = text
                await writer.drain()
    writer.close()


async def user(number: int, prompt: str, port: int) -> None:
    reader, writer = await asyncio.open_connection("localhost", port)
    writer.write(prompt.encode() + b"\n\n")
    while piece := await reader.read(4096):
        print(f"user {number}: {piece.decode()!r}")
    writer.close()


async def main(model: str, port: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    with hf_accel.Engine(hf_accel.patch(AutoModelForCausalLM.from_pretrained(model)), tokenizer=tokenizer) as engine:
        async with await asyncio.start_server(lambda *ends: answer(engine, *ends), "localhost", port) as server:
            if port:
                await server.serve_forever()
            port = server.sockets[0].getsockname()[1]
            await asyncio.gather(*(user(i, text, port) for i, text in enumerate(PROMPTS)))
        print(f"{engine.stats['new_tokens']} tokens in {engine.stats['passes']} passes of the model")


asyncio.run(main(str(Path(__file__).parent / "stdlib-tiny"), port=int(sys.argv[1]) if len(sys.argv) > 1 else 0))
