"""Merge: outputs made in one way become one. Owns what is taken from which source; what proves it is
`manifests/runs/proofs.py`.
"""
