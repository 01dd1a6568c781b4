"""A server of a few lines, on a free port, in a thread of the test's process."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CERTIFICATE = Path(__file__).parents[1] / "data" / "loopback.pem"


class Quiet(BaseHTTPRequestHandler):
    """Tells nobody what it is asked."""

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def listening(handler: type[Quiet], certificate: Path | None = None) -> Iterator[str]:
    """Its address.  certificate: with which it speaks TLS"""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
