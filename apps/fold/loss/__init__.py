"""The loss of training (Jumper et al. 2021, supplement, 1.9).

truth.py       experimental atoms as frames, torsions and names that suit the prediction
structure.py   FAPE, torsions
heads.py       the heads' losses and lDDT
violation.py   bonds, angles and clashes
total.py       their weighted sum
"""
