"""Builds query-document pairs to label or to train on: from the citations of generated answers, and context documents
by BM25.

Works on Parquet files with polars and bm25s (extra `pairs`), which load when a function here is called. Never asks a
model and never looks at a grade. Read `citations.py` first.
"""
