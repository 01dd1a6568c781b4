"""Requests to a server of ColabFold's protocol, and the one policy of retries.

1. a request that fails on the way, or by the server's fault (5xx, 429), is repeated after a pause twice as long each
   time, or as long as the server asks for (Retry-After), `_TRIES` times in a row at most
2. a server that refuses (401, 403), redirects, speaks something else, or has a certificate that is not trusted, is
   given up at once; none that was given up is asked again, by any thread
3. an answer has limits of time and of size
"""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from apps.fold.service.protocol import said
from core.config import UserError, in_words
from core.web.client import address, client_of, said_of, untrusted

_TRIES = 6
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_TIMEOUT_S = 60.0  # to connect, and between two pieces of an answer
_SLOWEST_S = 1800.0  # for an answer, which may come drop by drop
_MOST_BYTES = 1 << 31  # of a result
_MOST_SAID_BYTES = 1 << 20  # of a ticket, and of a refusal
_REFUSING = (401, 403)


class GivenUp(UserError):
    """The server is down, or refuses: no other record need ask it."""


@dataclass(frozen=True)
class _Answer:
    status: int
    body: bytes
    again_s: float
    """how long the server asks to wait"""


class Connection:
    """A server at a URL.  Its methods may be called from several threads.

    key  as the server's owner gave it; a name and a password may stand in the URL instead
    """

    def __init__(self, url: str, key: str | None, sleep: Callable[[float], None] = time.sleep):
        self.url, login = address(url, "http://127.0.0.1:8080")
        self._sleep = sleep
        self._given_up, self._lock = "", threading.Lock()
        headers = {"User-Agent": "megalith/0.1 fold", "Accept": "application/json, application/octet-stream"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self._client = client_of(
            self.url,
            headers=headers,
            auth=login if key is None else None,
            timeout=_TIMEOUT_S,
            limits=httpx2.Limits(max_keepalive_connections=0),  # requests are seconds apart
        )

    def ask(self, path: str, form: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The JSON object, which has a status, that answers GET, or, with a form, POST.

        Raises UserError where it is too large or too slow, GivenUp where the server is no use to others, either.
        """
        answer = _object(self._request(path, form, _MOST_SAID_BYTES).body)
        if "status" not in answer:
            raise self._give_up(f"its answer to {_kind(path)} is not of ColabFold's protocol")
        return answer | {"status": str(answer["status"])}

    def download(self, path: str) -> bytes:
        """A file.  Raises as `ask`, and UserError where the server has none any more."""
        answer = self._request(path, None, _MOST_BYTES)
        if answer.status != 200:
            raise UserError(f"{self.url} sends no {_kind(path)}: {_message(answer.body)}")
        return answer.body

    def _request(self, path: str, form: Mapping[str, str] | None, most_bytes: int) -> _Answer:
        """An answer that is the file or the JSON object that was asked for, or says of a ticket how it is."""
        pauses, reason, again_s = self.pauses(), "", 0.0
        for attempt in range(_TRIES):
            if self._given_up:
                raise GivenUp(self._given_up)
            if attempt:
                self._sleep(max(next(pauses), again_s))
            again_s = 0.0
            try:
                answer = self._asked(path, form, most_bytes)
            except httpx2.RequestError as error:
                if found := untrusted(error):
                    raise self._give_up(found) from None
                reason = said_of(error)
                continue
            if answer.status == 200:
                return answer
            if answer.status in _REFUSING:
                raise self._give_up(f"it refuses ({answer.status}): {_message(answer.body)}")
            if answer.status < 500 and "status" in _object(answer.body):
                return answer
            if answer.status < 500 and answer.status != 429:
                raise self._give_up(f"it answers {answer.status} to {_kind(path)}")
            reason, again_s = f"it answers {answer.status}: {_message(answer.body)}", answer.again_s
        raise self._give_up(f"it does not answer ({reason}), asked {_TRIES} times")

    @staticmethod
    def pauses() -> Iterator[float]:
        """Seconds, twice as long each time, and longer by chance, so that clients do not ask all at once."""
        pause = _PAUSE_S
        while True:
            yield pause * random.uniform(1, 1.5)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _asked(self, path: str, form: Mapping[str, str] | None, most_bytes: int) -> _Answer:
        """One answer, as long as it is."""
        body, due = bytearray(), time.monotonic() + _SLOWEST_S
        with self._client.stream("GET" if form is None else "POST", f"{self.url}/{path}", data=form) as response:
            for piece in response.iter_bytes():
                body += piece
                if not response.is_success and len(body) > _MOST_SAID_BYTES:
                    break
                if len(body) > most_bytes:
                    raise UserError(f"the answer of {self.url} to {_kind(path)} has more than {in_words(most_bytes)}")
                if time.monotonic() > due:
                    raise UserError(f"the answer of {self.url} to {_kind(path)} takes more than {_SLOWEST_S:g} s")
            asked_for = response.headers.get("Retry-After", "")
            again_s = min(float(asked_for), _LONGEST_PAUSE_S) if asked_for.isdecimal() else 0.0
            return _Answer(response.status_code, bytes(body), again_s)

    def _give_up(self, reason: str) -> GivenUp:
        with self._lock:
            self._given_up = self._given_up or (
                f"the server {self.url}: {reason}; give another, or search here (megalith fold msa --databases)"
            )
        return GivenUp(self._given_up)


def _kind(path: str) -> str:
    return path.partition("/")[0]


def _object(body: bytes) -> dict[str, Any]:
    """A JSON object; empty where it is none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _message(body: bytes) -> str:
    if found := _object(body):
        return said(found)
    return " ".join(body.decode("utf-8", "replace").split())[:200] or "no reason is given"
