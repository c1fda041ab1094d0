"""Builds query-document pairs to label or to train on: from the citations of generated answers, context documents by
BM25, and documents cut into chunks.

Works on Parquet files with polars, bm25s, lxml and markdown-it-py (extra `pairs`), which load when a function here is
called. Never asks a model and never reads a grade. Each command has its file; `chunks.py` cuts what `pages.py` reads.
"""
