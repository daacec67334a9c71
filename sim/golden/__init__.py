"""The golden model: the arithmetic contract in NumPy, written from the definitions. Imports no Amaranth.

:mod:`.q6_k` decodes blocks, :mod:`.activations` quantises token vectors, :mod:`.matmul` multiplies.
"""
