"""Solvers that say how a module is spread: they read the table, a trace and a machine, and return plans.

costs       bytes and seconds of every collective, by the one function that search, solver and executor share
machines    GPUs and links by name, and which link the ranks of an axis have
measure     what a machine does: products, kernels, memory, links between groups of ranks
measured    that as a file, and as a machine for plans
check       a plan held against one rank that runs it, to the byte
step_time   seconds of a decoder's step on a cluster
strategies  the search over all ways to train a decoder: those that none beats in time and memory
draw        its picture
specs       how a tensor lies on a mesh of one to three axes: S01, S10, R, partial
conversion  paths from one spec to another, greedy and cheapest, and the collectives that execute them
checkpointing  which blocks keep their activations and which compute them again, in a given memory
rule        what an operator allows, from one description of its dims: specs of inputs and outputs
rules       that description for every operator of ATen
formulate   a step's graph as a problem: strategies and prices on a mesh, liveness
prune       strategies that no cheapest plan needs
problem     nodes, edges and bytes as values; equal blocks and followers folded into one
solve       the cheapest plan by linear programming, with its optimality gap
simulate    a plan's cost, counted again
"""
