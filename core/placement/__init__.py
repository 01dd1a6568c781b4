"""The placement of a model's tensors on a mesh, as data: without process groups, for ranks that need not exist.

style    `Style`: what is true of a way to cut a module, and the wrapper that does it; `Plan`: module pattern -> style
stages   which blocks make which pipeline stage, and which ranks hold a parameter
table    `placement`: what a plan makes of a model's parameters, name -> layout, partial axes, owners; `place` does it
messages what the styles of a plan send, in bytes by operation and axis
"""
