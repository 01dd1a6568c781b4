"""AlphaFold 2 (Jumper et al., Nature 596, 583, 2021; algorithm numbers are those of its supplement), and ESMFold.

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
folding.py     recycling, common to both models
alphafold.py   AlphaFold, the whole
multimer.py    AlphaFold-Multimer, by its differences
esmfold.py     ESMFold (Lin et al., Science 379, 1123, 2023), the whole
network.py     the model of a configuration
"""
