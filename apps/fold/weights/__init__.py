"""Weights in and out: AlphaFold's npz, OpenFold's .pt, ESMFold's folders, and folders of our own.

table.py      which tensors of theirs make each parameter of ours
alphafold.py  params_model_*.npz, read and written
openfold.py   .pt, read
esmfold.py    folders of transformers, read
folder.py     config.json and model.safetensors, read and written
source.py     recognises which of them a path is
"""
