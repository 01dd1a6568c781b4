"""Solvers: given what a model costs, the plan that is best.

checkpointing   which blocks keep their activations and which compute them again, in a given memory
"""
