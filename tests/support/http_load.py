"""A crowd of clients that know what they should be told, some of whom leave in the middle."""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """How many were told the right thing, left before, or were asked to come again; and what else was said."""

    right: int = 0
    left: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)


async def storm(
    port: int, known: dict[str, Any], *, max_tokens: int, clients: int, until: Callable[[Tally], bool]
) -> Tally:
    """Clients that ask, each its next request when it is done with its last.

    known  prompt -> the choices of its greedy completion
    until  asked before each request: whether that is enough
    """
    tally = Tally()

    async def client(number: int) -> None:
        dice = random.Random(number)
        while not until(tally):
            prompt = dice.choice(list(known))
            await one(dice, prompt, known[prompt][0])

    async def one(dice: random.Random, prompt: str, choice: dict[str, Any]) -> None:
        stream, leaves = dice.random() < 0.5, dice.random() < 0.3
        asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
        data = json.dumps(asked).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        if leaves:
            await writer.drain()
            await asyncio.sleep(dice.expovariate(20))
            writer.transport.abort()
            tally.left += 1
            return
        answer = (await reader.read()).decode()
        writer.close()
        if answer.startswith("HTTP/1.1 429"):
            tally.refused += 1
        elif answer.startswith("HTTP/1.1 200") and _text(answer, stream) == choice["text"]:
            tally.right += 1
        else:
            tally.wrong.append(answer[:300])

    await asyncio.gather(*(client(number) for number in range(clients)))
    return tally


def _text(answer: str, stream: bool) -> str:
    if not stream:
        return json.loads(answer.partition("\r\n\r\n")[2])["choices"][0]["text"]
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])
