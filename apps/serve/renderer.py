"""A process that renders a chat template, so that what a template does costs its own process at most.

`python -m apps.serve.renderer` with a socket as standard input; `apps.serve.template` starts it. The first line that it
reads tells the template, each further one the messages of a dialogue, and each of those gets a line of JSON in answer.
Memory and time of the processor have limits that the kernel holds. It ends when the other side of the socket does.
"""

import json
import resource
import socket
import sys
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template


def main() -> None:
    with socket.socket(fileno=sys.stdin.fileno()) as connection, connection.makefile("r", encoding="utf-8") as lines:
        job = json.loads(lines.readline())
        _limit_memory(job["memory_bytes"])
        for line in lines:
            is_spent = False
            try:
                answer = json.dumps(_answer(job, json.loads(line))).encode() + b"\n"
            except MemoryError:
                is_spent, answer = True, b'{"spent": true}\n'
            connection.sendall(answer)
            if is_spent:
                return


def _answer(job: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The `text`, that it is `too_large`, or why it is `refused`.  Raises MemoryError where that is `spent`."""
    _limit_time(job["cpu_s"])
    try:
        rendered, _ = render_jinja_template(
            conversations=[asked["messages"]],
            chat_template=job["template"],
            add_generation_prompt=True,
            **job["special_tokens"],
        )
        return {"too_large": True} if len(rendered[0]) > asked["max_characters"] else {"text": rendered[0]}
    except MemoryError:
        raise
    except Exception as error:  # templates raise what they like
        return {"refused": (str(error).splitlines() or [type(error).__name__])[0]}


def _limit_memory(more_bytes: int) -> None:
    """So much beyond what there is now, where the kernel tells that."""
    sizes = Path("/proc/self/statm")
    if sizes.exists():
        now = int(sizes.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, now + more_bytes))


def _limit_time(cpu_s: int) -> None:
    """So much from now; who takes longer is ended by the kernel."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + cpu_s, hard))


if __name__ == "__main__":
    main()
