"""Models: what a reference names, the digest of its files, and the checks of what is loaded from them."""
