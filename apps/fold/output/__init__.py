"""The output of a prediction: structures, confidences, plots, tables.

confidence.py  numbers of a prediction
files.py       mmCIF, PDB, json and npz
modelcif.py    what an mmCIF file says of a prediction
plots.py       PNGs
report.py      HTML, with a view of the structure; what of it is not Python lies in page/
unfinished.py  the folder of a record while its predictions are made
"""
