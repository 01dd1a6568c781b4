"""From files to what the network reads.

    arrays.py      arrays in the original's naming as features
"""
