"""The way from files to what the network reads.

sequences.py   FASTA: records, and what is wrong with them
alignment.py   A3M and Stockholm
msa.py         draws, masking, clustering: an alignment as the network's features
structures.py  mmCIF and PDB files as chains of residues
entries.py     experimental chains with their whole sequences, as training targets
templates.py   structures aligned with the sequence
arrays.py      arrays in the original's naming as features
"""
