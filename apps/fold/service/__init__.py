"""Alignments as a service, by ColabFold's protocol: the server, and a client of any server that speaks it.

protocol.py   what clients ask: tickets, modes, statuses
databases.py  the databases of a server and what each is for
answers.py    the files of an answer, made of the searches' results
templates.py  structures and their profiles, as clients ask for them
keys.py       who may ask, and how much
store.py      tickets and results on disk
tickets.py    the life of a ticket: 1. asked for (or known already) 2. on disk 3. in the queue 4. its searches
              5. its result on disk; a server that was killed goes on with 3
server.py     HTTP
shared.py     searches that several tickets need
metrics.py    figures for Prometheus
client.py     asking a server, by `fold msa` and `fold predict`
connection.py requests to it, and the policy of retries
"""
