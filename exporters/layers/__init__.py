"""Graph modules that architectures are built of.

Shape suffixes in this room: B batch, S sequence (new tokens), P past tokens, T = P + S, D hidden size,
H query heads, K key-value heads, E head dim, V vocabulary.
"""
