"""The training of `fold train`: its data, objective and recipes.

config.py      the options of a run
recipes.py     functions that return them
dataset.py     a folder of structures and alignments as chains, each read once; a line for each that cannot be used
distillation.py  predictions as targets beside experiments: their confidence, their turns
batches.py     crops, thinned alignments, draws: what a step learns from, a function of the step and the row alone
objective.py   a batch through the model to the loss
initialise.py  parameters from a seed
validation.py  lDDT of held-out chains
"""
