"""An engine for the toy server."""
