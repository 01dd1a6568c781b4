"""A text that ends amid a character ends in U+FFFD: in an answer, in a stream, and where a token ends the text."""

import json

import pytest

from tests.support.http_server import post, raw, served, small_model

EURO, END = b"\xe2\x82\xac", 256


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with served(small_model(tmp_path_factory.mktemp("models") / "tiny")) as server:
        yield server


def written(running, **body) -> str:
    asked = {"prompt": "price: ", "temperature": 0} | body
    if not body.get("stream"):
        status, _, answer = post(running.port, "/v1/completions", asked)
        assert status == 200, answer
        return answer["choices"][0]["text"]
    data = json.dumps(asked)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    status, _, answer = raw(running.port, f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode())
    assert status == 200, answer
    lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_bytes_of_a_character(running, stream):
    """The model is made to write one byte again and again: a character's first, or one that is whole."""
    for byte, num_tokens, text in ((EURO[0], 1, "\ufffd"), (EURO[0], 3, "\ufffd" * 3), (ord("a"), 2, "aa")):
        bias = {str(byte): 100}
        assert written(running, logit_bias=bias, max_tokens=num_tokens, stream=stream) == text


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_that_ends_the_text_amid_a_character(running, stream):
    body = {"logit_bias": {str(EURO[0]): 100, str(END): 90}, "repetition_penalty": 2.0, "max_tokens": 9}
    assert written(running, stream=stream, **body) == "\ufffd"
