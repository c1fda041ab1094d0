"""The demo: its pairs and its steps."""
