"""Asking a server over HTTP, by httpx: what is an address, and what is wrong where there is no answer.

httpx takes proxies and certificates' authorities from the environment (HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE, …).
"""

import re
import ssl
import urllib.parse
from typing import Any

import httpx2

from core.config import UserError


def address(url: str, example: str) -> tuple[str, tuple[str, str] | None]:
    """The address without what stands behind its path, and the name and the password in it.

    Raises UserError for what is none, with an example of one.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = (parts.hostname or "").encode("idna"), parts.port  # which raise ValueError where there is none such
        is_address = parts.scheme in ("http", "https") and bool(host) and bool(httpx2.URL(url).host)
    except (ValueError, httpx2.InvalidURL):
        is_address = False
    if not is_address:
        shown = re.sub(r"//[^/]*@", "//", url)
        raise UserError(f"{shown} is no address of a server; give one such as {example}")
    name, password = (urllib.parse.unquote(part or "") for part in (parts.username, parts.password))
    cleaned = urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
    return cleaned, (name, password) if name or password else None


def client_of(url: str, **options: Any) -> httpx2.Client:
    """A client of the server at that address; options are httpx's.

    Raises UserError where the environment names proxies or authorities that cannot be.
    """
    try:
        # A key is sent to the address that the user gave, and to no other.
        return httpx2.Client(follow_redirects=False, **options)
    except (ValueError, ImportError, OSError, httpx2.InvalidURL) as error:
        raise UserError(
            f"cannot ask {url} ({error}); mend HTTP_PROXY, HTTPS_PROXY, ALL_PROXY or SSL_CERT_FILE"
        ) from None


def untrusted(error: BaseException | None) -> str:
    """What is wrong with a certificate; empty where something else is."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted ({error.verify_message}), nor by SSL_CERT_FILE"
        error = error.__cause__ or error.__context__
    return ""


def said_of(error: httpx2.RequestError) -> str:
    """Why a request was not answered."""
    what = "the proxy: " if isinstance(error, httpx2.ProxyError) else ""
    return f"{what}{error}" if str(error) else type(error).__name__
