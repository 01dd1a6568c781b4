"""Searching sequence databases for an alignment, by tools that are installed.

database.py   FASTA databases: how many sequences, cut into shards
jackhmmer.py  one search of one sequence in one shard, and its hits as rows; so are
hhblits.py    and
mmseqs.py
hhsearch.py   one search of an alignment for structures that resemble it
hits.py       hits as rows of an alignment
program.py    running a program
options.py    the options of all that searches, and the databases that they name
jobs.py       all searches of a run, in parallel, each kept by what it depends on
schedule.py   which node runs which of them, and what happens to one that is cut off
on_ray.py     the nodes of a Ray cluster
"""
