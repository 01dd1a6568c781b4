"""What every HTTP server of ours has below its application; its users bring uvicorn.

listen.py  an address that nobody else gets, and uvicorn that leaves signals alone
wire.py    HTTP/1.1 on a connection
hosts.py   the names under which a server may be called
body.py    the body of a request
"""
