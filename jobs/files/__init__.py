"""Files that commands write beside a run: durable, in scratch folders, larger than memory. Read `durable_files.py`
first.
"""
