"""What a decoder computes between its matrix products and attention: three replaceable parts.

`base` has their interfaces, `plain` the way that torch computes them, which everything else is held against.
"""
