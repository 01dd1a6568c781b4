"""Relaxation of structures: atoms move a little until bonds and angles are those of proteins and none overlap.

stereochemistry.py  which residues violate what proteins obey
protocol.py         the rounds of AlphaFold's relaxation, whichever minimizer does them
amber.py            the minimizer that is AlphaFold's: OpenMM, the force field AMBER99SB
violations.py       one of our own, of violations alone, for machines without OpenMM
"""
