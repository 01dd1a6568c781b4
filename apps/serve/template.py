"""A model's chat template, rendered as `transformers` does, in a process with limits of time and memory.

A template is a program of the folder's: it may loop for hours or write gigabytes, over messages that anyone sends.
Nothing of that stops the server: rendering waits for another process (`apps.serve.renderer`), which is ended when it
takes too long. Processes are kept for the next dialogues; there are at most as many as dialogues are rendered at once.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from core.config import UserError

Message = Mapping[str, str]

CPU_S = 10
MEMORY_BYTES = 512 << 20
MAX_PROCESSES = 4


class TooLarge(Exception):
    """The text is longer than asked for."""


class RendererFailed(Exception):
    """The process that renders has ended, through no fault of the messages."""


class ChatTemplate:
    """Renders dialogues; may be called from several threads.

    To a template that does not know developers theirs are messages of the system, as OpenAI's models take the one for
    the other: many templates leave out, without a word, messages of a role that they do not know.

    source          in Jinja
    special_tokens  what it may name: bos_token, …
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any]):
        self._job = {
            "template": source, "special_tokens": dict(special_tokens), "cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES,
        }  # fmt: skip
        self._knows_developers = "developer" in source
        self._places = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: list[_Process] = []

    def start(self) -> None:
        """A process, so that the first dialogue need not wait for it."""
        self._idle.append(_Process(self._job))

    def render(self, messages: Sequence[Message], max_characters: int, timeout_s: float) -> str:
        """The dialogue as text, up to where the assistant speaks.

        Raises UserError where the template refuses the messages or exceeds its limits, TooLarge, TimeoutError, and
        RendererFailed.
        """
        deadline = time.monotonic() + timeout_s
        if not self._knows_developers:
            messages = [_of_the_system(message) for message in messages]
        if not self._places.acquire(timeout=max(0.0, timeout_s)):
            raise TimeoutError
        try:
            answer = self._ask({"messages": list(messages), "max_characters": max_characters}, deadline)
        finally:
            self._places.release()
        if "text" in answer:
            return answer["text"]
        if "too_large" in answer:
            raise TooLarge
        limit = f"it needs more than {MEMORY_BYTES >> 20} MiB" if answer.get("spent") else answer["refused"]
        raise UserError(f"the model's chat template refuses these messages: {limit}")

    def _ask(self, asked: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """The answer of a process that is kept, or of a new one."""
        try:
            process = self._idle.pop()
            answer = process.ask(asked, deadline)
        except (IndexError, RendererFailed):  # none is kept, or it was ended while it waited
            process = _Process(self._job)
            answer = process.ask(asked, deadline)
        if not answer.get("spent"):
            self._idle.append(process)
        return answer


def _of_the_system(message: Message) -> Message:
    return {**message, "role": "system"} if message["role"] == "developer" else message


class _Process:
    """One that renders, and the socket to it. It ends when the socket is closed, also by this process's end.

    Raises RendererFailed where none can be started.
    """

    def __init__(self, job: Mapping[str, Any]):
        self._socket, theirs = socket.socketpair()
        # numpy, which transformers imports, would take address space for threads.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "apps.serve.renderer"],
                    stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
                )  # fmt: skip
            self._socket.sendall(json.dumps(job, default=str).encode() + b"\n")
        except OSError as error:
            raise RendererFailed(f"no process that renders the model's chat template starts ({error})") from None

    def ask(self, asked: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """Its answer.

        Raises TimeoutError, UserError where the kernel ended it for the time that it took, and RendererFailed where it
        ended otherwise; it is gone then.
        """
        try:
            self._wait_until(deadline)
            self._socket.sendall(json.dumps(asked).encode() + b"\n")
            received = bytearray()
            while not received.endswith(b"\n"):
                self._wait_until(deadline)
                more = self._socket.recv(1 << 20)
                if not more:
                    raise self._ended()
                received += more
            return json.loads(received)
        except ConnectionError:
            raise self._ended() from None
        except TimeoutError:
            self._process.kill()
            self._process.wait()
            raise

    def _wait_until(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def _ended(self) -> UserError | RendererFailed:
        if self._process.wait() == -signal.SIGXCPU:
            return UserError(f"the model's chat template takes more than {CPU_S} s for these messages")
        return RendererFailed(
            f"the process that renders the model's chat template has ended (exit code {self._process.returncode})"
        )
