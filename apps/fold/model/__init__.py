"""AlphaFold 2 (Jumper et al., Nature 596, 583, 2021; algorithm numbers are those of its supplement).

config.py      widths and depths, presets
residues.py    atoms, rigid groups, ideal geometry
rigid.py       frames in space
torsions.py    angles from atoms, atoms from angles
layers.py      linear maps with their initialisation, norms, dropout, transitions
attention.py   gated attention, with or without a bias
msa.py         row and column attention, outer product mean
triangle.py    triangle multiplication and attention
evoformer.py   the blocks and stacks
embedders.py   input, recycling and template embedders
structure.py   invariant point attention and the structure module
heads.py       heads, and what their logits say
alphafold.py   the whole
"""
