"""How structure is found: trace a forward, push labels through it, read off symmetries, prove them.

trace -> starts, push (labels) -> symmetries -> structure (a graph of candidates) -> narrow, proof.
"""
