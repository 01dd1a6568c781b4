"""What every HTTP server of ours has below its application, and every client; users bring uvicorn, and httpx2.

listen.py  an address that nobody else gets, and uvicorn that leaves signals alone
wire.py    HTTP/1.1 on a connection
hosts.py   the names under which a server may be called
body.py    the body of a request
client.py  addresses, and what is wrong where a server does not answer
key.py     the key that a client sends, and a server asks for
"""
