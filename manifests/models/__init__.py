"""Models: what a reference names, and the digest of the files that it comes to."""
