"""Models: what a reference names, the digest of the files that it comes to, and the checks of what is loaded from them."""
