"""Convert: labels, qrels, run files, JSONL and Parquet into each other. Owns what each form can hold and which rows
are left out; the form of TREC lines is in `manifests/gold.py`. Read `conversion.py` first.
"""
