"""The cost of a step of any module, found before it runs; and the counting of what one has.

account   MemoryAccount: bytes of the tensors that are alive, on a CPU or without memory; peak_bytes of a device
cost      FLOPs, bytes read and written of one operator
alike     blocks that repeat: a step with a few of them tells of any number
balanced  what experts are given, where nobody can look
chain     what a model's blocks cost, one by one, and the simulator of a step by its segments
segments  which blocks keep what their backward needs, as data; sqrt and recursive
graph     Graph: a step as nodes, values and storages; lives, peak, alike blocks; run_graph
grow      the graph of many alike blocks from that of a few
record    trace_graph: the graph of any module's step, on fake tensors
tracer    trace_step: a step on fake tensors, as stretches with their parameters, bytes and seconds
machine   what a device computes, reads and copies in a second, by data sheets or measured
"""
